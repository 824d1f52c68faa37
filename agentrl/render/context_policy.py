"""Context management: what a person may do to old turns when a conversation grows long. Whatever it does opens a new segment.

An environment names its policy in `Env.context_policy` (a method will do), or the command line one with `--context-policy`. The runner asks
it after every observation.

A policy is a function of a `ContextView` that returns the messages to go on with, or None to leave the context as it is. The segments
before it stay what they were and are trained with the episode's advantage; what the new one begins with is PROMPT and is not trained
again. So every sampled token is trained once.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.core.registry import Registry
from agentrl.errors import ContractError
from agentrl.render.renderer import Renderer
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class ContextView:
    """A conversation before a generation."""

    messages: tuple[Message, ...]
    """all of it, the newest observation last"""
    first: int
    """how many messages the first prompt had (system and task)"""
    tokens: int
    """what the next generation would see"""
    limit: int
    """most tokens of context"""

    @property
    def share(self) -> float:
        """How full the context is."""
        return self.tokens / self.limit

    def turns(self) -> list[tuple[Message, ...]]:
        """After the first prompt: each assistant's message with what was answered to it."""
        found: list[list[Message]] = []
        for message in self.messages[self.first :]:
            if message["role"] == "assistant" or not found:
                found.append([])
            found[-1].append(message)
        return [tuple(t) for t in found]


ContextPolicy = Callable[[ContextView], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]


def checked(messages: Any, view: ContextView) -> list[Message] | None:
    """What a policy returned as the new conversation, or None if it stays as it is.

    Raises:
        ContractError: it is no conversation ending in a message to be answered.
    """
    if messages is None or list(messages) == list(view.messages):
        return None
    listed: list[Any] = list(messages)
    if not listed or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in listed):
        raise ContractError(f"a context policy must return messages or None, found {listed!r:.80}")
    if listed[-1]["role"] == "assistant":
        raise ContractError(
            "a context policy must leave the newest observation in place; its conversation ends with the assistant"
        )
    return listed


def view_of(
    renderer: Renderer,
    history: Sequence[Message],
    said: Message,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    first: int,
    length: int,
    limit: int,
    tools: Sequence[Mapping[str, Any]],
) -> ContextView:
    """What a policy is shown after `said` was answered by `messages`, before these are cut to what fits. `length`: tokens up to there."""
    whole = (*history, said, *messages)
    delta = renderer.delta(messages, sampled, history=history, tools=tools)
    if delta.new_segment is not None:
        return ContextView(whole, first, sum(len(ids) for _, ids in renderer.prompt(whole, tools)), limit)
    return ContextView(whole, first, length + len(delta), limit)


def newest(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation up to the policy's last turn, and what is to be answered."""
    at = max((i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages) - 1)
    return list(messages[:at]), list(messages[at:])


def resolve_context_policy(name: str | None) -> ContextPolicy | None:
    """The policy behind `--context-policy`: one of POLICIES with its defaults, or `module:policy`.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, or nothing that can be called.
    """
    if name is None:
        return None
    found: Any = POLICIES.resolve(name)
    policy = found() if inspect.isclass(found) else found
    if not callable(policy):
        raise ContractError(f"--context-policy {name}: expected a function of a ContextView, found {policy!r:.80}")
    return cast(ContextPolicy, policy)


def _aged(view: ContextView, keep: int, above: float) -> tuple[list[Message], list[Message]] | None:
    """The messages of the old turns and those of the `keep` newest; None while the context has room, or no turn is old."""
    turns = view.turns()
    if view.share < above or len(turns) <= keep:
        return None
    old = len(turns) - keep
    return [m for t in turns[:old] for m in t], [m for t in turns[old:] for m in t]


@dataclass(frozen=True)
class DropOldTurns:
    """Leave out all but the newest turns once the context is so full."""

    keep: int = 4
    """turns kept"""
    above: float = 0.75
    """of the limit"""

    def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """The first prompt and the newest turns."""
        parts = _aged(view, self.keep, self.above)
        return None if parts is None else [*view.messages[: view.first], *parts[1]]


@dataclass(frozen=True)
class TruncateOldResults:
    """Cut what was answered in all but the newest turns to its beginning once the context is so full."""

    keep: int = 2
    characters: int = 200
    above: float = 0.75

    def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """Every turn, the old ones' results cut."""
        parts = _aged(view, self.keep, self.above)
        return None if parts is None else [*view.messages[: view.first], *map(self._cut, parts[0]), *parts[1]]

    def _cut(self, message: Message) -> Message:
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str) or len(content) <= self.characters:
            return message
        return {**message, "content": content[: self.characters] + " …"}


@dataclass(frozen=True)
class Summarise:
    """Put a summary in the place of all but the newest turns once the context is so full."""

    write: Callable[[Sequence[Message]], str | Awaitable[str]]
    """of the old turns; may ask a model"""
    keep: int = 2
    above: float = 0.75

    async def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """The first prompt with the summary, and the newest turns."""
        parts = _aged(view, self.keep, self.above)
        if parts is None:
            return None
        written = self.write(parts[0])
        summary = await written if inspect.isawaitable(written) else written
        return [*_with_note(view.messages[: view.first], summary), *parts[1]]


POLICIES = Registry(
    "context policy",
    {
        "drop_old_turns": "agentrl.render.context_policy:DropOldTurns",
        "truncate_old_results": "agentrl.render.context_policy:TruncateOldResults",
    },
)
"""Context policies by name."""


def _with_note(first: Sequence[Message], summary: str) -> list[Message]:
    """The first prompt with the summary at the end of its last message (no template needs another role for it)."""
    last = first[-1]
    if not isinstance(last.get("content"), str):
        return [
            *first[:-1],
            {**last, "content": [*(last.get("content") or []), {"type": "text", "text": f"\n\n{summary}"}]},
        ]
    return [*first[:-1], {**last, "content": f"{last['content']}\n\n{summary}"}]
