"""What the protocols have in common: a request and a reply without the form of any protocol, and the errors that clients read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.errors import DataError
from agentrl.gateway.known_requests import Conversation, KnownRequests, known_tools
from agentrl.types import Message, ToolCall

MAX_CHOICES = 64
"""largest `n` of one request"""


class RequestError(Exception):
    """A request that is refused. The protocol gives it its own form.

    Args:
        status: the HTTP status.
        message: one sentence for the client's developer.
        code: short machine-readable name.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(slots=True, kw_only=True, eq=False)
class ModelRequest:
    """One request for generations."""

    protocol: str
    """chat, responses or messages"""
    model: str
    messages: list[Message]
    """in the normal form of agentrl.data.message_form; the role developer is written system"""
    paths: Sequence[bytes] = ()
    """`path_key` up to each message; empty: not known, since there are images, which must be loaded"""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    """the client's own limit on sampled tokens; None: none"""
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    calls_allowed: int | None = None
    """maximum tool calls of the reply; None: the run's limit"""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """sampling parameters of the client, which the run's replace"""
    include_usage: bool = False
    """chat: the stream ends with a chunk of token counts"""


@dataclass(slots=True, kw_only=True, eq=False)
class Reply:
    """One generation as the client reads it."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    """stop, tool_calls or length"""
    stop_sequence: str | None = None
    """the client's stop string that ended it"""
    number: str = "0"
    """unique in the episode"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    message: Message = field(default_factory=dict)
    """in the normal form, as a client sends it back; empty: nothing was sampled"""


class Event(NamedTuple):
    """One server-sent event."""

    data: Mapping[str, Any] | str
    name: str | None = None


class Protocol(NamedTuple):
    """How one protocol is read and written."""

    name: str
    read: Callable[[Mapping[str, Any], KnownRequests], ModelRequest]
    """a JSON body to a request, given what the session's earlier ones contained; raises RequestError"""
    write: Callable[[ModelRequest, Sequence[Reply]], dict[str, Any]]
    """the answer to a request"""
    events: Callable[[ModelRequest, Sequence[Reply]], Iterator[Event]]
    """the answer as server-sent events"""
    error: Callable[[RequestError], dict[str, Any]]
    """the body of an error"""
    returned: Callable[[Reply], Mapping[str, Any]]
    """a reply, without its reasoning, as `read` gives it to `read_messages` when a client sends it back as it was written"""
    keep_alive: bytes = b": waiting\n\n"
    """sent while a stream waits for its generation"""


def read_messages(value: Any, known: KnownRequests) -> Conversation:
    """The messages of a request in the normal form, without keys that no template reads.

    Raises:
        RequestError: they are not a conversation.
    """
    try:
        return known.messages(value)
    except DataError as e:
        raise RequestError(400, f"messages: {e}") from e


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The tools of a request as function schemas.

    Raises:
        RequestError: one of them is not a function.
    """
    try:
        return known_tools(value)
    except DataError as e:
        raise RequestError(400, str(e)) from e


def check_fields(body: Mapping[str, Any], served: frozenset[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse fields that would be ignored.

    Args:
        body: the request.
        served: fields that have an effect, or are recorded.
        neutral: further fields, with the values that ask for nothing.

    Raises:
        RequestError: the body has another field, or another value.
    """
    for name, value in body.items():
        if name in served or value is None or (name in neutral and value in neutral[name]):
            continue
        if name in neutral:
            raise RequestError(400, f"{name} = {value!r:.60} is not served; leave it out", "unsupported_value")
        raise RequestError(400, f"the field {name!r:.60} is not served; leave it out", "unsupported_field")


def read_number(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """A count of at least 1, or the default where it is absent.

    Raises:
        RequestError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise RequestError(400, f"{name} must be an integer of at least 1, found {value!r:.60}")
    return value


def read_stop(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings of a request.

    Raises:
        RequestError: they are not texts.
    """
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise RequestError(400, f"{name} must be up to 16 non-empty texts, found {value!r:.60}")
    return tuple(stops)


def read_model(body: Mapping[str, Any]) -> str:
    """The name of the model.

    Raises:
        RequestError: there is none.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError(400, f"model must be the name of a model, found {model!r:.60}")
    return model
