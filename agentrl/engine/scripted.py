"""An engine that says what it is told: for tests, for `agentrl check`, and for answers that an expert wrote. No torch, no model.

    engine = ScriptedEngine(["<search> who </search>", "<answer> Ada </answer>"], encode=tokenizer.encode, decode=tokenizer.decode)

It keeps the contract of a real engine: stop ids and strings, lengths, versions, abort, pause. Its log-probs are made up, but the same
for the same ids.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest, check_request
from agentrl.engine.sampling import Decode, StopFinder, uniform
from agentrl.errors import ConfigError, EngineAbort, EngineFailure, boundary
from agentrl.types import FinishReason


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as the engine got it."""

    session: str
    number: int
    """of the session's earlier generations"""
    ids: tuple[int, ...]
    """the context"""
    sampling: SamplingParams
    text: str = ""
    """of the context; empty for an engine without `decode`"""


Answer = str | Sequence[int]
"""a text to be encoded, or ids to be taken as they are"""
Script = Callable[[Ask], Answer | Awaitable[Answer]]


class ScriptedEngine:
    """An `Engine` that answers from a script.

    Args:
        script: texts or ids, one for each generation of a session in turn; or a function of the request, sync or async. What it
            raises becomes an EngineFailure, except that Failures pass: so a test can have the engine fail or abort.
        encode: text -> ids, adding nothing; needed where the script gives text.
        decode: ids -> text; needed for stop strings.
        end_id: appended where an answer runs out before anything ended it, as a model ends its turn; it ends an answer anywhere. None:
            such an answer ends with finish reason stop and no matched stop.
        context_length: most tokens of context and generation together.
        demonstration: mark every answer as written by an expert.
        delay_s: how long an answer takes.
    """

    def __init__(
        self,
        script: Script | Sequence[Answer],
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Decode | None = None,
        end_id: int | None = None,
        context_length: int = 1 << 20,
        policy_version: int = 0,
        demonstration: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        self._script = script if callable(script) else _recite(script)
        self._encode = encode
        self._decode = decode
        self._end_id = end_id
        self._context_length = context_length
        self._demonstration = demonstration
        self._delay_s = delay_s
        self._paused = self._asleep = self._closed = False
        self._flights: dict[asyncio.Future[None], str] = {}
        self._resumed: list[asyncio.Future[None]] = []
        self._counts: dict[str, int] = {}
        self._cache: dict[str, tuple[int, ...]] = {}
        self.policy_version = policy_version
        """completed weight updates"""
        self.requests: list[Ask] = []
        """everything it was asked, in order of arrival"""
        self.released: list[str] = []
        """sessions that were released, in order"""

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Answer from the script; see `Engine.generate`."""
        self._check_awake()
        room = check_request(ids, sampling, self._context_length)
        if sampling.stop and self._decode is None:
            raise ConfigError("this scripted engine was made without `decode`; it cannot look for stop strings")
        number = self._counts.get(session, 0)
        self._counts[session] = number + 1
        ask = Ask(session, number, tuple(ids), sampling, self._decode(ids) if self._decode else "")
        self.requests.append(ask)
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flights[flight] = session
        try:
            with boundary(EngineFailure, "the script"):
                answer = self._script(ask)
                if inspect.isawaitable(answer):
                    answer = await answer
            await self._hold(flight)
        finally:
            del self._flights[flight]
        return self._cut(ask, self._ids(answer), room)

    async def release(self, session: str) -> None:
        """Forget the session; its next generation is number 0 again."""
        self.released.append(session)
        self._counts.pop(session, None)
        self._cache.pop(session, None)
        self._give_up(EngineAbort(f"session {session} was released while a request was in flight", "released"), session)

    async def pause(self) -> None:
        """Answer nothing until `resume`."""
        self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        for future in self._resumed:
            if not future.done():
                future.set_result(None)
        self._resumed.clear()

    async def abort(self, session: str | None = None) -> None:
        """Give up requests in flight: of one session, or all."""
        self._give_up(EngineAbort("the request was aborted", "aborted"), session)

    async def sleep(self) -> None:
        """Refuse requests until `wake`."""
        if self._flights:
            raise EngineFailure(
                "the engine cannot sleep while requests are in flight; abort them first", "sleep while busy"
            )
        self._asleep = True
        self._cache.clear()

    async def wake(self) -> None:
        """Go on after `sleep`."""
        self._asleep = False

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """There are no weights: count the version, and drop the made-up prefix cache."""
        self.policy_version = policy_version
        self._cache.clear()

    async def health(self) -> EngineInfo:
        """What it is."""
        if self._closed:
            raise EngineFailure("the scripted engine is closed", "engine closed")
        return EngineInfo("scripted", "1", self.policy_version, self._context_length, deterministic=True)

    async def close(self) -> None:
        """Stop; requests in flight raise EngineFailure."""
        self._closed = True
        self._give_up(EngineFailure("the scripted engine is closed", "engine closed"), None)

    def _check_awake(self) -> None:
        if self._closed:
            raise EngineFailure("the scripted engine is closed", "engine closed")
        if self._asleep:
            raise EngineFailure("the scripted engine sleeps; wake it before generate", "engine asleep")

    async def _hold(self, flight: asyncio.Future[None]) -> None:
        """Wait for `delay_s` and for `resume`; raise if the request is given up meanwhile."""
        await asyncio.wait({flight}, timeout=self._delay_s)
        while self._paused and not flight.done():
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._resumed.append(resumed)
            await asyncio.wait({flight, resumed}, return_when=asyncio.FIRST_COMPLETED)
        if flight.done():
            flight.result()

    def _give_up(self, reason: EngineAbort | EngineFailure, session: str | None) -> None:
        for flight, owner in self._flights.items():
            if session in (None, owner) and not flight.done():
                flight.set_exception(type(reason)(str(reason), reason.cause))

    def _ids(self, answer: Answer) -> list[int]:
        if not isinstance(answer, str):
            return list(answer)
        if self._encode is None:
            raise ConfigError("the script gave a text, but this scripted engine was made without `encode`")
        return list(self._encode(answer))

    def _cut(self, ask: Ask, answer: list[int], room: int) -> Generation:
        """End an answer where a real engine would have ended it."""
        sampling = ask.sampling
        ends = set(sampling.stop_token_ids)
        if self._end_id is not None and not sampling.ignore_eos:
            ends.add(self._end_id)
            answer = [*answer, self._end_id]
        finder = StopFinder(sampling.stop, self._decode) if self._decode else None
        ids: list[int] = []
        finish, matched = FinishReason.STOP, None
        for token in answer:
            ids.append(token)
            matched = token if token in ends else finder.find(ids) if finder else None
            if matched is not None:
                break
            if len(ids) == room:
                finish = FinishReason.LENGTH
                break
        log_probs = tuple(-0.05 - uniform(token, len(ask.ids) + i) for i, token in enumerate(ids))
        cached = self._cached(ask, ids)
        return Generation(tuple(ids), log_probs, finish, matched, self.policy_version, cached, self._demonstration)

    def _cached(self, ask: Ask, ids: list[int]) -> int:
        """Context tokens that a prefix cache would have held: those of the session's last context and answer, less one."""
        known = self._cache.get(ask.session, ())
        same = next(
            (i for i, (a, b) in enumerate(zip(known, ask.ids, strict=False)) if a != b), min(len(known), len(ask.ids))
        )
        self._cache[ask.session] = (*ask.ids, *ids)
        return min(same, len(ask.ids) - 1)


def random_policy(choices: Sequence[int], *, end_id: int | None = None, mean_length: int = 16) -> Script:
    """A script of random ids from `choices`, a function of `sampling.seed` alone; each ends with about 1 chance in `mean_length`."""

    def script(ask: Ask) -> list[int]:
        ids: list[int] = []
        while len(ids) < ask.sampling.max_new_tokens:
            if ids and uniform(ask.sampling.seed, 2 * len(ids)) < 1 / mean_length:
                return ids if end_id is None else [*ids, end_id]
            ids.append(choices[int(uniform(ask.sampling.seed, 2 * len(ids) + 1) * len(choices))])
        return ids

    return script


def _recite(answers: Sequence[Answer]) -> Script:
    """Every session hears the same answers in turn."""

    def script(ask: Ask) -> Answer:
        if ask.number >= len(answers):
            raise EngineFailure(
                f"the script has {len(answers)} answers; session {ask.session} asks for one more", "script is over"
            )
        return answers[ask.number]

    return script
