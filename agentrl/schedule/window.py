"""Which groups may start, and which may be trained on: a window over the order of submission. No clock, no asyncio.

Groups have slots 0, 1, 2 … in the order in which they start. With P = `batch`, B = `buffer`, W = `window` and k = `interval`:

1. Slot j may start once j < p + B. p is the number of slots whose training is in the weights that the engines have.
2. Slot j may be trained on once it has finished and j < o + W. o is the first slot that was not trained on.
3. Each rollout trains on P slots. The engines receive the weights after every k-th rollout.

The bound. Slot j starts with the weights of v rollouts, so j < vP + B and v ≥ ⌈(j + 1 - B) / P⌉. While j waits, o ≤ j, so only slots below
j + W are trained on: at most j + W - 1 before j, and j is in rollout t ≤ ⌊(j + W - 1) / P⌋. Its staleness, in rollouts, is therefore

    t - v ≤ ⌊(j + W - 1) / P⌋ + ⌊(B - j - 1) / P⌋ ≤ ⌊(B + W - 2) / P⌋,

which for B = (S + 1)P is S + ⌈(W - 1) / P⌉ (the windowed FIFO of torchtitan's RL documentation). Every token of an episode was sampled
after its slot started, so the bound holds for its oldest token and includes all time in queues. In policy versions it is the bound divided by
k, rounded down. No slot is dropped because it is slow: the window waits for its first slot.

No deadlock. If all slots that may start have finished, the first P of those that are left may be trained on, as long as B ≥ kP.

Example:
    >>> fifo = WindowedFifo(Pace(batch=2, buffer=4, window=2), total=6)
    >>> [fifo.admit() for _ in range(4)], fifo.may_admit
    ([0, 1, 2, 3], False)
    >>> fifo.finish(1); fifo.finish(2); fifo.ready
    False
    >>> fifo.finish(0); fifo.take()
    [(0, 0), (1, 0)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far generation may run ahead of training. Sizes are in groups.

    Raises:
        ConfigError: training would wait forever, or a window is larger than the buffer.
    """

    batch: int
    """groups that a rollout trains on (P)"""
    buffer: int
    """groups that have started and are not yet trained on (B)"""
    window: int = 1
    """how far training may depart from the order of submission (W); 1: not at all"""
    interval: int = 1
    """rollouts between weight updates (k)"""
    whole_rollouts: bool = False
    """start the groups of a rollout together, when training on the one before begins, and update weights while none is in flight"""
    stops_rest: bool = False
    """when a rollout is taken, stop the slots that have started and are not in it; they start again after the weight update"""

    def __post_init__(self) -> None:
        if min(self.batch, self.buffer, self.window, self.interval) < 1:
            raise ConfigError(f"batch, buffer, window and interval must be at least 1; found {self}")
        needed = self.batch * self.interval
        if self.buffer < needed:
            raise ConfigError(
                f"a buffer of {self.buffer} groups can never fill: weights are updated after {self.interval} rollouts of {self.batch} "
                f"groups; give --async-buffer-size at least {needed}"
            )
        if self.window > self.buffer:
            raise ConfigError(
                f"a window of {self.window} groups is larger than the buffer of {self.buffer}; give --consumption-window at most {self.buffer}"
            )

    @property
    def max_staleness(self) -> int:
        """The largest staleness of a sample, in rollouts: those trained on between the weights of its oldest token and its own."""
        if self.stops_rest:
            return 0
        return (self.buffer + self.window - 2) // self.batch

    @property
    def max_version_lag(self) -> int:
        """The largest staleness of a sample, in policy versions."""
        return self.max_staleness // self.interval


class WindowedFifo:
    """The state of the window.

    Args:
        pace: its sizes.
        total: slots of the whole run; none is started beyond it.
        state: of `state_dict`, to continue. Slots in flight count as started.
    """

    def __init__(self, pace: Pace, total: int, state: Mapping[str, Any] | None = None) -> None:
        self.pace = pace
        self.total = total
        self.admitted = 0
        """slots that have started"""
        self.rollouts = 0
        """rollouts that were taken for training"""
        self.published = 0
        """rollouts whose training is in the engines' weights"""
        self._oldest = 0
        """first slot that was not taken"""
        self._taken: set[int] = set()
        """slots after the oldest that were taken"""
        self._finished: set[int] = set()
        """slots that have finished and were not taken"""
        self._started_at: dict[int, int] = {}
        """`published` when each slot started that was not taken yet"""
        if state:
            self._restore(state)

    # -- start ---------------------------------------------------------------------------------------------------------

    @property
    def may_admit(self) -> bool:
        """Whether the next slot may start."""
        batch, ahead = self.pace.batch, self.pace.buffer
        whole = self.pace.whole_rollouts
        limit = (self.rollouts + 1) * batch if whole else self.published * batch + ahead
        return self.admitted < min(limit, self.total)

    def admit(self) -> int:
        """Start the next slot; returns its number.

        Raises:
            InvariantError: none may start.
        """
        if not self.may_admit:
            raise InvariantError(f"slot {self.admitted} may not start: {self}")
        slot = self.admitted
        self.admitted += 1
        self._started_at[slot] = self.published
        return slot

    def restart(self, slot: int) -> None:
        """A slot in flight starts again with another group: its staleness counts from now.

        Raises:
            InvariantError: it is not in flight.
        """
        self._require_in_flight(slot)
        self._started_at[slot] = self.published

    def finish(self, slot: int) -> None:
        """A slot in flight has finished, with or without a group to train on.

        Raises:
            InvariantError: it is not in flight.
        """
        self._require_in_flight(slot)
        self._finished.add(slot)

    def _require_in_flight(self, slot: int) -> None:
        if slot not in self._started_at or slot in self._finished:
            raise InvariantError(f"slot {slot} is not in flight: {self}")

    @property
    def in_flight(self) -> int:
        """Slots that have started and not finished."""
        return len(self._started_at) - len(self._finished)

    @property
    def waiting(self) -> list[int]:
        """Slots that have started and were not taken, in order."""
        return sorted(self._started_at)

    def is_finished(self, slot: int) -> bool:
        """Whether a slot has finished and was not taken."""
        return slot in self._finished

    # -- training ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the slots of the next rollout may be trained on."""
        return len(self._finished) >= self.pace.batch and self._next() is not None

    def take(self) -> list[tuple[int, int]]:
        """Take the slots of the next rollout: (slot, its staleness in rollouts), in order of submission.

        Raises:
            InvariantError: the rollout is not ready, or a sample is staler than the bound.
        """
        slots = self._next()
        if slots is None:
            raise InvariantError(f"the next rollout is not ready: {self}")
        taken = [(slot, self.rollouts - self._started_at.pop(slot)) for slot in slots]
        self._finished.difference_update(slots)
        self._taken.update(slots)
        self._oldest = self._first_untaken(self._oldest, self._taken)
        self._taken = {slot for slot in self._taken if slot > self._oldest}
        self.rollouts += 1
        stalest = max(behind for _, behind in taken)
        if stalest > self.pace.max_staleness:
            raise InvariantError(f"a sample is {stalest} rollouts old, above the bound of {self.pace.max_staleness}")
        return taken

    def stop_rest(self) -> list[int]:
        """The slots that have started and were not taken, which must be restarted after the weight update; those that have finished too."""
        self._finished.clear()
        return self.waiting

    def publish(self) -> None:
        """The engines have the weights of all rollouts that were taken."""
        self.published = self.rollouts

    @property
    def publish_due(self) -> bool:
        """Whether a weight update follows the last rollout."""
        return self.rollouts - self.published >= self.pace.interval

    def _next(self) -> list[int] | None:
        """The first finished slots in order of submission that the window allows, as many as a rollout needs; None: too few."""
        slots: list[int] = []
        slot = oldest = self._oldest
        window = (
            self.admitted if self.pace.stops_rest else self.pace.window
        )  # then no slot waits for a slow one before it
        while len(slots) < self.pace.batch and slot < min(oldest + window, self.admitted):
            if slot in self._finished:
                slots.append(slot)
            if slot == oldest and (slot in self._finished or slot in self._taken):
                oldest += 1
            slot += 1
        return slots if len(slots) == self.pace.batch else None

    @staticmethod
    def _first_untaken(slot: int, taken: set[int]) -> int:
        while slot in taken:
            slot += 1
        return slot

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        return {
            "admitted": self.admitted,
            "rollouts": self.rollouts,
            "published": self.published,
            "taken": sorted(self._taken),
            "oldest": self._oldest,
            "finished": sorted(self._finished),
            "started_at": sorted(self._started_at.items()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.admitted, self.rollouts, self.published = state["admitted"], state["rollouts"], state["published"]
        self._oldest, self._taken, self._finished = state["oldest"], set(state["taken"]), set(state["finished"])
        self._started_at = dict(state["started_at"])

    def __str__(self) -> str:
        return (
            f"{self.admitted} of {self.total} slots started, {self.in_flight} in flight, {len(self._finished)} finished, "
            f"{self.rollouts} rollouts taken, {self.published} published"
        )
