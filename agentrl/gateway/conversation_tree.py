"""The forest of the messages of one episode: which generation a request continues, and why none where it continues none.

Each path from the root is a conversation as a client sent it. A node is a message. Where the policy generated the message, the node knows the
tokens. A generation is found by the key of its path (`message_match.path_key`), of its tools first: from the end of a request, which usually
continues the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.gateway.message_match import NO_MESSAGES, message_key, path_key, path_keys, shown_key, tools_key
from agentrl.types import Message

TOOLS_CHANGED = "the tools changed"
SYSTEM_CHANGED = "the system prompt changed"
HISTORY_CHANGED = "the client changed the history"
HISTORY_REPLACED = "a conversation with the same system prompt began (the history was compacted, or another task)"
SAMPLED_AGAIN = "another generation for the same conversation"
AGENT_BEGAN = "an agent with another system prompt began"
TURN_BRANCHED = "another request continued the same turn"


@dataclass(slots=True, eq=False, kw_only=True)
class GeneratedTurn:
    """A generation of the policy and its place in the record."""

    index: int
    """of the turn"""
    segment: int
    end: int
    """tokens of the segment up to the end of the generation"""
    ids: tuple[int, ...]
    """the sampled ids"""
    message: Message
    """as the policy wrote it, for the chat template"""
    answered: Message
    """as the client read it"""
    call_ids: tuple[str, ...]
    """ids of its calls, as the policy or its format wrote them"""
    cut: bool
    """it ended because of its length, so the client may let it continue"""
    agent_id: str
    answered_at: float = 0.0
    """clock of the event loop, in seconds"""


@dataclass(slots=True, eq=False)
class Node:
    """A message in its conversation."""

    message: Message
    parent: Node | None = None
    path: bytes = NO_MESSAGES
    """key of the conversation up to here"""
    length: int = 0
    """its messages"""
    turn: GeneratedTurn | None = None
    """None: the client wrote the message"""
    changed: Mapping[int, Message] | None = None
    """of a generation: the messages before it that its request wrote in another way than the path, by their place; None: none"""

    @property
    def written(self) -> Message:
        """The message, as the policy wrote it if it did."""
        return self.turn.message if self.turn else self.message

    def upwards(self) -> Iterator[Node]:
        """The nodes from this one to the first message."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def child(self, message: Message, path: bytes) -> Node:
        """A new node after this one."""
        return Node(message, self, path, self.length + 1)


class Written(Sequence[Message]):
    """The conversation up to a node, the policy's messages as it wrote them. Its end is read without the rest."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __len__(self) -> int:
        return self._node.length

    def __reversed__(self) -> Iterator[Message]:
        return (node.written for node in self._node.upwards())

    def __iter__(self) -> Iterator[Message]:
        return iter([*reversed(self)][::-1])

    def __getitem__(self, index: Any) -> Any:
        return self._node.written if index == -1 and self._node.length else [*self][index]


class Match(NamedTuple):
    """How a request relates to the forest."""

    node: Node
    """the generated message that it continues; the root if there is none"""
    matched: int
    """messages of the request up to that one"""
    paths: Sequence[bytes]
    """key of the conversation up to each message"""
    reason: str | None
    """why it continues no generation; None: it does, or it is the first"""
    agent_id: str


class ConversationTree:
    """All conversations of one episode."""

    def __init__(self) -> None:
        self._root = Node({})
        self._asked: set[tuple[bytes, bytes]] = set()
        """tools and path of every message of every request"""
        self._generated: dict[bytes, dict[bytes, list[Node]]] = {}
        """generations by tools and path"""
        self._agents: dict[bytes, str] = {}
        """agent of each system prompt"""
        self._answers: dict[bytes, GeneratedTurn] = {}
        """generations by the key of their message alone"""
        self._shown: dict[bytes, GeneratedTurn] = {}
        """generations by the key of their path without system messages"""
        self._last_tools: tuple[Sequence[Mapping[str, Any]], bytes] = (), b""
        """those of the last request, which most others have, and their key"""

    def match(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], known_paths: Sequence[bytes] = ()
    ) -> Match:
        """The longest conversation up to a generation with which the messages begin, or why there is none.

        `known_paths`: the key of the conversation up to each message; empty: they are computed.
        """
        paths = known_paths or path_keys(messages)
        of_tools = self._tools_key(tools)
        node = self._deepest(of_tools, messages, paths)
        if node is not None and node.turn is not None:
            return Match(node, node.length, paths, None, node.turn.agent_id)
        agent_id = self._agent(messages)
        reason, known = self._reason(messages, paths, of_tools)
        return Match(self._root, 0, paths, reason, known or agent_id)

    def add(
        self, node: Node, messages: Sequence[Message], paths: Sequence[bytes], tools: Sequence[Mapping[str, Any]]
    ) -> Node:
        """The node of the last of `messages`, which follow `node` in a request with these tools."""
        of_tools = self._tools_key(tools)
        for message, path in zip(messages, paths, strict=True):
            node = node.child(message, path)
            self._asked.add((of_tools, path))
        return node

    def add_turn(
        self, node: Node, turn: GeneratedTurn, tools: Sequence[Mapping[str, Any]], changed: Mapping[int, Message]
    ) -> Node:
        """Add a generation after `node`, whose request had these tools and changes; returns its own node."""
        key = message_key(turn.answered)
        child = node.child(turn.answered, path_key(node.path, turn.answered, key, node.length))
        child.turn, child.changed = turn, changed or None
        self._answers[key] = turn
        self._shown[shown_key(child.path)] = turn
        self._generated.setdefault(self._tools_key(tools), {}).setdefault(child.path, []).append(child)
        return child

    def written_by_policy(self, message: Message) -> GeneratedTurn | None:
        """The generation of an assistant's message, wherever it stood."""
        return self._answers.get(message_key(message)) if message["role"] == "assistant" else None

    def _tools_key(self, tools: Sequence[Mapping[str, Any]]) -> bytes:
        if tools is not self._last_tools[0]:
            self._last_tools = tools, tools_key(tools)
        return self._last_tools[1]

    def _deepest(self, of_tools: bytes, messages: Sequence[Message], paths: Sequence[bytes]) -> Node | None:
        """The last generation on a path of these messages; of equal texts the one whose call ids the client kept, then the newest."""
        generated = self._generated.get(of_tools, {})
        for number in reversed(range(len(paths))):
            nodes = generated.get(paths[number])
            if nodes is None:
                continue
            if len(nodes) == 1:  # the usual case
                return nodes[0]
            ids = _call_ids(messages[number])
            return max(nodes, key=lambda n: (_call_ids(n.message) == ids, n.turn.index if n.turn else -1))
        return None

    def _agent(self, messages: Sequence[Message]) -> str:
        """The agent of the conversation's system prompt; a new one has another name."""
        name = "policy" if not self._agents else f"agent-{len(self._agents)}"
        return self._agents.setdefault(_system_key(messages), name)

    def _reason(
        self, messages: Sequence[Message], paths: Sequence[bytes], of_tools: bytes
    ) -> tuple[str | None, str | None]:
        """Why no generation precedes the end of a request, and the agent whose conversation it was, if it is known."""
        if not self._answers:
            return None, None
        for other in self._generated:
            node = self._deepest(other, messages, paths)
            if node is not None and node.turn is not None:
                return TOOLS_CHANGED, node.turn.agent_id
        shown = (self._shown.get(shown_key(path)) for path in reversed(paths))
        if (turn := next(filter(None, shown), None)) is not None:
            return SYSTEM_CHANGED, turn.agent_id
        if (turn := next(filter(None, map(self.written_by_policy, messages)), None)) is not None:
            return HISTORY_CHANGED, turn.agent_id
        agent_id = self._agents[_system_key(messages)]
        if not any(t.agent_id == agent_id for t in self._answers.values()):
            return AGENT_BEGAN, None
        return (SAMPLED_AGAIN if (of_tools, paths[-1]) in self._asked else HISTORY_REPLACED), None


def _system_key(messages: Sequence[Message]) -> bytes:
    return message_key(messages[0]) if messages[0]["role"] == "system" else b""


def _call_ids(message: Message) -> list[str]:
    return [c["id"] for c in message.get("tool_calls") or ()]
