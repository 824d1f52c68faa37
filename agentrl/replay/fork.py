"""Fork: a recorded episode up to a turn, then a live engine; optionally with another observation, other seeds or other weights.

With the same seed, observation, weights and code a fork equals the original, where the engine is deterministic (scripted, local).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.core.seeds import derive_seed
from agentrl.core.sequences import first_difference
from agentrl.engine.base import Generation, Generator, SamplingParams
from agentrl.env import Env
from agentrl.errors import ConfigError, StoreError
from agentrl.render.context_policy import Checked, ContextPolicy, ContextView
from agentrl.render.renderer import strip_control
from agentrl.replay.playback import PlaybackGenerator, PlaybackTools, is_stateful, with_playback
from agentrl.replay.replayer import spec_of
from agentrl.rollout.episode import EpisodeRunner, RewriteContext
from agentrl.rollout.seat import Player, Reply
from agentrl.rollout.tool_executor import ToolExecutor
from agentrl.tool import ToolSpec
from agentrl.types import Action, Message, Observation, StepResult, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One continuation of the episode."""

    number: int
    seed: int
    """0: the episode's own seeds; else it changes every seed after the fork"""
    trajectory: Trajectory
    differs_at: tuple[int, int] | None
    """(segment, token) of the first token that differs from the original; None: all are equal"""


class ForkGenerator(PlaybackGenerator):
    """The record before turn `fork_turn`, a live engine from that turn on."""

    def __init__(self, recorded: Trajectory, live: Generator, fork_turn: int, seed: int) -> None:
        super().__init__(recorded)
        self.live, self.fork_turn, self.seed = live, fork_turn, seed

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """The recorded generation, or a new one."""
        return await self.generate_on(self.live, ids, sampling, session=session, images=images)

    async def generate_on(
        self, live: Generator, ids: Sequence[int], sampling: SamplingParams, **how: Any
    ) -> Generation:
        """The recorded generation, or a new one of `live`."""
        if self.turn < self.fork_turn:
            return await super().generate(ids, sampling, **how)
        self.turn += 1
        return await live.generate(ids, replace(sampling, seed=self.seed_from(sampling.seed)), **how)

    async def reply_of(self, live: Reply, messages: Sequence[Message], *, seed: int) -> Any:
        """The recorded text, or a new one of `live`."""
        if self.turn < self.fork_turn:
            return await self.reply(messages, seed=seed)
        self.turn += 1
        text = live(messages, seed=self.seed_from(seed))
        return await text if inspect.isawaitable(text) else text

    def seed_from(self, seed: int) -> int:
        """The seed of a generation after the fork."""
        return derive_seed(seed, "branch", self.seed) if self.seed else seed

    def of_player(self, player: Player) -> Player:
        """The player behind the record of its turns."""
        return _ForkPlayer(self, player) if isinstance(player, Generator) else functools.partial(self.reply_of, player)

    async def release(self, session: str) -> None:
        """Release the live engine's session."""
        await self.live.release(session)

    async def rewrite_context(self, call: RewriteContext, policy: ContextPolicy, view: ContextView) -> Checked:
        """As in a replay before the fork, the result of today's policy from there on."""
        if self.turn >= self.fork_turn:
            return await call(policy, view)
        return await super().rewrite_context(call, policy, view)


class _ForkPlayer:
    """A frozen model whose turns before the fork are recorded."""

    def __init__(self, fork: ForkGenerator, live: Generator) -> None:
        self._fork, self._live = fork, live

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        return await self._fork.generate_on(self._live, ids, sampling, session=session, images=images)

    async def release(self, session: str) -> None:
        await self._live.release(session)


class ForkTools(PlaybackTools):
    """Recorded results before the fork, real calls after it.

    Before the fork, methods of the environment and of `Tool` objects are called too, for their side effects; their results are dropped.
    """

    def __init__(self, generator: ForkGenerator, real: ToolExecutor) -> None:
        super().__init__(generator, real)
        self.fork_turn = generator.fork_turn

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """The action with its results."""
        if self.generator.turn > self.fork_turn:
            return await self.real.execute(tools, action)
        stateful = tuple(c for c in action.calls if c.name in tools and is_stateful(tools[c.name]))
        if stateful:
            await self.real.execute(tools, Action(action.text, stateful))
        return await super().execute(tools, action)


async def fork(
    runner: EpisodeRunner,
    recorded: Trajectory,
    turn: int,
    *,
    observation: str | None = None,
    seeds: Sequence[int] = (0,),
) -> list[Branch]:
    """Continue an episode from the generation of a turn, once for each seed, on the runner's engine.

    Args:
        runner: a runner with the seed and temperature of the episode.
        recorded: the episode.
        turn: the first turn that is sampled again.
        observation: replaces what the policy read just before that turn.
        seeds: one per branch; see `Branch.seed`.

    Raises:
        ConfigError: the episode has no such turn.
        StoreError: today's code does not reach that turn as recorded (see `replay`).
    """
    if not 0 <= turn <= len(recorded.turns) - 1:
        raise ConfigError(
            f"episode {recorded.episode_id} has turns 0 to {len(recorded.turns) - 1}; "
            f"it cannot be forked at turn {turn}"
        )
    if observation is not None and runner.driver is not None:
        raise ConfigError(
            f"episode {recorded.episode_id}: what an agent reads is not the environment's to change; leave --observation out"
        )
    make_env = runner.make_env if observation is None else _edited(runner.make_env, turn, observation)
    spec = spec_of(recorded)
    branches = []
    for number, seed in enumerate(seeds):
        generator = ForkGenerator(recorded, runner.engine, turn, seed)
        forked = with_playback(runner, generator, ForkTools(generator, runner.pools.tool_executor))
        trajectory = await replace(forked, make_env=make_env, driver=runner.driver).run(
            replace(spec, prefix=f"fork/{recorded.episode_id}@{turn}/{number}/")
        )
        if generator.departure is not None or generator.turn <= turn - 1:
            raise StoreError(
                f"episode {recorded.episode_id}: today's code does not reach turn {turn} as recorded; "
                "agentrl replay reports where it differs"
            )
        differs_at = _differs_at(recorded, trajectory)
        branches.append(Branch(number=number, seed=seed, trajectory=trajectory, differs_at=differs_at))
    return branches


def _edited(make_env: Callable[[], Env], turn: int, text: str) -> Callable[[], Env]:
    """An environment factory whose environments return `text` just before turn `turn` (0: as the first observation)."""
    return functools.partial(_make_edited, make_env, turn, text)


def _make_edited(make_env: Callable[[], Env], turn: int, text: str) -> Env:
    env = make_env()
    name = "step" if turn else "reset"
    original = getattr(env, name)
    calls = 0

    def edit(result: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != max(1, turn):
            return result
        if isinstance(result, StepResult):
            return replace(result, observation=_reworded(result.observation, text), terminated=False, truncated=False)
        return _reworded(result, text)

    async def edited_async(*args: Any, **kwargs: Any) -> Any:
        return edit(await original(*args, **kwargs))

    def edited_sync(*args: Any, **kwargs: Any) -> Any:
        return edit(original(*args, **kwargs))

    setattr(env, name, edited_async if inspect.iscoroutinefunction(original) else edited_sync)
    return env


def _reworded(observation: Any, text: str) -> list[dict[str, Any]]:
    """The messages with `text` as the content of the last, without earlier ones of its role."""
    messages = list(Observation.of(observation).messages) or [{"role": "user"}]
    last = messages[-1]
    return [*(m for m in messages[:-1] if m["role"] != last["role"]), {**last, "content": text}]


def _differs_at(a: Trajectory, b: Trajectory) -> tuple[int, int] | None:
    ids_a, ids_b = [s.ids for s in a.segments], [s.ids for s in b.segments]
    if ids_a == ids_b:
        return None
    segment = first_difference(ids_a, ids_b)
    if segment == min(len(ids_a), len(ids_b)):
        return segment, 0
    return segment, first_difference(ids_a[segment], ids_b[segment])


def table(original: Trajectory, branches: Sequence[Branch]) -> str:
    """The original and its branches, side by side."""
    names = list(dict.fromkeys(k for t in (original, *(b.trajectory for b in branches)) for k in t.rewards))
    head = ["branch", "seed", "stop reason", "turns", "sampled", "score", *names, "differs at token", "answer"]
    rows = [["original", "", *_cells(original, names), "", _answer(original)]]
    for b in branches:
        at = (
            "identical"
            if b.differs_at is None
            else (f"{b.differs_at[0]}:" if b.differs_at[0] else "") + str(b.differs_at[1])
        )
        rows.append([str(b.number), str(b.seed), *_cells(b.trajectory, names), at, _answer(b.trajectory)])
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in (head, *rows))


def _cells(t: Trajectory, names: Sequence[str]) -> list[str]:
    values = [t.rewards.get(n) for n in names]
    shown = ["-" if v is None else f"{v:.3f}" for v in values]
    return [t.stop_reason.value, str(len(t.turns)), str(t.sampled_tokens), f"{t.score:.3f}", *shown]


def _answer(t: Trajectory) -> str:
    return strip_control(" ".join((t.answer or "").split()))[:60]
