"""A branch of an episode that a rollout has just played: its turns again by verified replay, then the live engine.

The environment plays again with the recorded seed, generations and results of functions; methods of objects are called again. The context of the
first new generation, and everything that the environment and these methods returned before it, must equal the record. A branch that differs is
refused, because it would sample in another state than its parent did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.core.message_images import PlacedImage
from agentrl.core.seeds import derive_seed
from agentrl.engine.base import Generation, SamplingParams
from agentrl.render.context_policy import Checked, ContextPolicy, ContextView
from agentrl.replay.compare import compare
from agentrl.replay.fork import ForkGenerator
from agentrl.replay.playback import PlaybackGenerator, PlaybackTools, is_stateful, with_playback
from agentrl.rollout.branching import LEFT_RECORD, BranchSpec
from agentrl.rollout.episode import EpisodeRunner, RewriteContext
from agentrl.tool import ToolSpec
from agentrl.types import Action, EpisodeSpec, Status, StopReason, Trajectory


class BranchGenerator(ForkGenerator):
    """The record before the branching turn, the live engine from there on, if the context is the recorded one."""

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """The recorded generation, or a new one."""
        if self.turn == self.fork_turn:
            turn = self.recorded.turns[self.turn]
            if list(ids) != self.recorded.segments[turn.segment].ids[: turn.context_length]:
                raise self.leave("context", self.turn, ids)
        return await super().generate(ids, sampling, session=session, images=images)

    async def rewrite_context(self, call: RewriteContext, policy: ContextPolicy, view: ContextView) -> Checked:
        """As in a replay up to the context of the branching turn, the result of the policy from there on."""
        if self.turn > self.fork_turn:
            return await call(policy, view)
        return await PlaybackGenerator.rewrite_context(self, call, policy, view)


class BranchTools(PlaybackTools):
    """Before the branching turn: recorded results of functions, and methods of objects called again. Real calls from there on."""

    def __init__(self, generator: BranchGenerator, runner: EpisodeRunner) -> None:
        super().__init__(generator, runner.pools.tool_executor)
        self.fork_turn = generator.fork_turn

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """The action with its results."""
        if self.generator.turn > self.fork_turn:
            return await self.real.execute(tools, action)
        self.live = {c.name for c in action.calls if c.name in tools and is_stateful(tools[c.name])}
        return await super().execute(tools, action)


async def play_branch(runner: EpisodeRunner, spec: BranchSpec) -> Trajectory:
    """Play a branch. One that does not reach its first generation as recorded is an ENV_FAILURE with the cause `LEFT_RECORD`."""
    parent = spec.parent
    seed = derive_seed(runner.seed, "branch", spec.turn, spec.number, spec.retry)
    generator = BranchGenerator(parent, runner.engine, spec.turn, seed)
    branch = with_playback(runner, generator, BranchTools(generator, runner))
    plain = EpisodeSpec(spec.task, spec.group_index, spec.index, spec.attempt, spec.prefix, spec.env)
    played = replace(await branch.run(plain), parent=parent.episode_id, branch_turn=spec.turn)
    left, reached = generator.departure is not None, generator.turn > spec.turn
    if not (left or reached) and (
        played.status in (Status.FAILED, Status.ABORTED) or played.stop_reason is StopReason.EPISODE_TIMEOUT
    ):
        return played  # it failed as any episode may, not because it left the record
    difference = _difference(runner, spec, played, generator)
    if reached and not left and difference is None:
        return played
    detail = f"{LEFT_RECORD}: {difference or f'the episode ended before turn {spec.turn}'}"
    return replace(played, stop_reason=StopReason.ENV_FAILURE, cause=LEFT_RECORD, detail=detail, rewards={})


def _difference(runner: EpisodeRunner, spec: BranchSpec, played: Trajectory, generator: BranchGenerator) -> str | None:
    """The first difference before the branching turn."""
    end = spec.turn + (generator.departure is not None or generator.turn <= spec.turn)
    then = replace(spec.parent, turns=spec.parent.turns[:end], stop_reason=StopReason.ENGINE_ABORT)
    today = replace(played, turns=played.turns[:end])
    divergence = compare(then, today, generator.departure, runner.renderer.tokenizer.decode)
    return None if divergence is None else str(divergence)
