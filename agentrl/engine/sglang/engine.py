"""One SGLang server behind the Engine protocol, over its native HTTP API: ids in, ids and log-probs out.

What it is not: the process (see `launch`) and not a fleet (see `fleet`). While it is paused it sends nothing, and what was in flight
waits in the server, retracted, so that requests can be given up and weights changed. Every answer says which weights sampled it; an answer
of other weights than those last synced is a failure, since the server must have been restarted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation, SamplingParams, WeightsManifest, check_request
from agentrl.engine.sglang.api import QUICK_S, SGLangServer
from agentrl.engine.sglang.protocol import (
    check_prompt,
    finish_reason,
    goes_on,
    join,
    read_generation,
    request_body,
    sampled_tokens,
    with_images,
    within,
)
from agentrl.engine.weight_files import check_weights
from agentrl.errors import EngineAbort, EngineFailure, Failure
from agentrl.types import FinishReason

WORKS_S = 30.0
"""of the question whether it generates; the server itself gives up after 20 s"""
GIVEN_BACK = 16
"""how often a request that the server gave up without a token is asked again; each sync gives up all"""
ALL_MEMORY = ("kv_cache", "weights", "cuda_graph")
KEPT_WEIGHTS = ("kv_cache", "cuda_graph")


@dataclass(eq=False, slots=True)
class _Flight:
    """One request that the server has."""

    session: str
    rid: str = ""
    version: int = 0
    """of the weights when it was sent"""
    given_back: int = 0
    """times that the server gave it up before it had sampled anything"""
    task: asyncio.Task[Any] | None = None
    """that waits for the answer"""
    given_up: Failure | None = None

    def give_up(self, why: Failure) -> None:
        """Have the waiting task raise this at once."""
        if self.given_up is None:
            self.given_up = why
            if self.task is not None:
                self.task.cancel()


class SGLangEngine(SGLangServer):
    """An `Engine` at an HTTP address.

    Args:
        address: http://host:port of a server that is up (or will be when `start` is called).
        model_dir: the model's folder, if it can be read here: weights are then checked against it before they are sent.
        context_length: most tokens of context and generation; None: what the server says.
        policy_version: of the weights that the server starts with.
        timeout_s: how long a call other than `generate` may take.
        generate_timeout_s: how long one generation may take, queueing included.
    """

    def __init__(
        self,
        address: str,
        *,
        model_dir: Path | None = None,
        context_length: int | None = None,
        policy_version: int = 0,
        timeout_s: float = 300.0,
        generate_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(address, model_dir, context_length, policy_version, timeout_s)
        self._generate_timeout_s = generate_timeout_s
        self._name, self._asked = uuid.uuid4().hex, 0
        """of this client, and its requests so far: no two requests to a server have the same id"""
        self._out, self._heard = 0, 0.0
        """requests that the server has, and when it last answered one, or had none"""
        self._flights: set[_Flight] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._background: set[asyncio.Task[Any]] = set()

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample a continuation of `ids`; see `Engine.generate`. A cancelled call is given up by the server too."""
        facts = self.facts
        if self._asleep:
            raise EngineFailure(f"the engine at {self.address} sleeps; wake it before generate", "engine asleep")
        context = ids if isinstance(ids, list) else list(ids)
        room = check_request(context, sampling, self.context_length)
        if self.vocab_size is not None and not within(context, self.vocab_size):
            raise EngineFailure(f"the context holds ids outside 0..{self.vocab_size - 1}", "ids outside the vocabulary")
        flight = _Flight(session)
        self._flights.add(flight)
        parts: list[Generation] = []
        try:
            while True:
                answer = await self._ask(flight, context, sampling, room, images, seeded=facts.deterministic)
                if finish_reason(answer, self.address) is FinishReason.ABORT:
                    if sampled_tokens(answer):
                        raise EngineAbort("the generation was given up while it was in flight", "weight update")
                    flight.given_back += 1
                    if flight.given_back > GIVEN_BACK:
                        raise EngineAbort(f"{self.address} gave a request up again and again", "engine: gives up")
                    continue
                if images:
                    check_prompt(answer, context, self.address)
                part = self._checked(read_generation(answer, self._first_version, self.address), flight)
                parts.append(part)
                room -= len(part.ids)
                if not goes_on(part, sampling):
                    return join(parts)
                if room <= 0:
                    return join([*parts[:-1], replace(part, finish_reason=FinishReason.LENGTH, matched_stop=None)])
                context = [*context, *part.ids]
        finally:
            self._flights.discard(flight)

    async def _ask(
        self,
        flight: _Flight,
        ids: list[int],
        sampling: SamplingParams,
        room: int,
        images: Sequence[PlacedImage],
        *,
        seeded: bool,
    ) -> Any:
        """Send one request, once the engine is not paused; EngineAbort if it is given up."""
        self._asked += 1
        flight.rid = f"{self._name}-{self._asked}"
        task = flight.task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            body = request_body(ids, sampling, room, flight.rid, seeded=seeded)
            return await self._send(flight, with_images(body, images) if images else body)
        except asyncio.CancelledError:
            if flight.given_up is not None and task.uncancel() <= cancels:  # else the task itself was cancelled as well
                raise flight.given_up from None
            self._later(self._abort_quietly(flight.rid))
            raise
        finally:
            flight.task = None

    async def _send(self, flight: _Flight, body: dict[str, Any]) -> Any:
        await self._open.wait()
        flight.version = self.policy_version
        clock = asyncio.get_running_loop().time
        if not self._out:
            self._heard = clock()
        self._out += 1
        try:
            answer = await self.http.post("/generate", body, timeout_s=self._generate_timeout_s)
            self._heard = clock()
            return answer
        finally:
            self._out -= 1

    def _checked(self, generation: Generation, flight: _Flight) -> Generation:
        if generation.policy_version not in (self.policy_version, flight.version):
            raise EngineFailure(
                f"the engine at {self.address} answers with weights of version {generation.policy_version}, "
                f"version {self.policy_version} was synced: it must have been restarted",
                "engine: old weights",
            )
        return generation

    async def release(self, session: str) -> None:
        """Nothing: SGLang keeps prefixes as long as there is room."""

    # -- control -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["retract", "in_place", "abort"] = "retract") -> None:
        """Send nothing more. What is in flight waits in the server's queue, its keys and values dropped (`retract`) or kept (`in_place`), or
        is given up (`abort`): with sampled tokens it raises EngineAbort, without any it is asked again after `resume`.
        """
        self._open.clear()
        await self._call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("/continue_generation", {})
        self._heard = asyncio.get_running_loop().time()
        self._open.set()

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return not self._open.is_set()

    async def abort(self, session: str | None = None) -> None:
        """Give up requests in flight, of one session or all: they raise EngineAbort at once, the server hears of it."""
        flights = [f for f in self._flights if session in (None, f.session)]
        for flight in flights:
            flight.give_up(EngineAbort("the request was aborted", "aborted"))
        for flight in flights:
            await self._abort_quietly(flight.rid)

    async def sleep(self, tags: Sequence[str] = KEPT_WEIGHTS) -> None:
        """Free the server's memory of these tags (the weights stay unless they are named); refused while requests are in flight."""
        facts = self.facts
        if self._out:
            raise EngineFailure(
                f"the engine at {self.address} has {self._out} requests in flight and cannot sleep",
                "engine busy",
            )
        if facts.memory_saver and not self._asleep:
            await self.flush()
            await self._call("/release_memory_occupation", {"tags": list(tags)})
        self._asleep = True

    async def wake(self, tags: Sequence[str] = KEPT_WEIGHTS, *, ready: bool = True) -> None:
        """Take memory of these tags back; `ready`: generations may come again."""
        if not self._asleep:
            return
        if self.facts.memory_saver:
            await self._call("/resume_memory_occupation", {"tags": list(tags)})
        self._asleep = not ready

    @property
    def silent_s(self) -> float:
        """For how long the server has had requests and answered none."""
        return asyncio.get_running_loop().time() - self._heard if self._out and not self.paused else 0.0

    async def works(self) -> None:
        """Have the server prove that it generates; one that has something to do need not do more.

        Raises:
            EngineFailure: it does not.
        """
        await self.http.get("/health_generate", timeout_s=WORKS_S)
        self._heard = asyncio.get_running_loop().time()

    def fail(self, why: Failure) -> None:
        """Have everything in flight raise this at once."""
        for flight in list(self._flights):
            flight.give_up(why)

    async def close(self) -> None:
        """Fail what is in flight and drop the connections; the server itself goes on. Idempotent."""
        self._closed = True
        self._open.set()
        self.fail(EngineFailure("the engine was closed", "engine closed"))
        for task in list(self._background):
            task.cancel()
        await self.http.close()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Have the server read a folder; see `Engine.update_weights`. The folder must be readable where the server runs."""
        await asyncio.to_thread(check_weights, weights, self._model_dir)
        was_open = not self.paused
        await self.begin_weights()
        body = {"model_path": str(weights.path), "flush_cache": True, "weight_version": str(policy_version)}
        await self._call("/update_weights_from_disk", body)
        await self._took(policy_version)
        if was_open:
            await self.resume()

    async def begin_weights(self, *, bracket: bool = False) -> None:
        """Pause and give up what is in flight; `bracket`: announce weights over tensors or a group where the server wants it."""
        if not self.paused:
            await self.pause()
        await self.give_up()
        if bracket and self.facts.brackets:
            await self._call("/begin_weight_update", {})

    async def end_weights(self, policy_version: int) -> None:
        """The weights that `begin_weights(bracket=True)` announced are all there: answer with them, and with their version, from now on.

        Raises:
            EngineFailure: the server may hold a mixture of two versions; it must be discarded.
        """
        if self.facts.brackets:
            await self._call("/end_weight_update", {})
        await self.flush()
        await self._call("/update_weight_version", {"new_version": str(policy_version), "abort_all_requests": False})
        await self._took(policy_version)

    async def _took(self, policy_version: int) -> None:
        self.policy_version = policy_version
        found = (await self.health()).policy_version
        if found != policy_version:
            raise EngineFailure(
                f"{self.address} says version {found} after version {policy_version} was sent", "engine: old weights"
            )

    async def give_up(self) -> None:
        """Have the paused server answer everything that it has; requests without a sampled token will be asked again.

        A request that reached the server after the pause waits before its scheduler and cannot be given up: it has no token yet and
        will be sampled by the new weights. So it is enough that the scheduler is idle, which a flushed cache proves.
        """
        limit = asyncio.get_running_loop().time() + self._timeout_s
        while self._out:
            await self._call("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.sleep(0.05)
            if not self._out or await self._idle():
                await asyncio.sleep(0.05)
                return
            if asyncio.get_running_loop().time() > limit:
                raise EngineFailure(
                    f"{self.address} did not give up its requests within {self._timeout_s:g} s", "engine: timeout"
                )

    # -- pieces ------------------------------------------------------------------------------------------------------

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.http.post("/abort_request", {"rid": rid}, timeout_s=QUICK_S)
        except EngineFailure:
            return  # a server that is gone has given it up too

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
