"""What `--over-sampling-batch-size` costs: groups that are stopped, and the length bias of those that are trained on."""

from __future__ import annotations

from agentrl.run.group_player import PlayedGroup, StoppedGroups


class OverSampling:
    """Counts of a run, over its rollouts.

    Episodes that were stopped would have become longer than they are. So the mean length of all episodes as they are is a lower bound of what it
    would have been, and the bias of those that are trained on is at least their difference.
    """

    def __init__(self) -> None:
        self.groups = self.stopped = self.dropped = 0
        self.taken_tokens = self.taken_episodes = self.all_tokens = self.all_episodes = 0

    def add(self, taken: list[PlayedGroup], stopped: StoppedGroups, sampled_tokens: int) -> dict[str, float]:
        """Count a rollout; returns its metrics. `sampled_tokens`: all tokens that the engine sampled in it."""
        attempts = [t for group in taken for t in (*group.attempts, *group.refused)]
        of_taken = sum(t.sampled_tokens for t in attempts)
        self.groups += len(taken) + stopped.groups
        self.stopped += stopped.groups
        self.dropped += stopped.dropped
        self.taken_tokens += of_taken
        self.taken_episodes += len(attempts)
        self.all_tokens += sampled_tokens
        self.all_episodes += len(attempts) + len(stopped.attempts) + stopped.unfinished
        return {
            "schedule/stopped_groups": stopped.groups,
            "schedule/stopped_episodes": stopped.unfinished,
            "schedule/stopped_tokens": sampled_tokens - of_taken,
        }

    @property
    def bias(self) -> float:
        """Lower bound of the share by which the episodes that are trained on are too short."""
        if not (self.all_tokens and self.taken_episodes):
            return 0.0
        taken, every = self.taken_tokens / self.taken_episodes, self.all_tokens / self.all_episodes
        return max(0.0, 1 - taken / every)

    def line(self) -> str:
        """The counts in words."""
        waste = 1 - self.taken_tokens / self.all_tokens if self.all_tokens else 0.0
        dropped = f", {self.dropped} of them not given back" if self.dropped else ""
        return (
            f"over-sampling: {self.stopped} of {self.groups} groups were stopped{dropped}, with {waste:.0%} of the sampled tokens; length bias: the "
            f"episodes trained on are at least {self.bias:.1%} shorter than all that were started"
        )
