"""The forest of the messages of one episode: which generation a request continues, and why none where it continues none.

Each path from a root is a conversation as a client sent it; requests with other tools have other roots. A node is a message. Where the policy
generated the message, the node knows the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from agentrl.gateway.message_match import message_key, tools_key
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
    turn: GeneratedTurn | None = None
    """None: the client wrote the message"""
    without_system: bytes = b""
    """key of the conversation up to here without system messages"""
    children: dict[bytes, list[Node]] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Match(NamedTuple):
    """How a request relates to the forest."""

    node: Node
    """the generated message that it continues; a root if there is none"""
    matched: int
    """messages of the request up to that one"""
    keys: list[bytes]
    """key of each message"""
    reason: str | None
    """why it continues no generation; None: it does, or it is the first"""
    agent_id: str


class ConversationTree:
    """All conversations of one episode."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        """by the key of the tools"""
        self._agents: dict[bytes, str] = {}
        """agent of each system prompt"""
        self._answers: dict[bytes, GeneratedTurn] = {}
        """generations by the key of their message alone"""
        self._shown: dict[bytes, GeneratedTurn] = {}
        """generations by `Node.without_system`"""
        self._last_tools: tuple[Sequence[Mapping[str, Any]], bytes] = (), b""
        """those of the last request, which most others have, and their key"""

    def match(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], known_keys: Sequence[bytes] = ()
    ) -> Match:
        """The longest conversation up to a generation with which the messages begin, or why there is none.

        `known_keys`: the key of each message; empty: they are computed.
        """
        keys = list(known_keys) or [message_key(m) for m in messages]
        if tools is not self._last_tools[0]:
            self._last_tools = tools, tools_key(tools)
        of_tools = self._last_tools[1]
        root = self._roots.setdefault(of_tools, Node({}))
        agent_id = self._agent(messages, keys)
        node, count = self._deepest(root, messages, keys)
        if node is not None and node.turn is not None:
            return Match(node, count, keys, None, node.turn.agent_id)
        reason, known = self._reason(messages, keys, of_tools)
        return Match(root, 0, keys, reason, known or agent_id)

    def add(self, node: Node, messages: Sequence[Message], keys: Sequence[bytes]) -> Node:
        """The node of the last of `messages`, which follow `node` in a request."""
        for message, key in zip(messages, keys, strict=True):
            given = next((c for c in node.children.get(key, ()) if c.turn is None), None)
            if given is None:
                given = self._child(node, message, key)
            node = given
        return node

    def add_turn(self, node: Node, turn: GeneratedTurn) -> Node:
        """Add a generation after `node`; returns its own node."""
        key = message_key(turn.answered)
        child = self._child(node, turn.answered, key)
        child.turn = turn
        self._answers[key] = turn
        self._shown[child.without_system] = turn
        return child

    def written_by_policy(self, key: bytes) -> GeneratedTurn | None:
        """The generation whose message has this key, wherever it stood."""
        return self._answers.get(key)

    def _child(self, node: Node, message: Message, key: bytes) -> Node:
        shown = node.without_system if message["role"] == "system" else _joined(node.without_system, key)
        child = Node(message, node, without_system=shown)
        node.children.setdefault(key, []).append(child)
        return child

    @staticmethod
    def _deepest(root: Node, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[Node | None, int]:
        """The last generation on a path of these messages; of equal texts the one whose call ids the client kept, then the newest."""
        level, best, count = [root], None, 0
        for number, key in enumerate(keys):
            level = level[0].children.get(key, []) if len(level) == 1 else _children(level, key)
            if not level:
                break
            if len(level) == 1:  # the usual case
                if level[0].turn is not None:
                    best, count = level[0], number + 1
                continue
            generated = [n for n in level if n.turn is not None]
            if generated:
                ids = _call_ids(messages[number])
                best = max(generated, key=lambda n: (_call_ids(n.message) == ids, n.turn.index if n.turn else -1))
                count = number + 1
        return best, count

    def _agent(self, messages: Sequence[Message], keys: Sequence[bytes]) -> str:
        """The agent of the conversation's system prompt; a new one has another name."""
        system = keys[0] if messages and messages[0]["role"] == "system" else b""
        name = "policy" if not self._agents else f"agent-{len(self._agents)}"
        return self._agents.setdefault(system, name)

    def _reason(
        self, messages: Sequence[Message], keys: Sequence[bytes], of_tools: bytes
    ) -> tuple[str | None, str | None]:
        """Why no generation precedes the end of a request, and the agent whose conversation it was, if it is known."""
        if not self._answers:
            return None, None
        for other, root in self._roots.items():
            node, _ = self._deepest(root, messages, keys)
            if other != of_tools and node is not None and node.turn is not None:
                return TOOLS_CHANGED, node.turn.agent_id
        shown = b""
        turn: GeneratedTurn | None = None
        for message, key in zip(messages, keys, strict=True):
            shown = shown if message["role"] == "system" else _joined(shown, key)
            turn = self._shown.get(shown, turn)
        if turn is not None:
            return SYSTEM_CHANGED, turn.agent_id
        for message, key in zip(messages, keys, strict=True):
            if message["role"] == "assistant" and key in self._answers:
                return HISTORY_CHANGED, self._answers[key].agent_id
        system = keys[0] if messages[0]["role"] == "system" else b""
        if not any(t.agent_id == self._agents[system] for t in self._answers.values()):
            return AGENT_BEGAN, None
        same = self._roots[of_tools]
        for key in keys:
            children = same.children.get(key)
            if not children:
                return HISTORY_REPLACED, None
            same = children[0]
        return SAMPLED_AGAIN, None


def _children(nodes: Sequence[Node], key: bytes) -> list[Node]:
    return [child for node in nodes for child in node.children.get(key, ())]


def _joined(before: bytes, key: bytes) -> bytes:
    return blake2b(before + key, digest_size=16).digest()


def _call_ids(message: Message) -> list[str]:
    return [c["id"] for c in message.get("tool_calls") or ()]
