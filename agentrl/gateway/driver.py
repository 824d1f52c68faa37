"""Plays the episodes of an `AgentEnv`: each with a session at the gateway and its agent; or again from its record, without the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentrl.config import Config, GatewaySettings
from agentrl.env import Env
from agentrl.errors import ConfigError, ContractError, EnvFailure, boundary
from agentrl.gateway.agent_env import AgentEnv, ModelEndpoint, check_finished
from agentrl.gateway.context_plan import ContextPlan, NoRoomError
from agentrl.gateway.protocol import ModelRequest, RequestError
from agentrl.gateway.server import GatewayServer
from agentrl.gateway.session import GatewaySession
from agentrl.gateway.turn_recorder import Arrival
from agentrl.rollout.episode import Episode
from agentrl.rollout.outcomes import FAILURES
from agentrl.types import Message, StopReason, Trajectory


def make_driver(config: Config, env_class: type[Env], mixed: Sequence[type[Env]] = ()) -> GatewayDriver | None:
    """The gateway of an environment whose agent is a separate program; None: the environment needs none.

    Args:
        config: all settings.
        env_class: the run's environment.
        mixed: those of a run with several.

    Raises:
        ConfigError: the gateway's flags or a context policy have no effect, or the environment cannot be mixed or isolated.
    """
    g = config.gateway
    if agents := [env.label() for env in mixed if issubclass(env, AgentEnv)]:
        raise ConfigError(
            f"{agents[0]} is an AgentEnv and cannot be mixed with other environments; give it a separate run"
        )
    if not issubclass(env_class, AgentEnv):
        if g != GatewaySettings():
            raise ConfigError(
                f"--gateway flags have no effect, since {env_class.label()} is not an AgentEnv and needs no gateway; leave them out"
            )
        return None
    if "process" in (config.env.env_isolation, env_class.isolation):
        raise ConfigError(
            f"{env_class.label()} is an AgentEnv and cannot be isolated in a process; give its agent as a `command`, which is one"
        )
    if config.env.context_policy is not None or env_class.context_policy is not None:
        raise ConfigError(
            f"{env_class.label()} is an AgentEnv, whose agent decides itself what leaves its conversation; leave out the context policy"
        )
    return GatewayDriver(env_class, host=g.gateway_host, port=g.gateway_port, url=g.gateway_url)


class GatewayDriver:
    """Gives every episode a session at one server, which starts with the first.

    Args:
        env_class: the environment.
        host: address to listen on.
        port: 0: any free port.
        url: base address that agents use; None: that of host and port.
    """

    def __init__(
        self, env_class: type[AgentEnv], *, host: str = "127.0.0.1", port: int = 0, url: str | None = None
    ) -> None:
        self.url = url
        self.server = GatewayServer(host, port)
        self._starting: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(env_class.max_agents) if env_class.max_agents is not None else None

    async def play(self, episode: Episode) -> StopReason:
        """Run the agent of one episode and return why it ended. Raises failures, as the loop over turns does."""
        await self._started()
        await episode.reset()
        if self._slots is None:
            return await self._run_agent(episode)
        async with self._slots:
            return await self._run_agent(episode)

    def playback(self, recorded: Trajectory) -> PlaybackDriver:
        """Makes the requests of a recorded episode."""
        return PlaybackDriver(recorded)

    async def close(self) -> None:
        """Stop the server."""
        if self._starting is not None:
            await asyncio.wait({self._starting})
            self._starting = None
            await self.server.close()

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.server.start())
        with boundary(EnvFailure, "the gateway's server"):
            await asyncio.shield(self._starting)

    async def _run_agent(self, episode: Episode) -> StopReason:
        env = agent_env(episode)
        session = GatewaySession(episode, env)
        key = self.server.register(session)
        endpoint = ModelEndpoint(
            url=(self.url or self.server.url).rstrip("/"),
            api_key=key,
            model=env.models[0],
            side_model=next(iter(env.side_models), env.models[0]),
        )
        episode.activity = "the agent's run"
        task = episode.spec.task.copy()
        limit_s = episode.runner.limits.episode_timeout_s
        agent = asyncio.ensure_future(episode.instance.call("run", task, endpoint, timeout_s=limit_s))
        try:
            await _until_over(agent, session, env.grace_s)
        finally:
            self.server.unregister(key)
            agent.cancel()
            await asyncio.wait({agent})
            await session.seal()
            episode.turns = [d.complete() for d in session.recorder.drafts]
            env.gateway = session.summary()
        if session.failed.done():
            session.failed.result()
        if session.recorder.bound is None or not (
            agent.cancelled() or agent.exception()
        ):  # a spent budget may stop it in any way
            result = agent.result()
            if result is not None:
                env.set_outcome({"result": result})
        if session.recorder.bound is not None:
            return session.recorder.bound
        check_finished(env, len(session.recorder.drafts))
        return StopReason.TERMINATED


class PlaybackDriver:
    """Makes the requests of one recorded episode in their order; the generator gives the recorded generations."""

    def __init__(self, recorded: Trajectory) -> None:
        self.recorded = recorded

    async def play(self, episode: Episode) -> StopReason:
        """Play the recorded requests and end as the record does."""
        recorded = self.recorded
        await episode.instance.create(episode.seed, episode.spec.task)
        env = agent_env(episode)
        env.set_outcome({k: v for k, v in recorded.state.items() if k != "gateway"})
        env.gateway = recorded.state.get("gateway", {})
        session = GatewaySession(episode, env)
        try:
            await self._repeat(session)
        finally:
            await session.seal()
            for draft, turn in zip(session.recorder.drafts, recorded.turns, strict=False):
                draft.info.pop("undelivered", None)
                if "undelivered" in turn.info:
                    draft.info["undelivered"] = turn.info["undelivered"]
            episode.turns = [d.complete() for d in session.recorder.drafts]
        failure = next((kind for kind, reason in FAILURES.items() if reason is recorded.stop_reason), None)
        if failure is not None:
            raise failure(recorded.detail or "", recorded.cause)
        return recorded.stop_reason

    def playback(self, recorded: Trajectory) -> PlaybackDriver:
        """See `GatewayDriver.playback`."""
        return PlaybackDriver(recorded)

    async def close(self) -> None:
        """Nothing to free."""

    async def _repeat(self, session: GatewaySession) -> None:
        """Make all requests; one that today's code refuses ends the episode."""
        try:
            await self._repeat_requests(session)
        except (RequestError, NoRoomError) as e:
            raise EnvFailure(f"the gateway refuses a recorded request: {e}", "a recorded request is refused") from e

    async def _repeat_requests(self, session: GatewaySession) -> None:
        """Plan each request when as many turns were recorded as then, and record its generation in the order of the turns."""
        turns = self.recorded.turns
        firsts = sorted(
            (t for t in turns if "choice" not in t.info["request"]), key=lambda t: t.info["request"]["number"]
        )
        plans: dict[int, ContextPlan] = {}
        for turn in turns:
            for first in firsts:
                info = first.info["request"]
                if info["number"] not in plans and info["seen"] <= len(session.recorder.drafts):
                    plans[info["number"]] = session.plan(self._request(session, first.index))
            info = turn.info["request"]
            plan, choice = plans[info["number"]], info.get("choice", 0)
            sampled = await session.sample(plan, "policy", info["number"], choice)
            session.recorder.commit(plan, Arrival(number=info["number"], seen=info["seen"], at=0.0), choice, sampled)

    def _request(self, session: GatewaySession, index: int) -> ModelRequest:
        """The request of a turn, as the client made it."""
        info = self.recorded.turns[index].info["request"]
        before = session.planner.messages_up_to(info["parent"], info["matched"])
        messages = [info.get("changed", {}).get(str(i), m) for i, m in enumerate(before)]
        new = info.get("messages")
        if new is None:
            new = self.recorded.turns[info["parent"]].observation.messages
        tools = info.get("tools") or session.planner.tools_of(info["parent"])
        return ModelRequest(
            protocol=info["protocol"],
            model=session.models[0],
            messages=self._with_images([*messages, *new]),
            tools=tools,
            max_tokens=info.get("max_tokens"),
            stop=tuple(info.get("stop", ())),
            n=info.get("n", 1),
            calls_allowed=info.get("calls_allowed"),
            overridden=info.get("overridden", {}),
        )

    def _with_images(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of the record with the episode's images in place of their hashes."""
        images = {p.image.sha256: p.image for s in self.recorded.segments for p in s.images}

        def whole(part: Any) -> Any:
            image = part.get("image")
            known = isinstance(image, dict) and image.get("sha256") in images
            return {**part, "image": images[image["sha256"]]} if known else part

        return [
            {**m, "content": [whole(p) for p in m["content"]]} if isinstance(m.get("content"), (list, tuple)) else m
            for m in messages
        ]


def agent_env(episode: Episode) -> AgentEnv:
    """The episode's environment.

    Raises:
        ContractError: it is not an AgentEnv.
    """
    env = episode.instance.env
    if not isinstance(env, AgentEnv):
        raise ContractError(f"{type(env).__name__} is not an AgentEnv; only these play at the gateway")
    return env


async def _until_over(agent: asyncio.Future[Any], session: GatewaySession, grace_s: float) -> None:
    """Wait until the agent ends, or the episode fails, or its turns are spent and the time of grace is over."""
    spent = asyncio.ensure_future(session.spent.wait())
    try:
        await asyncio.wait({agent, session.failed, spent}, return_when=asyncio.FIRST_COMPLETED)
        if not agent.done() and not session.failed.done():
            await asyncio.wait({agent, session.failed}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        spent.cancel()
