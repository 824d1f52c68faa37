"""What a renderer gives (`Delta`), what an action format is (`ActionFormat`), and what is known about a family (`Family`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.types import Action, FinishReason, Message, Provenance

Pieces = tuple[tuple[Provenance, tuple[int, ...]], ...]
HistoryPolicy = Literal["append", "rerender"]
"""where a template drops earlier thinking (or writes another end token than was sampled): keep the tokens, or open a new segment"""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is appended to the context between two generations, or why a new segment must open."""

    pieces: Pieces
    new_segment: str | None = None
    """the reason why nothing can follow the context exactly: the caller renders the conversation anew; None: `pieces` follow it"""

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.pieces)


class ActionParser(Protocol):
    """Reads one generation in pieces."""

    def feed(self, text: str) -> None:
        """The next piece."""

    def finish(self, finish_reason: FinishReason) -> Action:
        """The action, now that nothing follows. The same as `parse` of the whole."""


class ActionFormat(Protocol):
    """How a policy writes its actions, and how observations come back."""

    @property
    def name(self) -> str:
        """By which it is chosen."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a generation."""

    @property
    def inline(self) -> bool:
        """Observations continue the same assistant turn (Search-R1's `<information>`) instead of opening a new one."""

    @property
    def needs_tools(self) -> bool:
        """The chat template is given the tools' schemas."""

    @property
    def own(self) -> tuple[str, ...]:
        """Marks that stay tokens when the policy's turn is rendered anew, though the tokenizer may call them special."""

    def parser(self, max_calls: int) -> ActionParser:
        """A parser to be fed."""

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """Read one generation (without its end token). Total: any text gives an Action, never an exception.

        At most `max_calls` calls; further ones become errors of kind 'surplus'. A generation cut by length is no parse error.
        """

    def message(self, action: Action) -> Message:
        """The action as a message of the conversation, for rendering it anew."""

    def as_data(self, action: Action) -> Message:
        """The same with calls and reasoning in fields of their own, for templates that tell turns apart by them."""

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """For inline formats: the text to insert, as (part, is it content?)."""


def as_they_are(messages: Sequence[Message]) -> list[Message]:
    """Messages for a template that takes them all."""
    return list(messages)


@dataclass(frozen=True)
class Family:
    """What cannot be read off a template's renderings."""

    name: str
    marks: tuple[str, ...]
    """strings that all occur in the template of this family and not in an earlier one of the list"""
    format: str
    """the family's own action format"""
    ends: tuple[str, ...] = ()
    """tokens that end the assistant's turn when sampled, whichever of them the template writes; (): the one it writes"""
    headers: tuple[str, ...] = ()
    """tokens that end the assistant's turn when sampled and are the next turn's header (GLM)"""
    other_stops: tuple[str, ...] = ()
    """tokens at which engines stop too, but after which the template still writes the turn's end"""
    templated: bool = False
    """the template writes markup of its own inside the assistant's turn (channels), so its plain text is not what a policy says"""
    fields: bool = False
    """its template tells a turn's kind by its fields (`tool_calls`, `reasoning_content`), so turns are rendered anew from those"""
    adapt: Callable[[Sequence[Message]], list[Message]] = as_they_are
    """messages as the template takes them (roles that it does not know)"""
