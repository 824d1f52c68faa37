"""The turn in progress, before it becomes a `Turn` of the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.types import Action, Message, Observation, Turn

_NOTHING = Observation()


@dataclass(slots=True, kw_only=True)
class TurnDraft:
    """A turn from its generation to its observation; the fields are those of `Turn`."""

    index: int
    segment: int
    context_length: int
    context_crc: int
    seed: int
    action: Action
    matched_stop: str | int | None
    timings: dict[str, float]
    observation: Observation = _NOTHING
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    observation_cut_tokens: int = 0
    context: tuple[Message, ...] | None = None

    def complete(self) -> Turn:
        return Turn(
            index=self.index,
            segment=self.segment,
            context_length=self.context_length,
            action=self.action,
            observation=self.observation,
            reward=self.reward,
            info=self.info,
            state_key=self.state_key,
            matched_stop=self.matched_stop,
            context_crc=self.context_crc,
            observation_cut_tokens=self.observation_cut_tokens,
            seed=self.seed,
            timings=self.timings,
            context=self.context,
        )
