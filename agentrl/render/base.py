"""The types of rendering: what a renderer returns (`Delta`), an action format (`ActionFormat`), and a model family (`Family`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.types import Action, FinishReason, Message, Provenance

Pieces = tuple[tuple[Provenance, tuple[int, ...]], ...]
"""token ids in order, by provenance"""
HistoryPolicy = Literal["append", "rerender"]
"""where a template drops earlier thinking, or writes another end token than was sampled: keep the tokens, or open a new segment"""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is appended to the context between two generations, or why a new segment must open.

    Example:
        >>> Delta(((Provenance.TEMPLATE, (3, 1)), (Provenance.OBSERVATION, (55, 56)), (Provenance.TEMPLATE, (2, 7))))
    """

    pieces: Pieces
    new_segment: str | None = None
    """why the context cannot be continued exactly, so that the caller must render the whole conversation; None: `pieces` continue it"""

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.pieces)


class ActionFormat(Protocol):
    """How a policy writes its actions, and how observations are returned to it."""

    @property
    def name(self) -> str:
        """The name by which it is chosen (`--action-format`)."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a generation."""

    @property
    def inline(self) -> bool:
        """Whether observations continue the same assistant turn (Search-R1's `<information>`) instead of opening a new one."""

    @property
    def needs_tools(self) -> bool:
        """Whether the chat template receives the tools' schemas."""

    @property
    def text_values(self) -> bool:
        """Whether arguments are written as text, so that only the tool's schema tells `5` from `"5"`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens of the format itself, which stay tokens when the policy's turn is rendered again."""

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """The action in one generation.

        Args:
            text: The generation without its end token. Any text is accepted.
            finish_reason: With LENGTH, an unfinished call is not an error.
            max_calls: Further calls become errors of kind 'surplus'.

        Returns:
            The calls, the errors, and the answer if there is one. It never raises.
        """

    def message(self, action: Action) -> Message:
        """The action as a message of the conversation, its content as the policy wrote it."""

    def structured_message(self, action: Action) -> Message:
        """The action as a message with calls and reasoning in separate fields, for templates that require these."""

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """For inline formats: the text to insert, as (part, whether it is content)."""


def unchanged(messages: Sequence[Message]) -> list[Message]:
    """The messages as they are, for templates that accept every role."""
    return list(messages)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of a model family that a template's renderings do not show."""

    name: str
    marks: tuple[str, ...]
    """strings that all occur in the templates of this family and not in those of an earlier one in `FAMILIES`"""
    format: str
    """name of the family's action format"""
    ends: tuple[str, ...] = ()
    """tokens that end the assistant's turn when sampled, whichever of them the template writes; (): the one that the template writes"""
    headers: tuple[str, ...] = ()
    """tokens that end the assistant's turn when sampled and begin the next turn's header (GLM)"""
    other_stops: tuple[str, ...] = ()
    """further tokens that end a generation; the template still writes the end of the turn after them"""
    writes_markup: bool = False
    """the template adds markup inside the assistant's turn (channels), so a policy's text differs from the message's content"""
    structured: bool = False
    """the template reads calls and reasoning from fields (`tool_calls`, `reasoning_content`), so turns are rendered from those"""
    call_id: str = ""
    """the id that the policy itself writes for a call, with {name} and {index}; "": it writes none, or any"""
    adapt: Callable[[Sequence[Message]], list[Message]] = unchanged
    """converts messages with roles that the template does not know"""
