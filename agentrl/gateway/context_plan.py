"""From a request to the ids of its context: the sampled prefix verbatim, the rest proven by the renderer, else a new segment with its reason."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.gateway.conversation_tree import ConversationTree, GeneratedTurn, Match, Node, Written
from agentrl.gateway.protocol import ModelRequest, RequestError
from agentrl.render.base import Pieces
from agentrl.render.renderer import Renderer
from agentrl.render.truncation import continue_context
from agentrl.rollout.episode import Limits
from agentrl.rollout.recorder import Recorder
from agentrl.types import Message, StopReason

_NO_LIMIT = 1 << 40


class NoRoomError(Exception):
    """A budget leaves nothing to sample."""

    def __init__(self, bound: StopReason) -> None:
        super().__init__(bound.value)
        self.bound = bound


@dataclass(slots=True, kw_only=True, eq=False)
class ContextPlan:
    """How a request continues the record."""

    request: ModelRequest
    node: Node
    """of its last message"""
    agent_id: str
    context: list[int]
    """the ids that are sent to the engine"""
    images: list[PlacedImage]
    """images of the context"""
    pieces: Pieces
    """what follows the parent's generation; the whole context if a segment opens"""
    new_images: list[PlacedImage]
    """images of the pieces"""
    parent: GeneratedTurn | None = None
    """the generation that it continues"""
    matched: int = 0
    """messages up to the parent's"""
    changed: Mapping[int, Message] = field(default_factory=dict)
    """matched messages that the client wrote in another way"""
    opens: bool = False
    """a segment opens in any case"""
    reason: str | None = None
    """why; None: it is the first"""
    observation: list[Message] = field(default_factory=list)
    """the messages after the parent's, as rendered"""
    cut_tokens: int = 0
    """tokens of them that did not fit"""
    continues_turn: bool = False
    """the parent's generation was cut by its length and continues"""
    room: int = 0
    """tokens that may be sampled"""
    bound: StopReason = StopReason.MAX_TOKENS
    """the limit that sets the room"""
    clients_limit: bool = False
    """the client's own max_tokens sets it"""
    left_out: dict[str, int] = field(default_factory=dict)
    """what the template leaves out of the context although the request has it, counted by kind"""


class ContextPlanner:
    """Plans the contexts of one episode."""

    def __init__(self, recorder: Recorder, renderer: Renderer, limits: Limits) -> None:
        self.recorder, self.renderer, self.limits = recorder, renderer, limits
        self.tree = ConversationTree()
        self._prompt_lengths: dict[str, int] = {}
        """tokens of the first prompt of each agent"""
        self._tools: dict[int, list[dict[str, Any]]] = {}
        """tools of the request of each turn"""
        self._nodes: dict[int, list[Node]] = {}
        """the messages of each turn; two where it continues another"""

    def plan(self, request: ModelRequest) -> ContextPlan:
        """Plan a request.

        Raises:
            RequestError: it cannot be served, or its prompt is longer than the context.
            NoRoomError: a budget is spent.
            TemplateError: the chat template cannot render it.
        """
        match = self.tree.match(request.messages, request.tools, request.paths)
        turn = match.node.turn
        plan = self._open(request, match) if turn is None else self._continue(request, match, turn)
        self._prompt_lengths.setdefault(plan.agent_id, len(plan.context))
        self._set_room(plan)
        return plan

    def plan_side_call(self, request: ModelRequest) -> ContextPlan:
        """Plan a request that does not belong to the record. Raises as `plan`."""
        plan = self._rendered(request, request.messages, Node({}), "side")
        self._set_room(plan)
        return plan

    def add_turn(self, plan: ContextPlan, turn: GeneratedTurn) -> None:
        """Take note of the generation of a planned request."""
        self._tools[turn.index] = plan.request.tools
        tools = plan.request.tools
        nodes = self._nodes[turn.index] = [self.tree.add_turn(plan.node, turn, tools, plan.changed)]
        if plan.continues_turn and plan.parent is not None and plan.node.parent is not None:
            whole = _merged(plan.parent.answered, turn.answered)
            message = _merged(plan.parent.message, turn.message)
            whole_turn = replace(turn, message=message, answered=whole)
            nodes.append(self.tree.add_turn(plan.node.parent, whole_turn, tools, plan.changed))

    def tools_of(self, turn: int) -> list[dict[str, Any]]:
        """The tools of the request that a turn answered; none for -1."""
        return self._tools.get(turn, [])

    def messages_up_to(self, turn: int, count: int) -> list[Message]:
        """The `count` messages of the conversation up to a turn's; none for -1."""
        node = next((node for node in self._nodes.get(turn, ()) if node.length == count), None)
        return [n.message for n in node.upwards()][::-1] if node else []

    # -- plans -------------------------------------------------------------------------------------------------------

    def _open(self, request: ModelRequest, match: Match) -> ContextPlan:
        """A conversation that continues no generation."""
        _check_last(request.messages)
        messages, sampled = self._as_written(request.messages)
        left_out = self._require_whole(messages, request.tools, sampled)
        node = self.tree.add(match.node, request.messages, match.paths, request.tools)
        plan = self._rendered(request, messages, node, match.agent_id)
        plan.reason, plan.left_out = match.reason, left_out
        return plan

    def _continue(self, request: ModelRequest, match: Match, turn: GeneratedTurn) -> ContextPlan:
        new = request.messages[match.matched :]
        base = self.recorder.segment_ids(turn.segment, turn.end)
        images = [p for p in self.recorder.segment_images(turn.segment) if p.at < turn.end]
        plan = ContextPlan(
            request=request,
            node=match.node,
            agent_id=turn.agent_id,
            context=base,
            images=images,
            pieces=(),
            new_images=[],
            parent=turn,
            matched=match.matched,
            changed=_changed(request, match.node),
        )
        if not new:
            if not turn.cut:
                raise RequestError(
                    400, "the conversation ends with a finished turn of the assistant; add a message to be answered"
                )
            plan.continues_turn = True
            return plan
        _check_last(new)
        new = _with_call_ids(new, _call_names(request.messages[match.matched - 1], turn))
        history = Written(match.node.parent or match.node)
        if any(m["role"] not in ("user", "tool") or (m.get("name") and m["role"] != "tool") for m in new):
            whole = [*history, turn.message, *new]
            plan.left_out = self._require_whole(whole, request.tools, range(len(whole) - len(new)))
        rest = slice(match.matched, None)
        plan.node = self.tree.add(match.node, request.messages[rest], match.paths[rest], request.tools)
        self._extend(plan, history, new)
        return plan

    def _extend(self, plan: ContextPlan, history: Sequence[Message], new: list[Message]) -> None:
        """Append the new messages, of which tool results are cut where the run's limits require it."""
        turn = plan.parent
        assert turn is not None
        limits, length = self.limits, len(plan.context)
        context_room = limits.context_length - length
        budget_room = limits.max_response_tokens - self._response_length(plan.agent_id, length)
        most = min(limits.context_length, self._prompt_lengths[plan.agent_id] + limits.max_response_tokens)
        cuts = all(m["role"] == "tool" for m in new)
        continuation = continue_context(
            self.renderer,
            history,
            turn.message,
            new,
            turn.ids,
            max_tokens=min(context_room, budget_room) - 1 if cuts else _NO_LIMIT,
            max_segment_tokens=most - 1 if cuts else _NO_LIMIT,
            tools=plan.request.tools,
        )
        if continuation is None:
            raise NoRoomError(StopReason.CONTEXT_FULL if context_room < budget_room else StopReason.MAX_TOKENS)
        plan.pieces, plan.new_images = continuation.pieces, continuation.images
        plan.observation, plan.cut_tokens = continuation.messages, continuation.cut_tokens
        ids = [i for _, piece in continuation.pieces for i in piece]
        if continuation.new_segment is not None:
            plan.opens, plan.reason = True, continuation.new_segment
            plan.context, plan.images = ids, continuation.images
        else:
            plan.context += ids
            plan.images += [replace(p, at=p.at + length) for p in continuation.images]

    def _rendered(self, request: ModelRequest, messages: list[Message], node: Node, agent_id: str) -> ContextPlan:
        """A plan that opens a segment with the model's own rendering of the conversation."""
        pieces = self.renderer.prompt(messages, request.tools)
        images = self.renderer.placed(pieces, messages)
        return ContextPlan(
            request=request,
            node=node,
            agent_id=agent_id,
            context=[i for _, piece in pieces for i in piece],
            images=images,
            pieces=pieces,
            new_images=images,
            opens=True,
        )

    def _require_whole(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampled: Container[int]
    ) -> dict[str, int]:
        """Count what templates leave out on purpose: reasoning, names of speakers, and parts of what the policy wrote.

        Args:
            messages: the conversation.
            tools: of the request.
            sampled: indices of the messages that the policy wrote, or that were checked before.

        Raises:
            TemplateError: the template leaves another part out, which the policy would not see.
        """
        others = [i for i in range(len(messages)) if i not in sampled]
        found = self.renderer.require_whole(messages, tools, numbers=others)
        counts = {
            "messages whose reasoning the template leaves out": found.reasoning,
            "messages whose name the template leaves out": found.names,
            "parts of the policy's messages that the template leaves out": len(found.parts),
        }
        return {kind: count for kind, count in counts.items() if count}

    def _as_written(self, messages: Sequence[Message]) -> tuple[list[Message], set[int]]:
        """A request's messages for the template, and the indices of the policy's own ones, in whose place is what the policy wrote."""
        written: list[Message] = []
        sampled: set[int] = set()
        names: dict[str, str] = {}
        for message in messages:
            turn = self.tree.written_by_policy(message)
            if turn is not None:
                names |= _call_names(message, turn)
                message = turn.message
                sampled.add(len(written))
            written += _with_call_ids([message], names)
        return written, sampled

    # -- limits ------------------------------------------------------------------------------------------------------

    def _set_room(self, plan: ContextPlan) -> None:
        """Set how much may be sampled.

        Raises:
            RequestError: the prompt is longer than the context.
            NoRoomError: nothing may.
        """
        limits, length = self.limits, len(plan.context)
        context = limits.context_length - length
        if context <= 0:
            raise RequestError(
                400,
                f"the prompt has {length} tokens and the context has {limits.context_length}; shorten the conversation",
                "context_length_exceeded",
            )
        budget = limits.max_response_tokens - self._response_length(plan.agent_id, length)
        if limits.max_tokens_per_turn is not None:
            budget = min(budget, limits.max_tokens_per_turn)
        plan.room, plan.bound = (
            (context, StopReason.CONTEXT_FULL) if context < budget else (budget, StopReason.MAX_TOKENS)
        )
        if plan.room <= 0:
            raise NoRoomError(plan.bound)
        if plan.request.max_tokens is not None and plan.request.max_tokens < plan.room:
            plan.room, plan.clients_limit = plan.request.max_tokens, True

    def _response_length(self, agent_id: str, length: int) -> int:
        """Tokens of a context beyond the length of its agent's first prompt."""
        return max(0, length - self._prompt_lengths.get(agent_id, length))


def _changed(request: ModelRequest, node: Node) -> Mapping[int, Message]:
    """The messages of a request up to a generation that are written in another way than those of its path, by their place."""
    last, before = node.length - 1, node.parent
    if request.paths and before is not None and request.messages[last - 1] is before.message:
        # the messages before the generation are those of its own request
        changed = {i: m for i, m in (node.changed or {}).items() if i < last}
        nodes: Iterable[Node] = (node,)
    else:
        changed, nodes = {}, [*node.upwards()][::-1]
    for compared in nodes:
        number = compared.length - 1
        message = request.messages[number]
        if message is not compared.message and message != compared.message:
            changed[number] = message
    return changed


def _check_last(messages: Sequence[Message]) -> None:
    """Refuse a conversation whose last message is an assistant's that the policy did not write.

    Raises:
        RequestError: it is.
    """
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            400,
            "the conversation ends with an assistant's message that the policy did not write (a prefill), which is not served; "
            "end it with a message to be answered",
        )


def _call_names(echoed: Message, turn: GeneratedTurn) -> dict[str, str]:
    """The ids of a turn's calls as the policy wrote them, by the client's ids."""
    return dict(zip((c["id"] for c in echoed.get("tool_calls") or ()), turn.call_ids, strict=False))


def _with_call_ids(messages: Sequence[Message], names: Mapping[str, str]) -> list[Message]:
    """The messages with the ids of the calls that tool results answer replaced."""
    return [{**m, "tool_call_id": names[m["tool_call_id"]]} if m.get("tool_call_id") in names else m for m in messages]


def _merged(first: Message, second: Message) -> Message:
    """Two pieces of one turn as one message."""
    joined = {**second, "content": str(first.get("content") or "") + str(second.get("content") or "")}
    reasoning = str(first.get("reasoning_content") or "") + str(second.get("reasoning_content") or "")
    return {**joined, "reasoning_content": reasoning} if reasoning else joined
