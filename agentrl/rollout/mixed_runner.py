"""The runners and rewards of several environments as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.reward import Scorer
from agentrl.rollout.episode import EpisodeRunner
from agentrl.types import EpisodeSpec, Trajectory


class MixedScorer:
    """Scores groups with the rewards of their environment. It takes the place of a `Scorer` in a rollout."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self.scorers = dict(scorers)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Scorer.score_group`."""
        return await self.scorers[trajectories[0].env].score_group(trajectories)

    def close(self) -> None:
        """Stop the threads of all."""
        for scorer in self.scorers.values():
            scorer.close()


class MixedRunner:
    """Plays each episode with the runner of its environment (`EpisodeSpec.env`)."""

    def __init__(self, runners: Mapping[str, EpisodeRunner]) -> None:
        self.runners = dict(runners)
        self.scorer = MixedScorer({env: runner.scorer for env, runner in runners.items()})

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """See `EpisodeRunner.run`."""
        return await self.runners[spec.env].run(spec)

    def for_env(self, env: str) -> EpisodeRunner:
        """The runner of the environment with this label."""
        return self.runners[env]

    def close(self) -> None:
        """Let the idle threads of the pools end."""
        for runner in self.runners.values():
            runner.close()
