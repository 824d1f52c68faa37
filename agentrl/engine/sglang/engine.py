"""One SGLang server behind the `Engine` protocol: ids in, ids and log-probs out.

It does not start the server (`server_process`), and does not restart or replace it (`fleet`). A paused engine sends no requests; those in
flight wait in the server's queue, so that they can be aborted and the weights can change. Every response names the weights that sampled it.
A response of other weights than those of the last update is a failure: the server must have been restarted.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RouterShape
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest, check_request
from agentrl.engine.sampling import Decode
from agentrl.engine.sglang.api import ServerApi
from agentrl.engine.sglang.loaded_adapters import LoadedAdapter, LoadedAdapters
from agentrl.engine.sglang.protocol import (
    add_images,
    check_prompt,
    concatenate,
    context_checksum,
    end_at_stop,
    must_continue,
    read_experts,
    read_finish_reason,
    read_generation,
    read_version,
    request_body,
    sampled_tokens,
)
from agentrl.engine.weight_files import check_weights
from agentrl.errors import EngineAbort, EngineFailure, Failure
from agentrl.types import FinishReason

MAX_RESENDS = 16
"""How often a request is sent again after the server aborted it without a token; every weight update aborts all requests."""
ALL_MEMORY = ("kv_cache", "weights", "cuda_graph")
KEPT_WEIGHTS = ("kv_cache", "cuda_graph")


@dataclass(eq=False, slots=True)
class _Flight:
    """One call of `generate`."""

    session: str
    request_id: str = ""
    version: int = 0
    """policy version when the request was sent"""
    resends: int = 0
    """times that the server aborted it without a token"""
    task: asyncio.Task[Any] | None = None
    """the task that waits for the response"""
    failure: Failure | None = None
    """why it ended before a response came"""
    adapter: str | None = None
    """which of several adapters samples it"""
    adapter_version: int = 0
    """the adapter's version when the request was sent"""

    def fail(self, failure: Failure) -> None:
        """Make the waiting task raise `failure` at once."""
        if self.failure is None:
            self.failure = failure
            if self.task is not None:
                self.task.cancel()


class SGLangEngine:
    """An `Engine` at an HTTP address.

    Args:
        address: http://host:port of a server that is up when `start` is called.
        router: what the model's routers choose from, if generations return their choices; the server must support it.
        serves_adapters: adapters are loaded into the server (`load_adapters`), which must support it.
        model_dir: the model's folder, if it can be read here: new weights are compared with it before they are sent.
        context_length: maximum tokens of context and generation; None: the server's.
        policy_version: version of the weights that the server starts with.
        timeout_s: limit of every call other than `generate`.
        generate_timeout_s: limit of one generation, including the time in the server's queue.
    """

    def __init__(
        self,
        address: str,
        *,
        model_dir: Path | None = None,
        router: RouterShape | None = None,
        serves_adapters: bool = False,
        context_length: int | None = None,
        policy_version: int = 0,
        timeout_s: float = 300.0,
        generate_timeout_s: float = 3600.0,
    ) -> None:
        self.api = ServerApi(address, timeout_s)
        self.address = self.api.address
        self.policy_version = policy_version
        self.keep_interrupted = False
        """see `keep_tokens`"""
        self.starts = 0
        """completed calls of `start`; what was agreed with the server before the last one is lost"""
        config = _text_config(model_dir)
        self.vocab_size: int | None = config.get("vocab_size")
        """None: unknown"""
        self._positions: int | None = config.get("max_position_embeddings")
        self._context_length = context_length
        self._model_dir = model_dir
        self._router = router
        self._serves_adapters = serves_adapters
        self._first_version = policy_version
        self._decode: Decode | None = None
        self._generate_timeout_s = generate_timeout_s
        self._client_id, self._requests_sent = uuid.uuid4().hex, 0
        self.adapters = LoadedAdapters(self._client_id[:8])
        """what the server has of each of several adapters"""
        self._flights: set[_Flight] = set()
        self._in_server, self._last_response = 0, 0.0
        """requests that the server has, and when it last responded or had none"""
        self._running = asyncio.Event()
        self._running.set()
        self._asleep = False
        self._background: set[asyncio.Task[None]] = set()

    @property
    def context_length(self) -> int:
        """Maximum tokens of context and generation together."""
        known = [n for n in (self._context_length, self.api.facts.context_length, self._positions) if n]
        if not known:
            raise EngineFailure(
                f"the server at {self.address} does not report its context length; pass context_length",
                "no context length",
            )
        return min(known)

    @property
    def lacks_adapters(self) -> bool:
        """The server was started again and has none of several adapters, whatever its version says."""
        return self._serves_adapters and not self.adapters.current

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return not self._running.is_set()

    @property
    def silent_s(self) -> float:
        """Time since the last response while the server has requests; 0 while it has none or is paused."""
        return asyncio.get_running_loop().time() - self._last_response if self._in_server and not self.paused else 0.0

    def keep_tokens(self, decode: Decode | None) -> None:
        """From now on, generations that a weight update interrupts keep their tokens and continue with the new weights.

        `decode` (ids -> text) finds stop strings that an interruption divides; without it, generations with stop strings raise EngineAbort.
        """
        self.keep_interrupted, self._decode = True, decode

    async def start(self) -> None:
        """Connect; call it again after the server was restarted. A paused engine stays paused.

        Raises:
            EngineFailure: the server does not answer.
        """
        await self.api.connect()
        if self._router is not None and not self.api.facts.routed_experts:
            raise EngineFailure(
                f"the server at {self.address} does not return routed experts, which --use-rollout-routing-replay records: start it with "
                "--enable-return-routed-experts",
                "engine: no routed experts",
            )
        if self._serves_adapters and not self.api.facts.lora:
            raise EngineFailure(
                f"the server at {self.address} takes no adapters, which --lora-adapter sends: start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules",
                "engine: no adapters",
            )
        self.adapters.forget()
        self._asleep = False
        self.starts += 1

    async def move(self, address: str) -> None:
        """The server was started at another address; call `start` next. Requests in flight fail."""
        await self.api.close()
        self.api = ServerApi(address, self.api.timeout_s)
        self.address = self.api.address

    async def health(self) -> EngineInfo:
        """The server's properties and policy version."""
        facts = self.api.facts
        return EngineInfo(
            name="sglang",
            version=facts.version,
            policy_version=read_version(await self.api.weight_version(), self._first_version),
            context_length=self.context_length,
            deterministic=facts.deterministic,
        )

    async def check_generates(self) -> None:
        """Make the server prove that it generates.

        Raises:
            EngineFailure: it does not.
        """
        await self.api.health_generate()
        self._last_response = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Fail the requests in flight and close the connections. The server continues. Idempotent."""
        self._running.set()
        self.fail(EngineFailure("the engine was closed", "engine closed"))
        for task in list(self._background):
            task.cancel()
        await self.api.close()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Engine.generate`. If the call is cancelled, the server aborts the request."""
        facts = self.api.facts
        if self._asleep:
            raise EngineFailure(f"the engine at {self.address} is asleep; call wake before generate", "engine asleep")
        context = ids if isinstance(ids, list) else list(ids)
        max_new_tokens = check_request(context, sampling, self.context_length)
        flight = _Flight(session, adapter=sampling.adapter)
        self._flights.add(flight)
        parts: list[Generation] = []
        experts_from = None if self._router is None else sampling.routed_experts_from
        interrupted = False
        crc: int | None = None
        try:
            while True:
                body = request_body(
                    context, sampling, max_new_tokens, seeded=facts.deterministic, experts_from=experts_from
                )
                if crc is None:
                    crc = context_checksum(body["input_ids"], self.vocab_size)
                response = await self._send(flight, add_images(body, images) if images else body)
                aborted = read_finish_reason(response, self.address) is FinishReason.ABORT
                if aborted and not self._may_keep(response, sampling):
                    self._count_abort(flight, response)
                    continue
                check_prompt(response, context, self.address, images=bool(images))
                part = read_generation(response, self._first_version, self.address, self.vocab_size, context_crc=crc)
                self._check_version(part, flight)
                if flight.adapter is not None:
                    part = replace(part, policy_version=flight.adapter_version, versions=())
                if experts_from is not None and self._router is not None:
                    tokens = len(context) + len(part.ids) - 1 - experts_from
                    part = replace(part, routed_experts=read_experts(response, self._router, tokens, self.address))
                    experts_from += 0 if part.routed_experts is None else tokens
                if interrupted and sampling.stop and self._decode is not None:
                    part = end_at_stop(parts, part, sampling.stop, self._decode)
                    aborted = part.finish_reason is FinishReason.ABORT
                parts.append(part)
                max_new_tokens -= len(part.ids)
                interrupted |= aborted
                if not (aborted or must_continue(part, sampling)):
                    return concatenate(parts)
                if max_new_tokens <= 0:
                    full = replace(part, finish_reason=FinishReason.LENGTH, matched_stop=None)
                    return concatenate([*parts[:-1], full])
                context = [*context, *part.ids]
        finally:
            self._flights.discard(flight)

    async def _send(self, flight: _Flight, body: dict[str, Any]) -> Any:
        """Send one request as soon as the engine is not paused; returns the response, and notes for `silent_s` when it came."""
        self._requests_sent += 1
        flight.request_id = body["rid"] = f"{self._client_id}-{self._requests_sent}"
        task = flight.task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            await self._running.wait()
            flight.version = self.policy_version
            if flight.adapter is not None:
                loaded = self.loaded(flight.adapter)
                flight.adapter_version, body["lora_path"] = loaded.version, loaded.name
            clock = asyncio.get_running_loop().time
            if not self._in_server:
                self._last_response = clock()
            self._in_server += 1
            try:
                response = await self.api.generate(body, timeout_s=self._generate_timeout_s)
                self._last_response = clock()
                return response
            finally:
                self._in_server -= 1
        except asyncio.CancelledError:
            if flight.failure is not None and task.uncancel() <= cancels:  # else the task itself was cancelled as well
                raise flight.failure from None
            self._in_background(self.api.abort(flight.request_id))
            raise
        finally:
            flight.task = None

    def _may_keep(self, response: Any, sampling: SamplingParams) -> bool:
        """Whether the tokens of an aborted request can be kept. The server does not report all tokens of one that waited in its queue."""
        count = sampled_tokens(response, self.address)
        known = response["meta_info"].get("completion_tokens") == count
        return self.keep_interrupted and count > 0 and known and not (sampling.stop and self._decode is None)

    def _count_abort(self, flight: _Flight, response: Any) -> None:
        """The server aborted a request.

        Raises:
            EngineAbort: the request must not be sent again.
        """
        if sampled_tokens(response, self.address):
            raise EngineAbort("the generation was aborted while it was in flight", "weight update")
        flight.resends += 1
        if flight.resends > MAX_RESENDS:
            raise EngineAbort(
                f"{self.address} aborted a request {flight.resends} times without a token", "engine: repeated aborts"
            )

    def _check_version(self, generation: Generation, flight: _Flight) -> None:
        if generation.policy_version not in (self.policy_version, flight.version):
            raise EngineFailure(
                f"the engine at {self.address} answers with weights of version {generation.policy_version}, expected version "
                f"{self.policy_version}: it must have been restarted",
                "engine: old weights",
            )

    async def release(self, session: str) -> None:
        """Does nothing: SGLang evicts prefixes itself."""

    async def abort(self, session: str | None = None) -> None:
        """Abort requests in flight, of one session or all: they raise EngineAbort at once, before the server confirms."""
        flights = [f for f in self._flights if session in (None, f.session)]
        for flight in flights:
            flight.fail(EngineAbort("the request was aborted", "aborted"))
        for flight in flights:
            await self.api.abort(flight.request_id)

    def fail(self, failure: Failure) -> None:
        """Make all requests in flight raise `failure` at once."""
        for flight in list(self._flights):
            flight.fail(failure)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["retract", "in_place", "abort"] = "retract") -> None:
        """Send no more requests. Those in flight wait in the server's queue with their keys and values dropped (`retract`) or kept
        (`in_place`), or are aborted (`abort`): with sampled tokens they raise EngineAbort, without they are sent again after `resume`.

        With `keep_interrupted` they are aborted first, since a server returns the tokens only of requests that it runs.
        """
        self._running.clear()
        if self.keep_interrupted:
            await self._abort_all()
        await self.api.command("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self.api.command("/continue_generation", {})
        self._last_response = asyncio.get_running_loop().time()
        self._running.set()

    async def sleep(self, tags: Sequence[str] = KEPT_WEIGHTS) -> None:
        """Free the server's memory with these tags; refused while requests are in flight."""
        facts = self.api.facts
        if self._in_server:
            raise EngineFailure(
                f"the engine at {self.address} has {self._in_server} requests in flight and cannot sleep; abort them first",
                "engine busy",
            )
        if facts.memory_saver and not self._asleep:
            await self.api.flush_cache()
            await self.api.command("/release_memory_occupation", {"tags": list(tags)})
        self._asleep = True

    async def wake(self, tags: Sequence[str] = KEPT_WEIGHTS, *, ready: bool = True) -> None:
        """Allocate the memory with these tags again. `ready`: accept generations."""
        if not self._asleep:
            return
        if self.api.facts.memory_saver:
            await self.api.command("/resume_memory_occupation", {"tags": list(tags)})
        self._asleep = not ready

    # -- weights -------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Make the server load a folder, which it must be able to read; see `Engine.update_weights`."""
        await asyncio.to_thread(check_weights, weights, self._model_dir)
        was_paused = self.paused
        await self.begin_weights()
        body = {"model_path": str(weights.path), "flush_cache": True, "weight_version": str(policy_version)}
        await self.api.command("/update_weights_from_disk", body)
        await self._set_version(policy_version)
        if not was_paused:
            await self.resume()

    async def load_adapters(self, adapters: Mapping[str, tuple[int, Path]], policy_version: int) -> None:
        """Make the server load adapters, by name, from folders of peft that it can read, and serve `policy_version`. It stays paused.

        Raises:
            EngineFailure: the server refused one.
        """
        await self.begin_weights()
        await self.adapters.load(self.api, adapters)
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self.api.command("/update_weight_version", body)
        await self._set_version(policy_version)

    def loaded(self, adapter: str) -> LoadedAdapter:
        """What the server has of an adapter.

        Raises:
            EngineFailure: nothing.
        """
        has = self.adapters.current
        if adapter not in has:
            raise EngineFailure(
                f"the request names the adapter {adapter!r}; {self.address} has {', '.join(has) or 'none'}",
                "unknown adapter",
            )
        return has[adapter]

    async def begin_weights(self, *, bracket: bool = False) -> None:
        """Pause and abort the requests in flight. `bracket`: announce weights by tensors or by a group, if the server's version requires it."""
        if not self.paused:
            await self.pause()
        await self._abort_all()
        if bracket and self.api.facts.brackets:
            await self.api.command("/begin_weight_update", {})

    async def end_weights(self, policy_version: int) -> None:
        """End an update that `begin_weights(bracket=True)` began: serve the new weights under their version.

        Raises:
            EngineFailure: the server may hold a mixture of two versions and must be discarded.
        """
        if self.api.facts.brackets:
            await self.api.command("/end_weight_update", {})
        await self.api.flush_cache()
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self.api.command("/update_weight_version", body)
        await self._set_version(policy_version)

    async def _set_version(self, policy_version: int) -> None:
        self.policy_version = policy_version
        reported = (await self.health()).policy_version
        if reported != policy_version:
            raise EngineFailure(
                f"{self.address} reports version {reported} after version {policy_version} was sent",
                "engine: old weights",
            )

    async def _abort_all(self) -> None:
        """Make the paused server respond to all its requests; those without a sampled token will be sent again.

        A request that arrived after the pause waits in front of the server's scheduler and cannot be aborted. It has no token yet and will
        be sampled by the new weights. So an idle scheduler is sufficient, and a successful flush of the cache proves it.
        """
        deadline = asyncio.get_running_loop().time() + self.api.timeout_s
        while self._in_server:
            await self.api.command("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.sleep(0.05)
            if not self._in_server or await self.api.try_flush_cache():
                await asyncio.sleep(0.05)
                return
            if asyncio.get_running_loop().time() > deadline:
                raise EngineFailure(
                    f"{self.address} did not abort its requests within {self.api.timeout_s:g} s", "engine: timeout"
                )


def _text_config(model_dir: Path | None) -> dict[str, Any]:
    """The language model's part of config.json; empty if there is none."""
    if model_dir is None or not (model_dir / "config.json").exists():
        return {}
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text
