"""Decides what the local engine computes next: sessions, slots, and one step at a time. It uses neither threads nor asyncio.

A session takes one of `max_running` slots with its first request and keeps it, with its keys and values, until it is released. Sessions
without a slot wait in order of arrival. Only when no session runs and one waits is the least recently used idle session preempted. Its
tokens are computed again later in the same chunks, so the results stay bit-exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Generation, SamplingParams
from agentrl.engine.local.kv_cache import BlockPool, Chunk, Session
from agentrl.engine.local.model import LocalModel
from agentrl.engine.local.sampler import sample
from agentrl.engine.sampling import StopFinder, uniform
from agentrl.errors import EngineAbort, EngineFailure, Failure
from agentrl.types import FinishReason


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One call of `generate`, and what was sampled so far."""

    session: str
    context: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    """at most `sampling.max_new_tokens`"""
    stop_finder: StopFinder
    on_finish: Callable[[Generation | Failure], None]
    """called once, in the engine's thread"""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) of the weights before the current ones that sampled a part"""

    def end_version(self, version: int) -> None:
        """The weights of `version` sampled all tokens since the last call."""
        count = len(self.ids) - sum(n for _, n in self.versions)
        if count:
            self.versions.append((version, count))


class Scheduler:
    """All sessions of the engine, and the order in which their chunks are computed."""

    def __init__(
        self, model: LocalModel, max_running: int, policy_version: int, *, keep_interrupted: bool = False
    ) -> None:
        self.model = model
        self.keep_interrupted = keep_interrupted
        self.pool = BlockPool(model.device)
        self.policy_version = policy_version
        self.preemptions = 0
        self._sessions: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        """sessions with a request and without a slot"""
        self._running: dict[str, Session] = {}
        self._free_slots = max_running
        self._clock = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._running or self._waiting)

    @property
    def must_preempt(self) -> bool:
        """Whether the next step will take the slot of an idle session."""
        return bool(self._waiting) and not self._free_slots and not self._running

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request. Requests of one session are served one after the other."""
        session = self._sessions.setdefault(request.session, Session(request.session))
        if session.active is not None:
            session.queue.append(request)
        else:
            self._serve(session, request)

    def release(self, key: str) -> None:
        """Forget a session. Its unfinished requests are aborted."""
        session = self._sessions.get(key)
        if session is None:
            return
        self._abort([session], EngineAbort(f"session {key} was released while a request was in flight", "released"))
        session.free(self.pool)
        if session.has_slot:
            self._free_slots += 1
        del self._sessions[key]

    def abort(self, key: str | None, reason: Failure) -> None:
        """Abort the requests of one session, or of all."""
        self._abort([s for s in self._sessions.values() if key in (None, s.key)], reason)

    def cancel(self, request: Request) -> None:
        """Forget one request without a result."""
        session = self._sessions.get(request.session)
        if session is None:
            return
        if session.active is request:
            self._finish(session)
        elif request in session.queue:
            session.queue.remove(request)

    def weights_changed(self, policy_version: int) -> None:
        """Free all keys and values. Requests with sampled tokens continue or are aborted (`keep_interrupted`), the others start again."""
        before, self.policy_version = self.policy_version, policy_version
        reason = EngineAbort("new weights arrived while the generation was in flight", "weight update")
        for session in self._sessions.values():
            if session.active is None or not session.active.ids:
                continue
            if self.keep_interrupted:
                session.active.end_version(before)
            else:
                session.active.on_finish(reason)
                self._finish(session)
        self.free_cache()

    def free_cache(self) -> None:
        """Free all keys and values. Tokens and chunk boundaries stay."""
        for session in self._sessions.values():
            session.free(self.pool)
            if session.key in self._running:
                session.active.cached_tokens = 0
        self.pool.clear()

    def _serve(self, session: Session, request: Request) -> None:
        session.active = request
        self._clock += 1
        session.last_used = self._clock
        if session.has_slot:
            self._run(session)
        else:
            self._waiting.append(session)

    def _run(self, session: Session) -> None:
        request = session.active
        request.cached_tokens = session.set_context(request.context, self.pool, self.model.max_chunk)
        self._running[session.key] = session

    def _finish(self, session: Session) -> None:
        """The active request is finished; serve the session's next one."""
        if self._running.pop(session.key, None) is None:
            self._waiting.remove(session)
        session.active = None
        if session.queue:
            self._serve(session, session.queue.popleft())

    def _abort(self, sessions: list[Session], reason: Failure) -> None:
        for session in sessions:
            requests = list(session.queue)
            session.queue.clear()
            if session.active is not None:
                requests.insert(0, session.active)
                self._finish(session)
            for request in requests:
                request.on_finish(reason)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compute one batch of chunks, sample where a context is complete, and finish requests."""
        self._admit()
        chunks = self._schedule()
        tokens, logits_at, sampled = 0, [], []
        for chunk in chunks:
            tokens += chunk.tokens
            if chunk.end == len(chunk.session.ids):
                logits_at.append(tokens - 1)
                sampled.append(chunk.session)
        logits = self.model.forward(chunks, self.pool, logits_at)
        experts, start = self.model.experts(tokens), 0
        for chunk in chunks:
            chunk.session.computed_chunks += 1
            if experts is not None:
                chunk.session.record_experts(chunk.start, experts[start : start + chunk.tokens])
            start += chunk.tokens
        if logits is None:
            return
        params = [s.active.sampling for s in sampled]
        ids, log_probs = sample(logits, params, [uniform(s.active.sampling.seed, len(s.ids)) for s in sampled])
        for session, token, log_prob in zip(sampled, ids, log_probs, strict=True):
            self._accept(session, token, log_prob)

    def _admit(self) -> None:
        """Give free slots to waiting sessions, and preempt an idle one if nothing could run otherwise."""
        if self.must_preempt:
            idle = min((s for s in self._sessions.values() if s.has_slot), key=lambda s: s.last_used)
            idle.free(self.pool)
            idle.has_slot = False
            self._free_slots += 1
            self.preemptions += 1
        while self._waiting and self._free_slots:
            session = self._waiting.popleft()
            session.has_slot = True
            self._free_slots -= 1
            self._run(session)

    def _schedule(self) -> list[Chunk]:
        """The next batch, chunks of one token first. Sessions that are decoding have priority, then contexts in order of arrival."""
        chunks: list[Chunk] = []
        budget = self.model.batch_sizes[-1]
        for chunk in self._candidates():
            budget -= chunk.tokens
            if budget < 0:
                break
            chunks.append(chunk)
        chunks.sort(key=lambda chunk: chunk.tokens > 1)
        for chunk in chunks:
            chunk.session.allocate(chunk.end, self.pool)
        return chunks

    def _candidates(self) -> Iterator[Chunk]:
        """All chunks to compute, by priority."""
        running = list(self._running.values())
        decoding = [s.computed_chunks == len(s.chunk_ends) - 1 and bool(s.active.ids) for s in running]
        for priority in (True, False):
            for session, is_decoding in zip(running, decoding, strict=True):
                if is_decoding is priority:
                    start = session.computed_tokens
                    for end in session.chunk_ends[session.computed_chunks :]:
                        yield Chunk(session, start, end)
                        start = end

    def _accept(self, session: Session, token: int, log_prob: float) -> None:
        """Add a sampled token to its request, and finish the request if it is complete."""
        request = session.active
        if not -1e30 < log_prob <= 1e-3:
            self._fail(session, log_prob)
            return
        request.ids.append(token)
        request.log_probs.append(log_prob)
        finish_reason, matched_stop = self._finish_reason(request, token)
        if finish_reason is None:
            session.append(token)
            return
        if request.versions:
            request.end_version(self.policy_version)
        request.on_finish(
            Generation(
                ids=tuple(request.ids),
                log_probs=tuple(request.log_probs),
                finish_reason=finish_reason,
                matched_stop=matched_stop,
                policy_version=self.policy_version,
                cached_tokens=request.cached_tokens,
                versions=tuple(request.versions),
                context_crc=ids_checksum(session.ids[: len(request.context)]),
                routed_experts=session.experts_from(request.sampling.routed_experts_from),
            )
        )
        self._finish(session)

    def _fail(self, session: Session, log_prob: float) -> None:
        """Fail a request whose logits are not finite. Its blocks are cleared: values that are not finite would reach the next owner's tokens."""
        wrong = self.model.not_finite()
        cause = f"weights that are not finite: {', '.join(wrong[:3])}" if wrong else "all weights are finite"
        session.active.on_finish(
            EngineFailure(f"the model's logits are not finite (log-prob {log_prob}); {cause}", "logits not finite")
        )
        self.pool.erase(session.blocks)
        session.free(self.pool)
        self._finish(session)

    def _finish_reason(self, request: Request, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether the last token ends the generation, and the stop that matched: end ids, then stop strings, then length."""
        sampling = request.sampling
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.model.eos_ids):
            return FinishReason.STOP, token
        matched_stop = request.stop_finder.find(request.ids)
        if matched_stop is not None:
            return FinishReason.STOP, matched_stop
        return (FinishReason.LENGTH if len(request.ids) >= request.max_new_tokens else None), None
