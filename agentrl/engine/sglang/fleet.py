"""Several SGLang servers behind one `Engine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest
from agentrl.engine.sglang.engine import ALL_MEMORY, KEPT_WEIGHTS, SGLangEngine
from agentrl.engine.sglang.members import Failures, Member, all_or_cancel, failures_of
from agentrl.errors import AgentRLError, EngineFailure, Failure

logger = logging.getLogger(__name__)

POLL_S = 0.25
ROOM_POLL_S = 2.0
"""how often a ray cluster is asked for room for a late member"""
SILENT_S = 30.0
"""A server that has requests and answers none for this time must prove that it generates."""
UPDATE_ATTEMPTS = 3
"""How often a weight update that no member accepted is tried before it fails."""
RestoreWeights = Callable[[SGLangEngine], Awaitable[bool]]
"""brings the current weights to a server that came back; False: impossible at the moment"""
SendWeights = Callable[[Sequence[SGLangEngine]], Awaitable[Failures]]
"""brings new weights to all these engines at once; returns what failed"""


class Fleet:
    """An `Engine` made of SGLang servers.

    A session stays on one server. Generations go to ready members and wait, for a bounded time, while there is none. A failure that leaves the
    state of a server unknown takes it out. A background task then brings it back: it restarts a server that agentrl started, or waits for an
    external one, and has the current weights restored.

    Args:
        members: engines, with their processes if agentrl starts the servers.
        patience_s: how long a generation waits for a ready member. A weight update waits at least `start_timeout_s`.
        start_timeout_s: how long a server may take to start.
        release: called once, after all our servers have stopped.
        grows: late members may join from the start on, not only once `grows` is set.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        patience_s: float = 600.0,
        start_timeout_s: float = 600.0,
        release: Callable[[], None] | None = None,
        grows: bool = True,
    ) -> None:
        self.grows = grows
        """whether late members join: whatever else the run needs on the cluster has been reserved"""
        self.members = list(members)
        self._release = release
        self.policy_version = 0
        self.recovery: RestoreWeights | None = None
        self.causes: dict[str, int] = {}
        """how often members were taken out, by cause"""
        self.on_down: Callable[[str, Failure], None] | None = None
        """called with the address of each member that is taken out"""
        self.on_moved: Callable[[], None] | None = None
        """called when a server of ours was started at another address"""
        self._patience_s, self._start_timeout_s = patience_s, start_timeout_s
        self._sessions: dict[str, Member] = {}
        self._state_changed = asyncio.Condition()
        self._weights_lock = asyncio.Lock()
        """held while the fleet is paused, goes to sleep, or restores a member's weights"""
        self._watcher: asyncio.Task[None] | None = None
        self._asleep = self._paused = self._pausing = self._sending = self._closed = self._attached = False

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start our servers concurrently and wait until all members answer, except late ones.

        Raises:
            EngineFailure: a member did not answer; all are stopped.
        """
        if not self._attached:
            try:
                members = [m for m in self.members if not m.late]
                for member in members:
                    if member.process is not None:
                        member.process.start()
                await all_or_cancel(m.connect(self._start_timeout_s) for m in members)
                await self._adopt_version(members)
            except BaseException:
                await self.close()
                raise
        self._watcher = asyncio.create_task(self._watch())

    def attach(self, policy_version: int) -> None:
        """Before `start`: use servers that another fleet controls. This fleet sends no commands and no weights, and uses the members that
        serve `policy_version`.
        """
        self._attached, self.policy_version = True, policy_version
        for member in self.members:
            member.engine.policy_version = policy_version

    async def follow(self, addresses: Sequence[str]) -> None:
        """Attached: the servers of the members, in this order, are at these addresses now."""
        for member, address in zip(self.members, addresses, strict=True):
            before = member.engine.address
            if address != before:
                self._take_out(member, EngineFailure(f"the server at {before} moved to {address}", "engine: moved"))
                await member.engine.move(address)

    async def close(self) -> None:
        """Stop our servers; external ones continue. Idempotent."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(m.engine.close() for m in self.members), return_exceptions=True)
        await asyncio.gather(*(m.process.stop() for m in self.members if m.process is not None))
        if self._release is not None:
            self._release()
            self._release = None
        async with self._state_changed:
            self._state_changed.notify_all()

    async def _adopt_version(self, members: Sequence[Member]) -> None:
        """Take the version of the first member as the current one. External servers may have weights of an earlier run."""
        versions = [(await m.engine.health()).policy_version for m in members]
        self.policy_version = versions[0]
        for member, version in zip(members, versions, strict=True):
            member.state, member.reason, member.engine.policy_version = "ready", "", self.policy_version
            if version != self.policy_version:
                text = f"{member.engine.address} has weights of version {version}, {self.members[0].engine.address} of version {versions[0]}"
                self._take_out(member, EngineFailure(text, "engine: old weights"))

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample on the session's server; see `Engine.generate`."""
        member = self._sessions.get(session)
        if member is None or member.state != "ready":
            member = await self._assign(session)
        try:
            return await member.engine.generate(ids, sampling, session=session, images=images)
        except EngineFailure as e:
            if await self._member_failed(member, e):
                self._take_out(member, e)
            raise

    async def _assign(self, session: str) -> Member:
        """Assign a session to the ready member with the fewest sessions."""
        ready = [] if self._closed else self._in_state("ready")
        ready = ready or await self._wait_for(("ready",), self._patience_s)
        member = min(ready, key=lambda m: len(m.sessions))
        member.sessions.add(session)
        self._sessions[session] = member
        return member

    async def _member_failed(self, member: Member, failure: EngineFailure) -> bool:
        """Whether the server failed, and not only the request or one connection."""
        if not failure.cause.startswith("engine:") or failure.cause.startswith("engine: HTTP 4"):
            return False
        if failure.cause == "engine: connection lost":
            try:
                await member.engine.health()
            except EngineFailure:
                return True
            return False
        return True

    async def release(self, session: str) -> None:
        """Forget the session's server."""
        member = self._sessions.pop(session, None)
        if member is not None:
            member.sessions.discard(session)

    async def abort(self, session: str | None = None) -> None:
        """Abort requests in flight, of one session or all."""
        members = self.members if session is None else [m for m in self.members if session in m.sessions]
        await self._command(members, lambda e: e.abort(session))

    async def health(self) -> EngineInfo:
        """Properties of the first ready member.

        Raises:
            EngineFailure: no member is ready.
        """
        ready = self._in_state("ready")
        if not ready:
            reasons = "; ".join(f"{m.engine.address}: {m.reason}" for m in self.members)
            raise EngineFailure(f"no engine is ready: {reasons}", "engine: none ready")
        return await ready[0].engine.health()

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pause all members; a member that fails is taken out. Idempotent."""
        if not self._paused:
            self._pausing = True
            try:
                await self._weights_lock.acquire()
            finally:
                self._pausing = False
            self._paused = True
        await self._command(self._in_state("ready"), lambda e: e.pause())

    async def resume(self) -> None:
        """Resume all members that are up. Idempotent."""
        await self._command(self._in_state("ready", "stale"), lambda e: e.resume())
        if self._paused:
            self._paused = False
            self._weights_lock.release()

    async def sleep(self, *, weights: bool = False) -> None:
        """Free memory. `weights`: including the weights, which must be sent again before the next generation."""
        async with self._weights_lock:
            self._asleep = True
            tags = ALL_MEMORY if weights else KEPT_WEIGHTS
            await self._command(self._in_state("ready"), lambda e: e.sleep(tags))

    async def wake(self, tags: Sequence[str] = KEPT_WEIGHTS, *, ready: bool = True) -> None:
        """Allocate memory again. `ready`: accept generations."""
        await self._command(self._in_state("ready"), lambda e: e.wake(tags, ready=ready))
        self._asleep = not ready

    async def _command(self, members: Sequence[Member], command: Callable[[SGLangEngine], Awaitable[Any]]) -> None:
        """Run `command` on these members concurrently; those that fail are taken out."""
        failures = await failures_of([m.engine for m in members], command)
        for member in members:
            if member.engine.address in failures:
                self._take_out(member, failures[member.engine.address])

    # -- weights -------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Make every member load a folder; see `transfer`."""

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            return await failures_of(engines, lambda e: e.update_weights(weights, policy_version))

        await self.transfer(send, policy_version)

    async def transfer(self, send: SendWeights, policy_version: int) -> list[SGLangEngine]:
        """Bring new weights to all members that are up. Members that fail are taken out. If all fail, it is tried again with those that
        come back.

        Returns:
            The engines that have the weights: at least one.

        Raises:
            EngineFailure: no member accepted the weights in several attempts, or all refused them before they loaded anything.
        """
        must_resume, patience_s = not self._paused, max(self._patience_s, self._start_timeout_s)
        await self.pause()
        failures: Failures = {}
        try:
            for _ in range(UPDATE_ATTEMPTS):
                members = await self._wait_for(("ready", "stale"), patience_s)
                await self._command([m for m in members if m.state == "stale"], lambda e: e.pause())
                self._sending = True
                try:
                    failures = await send([m.engine for m in members])
                finally:
                    self._sending = False
                if failures and all(f.cause.startswith("weights ") for f in failures.values()):
                    break
                updated = await self._apply_update(members, failures, policy_version)
                if updated:
                    return updated
        finally:
            if must_resume:
                await self.resume()
        raise EngineFailure(
            f"no engine accepted the weights of version {policy_version}: {'; '.join(map(str, failures.values()))}",
            next((f.cause for f in failures.values()), "weights not taken"),
        )

    async def _apply_update(
        self, members: Sequence[Member], failures: Failures, policy_version: int
    ) -> list[SGLangEngine]:
        """Make members with the new weights ready and take out the others; returns the engines with the new weights."""
        updated = [m for m in members if m.engine.address not in failures]
        if updated:
            self.policy_version = policy_version
        for member in members:
            if member in updated:
                member.engine.policy_version, member.weights_unknown = policy_version, False
                await self._set_state(member, "ready")
            else:
                member.weights_unknown = True
                self._take_out(member, failures[member.engine.address])
        return [m.engine for m in updated]

    # -- members' states -----------------------------------------------------------------------------------------------

    def suspect(self, address: str, failure: Failure) -> None:
        """Another user of this server saw it fail: take it out until the watcher has checked it."""
        for member in self.members:
            if member.engine.address == address:
                self._take_out(member, failure)

    def _take_out(self, member: Member, failure: Failure) -> None:
        if member.state == "down" or self._closed:
            return
        member.state, member.reason = "down", str(failure)
        logger.warning("server %s taken out: %s", member.engine.address, failure)
        self.causes[failure.cause] = self.causes.get(failure.cause, 0) + 1
        member.down_since = asyncio.get_running_loop().time()
        for session in member.sessions:
            self._sessions.pop(session, None)
        member.sessions.clear()
        if self.on_down is not None:
            self.on_down(member.engine.address, failure)

    async def _set_state(self, member: Member, state: str) -> None:
        if state == "ready" and member.state != "ready":
            logger.warning("server %s is ready, with weights of version %d", member.engine.address, self.policy_version)
        async with self._state_changed:
            member.state, member.reason = state, ""
            self._state_changed.notify_all()

    def _in_state(self, *states: str) -> list[Member]:
        return [m for m in self.members if m.state in states]

    async def _wait_for(self, states: Sequence[str], patience_s: float) -> list[Member]:
        """Members in one of these states, as soon as there is one.

        Raises:
            EngineFailure: there was none within `patience_s`.
        """
        try:
            async with asyncio.timeout(patience_s), self._state_changed:
                await self._state_changed.wait_for(lambda: self._in_state(*states) or self._closed)
        except TimeoutError:
            reasons = "; ".join(f"{m.engine.address}: {m.state}: {m.reason}" for m in self.members)
            raise EngineFailure(
                f"no engine came back within {patience_s:g} s: {reasons}", "engine: none ready"
            ) from None
        if self._closed:
            raise EngineFailure("the engines are closed", "engine closed")
        return self._in_state(*states)

    # -- the watcher ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Find servers that died or hang, and bring members back. Each member has at most one task of each kind."""
        tasks: dict[tuple[Member, str], asyncio.Task[None]] = {}
        try:
            while True:
                for member in self.members:
                    if member.state != "down" and member.process is not None and not member.process.alive:
                        text = f"the server at {member.engine.address} died"
                        self._take_out(member, EngineFailure(text, "engine: server died"))
                    joins = member.state != "ready" and (self.grows or not member.late)
                    kinds = {"bring back": joins, "check": member.engine.silent_s > SILENT_S}
                    for kind in (k for k, due in kinds.items() if due):
                        if (member, kind) not in tasks or tasks[member, kind].done():
                            work = self._bring_back(member) if kind == "bring back" else self._check_generates(member)
                            tasks[member, kind] = asyncio.create_task(work)
                await asyncio.sleep(POLL_S)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _check_generates(self, member: Member) -> None:
        """Take out a silent server that does not generate, and fail its requests."""
        try:
            await member.engine.check_generates()
        except EngineFailure as e:
            silent_s = member.engine.silent_s
            if silent_s > SILENT_S:  # else it was paused during the check
                text = f"{member.engine.address} has answered nothing for {silent_s:.0f} s and does not generate: {e}"
                failure = EngineFailure(text, "engine: hangs")
                self._take_out(member, failure)
                member.engine.fail(failure)

    async def _bring_back(self, member: Member) -> None:
        """Try once to make a member ready. A failure is noted, and the watcher tries again."""
        if self._sending or (self._asleep and not self._paused):
            return  # during an update it must stay paused; while the fleet sleeps its memory is the trainer's
        try:
            if member.state == "down":
                if member.waits_for_room:
                    await asyncio.sleep(ROOM_POLL_S)
                    return
                before = member.engine.address
                await member.revive(self._start_timeout_s, may_command=not self._attached)
                if member.engine.address != before and self.on_moved is not None:
                    self.on_moved()
                await self._set_state(member, "stale")
            if not (
                self._pausing or self._paused
            ):  # else an update may use the member, and lose it; the watcher tries again
                await self._make_ready(member)
        except AgentRLError as e:
            if member.reason != str(e):  # it is tried several times a second
                logger.warning("server %s did not come back: %s", member.engine.address, e)
            member.state, member.reason = "down", str(e)
            await asyncio.sleep(POLL_S)

    async def _make_ready(self, member: Member) -> None:
        """Make a stale member ready. If its weights are not the current ones, `recovery` restores them."""
        async with self._weights_lock:
            if member.state != "stale" or self._asleep:
                return
            version = (await member.engine.health()).policy_version
            if version != self.policy_version or member.weights_unknown or member.engine.lacks_adapters:
                member.reason = f"it has weights of version {version}, expected version {self.policy_version}"
                if self.recovery is None:
                    return  # until the next weight update
                try:
                    if not await self.recovery(member.engine):
                        return
                except EngineFailure:
                    member.weights_unknown = True
                    raise
            member.weights_unknown = False
            member.engine.policy_version = self.policy_version
            if member.engine.paused:
                await member.engine.resume()
            await self._set_state(member, "ready")
