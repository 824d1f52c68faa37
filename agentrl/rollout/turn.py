"""The turn in progress, before it becomes a `Turn` of the record."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from agentrl.core.summary_request import SummaryRequest
from agentrl.types import Action, Message, Observation, Turn

_NOTHING = Observation()


@dataclass(slots=True, kw_only=True)
class TurnDraft:
    """A turn from its generation to its observation. The fields are those of `Turn`."""

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
    agent_id: str = "policy"
    context: tuple[Message, ...] | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    summary: SummaryRequest | None = None

    def complete(self) -> Turn:
        return Turn(*_turn_values(self))


_turn_values = attrgetter(*(f.name for f in fields(Turn)))
