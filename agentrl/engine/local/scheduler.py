"""What the local engine computes next: sessions, slots, and one step at a time. No threads and no asyncio here.

Slots. A session takes one of `max_running` slots with its first request and holds it, and with it its keys and values, until it is
released. A session without one waits in the order of arrival. Only when nothing runs and one waits is the idle session that was used
longest ago put out (counted in `evictions`): its tokens are computed again later, in the same pieces, so the answers keep their bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentrl.engine.base import Generation, SamplingParams
from agentrl.engine.local.kv_cache import BlockPool, Session
from agentrl.engine.local.model import LocalModel
from agentrl.engine.local.sampler import sample
from agentrl.engine.sampling import StopFinder, uniform
from agentrl.errors import EngineAbort, EngineFailure, Failure
from agentrl.types import FinishReason


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`, and what it has so far."""

    session: str
    context: list[int]
    sampling: SamplingParams
    room: int
    """most tokens to sample"""
    finder: StopFinder
    done: Callable[[Generation | Failure], None]
    """called once, from the engine's thread"""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cached: int = 0


class Scheduler:
    """All sessions of the engine and the order in which their pieces are computed."""

    def __init__(self, model: LocalModel, max_running: int, policy_version: int) -> None:
        self.model = model
        self.pool = BlockPool(model.device)
        self.policy_version = policy_version
        self.evictions = 0
        """sessions put out of their slot while they were not over"""
        self._sessions: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        self._running: dict[str, Session] = {}
        self._free_slots = max_running
        self._clock = 0

    @property
    def busy(self) -> bool:
        """There is something to compute."""
        return bool(self._running or self._waiting)

    @property
    def crowded(self) -> bool:
        """The next step will put an idle session out of its slot."""
        return bool(self._waiting) and not self._free_slots and not self._running

    def add(self, request: Request) -> None:
        """Take a request. Requests of one session are served one after the other."""
        session = self._sessions.setdefault(request.session, Session(request.session))
        if session.active is not None:
            session.queue.append(request)
        else:
            self._serve(session, request)

    def release(self, key: str) -> None:
        """Forget a session; requests of it that are not answered are given up."""
        session = self._sessions.get(key)
        if session is None:
            return
        self._give_up([session], EngineAbort(f"session {key} was released while a request was in flight", "released"))
        session.drop(self.pool)
        if session.slot:
            self._free_slots += 1
        del self._sessions[key]

    def abort(self, key: str | None, reason: Failure) -> None:
        """Give up the requests of one session, or of all."""
        sessions = list(self._sessions.values()) if key is None else [s for s in [self._sessions.get(key)] if s]
        self._give_up(sessions, reason)

    def cancel(self, request: Request) -> None:
        """Forget one request without an answer."""
        session = self._sessions.get(request.session)
        if session is None:
            return
        if session.active is request:
            self._finish(session)
        elif request in session.queue:
            session.queue.remove(request)

    def weights_changed(self, policy_version: int) -> None:
        """Drop all keys and values; give up requests that hold sampled tokens, start the others over."""
        self.policy_version = policy_version
        active = [s for s in self._sessions.values() if s.active is not None]
        reason = EngineAbort("new weights arrived while the generation was in flight", "weight update")
        for session in active:
            if session.active.ids:
                session.active.done(reason)
                self._finish(session)
        self.drop_cache()

    def drop_cache(self) -> None:
        """Forget all keys and values; tokens and pieces stay known."""
        for session in self._sessions.values():
            session.drop(self.pool)
            if session.key in self._running:
                session.active.cached = 0
        self.pool.clear()

    def step(self) -> None:
        """Compute one line of tokens and hand out what is finished."""
        self._admit()
        batch = self._batch()
        line, wanted, rows = 0, [], []
        for session, start, end in batch:
            line += end - start
            if end == len(session.ids):
                wanted.append(line - 1)
                rows.append(session)
        logits = self.model.forward(batch, self.pool, wanted)
        for session, _, _ in batch:
            session.done += 1
        if logits is None:
            return
        params = [s.active.sampling for s in rows]
        tokens, log_probs = sample(logits, params, [uniform(s.active.sampling.seed, len(s.ids)) for s in rows])
        for session, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            self._accept(session, token, log_prob)

    def _serve(self, session: Session, request: Request) -> None:
        session.active = request
        self._clock += 1
        session.last_used = self._clock
        if session.slot:
            self._start(session)
        else:
            self._waiting.append(session)

    def _start(self, session: Session) -> None:
        session.active.cached = session.begin(session.active.context, self.pool, self.model.piece)
        self._running[session.key] = session

    def _admit(self) -> None:
        """Give free slots to those who wait; make one free if nothing could run otherwise."""
        if self.crowded:
            idle = min((s for s in self._sessions.values() if s.slot), key=lambda s: s.last_used)
            idle.drop(self.pool)
            idle.slot = False
            self._free_slots += 1
            self.evictions += 1
        while self._waiting and self._free_slots:
            session = self._waiting.popleft()
            session.slot = True
            self._free_slots -= 1
            self._start(session)

    def _batch(self) -> list[tuple[Session, int, int]]:
        """The pieces of the next line: what is being sampled first, then contexts in the order of arrival while they fit."""
        budget = self.model.rows[-1]
        singles: list[tuple[Session, int, int]] = []
        longer: list[tuple[Session, int, int]] = []
        running = list(self._running.values())
        for decoding in (True, False):
            for session in running:
                if (session.done == len(session.ends) - 1 and bool(session.active.ids)) is not decoding:
                    continue
                for start, end in _pending(session):
                    if end - start > budget:
                        return self._reserved(singles, longer)
                    budget -= end - start
                    (singles if end - start == 1 else longer).append((session, start, end))
        return self._reserved(singles, longer)

    def _reserved(
        self, singles: list[tuple[Session, int, int]], longer: list[tuple[Session, int, int]]
    ) -> list[tuple[Session, int, int]]:
        batch = singles + longer
        for session, _, end in batch:
            session.reserve(end, self.pool)
        return batch

    def _accept(self, session: Session, token: int, log_prob: float) -> None:
        """Add a sampled token to its request, and end the request if it is complete."""
        request = session.active
        if not -1e30 < log_prob <= 1e-3:
            request.done(
                EngineFailure(f"the model gave logits that are not numbers (log-prob {log_prob})", "logits not finite")
            )
            self._finish(session)
            return
        request.ids.append(token)
        request.log_probs.append(log_prob)
        finish, matched = self._ended(request, token)
        if finish is None:
            session.append(token)
            return
        request.done(
            Generation(
                tuple(request.ids), tuple(request.log_probs), finish, matched, self.policy_version, request.cached
            )
        )
        self._finish(session)

    def _ended(self, request: Request, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether the last token ends the generation: end ids, then stop strings, then length."""
        sampling = request.sampling
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.model.eos_ids):
            return FinishReason.STOP, token
        matched = request.finder.find(request.ids)
        if matched is not None:
            return FinishReason.STOP, matched
        return (FinishReason.LENGTH if len(request.ids) >= request.room else None), None

    def _finish(self, session: Session) -> None:
        """The active request is over; serve the session's next."""
        if self._running.pop(session.key, None) is None:
            self._waiting.remove(session)
        session.active = None
        if session.queue:
            self._serve(session, session.queue.popleft())

    def _give_up(self, sessions: list[Session], reason: Failure) -> None:
        for session in sessions:
            queued = list(session.queue)
            session.queue.clear()
            if session.active is not None:
                queued.insert(0, session.active)
                self._finish(session)
            for request in queued:
                request.done(reason)


def _pending(session: Session) -> Iterator[tuple[int, int]]:
    """The pieces still to compute, as (start, end)."""
    start = session.computed
    for end in session.ends[session.done :]:
        yield start, end
        start = end
