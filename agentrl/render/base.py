"""What a renderer gives (`Delta`) and what an action format is (`ActionFormat`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.types import Action, FinishReason, Message, Provenance

Pieces = tuple[tuple[Provenance, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is appended to (or, as a `rewrite`, put in the place of) the context between two generations."""

    pieces: Pieces
    new_segment: str | None = None
    """a reason why the pieces are a whole new context, a segment of their own; None: they follow the context exactly"""

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.pieces)


class ActionFormat(Protocol):
    """How a policy writes its actions, and how observations come back."""

    name: str
    stop: tuple[str, ...]
    """strings that end a generation"""
    inline: bool
    """observations continue the same assistant turn (Search-R1's `<information>`) instead of opening a new one"""
    needs_tools: bool
    """the chat template is given the tools' schemas"""

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """Read one generation (without its end token). Total: any text gives an Action, never an exception.

        At most `max_calls` calls; further ones become errors of kind 'surplus'. A generation cut by length is no parse error.
        """

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """For inline formats: the text to insert, as (part, is it content?)."""
