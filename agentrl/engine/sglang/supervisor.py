"""Servers that come and go: started, watched, taken out when they fail, started again and given the weights that count.

A member is *ready* (up, with the current weights), *stale* (up, with other weights) or *down*. Whatever fails in a way that makes a member's
state unknown takes it down; a watcher brings it back: a server of ours is started again, an external one is asked until it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import AgentRLError, EngineFailure, Failure

logger = logging.getLogger(__name__)

POLL_S = 0.25
UNHEALTHY_S = 60.0
"""a server of ours that lives and does not answer is started again after so long"""
SILENT_S = 30.0
"""a server that has requests and answers none for so long must prove that it generates"""
Recovery = Callable[[SGLangEngine], Awaitable[bool]]
"""gives a server that has just come back the weights that count; False: it cannot now"""
Failures = dict[str, EngineFailure]
"""by an engine's address"""


@dataclass(eq=False)
class Member:
    """One server of a fleet."""

    engine: SGLangEngine
    process: ServerProcess | None = None
    """None: external"""
    state: str = "down"
    """ready, stale, down"""
    why: str = "not started"
    since: float = 0.0
    """when it went down"""
    spoilt: bool = False
    """a weight update broke off: nothing is known of its weights"""
    restarts: int = 0
    sessions: set[str] = field(default_factory=set)


class Members:
    """The servers of a fleet and how each of them stands.

    Args:
        members: engines and, where they are ours, their processes.
        patience_s: how long a generation waits for a server to come back; an update waits as long as a start may take, too.
        start_timeout_s: how long a server may take to start.
    """

    def __init__(self, members: Sequence[Member], *, patience_s: float = 600.0, start_timeout_s: float = 600.0) -> None:
        self.members = list(members)
        self.policy_version = 0
        self.recovery: Recovery | None = None
        self.causes: dict[str, int] = {}
        """why members were taken down, with counts"""
        self.on_down: Callable[[str, Failure], None] | None = None
        """told of every member that is taken down, by its address"""
        self._patience_s, self._start_timeout_s = patience_s, start_timeout_s
        self._where: dict[str, Member] = {}
        self._changed = asyncio.Condition()
        self._weights = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._asleep = self._paused = self._sending = self._closed = self._attached = False

    # -- coming and going --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start our servers side by side, and wait until all members answer.

        Raises:
            EngineFailure: one did not; all are stopped.
        """
        if not self._attached:
            await self._bring_up()
        self._watcher = asyncio.create_task(self._watch())

    async def _bring_up(self) -> None:
        try:
            for m in self.members:
                if m.process is not None:
                    m.process.start()
            await _all(self._come_up(m) for m in self.members)
            await self._agree()
        except BaseException:
            await self.close()
            raise

    async def _agree(self) -> None:
        """External servers may hold weights of an earlier run: those of the first one's version count, the others wait for new ones."""
        found = [(await m.engine.health()).policy_version for m in self.members]
        self.policy_version = found[0]
        for m, version in zip(self.members, found, strict=True):
            m.state, m.why, m.engine.policy_version = "ready", "", self.policy_version
            if version != self.policy_version:
                text = f"{m.engine.address} has weights of version {version}, {self.members[0].engine.address} of version {found[0]}"
                self._down(m, EngineFailure(text, "engine: old weights"))

    def attach(self, policy_version: int) -> None:
        """Before `start`: another fleet looks after the servers. This one gives no commands and no weights, it uses those that have this version."""
        self._attached, self.policy_version = True, policy_version
        for m in self.members:
            m.engine.policy_version = policy_version

    async def close(self) -> None:
        """Stop our servers; external ones go on. Idempotent."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(m.engine.close() for m in self.members), return_exceptions=True)
        await asyncio.gather(*(m.process.stop() for m in self.members if m.process is not None))
        async with self._changed:
            self._changed.notify_all()

    async def _come_up(self, member: Member) -> None:
        if member.process is not None:
            await member.process.wait_ready(self._start_timeout_s)
        await member.engine.start()

    def _down(self, member: Member, failure: Failure) -> None:
        """Take a member out; the watcher brings it back."""
        if member.state == "down" or self._closed:
            return
        member.state, member.why = "down", str(failure)
        logger.warning("server %s taken down: %s", member.engine.address, failure)
        self.causes[failure.cause] = self.causes.get(failure.cause, 0) + 1
        member.since = asyncio.get_running_loop().time()
        for session in member.sessions:
            self._where.pop(session, None)
        member.sessions.clear()
        if self.on_down is not None:
            self.on_down(member.engine.address, failure)

    def suspect(self, address: str, failure: Failure) -> None:
        """Somebody else who uses this server found it failing: take it out until the watcher has seen that it is well."""
        for m in self.members:
            if m.engine.address == address:
                self._down(m, failure)

    async def _set(self, member: Member, state: str, why: str = "") -> None:
        if state == "ready" and member.state != "ready":
            logger.warning("server %s is ready, with weights of version %d", member.engine.address, self.policy_version)
        async with self._changed:
            member.state, member.why = state, why
            self._changed.notify_all()

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """See servers die, bring them back, give them the weights they lack."""
        busy: dict[tuple[Member, str], asyncio.Task[None]] = {}

        def begin(m: Member, name: str, work: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
            if (m, name) not in busy or busy[m, name].done():
                busy[m, name] = asyncio.create_task(work(m))

        try:
            while True:
                for m in self.members:
                    if m.state != "down" and m.process is not None and not m.process.alive:
                        self._down(m, EngineFailure(f"the server at {m.engine.address} died", "engine: server died"))
                    if m.state != "ready":
                        begin(m, "bring back", self._bring_back)
                    if m.engine.silent_s > SILENT_S:
                        begin(m, "listen", self._listen)
                await asyncio.sleep(POLL_S)
        finally:
            for task in busy.values():
                task.cancel()
            await asyncio.gather(*busy.values(), return_exceptions=True)

    async def _listen(self, member: Member) -> None:
        """A server that works on something says so within seconds; one that does not is lost with all it has."""
        try:
            await member.engine.works()
        except EngineFailure as e:
            silent_s = member.engine.silent_s
            if silent_s > SILENT_S:  # else it was paused meanwhile
                text = f"{member.engine.address} has answered nothing for {silent_s:.0f} s and does not generate: {e}"
                failure = EngineFailure(text, "engine: hangs")
                self._down(member, failure)
                member.engine.fail(failure)

    async def _bring_back(self, member: Member) -> None:
        """One try to make a member ready; what fails is noted, and the watcher tries again."""
        if self._sending or (self._asleep and not self._paused):
            return  # amid an update it must not go on; while all sleep its memory is another's
        try:
            if member.state == "down":
                await self._revive(member)
                await self._set(member, "stale")
            await self._refresh(member)
        except AgentRLError as e:
            if member.why != str(e):  # tried again several times a second
                logger.warning("server %s did not come back: %s", member.engine.address, e)
            member.state, member.why = "down", str(e)
            await asyncio.sleep(POLL_S)

    async def _revive(self, member: Member) -> None:
        """Have the server answer: wait for one that lives, start one that is ours and died, or is spoilt, or has been down for long."""
        process = member.process
        long_down = asyncio.get_running_loop().time() - member.since > UNHEALTHY_S
        if process is not None and (member.spoilt or long_down or not process.alive):
            await process.stop()
            member.restarts += 1
            logger.warning("server %s is started again (restart %d)", member.engine.address, member.restarts)
            process.start()
            member.since = asyncio.get_running_loop().time()
            await self._come_up(member)
            member.spoilt = False
            return
        await member.engine.start()
        if self._attached:
            await member.engine.generate((1, 1), SamplingParams(1), session="")  # not `score`, which ends a pause
            return
        await member.engine.score((1, 1), timeout_s=UNHEALTHY_S)  # proves that it generates, not only that it answers

    async def _refresh(self, member: Member) -> None:
        """Make a stale member ready: with the weights it has, if they are the current ones, else with those of `recovery`."""
        async with self._weights:
            if member.state != "stale" or self._asleep:
                return
            found = (await member.engine.health()).policy_version
            if found != self.policy_version or member.spoilt:
                member.why = f"it has weights of version {found}, those of version {self.policy_version} count"
                if self.recovery is None:
                    return  # until an update comes, if one does
                try:
                    if not await self.recovery(member.engine):
                        return
                except EngineFailure:
                    member.spoilt = True
                    raise
            member.spoilt = False
            member.engine.policy_version = self.policy_version
            if member.engine.paused:
                await member.engine.resume()
            await self._set(member, "ready")

    async def _usable(self, states: Sequence[str], patience_s: float) -> list[Member]:
        """Members in one of these states, as soon as there is one.

        Raises:
            EngineFailure: there is none for so long.
        """

        def found() -> list[Member]:
            return [m for m in self.members if m.state in states]

        try:
            async with asyncio.timeout(patience_s), self._changed:
                await self._changed.wait_for(lambda: found() or self._closed)
        except TimeoutError:
            whys = "; ".join(f"{m.engine.address}: {m.state}: {m.why}" for m in self.members)
            raise EngineFailure(f"no engine came back within {patience_s:g} s: {whys}", "engine: none left") from None
        if self._closed:
            raise EngineFailure("the engines are closed", "engine closed")
        return found()

    async def _on_each(self, members: Sequence[Member], what: Callable[[SGLangEngine], Awaitable[Any]]) -> None:
        failed = await failures_of([m.engine for m in members], what)
        for m in members:
            if m.engine.address in failed:
                self._down(m, failed[m.engine.address])


async def failures_of(engines: Sequence[SGLangEngine], what: Callable[[SGLangEngine], Awaitable[Any]]) -> Failures:
    """Do it on all at once; what failed."""
    found = await asyncio.gather(*(what(e) for e in engines), return_exceptions=True)
    failed: Failures = {}
    for engine, result in zip(engines, found, strict=True):
        if isinstance(result, EngineFailure):
            failed[engine.address] = result
        elif isinstance(result, Failure):
            failed[engine.address] = EngineFailure(str(result), result.cause)
        elif isinstance(result, BaseException):
            raise result
    return failed


async def _all(work: Any) -> None:
    """Wait for all; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
