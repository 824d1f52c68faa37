"""Context policies: what may be done to old turns when a conversation grows long. Every change opens a new segment.

An environment names its policy in `Env.context_policy` (a method works too), or the command line one with `--context-policy`. The runner
calls it after every observation.

A policy is a function of a `ContextView` that returns the messages to continue with, None to leave the context unchanged, or a
`SummaryRequest`: then the acting policy writes a summary, which is an extra turn (rollout/summary.py). Earlier
segments remain as they are and are trained with the episode's advantage; the beginning of the new one is PROMPT and is not trained again.
So every sampled token is trained once.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.core.constructor_arguments import check_arguments
from agentrl.core.registry import Registry
from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import ConfigError, ContractError
from agentrl.render.renderer import Renderer
from agentrl.types import Message

INSTRUCTION = (
    "The conversation is about to exceed its length, and older messages will be removed. Summarise what was asked, what was done and what was "
    "found, with every fact that is still needed. Write only the summary; do not call tools and do not answer yet."
)
"""the default of `SummariseByPolicy`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """A conversation before a generation."""

    messages: tuple[Message, ...]
    """the whole conversation, the newest observation last"""
    first: int
    """number of messages in the first prompt (system and task)"""
    tokens: int
    """length of the context of the next generation"""
    limit: int
    """maximum length of a context, in tokens"""
    turns_left: int | None = None
    """turns that the role may still take; None: not limited"""

    @property
    def share(self) -> float:
        """The share of the limit that is used."""
        return self.tokens / self.limit

    def turns(self) -> list[tuple[Message, ...]]:
        """The turns after the first prompt: each assistant's message with the messages that answer it."""
        turns: list[list[Message]] = []
        for message in self.messages[self.first :]:
            if message["role"] == "assistant" or not turns:
                turns.append([])
            turns[-1].append(message)
        return [tuple(turn) for turn in turns]


Rewrite = Sequence[Message] | SummaryRequest | None
Checked = list[Message] | SummaryRequest | None
"""a `Rewrite` after `check_rewrite`: None if the conversation is unchanged"""
ContextPolicy = Callable[[ContextView], Rewrite | Awaitable[Rewrite]]


def check_rewrite(messages: Any, view: ContextView) -> Checked:
    """The new conversation or the request that a policy returned, or None if the conversation is unchanged.

    A summary is not asked for if no turn may follow it.

    Raises:
        ContractError: it is not a conversation that ends in a message to be answered, or the request is not usable.
    """
    if isinstance(messages, SummaryRequest):
        _check_request(messages)
        return None if view.turns_left is not None and view.turns_left < 2 else messages
    if messages is None or list(messages) == list(view.messages):
        return None
    conversation: list[Any] = list(messages)
    if not conversation or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in conversation):
        raise ContractError(
            f"a context policy must return messages, a SummaryRequest or None, found {conversation!r:.80}"
        )
    if conversation[-1]["role"] == "assistant":
        raise ContractError(
            "a context policy must keep the newest observation, but its conversation ends with an assistant message"
        )
    return conversation


def context_view(
    renderer: Renderer,
    history: Sequence[Message],
    turn: Message,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    first: int,
    length: int,
    limit: int,
    tools: Sequence[Mapping[str, Any]],
    turns_left: int | None = None,
) -> ContextView:
    """The view after `messages` answered the policy's `turn`, before they are truncated. `length`: tokens up to the end of the turn."""
    conversation = (*history, turn, *messages)
    delta = renderer.delta(messages, sampled, history=history, tools=tools)
    if delta.new_segment is None:
        length += len(delta)
    else:
        length = sum(len(ids) for _, ids in renderer.prompt(conversation, tools))
    return ContextView(messages=conversation, first=first, tokens=length, limit=limit, turns_left=turns_left)


def split_after_last_turn(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation up to the policy's last turn, and the messages to be answered."""
    at = max((i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages) - 1)
    return list(messages[:at]), list(messages[at:])


def resolve_context_policy(name: str | None, args: Mapping[str, Any] | None = None) -> ContextPolicy | None:
    """The policy behind `--context-policy`: one of POLICIES, or `module:policy`; a class is constructed with `args`.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, not callable, or not to be constructed with these arguments.
    """
    args = args or {}
    if name is None:
        if args:
            raise ConfigError("--context-policy-arg needs --context-policy, whose arguments it gives")
        return None
    resolved: Any = POLICIES.resolve(name)
    if args and not inspect.isclass(resolved):
        raise ConfigError(f"--context-policy {name} is not a class, so it takes no --context-policy-arg")
    policy = _construct(name, resolved, args) if inspect.isclass(resolved) else resolved
    if not callable(policy):
        raise ContractError(f"--context-policy {name}: expected a function of a ContextView, found {policy!r:.80}")
    return cast(ContextPolicy, policy)


def _construct(name: str, policy: type, args: Mapping[str, Any]) -> Any:
    check_arguments(f"context policy {name}", policy, args, "--context-policy-arg")
    try:
        return policy(**args)
    except TypeError as e:
        raise ConfigError(f"context policy {name}: {e}; give other --context-policy-arg NAME=VALUE") from e


def _check_request(request: SummaryRequest) -> None:
    """Refuse a request that cannot be answered.

    Raises:
        ContractError: which field is wrong.
    """
    instruction: Any = request.instruction
    if not isinstance(instruction, str) or not instruction.strip():
        raise ContractError(f"a summary needs an instruction, a text, found {instruction!r:.80}")
    for name, least in (("keep", 0), ("max_tokens", 1)):
        value = getattr(request, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ContractError(f"{name} of a summary must be an integer of at least {least}, found {value!r:.80}")


def _check_bounds(above: Any, keep: Any = 1, characters: Any = 0) -> None:
    """Refuse arguments that no policy can work with. At least one turn is kept: the newest observation is of the newest turn.

    Raises:
        ContractError: which argument is wrong.
    """
    if isinstance(above, bool) or not isinstance(above, (int, float)) or not 0 <= above <= 1:
        raise ContractError(f"above must be a share of the context from 0 to 1, found {above!r:.80}")
    for name, value, least in (("keep", keep, 1), ("characters", characters, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ContractError(
                f"{name} of a context policy must be an integer of at least {least}, found {value!r:.80}"
            )


def _split_old_turns(view: ContextView, keep: int, above: float) -> tuple[list[Message], list[Message]] | None:
    """The messages of old turns and of the `keep` newest ones, or None while the context has room or no turn is old."""
    turns = view.turns()
    if view.share < above or len(turns) <= keep:
        return None
    old = len(turns) - keep
    return [m for turn in turns[:old] for m in turn], [m for turn in turns[old:] for m in turn]


@dataclass(frozen=True)
class DropOldTurns:
    """Keep only the newest turns once the context exceeds a share of the limit.

    Example:
        >>> class Browse(ToolEnv):
        ...     context_policy = DropOldTurns(keep=4, above=0.75)
    """

    keep: int = 4
    """number of turns kept, at least 1"""
    above: float = 0.75
    """share of the limit"""

    def __post_init__(self) -> None:
        _check_bounds(self.above, keep=self.keep)

    def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """The first prompt and the newest turns."""
        parts = _split_old_turns(view, self.keep, self.above)
        return None if parts is None else [*view.messages[: view.first], *parts[1]]


@dataclass(frozen=True)
class TruncateOldResults:
    """Shorten the observations of all but the newest turns once the context exceeds a share of the limit."""

    keep: int = 2
    """number of turns kept whole, at least 1"""
    characters: int = 200
    """kept of each older observation"""
    above: float = 0.75
    """share of the limit"""

    def __post_init__(self) -> None:
        _check_bounds(self.above, keep=self.keep, characters=self.characters)

    def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """Every turn, the old ones with shortened observations."""
        parts = _split_old_turns(view, self.keep, self.above)
        return None if parts is None else [*view.messages[: view.first], *map(self._shorten, parts[0]), *parts[1]]

    def _shorten(self, message: Message) -> Message:
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str) or len(content) <= self.characters:
            return message
        return {**message, "content": content[: self.characters] + " …"}


@dataclass(frozen=True)
class Summarise:
    """Replace all but the newest turns by a summary once the context exceeds a share of the limit."""

    write: Callable[[Sequence[Message]], str | Awaitable[str]]
    """returns the summary of the old turns' messages; may call a model"""
    keep: int = 2
    """number of turns kept, at least 1"""
    above: float = 0.75
    """share of the limit"""

    def __post_init__(self) -> None:
        _check_bounds(self.above, keep=self.keep)

    async def __call__(self, view: ContextView) -> Sequence[Message] | None:
        """The first prompt with the summary, and the newest turns."""
        parts = _split_old_turns(view, self.keep, self.above)
        if parts is None:
            return None
        written = self.write(parts[0])
        summary = await written if inspect.isawaitable(written) else written
        return [*with_note(view.messages[: view.first], summary), *parts[1]]


@dataclass(frozen=True)
class SummariseByPolicy:
    """Once the context exceeds a share of the limit, the policy replaces all but the newest turns by a summary that it writes itself.

    The summary's tokens are sampled and trained like those of any turn (Lu et al. 2025, arXiv:2510.06727).

    Example:
        >>> class Browse(ToolEnv):
        ...     context_policy = SummariseByPolicy(keep=1, above=0.6, max_tokens=128)

    Raises:
        ContractError: an argument that no summary can be written with.
    """

    keep: int = 2
    """number of turns kept; 0: the summary stands for the newest observation too"""
    above: float = 0.75
    """share of the limit"""
    max_tokens: int = 256
    """maximum tokens of a summary"""
    instruction: str = INSTRUCTION
    """what the policy is asked"""

    def __post_init__(self) -> None:
        _check_request(self._request())
        _check_bounds(self.above)

    def _request(self) -> SummaryRequest:
        return SummaryRequest(instruction=self.instruction, keep=self.keep, max_tokens=self.max_tokens)

    def __call__(self, view: ContextView) -> SummaryRequest | None:
        """The request, once the context is long and a turn is old."""
        return None if _split_old_turns(view, self.keep, self.above) is None else self._request()


POLICIES = Registry(
    "context policy",
    {
        "summarise": "agentrl.render.context_policy:SummariseByPolicy",
        "drop_old_turns": "agentrl.render.context_policy:DropOldTurns",
        "truncate_old_results": "agentrl.render.context_policy:TruncateOldResults",
    },
)
"""context policies by name"""


def with_note(prompt: Sequence[Message], note: str) -> list[Message]:
    """The prompt with a note at the end of its last message, since templates may refuse another message."""
    *before, last = prompt
    content, note = last.get("content"), f"\n\n{note}"
    added = content + note if isinstance(content, str) else [*(content or []), {"type": "text", "text": note}]
    return [*before, {**last, "content": added}]
