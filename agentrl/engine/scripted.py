"""An engine that returns scripted generations: for tests, for `agentrl check`, and for demonstrations that an expert wrote. No torch, no model.

    engine = ScriptedEngine(["<search> who </search>", "<answer> Ada </answer>"], encode=tokenizer.encode, decode=tokenizer.decode)

It fulfils the contract of a real engine: stop ids and strings, lengths, versions, abort, pause. Its log-probs are invented, but the same for the
same ids.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RoutedExperts, RouterShape
from agentrl.core.sequences import first_difference, ids_checksum
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest, check_request
from agentrl.engine.sampling import Decode, StopFinder, uniform
from agentrl.errors import ConfigError, EngineAbort, EngineFailure, boundary
from agentrl.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """One call of `ScriptedEngine.generate`."""

    session: str
    number: int
    """how many generations of the session came before"""
    ids: tuple[int, ...]
    """the context"""
    sampling: SamplingParams
    text: str = ""
    """the context as text; empty for an engine without `decode`"""


Answer = str | Sequence[int]
"""text, which is encoded, or ids"""
Script = Callable[[ScriptedRequest], Answer | Awaitable[Answer]]


@dataclass(slots=True)
class _Flight:
    """One call of `generate` in progress."""

    session: str
    started: float
    updates: list[tuple[int, float]] = field(default_factory=list)
    """(version that was replaced, time) of the weight updates since"""


class ScriptedEngine:
    """An `Engine` that takes its generations from a script.

    Args:
        script: texts or ids, one for each generation of a session; or a function of the request, sync or async. An exception that it raises
            becomes an EngineFailure, except for Failures: so a test can make the engine fail or abort.
        encode: text -> ids without adding special tokens; required if the script gives text.
        decode: ids -> text; required for stop strings.
        end_id: ends a generation anywhere, and is appended to an answer that nothing else ended, as a model ends its turn. None: such a
            generation has finish reason stop and no matched stop.
        context_length: maximum tokens of context and generation together.
        policy_version: version of the first generations.
        demonstration: mark every generation as written by an expert.
        delay_s: duration of a generation.
        keep_interrupted: a generation that a weight update interrupts has tokens of both versions, in proportion to the time. Without it, the
            last version has all of them.
        router: generations that ask for routed experts have invented ones of this shape, the same for the same ids.
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
        keep_interrupted: bool = False,
        router: RouterShape | None = None,
    ) -> None:
        self._script = script if callable(script) else _in_order(script)
        self._encode = encode
        self._decode = decode
        self._end_id = end_id
        self._context_length = context_length
        self._demonstration = demonstration
        self._delay_s = delay_s
        self._keep_interrupted = keep_interrupted
        self._router = router
        self._paused = self._asleep = self._closed = False
        self._flights: dict[asyncio.Future[None], _Flight] = {}
        """requests in flight"""
        self._resumed: list[asyncio.Future[None]] = []
        self._counts: dict[str, int] = {}
        self._cache: dict[str, tuple[int, ...]] = {}
        self.policy_version = policy_version
        self.requests: list[ScriptedRequest] = []
        """all requests in order of arrival"""
        self.released: list[str] = []
        """released sessions in order"""

    async def start(self) -> None:
        """Does nothing."""

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Generate from the script; see `Engine.generate`."""
        self._check_open()
        if self._asleep:
            raise EngineFailure("the scripted engine is asleep; call wake before generate", "engine asleep")
        max_new_tokens = check_request(ids, sampling, self._context_length)
        if sampling.stop and self._decode is None:
            raise ConfigError("this scripted engine was created without `decode`, which stop strings require")
        number = self._counts.get(session, 0)
        self._counts[session] = number + 1
        text = self._decode(ids) if self._decode else ""
        request = ScriptedRequest(session=session, number=number, ids=tuple(ids), sampling=sampling, text=text)
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        flight: asyncio.Future[None] = loop.create_future()
        state = self._flights[flight] = _Flight(session, loop.time())
        try:
            with boundary(EngineFailure, "the script"):
                answer = self._script(request)
                if inspect.isawaitable(answer):
                    answer = await answer
            await self._delay(flight)
        finally:
            del self._flights[flight]
        generation = self._generation(request, self._ids(answer), max_new_tokens)
        return replace(generation, versions=_versions(state, loop.time(), generation)) if state.updates else generation

    async def release(self, session: str) -> None:
        """Forget the session. Its next generation is number 0 again."""
        self.released.append(session)
        self._counts.pop(session, None)
        self._cache.pop(session, None)
        self._fail(EngineAbort(f"session {session} was released while a request was in flight", "released"), session)

    async def pause(self) -> None:
        """Finish no generation until `resume`."""
        self._paused = True

    async def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        for future in self._resumed:
            if not future.done():
                future.set_result(None)
        self._resumed.clear()

    async def abort(self, session: str | None = None) -> None:
        """Abort requests in flight, of one session or all."""
        self._fail(EngineAbort("the request was aborted", "aborted"), session)

    async def sleep(self) -> None:
        """Refuse requests until `wake`."""
        if self._flights:
            raise EngineFailure(
                "the engine cannot sleep while requests are in flight; abort them first", "sleep while busy"
            )
        self._asleep = True
        self._cache.clear()

    async def wake(self) -> None:
        """Accept requests again."""
        self._asleep = False

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Set the version and drop the imitated prefix cache; there are no weights."""
        if self._keep_interrupted:
            now = asyncio.get_running_loop().time()
            for flight in self._flights.values():
                flight.updates.append((self.policy_version, now))
        self.policy_version = policy_version
        self._cache.clear()

    async def health(self) -> EngineInfo:
        """The engine's properties."""
        self._check_open()
        return EngineInfo("scripted", "1", self.policy_version, self._context_length, deterministic=True)

    async def close(self) -> None:
        """Close the engine. Requests in flight raise EngineFailure."""
        self._closed = True
        self._fail(EngineFailure("the scripted engine is closed", "engine closed"), None)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailure("the scripted engine is closed", "engine closed")

    async def _delay(self, flight: asyncio.Future[None]) -> None:
        """Wait for `delay_s` and for `resume`. Raises the failure if the request fails during it."""
        await asyncio.wait({flight}, timeout=self._delay_s)
        while self._paused and not flight.done():
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._resumed.append(resumed)
            await asyncio.wait({flight, resumed}, return_when=asyncio.FIRST_COMPLETED)
        if flight.done():
            flight.result()

    def _fail(self, reason: EngineAbort | EngineFailure, session: str | None) -> None:
        """Make requests in flight raise `reason`, of one session or all."""
        for flight, state in self._flights.items():
            if session in (None, state.session) and not flight.done():
                flight.set_exception(type(reason)(str(reason), reason.cause))

    def _ids(self, answer: Answer) -> list[int]:
        if not isinstance(answer, str):
            return list(answer)
        if self._encode is None:
            raise ConfigError("the script gave text, but this scripted engine was created without `encode`")
        return list(self._encode(answer))

    def _generation(self, request: ScriptedRequest, answer: list[int], max_new_tokens: int) -> Generation:
        """Truncate an answer where a real engine would stop."""
        sampling = request.sampling
        ends = set(sampling.stop_token_ids)
        if self._end_id is not None and not sampling.ignore_eos:
            ends.add(self._end_id)
            answer = [*answer, self._end_id]
        stop_finder = StopFinder(sampling.stop, self._decode) if self._decode else None
        ids: list[int] = []
        finish_reason, matched_stop = FinishReason.STOP, None
        for token in answer:
            ids.append(token)
            matched_stop = token if token in ends else stop_finder.find(ids) if stop_finder else None
            if matched_stop is not None:
                break
            if len(ids) == max_new_tokens:
                finish_reason = FinishReason.LENGTH
                break
        return Generation(
            ids=tuple(ids),
            log_probs=tuple(-0.05 - uniform(token, len(request.ids) + i) for i, token in enumerate(ids)),
            finish_reason=finish_reason,
            matched_stop=matched_stop,
            policy_version=self.policy_version,
            cached_tokens=self._cached_tokens(request, ids),
            demonstration=self._demonstration,
            context_crc=ids_checksum(request.ids),
            routed_experts=self._experts([*request.ids, *ids[:-1]], sampling.routed_experts_from),
        )

    def _experts(self, ids: Sequence[int], start: int | None) -> RoutedExperts | None:
        """Consecutive experts for each token and layer, from a number that depends on the token, its position and the layer."""
        router = self._router
        if router is None or start is None:
            return None
        import numpy as np

        positions = np.arange(start, len(ids))
        first = np.array(ids[start:], np.int64)[:, None] * 31 + positions[:, None] * 7 + np.arange(router.layers)
        return RoutedExperts.of((first[..., None] + np.arange(router.topk)) % router.experts)

    def _cached_tokens(self, request: ScriptedRequest, ids: list[int]) -> int:
        """Context tokens that a prefix cache would have: those of the session's previous context and generation, but not the last."""
        cached, context = self._cache.get(request.session, ()), request.ids
        common = first_difference(cached, context)
        self._cache[request.session] = (*context, *ids)
        return min(common, len(context) - 1)


def _versions(flight: _Flight, now: float, generation: Generation) -> tuple[tuple[int, int], ...]:
    """The versions of a generation's tokens, if it samples them evenly over its time."""
    count, duration = len(generation.ids), (now - flight.started) or 1.0
    runs, start = [], 0
    for version, at in [*flight.updates, (generation.policy_version, now)]:
        end = count if at == now else int(count * (at - flight.started) / duration)
        if end > start:
            runs.append((version, end - start))
            start = end
    return tuple(runs)


def random_policy(choices: Sequence[int], *, end_id: int | None = None, mean_length: int = 16) -> Script:
    """A script of random ids from `choices`, which depend on `sampling.seed` only. A generation ends with a chance of 1 in `mean_length`."""

    def script(request: ScriptedRequest) -> list[int]:
        seed, ids = request.sampling.seed, list[int]()
        while len(ids) < request.sampling.max_new_tokens:
            if ids and uniform(seed, 2 * len(ids)) < 1 / mean_length:
                return ids if end_id is None else [*ids, end_id]
            ids.append(choices[int(uniform(seed, 2 * len(ids) + 1) * len(choices))])
        return ids

    return script


def _in_order(answers: Sequence[Answer]) -> Script:
    """The same answers in order, for every session."""

    def script(request: ScriptedRequest) -> Answer:
        if request.number >= len(answers):
            raise EngineFailure(
                f"the script has only {len(answers)} answers, but session {request.session} requested another",
                "script ended",
            )
        return answers[request.number]

    return script
