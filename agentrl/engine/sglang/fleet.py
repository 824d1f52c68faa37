"""Several SGLang servers behind one Engine: sessions stick to a server, weights reach all of them at once.

Generations go to ready members (members.py) and wait, for a bounded time, while there is none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest
from agentrl.engine.sglang.engine import ALL_MEMORY, KEPT_WEIGHTS, SGLangEngine
from agentrl.engine.sglang.supervisor import Failures, Member, Members, failures_of
from agentrl.errors import EngineFailure

ROUNDS = 3
"""how often a weight update is tried before the run stops"""
Send = Callable[[Sequence[SGLangEngine]], Awaitable[Failures]]
"""brings the weights to all these engines at once; returns what failed"""


class Fleet(Members):
    """An `Engine` made of servers."""

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Ask the session's server; see `Engine.generate`."""
        member = await self._member_of(session)
        try:
            return await member.engine.generate(ids, sampling, session=session, images=images)
        except EngineFailure as e:
            await self._judge(member, e)
            raise

    async def _judge(self, member: Member, failure: EngineFailure) -> None:
        """Take a member out for a failed request, unless the fault was the request's or of one connection alone."""
        cause = failure.cause
        if not cause.startswith("engine:") or cause.startswith("engine: HTTP 4"):
            return
        try:
            if cause == "engine: connection lost":
                await member.engine.health()
                return
        except EngineFailure:
            pass  # it is gone
        self._down(member, failure)

    async def _member_of(self, session: str) -> Member:
        member = self._where.get(session)
        if member is None or member.state != "ready":
            ready = await self._usable(("ready",), self._patience_s)
            member = min(ready, key=lambda m: len(m.sessions))
            member.sessions.add(session)
            self._where[session] = member
        return member

    async def release(self, session: str) -> None:
        """Forget where the session was."""
        member = self._where.pop(session, None)
        if member is not None:
            member.sessions.discard(session)

    async def pause(self) -> None:
        """Pause all members; one that cannot is taken down. Idempotent."""
        if not self._paused:
            await self._weights.acquire()
            self._paused = True
        await self._on_each([m for m in self.members if m.state == "ready"], lambda e: e.pause())

    async def resume(self) -> None:
        """Resume all members that are up."""
        await self._on_each([m for m in self.members if m.state != "down"], lambda e: e.resume())
        if self._paused:
            self._paused = False
            self._weights.release()

    async def abort(self, session: str | None = None) -> None:
        """Give up requests in flight, of one session or all."""
        where = self._where.get(session) if session is not None else None
        await self._on_each([where] if where else self.members if session is None else [], lambda e: e.abort(session))

    async def sleep(self, *, weights: bool = False) -> None:
        """Free memory; `weights`: also theirs, so they must be sent again before the members are of use."""
        async with self._weights:  # not amid a recovery
            self._asleep = True
            tags = ALL_MEMORY if weights else KEPT_WEIGHTS
            await self._on_each([m for m in self.members if m.state == "ready"], lambda e: e.sleep(tags))

    async def wake(self, tags: Sequence[str] = KEPT_WEIGHTS, *, ready: bool = True) -> None:
        """Take memory back."""
        await self._on_each([m for m in self.members if m.state == "ready"], lambda e: e.wake(tags, ready=ready))
        self._asleep = not ready

    async def health(self) -> EngineInfo:
        """Of the first member that is ready; EngineFailure if none is."""
        ready = [m for m in self.members if m.state == "ready"]
        if not ready:
            whys = "; ".join(f"{m.engine.address}: {m.why}" for m in self.members)
            raise EngineFailure(f"no engine is ready: {whys}", "engine: none left")
        return await ready[0].engine.health()

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Have every member read a folder; those that fail are taken down, and one must have them."""

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            return await failures_of(engines, lambda e: e.update_weights(weights, policy_version))

        await self.transfer(send, policy_version)

    async def transfer(self, send: Send, policy_version: int) -> list[SGLangEngine]:
        """Bring new weights to all members that are up, by `send`; tried again with those that come back until one has them.

        Raises:
            EngineFailure: none has them after some rounds, or they were refused without being touched.
        """
        owned, patience_s = not self._paused, max(self._patience_s, self._start_timeout_s)
        await self.pause()
        failed: Failures = {}
        try:
            for _ in range(ROUNDS):
                members = await self._usable(("ready", "stale"), patience_s)
                await self._on_each([m for m in members if m.state == "stale"], lambda e: e.pause())
                self._sending = True
                try:
                    failed = await send([m.engine for m in members])
                finally:
                    self._sending = False
                if failed and all(f.cause.startswith("weights ") for f in failed.values()):
                    break
                await self._sort_out(members, failed, policy_version)
                if len(failed) < len(members):
                    return [m.engine for m in members if m.engine.address not in failed]
        finally:
            if owned:
                await self.resume()
        causes = "; ".join(map(str, failed.values()))
        first = next((f.cause for f in failed.values()), "weights not taken")
        raise EngineFailure(f"no engine took the weights of version {policy_version}: {causes}", first)

    async def _sort_out(self, members: Sequence[Member], failed: Failures, policy_version: int) -> None:
        """Those that have the weights are ready, the others are discarded."""
        done = [m for m in members if m.engine.address not in failed]
        if done:
            self.policy_version = policy_version
        for m in members:
            if m in done:
                m.engine.policy_version, m.spoilt = policy_version, False
                await self._set(m, "ready")
            else:
                m.spoilt = True
                self._down(m, failed[m.engine.address])
