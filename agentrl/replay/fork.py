"""Fork: a recorded episode up to turn k, then a live engine; with the observation edited, other seeds, other weights. N branches.

With the same seed, observation, weights and code a fork is the original again, where the engine is deterministic (scripted, local).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from agentrl.core.message_images import PlacedImage
from agentrl.core.seeds import derive_seed
from agentrl.engine.base import Generation, Generator, SamplingParams
from agentrl.env import Env
from agentrl.errors import ConfigError, StoreError
from agentrl.render.context_policy import ContextPolicy, ContextView
from agentrl.render.renderer import strip_control
from agentrl.replay.json_values import first_unlike
from agentrl.replay.playback import PlaybackEngine, PlaybackToolExecutor, Rewrite, is_stateful
from agentrl.replay.replayer import spec_of
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.tool_executor import ToolExecutor
from agentrl.tool import ToolSpec
from agentrl.types import Action, Message, Observation, StepResult, Trajectory


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to go on."""

    number: int
    seed: int
    """0: the episode's own draws; else others"""
    trajectory: Trajectory
    differs_at: tuple[int, int] | None
    """(segment, token) of the first token that is not the original's; None: it is the original again"""


class ForkEngine(PlaybackEngine):
    """The record before turn `turn`, a live engine from there on."""

    def __init__(self, recorded: Trajectory, live: Generator, turn: int, seed: int) -> None:
        super().__init__(recorded)
        self.live, self.at, self.seed = live, turn, seed

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """The recorded generation, or a new one."""
        if self.turn < self.at:
            return await super().generate(ids, sampling, session=session, images=images)
        self.turn += 1
        if self.seed:
            sampling = replace(sampling, seed=derive_seed(sampling.seed, "branch", self.seed))
        return await self.live.generate(ids, sampling, session=session, images=images)

    async def rewrite(self, live: Rewrite, policy: ContextPolicy, view: ContextView) -> list[Message] | None:
        """Recorded before the fork, today's from there on."""
        return await (live(policy, view) if self.turn >= self.at else super().rewrite(live, policy, view))

    async def release(self, session: str) -> None:
        """Release the live engine's session."""
        await self.live.release(session)


class ForkToolExecutor(PlaybackToolExecutor):
    """Recorded results before the fork, real calls after it.

    Before it, methods of the environment (and of `Tool` objects) are called too, for what they change in it; what they give is not used.
    """

    engine: ForkEngine

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """The action with its results."""
        if self.engine.turn > self.engine.at:
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
    """Go on from the generation of turn `turn` once for each seed, on the runner's engine.

    `observation` replaces what the policy read just before it.

    Raises:
        ConfigError: the episode has no such turn.
        StoreError: today's code no longer gets to that turn as recorded (see `replay`).
    """
    if not 0 <= turn <= len(recorded.turns) - 1:
        raise ConfigError(
            f"episode {recorded.episode_id} has turns 0 to {len(recorded.turns) - 1}; it cannot be forked at turn {turn}"
        )
    live, real, make, rewrite = runner.engine, runner.tool_executor, runner.make_env, runner.rewrite
    spec = spec_of(recorded)
    branches = []
    try:
        for number, seed in enumerate(seeds):
            engine = ForkEngine(recorded, live, turn, seed)
            runner.engine = engine
            runner.tool_executor = cast(ToolExecutor, ForkToolExecutor(engine, real))
            runner.rewrite = partial(engine.rewrite, rewrite)  # type: ignore[method-assign]
            runner.make_env = make if observation is None else edited(make, turn, observation)
            made = await runner.run(replace(spec, prefix=f"fork/{recorded.episode_id}@{turn}/{number}/"))
            if engine.departure is not None or engine.turn <= turn - 1:
                raise StoreError(
                    f"episode {recorded.episode_id}: today's code does not get to turn {turn} as recorded; agentrl replay says where it differs"
                )
            branches.append(Branch(number, seed, made, _differs_at(recorded, made)))
    finally:
        runner.engine, runner.tool_executor, runner.make_env = live, real, make
        runner.rewrite = rewrite  # type: ignore[method-assign]
    return branches


def edited(make: Callable[[], Env], turn: int, text: str) -> Callable[[], Env]:
    """Environments that say `text` just before turn `turn` (0: as the first observation)."""

    def made() -> Env:
        env = make()
        name = "step" if turn else "reset"
        original = getattr(env, name)
        calls = 0

        def changed(result: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != max(1, turn):
                return result
            if isinstance(result, StepResult):
                return replace(
                    result, observation=_reworded(result.observation, text), terminated=False, truncated=False
                )
            return _reworded(result, text)

        async def later(*args: Any, **kwargs: Any) -> Any:
            return changed(await original(*args, **kwargs))

        def now(*args: Any, **kwargs: Any) -> Any:
            return changed(original(*args, **kwargs))

        setattr(env, name, later if inspect.iscoroutinefunction(original) else now)
        return env

    return made


def _reworded(observation: Any, text: str) -> list[dict[str, Any]]:
    """The same messages, the last one saying `text` and those before it, of the same role, gone."""
    messages = list(Observation.of(observation).messages) or [{"role": "user"}]
    last = messages[-1]
    return [*(m for m in messages[:-1] if m["role"] != last["role"]), {**last, "content": text}]


def _differs_at(a: Trajectory, b: Trajectory) -> tuple[int, int] | None:
    for n, (x, y) in enumerate(zip(a.segments, b.segments, strict=False)):
        left, right = x.ids, y.ids
        if left != right:
            return n, first_unlike(left, right)
    return None if len(a.segments) == len(b.segments) else (min(len(a.segments), len(b.segments)), 0)


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
