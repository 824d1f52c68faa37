"""Proving what a template puts between a generation and the next, or saying why it cannot be proven (design §5.1).

For new messages M the template renders synthetic conversations `H, assistant(P), M` and the header of the next turn. What follows the
placeholder P from the assistant's end token on is `tail(M)`. It is proven if it comes out the same over several histories H of the
same kind: short and long, with and without a system message, with tool calls where the conversation had some. M's texts are holes
(symbolic.py), so the tail holds for any contents that take the template down the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import Family
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.message_shape import shape_of, with_texts
from agentrl.render.template_trace import Hole, Part, Pattern, Trace
from agentrl.types import Message

PLACEHOLDER = "Placeholder7d1f"
REASONING = "Reasoning3c9a"
EARLIER = "Earlier8d2e"
DUMMY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
KINDS = ("fresh", "used", "using")
"""of histories: no tool was called so far; one was, earlier; the message before the assistant's turn is a tool's"""
_S: Message = {"role": "system", "content": "s"}
_U: Message = {"role": "user", "content": "a question"}
_A: Message = {"role": "assistant", "content": "an answer"}


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known about messages of one shape after histories of some kinds."""

    reason: str | None = None
    """why nothing is proven; None: it is"""
    end: str = ""
    """the added token that the tail begins with: the end of the assistant's turn, or the next header where a family has no end"""
    pattern: Pattern | None = None
    """the tail after `end`; None: it is proven to be the template's own, but must be rendered each time"""
    strips: bool = False
    """the template drops the reasoning of the assistant's turn once these messages follow"""
    histories: int = 0
    """how many synthetic conversations agreed"""

    def shown(self) -> str:
        """The tail for a person to read, contents as […]."""
        parts = self.pattern.parts if self.pattern is not None else ("…",)
        return "".join(repr(p)[1:-1] if isinstance(p, str) else "[…]" for p in parts)


def kind_of(history: Sequence[Message]) -> str:
    """The kind of a history (the messages before the assistant's turn)."""
    if history and history[-1]["role"] == "tool":
        return "using"
    return "used" if any(m["role"] == "tool" for m in reversed(history)) else "fresh"


class Prover:
    """Proves shapes against one template."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str], args: dict[str, Any], family: Family) -> None:
        """`ends` are the added tokens that may end an assistant's turn."""
        self._template = template
        self._ends = tuple(ends)
        self._args = args
        self._adapt = family.adapt
        self._thinking_as_data = family.structured and any(
            k in template.source for k in ("reasoning_content", "thinking")
        )

    def prove(self, messages: Sequence[Message], kinds: Sequence[str], tools: Sequence[bool]) -> Proof:
        """Prove `messages` (adapted) after histories of these kinds, with and without tools in the prompt."""
        found: list[_Tail] = []
        strips = False
        for kind, with_tools in product(kinds, tools):
            listed = [DUMMY_TOOL] if with_tools else None
            for history in self._usable(kind, listed):
                try:
                    found.append(replace(self._tail(history, messages, listed), tools=with_tools))
                except TemplateError as e:
                    return Proof(str(e))
                strips = strips or self._strips(history, messages, listed)
        if not found:
            return Proof("the template refuses every synthetic conversation")
        return _agree(found, messages, strips)

    def render_tail(self, messages: Sequence[Message], kind: str, proof: Proof) -> str:
        """The tail after its end token, rendered for messages as they are (proven, but not to be spliced)."""
        for history in self._usable(kind, None):
            for before in assistants(messages):
                try:
                    text = self._render([*history, before, *messages], None, generate=True)
                except TemplateError:
                    continue
                if PLACEHOLDER in text:
                    return text.rpartition(PLACEHOLDER)[2].partition(proof.end)[2]
        raise TemplateError("the template refuses messages of a shape that it rendered before")

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Any, *, generate: bool) -> str:
        return self._template.render(self._adapt(messages), tools=tools, generate=generate, **self._args)

    def _usable(self, kind: str, tools: Any) -> Iterator[list[Message]]:
        """The histories of a kind that the template renders, with calls' arguments as it wants them."""
        for index in range(3):
            for arguments in ({"x": "x"}, '{"x": "x"}'):
                history = histories(kind, arguments)[index]
                try:
                    self._render(history, tools, generate=True)
                except TemplateError:
                    continue
                yield history
                break

    def _tail(self, history: Sequence[Message], messages: Sequence[Message], tools: Any) -> _Tail:
        """With the first assistant turn that the template takes; with holes, else (it cannot be followed) with stand-ins."""
        refusal = TemplateError("the template cannot be followed")
        stand_ins = stand_ins_of(messages)
        for with_holes in (True, False):
            trace = Trace()
            listed = _filled(messages, stand_ins, trace if with_holes else None)
            for before in assistants(listed):
                trace.reset()
                try:
                    pattern = self._template.trace(
                        self._adapt([*history, before, *listed]), trace, tools=tools, generate=True, **self._args
                    )
                    if pattern is None:
                        break
                    end, parts = self._after(pattern.parts)
                except TemplateError as e:
                    refusal = e
                    continue
                tail = Pattern(parts, pattern.conditions)
                if with_holes and tail.leaks(stand_ins):
                    break
                return _Tail(end, tail.fill(stand_ins), tail if with_holes else None)
        raise refusal

    def _after(self, parts: Sequence[str | Part]) -> tuple[str, tuple[str | Part, ...]]:
        """The end token that follows the placeholder first, and all after it."""
        last, literal = next(
            ((i, p) for i, p in reversed(list(enumerate(parts))) if isinstance(p, str) and PLACEHOLDER in p), (-1, "")
        )
        if last < 0:
            raise TemplateError("the template leaves the assistant's text out")
        text = literal.rpartition(PLACEHOLDER)[2]
        at, end = min(((text.find(e), e) for e in self._ends if e in text), default=(-1, ""))
        if at < 0:
            raise TemplateError(
                "the template does not end the assistant's turn with a token of the tokenizer before these messages"
            )
        rest = text[at + len(end) :]
        return end, ((rest,) if rest else ()) + tuple(parts[last + 1 :])

    def _strips(self, history: Sequence[Message], messages: Sequence[Message], tools: Any) -> bool:
        """Does the template leave out the last turn's reasoning, or drop that of earlier ones, once the messages follow?"""
        plain = _filled(messages, stand_ins_of(messages), None)
        think = _thinking_as_data if self._thinking_as_data else _thinking_in_content
        earlier = [think(m, EARLIER) if m["role"] == "assistant" else m for m in history]
        said: list[Message] = [] if self._thinking_as_data else [{"role": "assistant", "content": PLACEHOLDER}]
        for before in (*said, *assistants(plain)):  # calls are in the content, unless the family has them as data
            try:
                asked = self._render(earlier, tools, generate=True)
                after = self._render([*earlier, think(before, REASONING), *plain], tools, generate=True)
            except TemplateError:
                continue
            if PLACEHOLDER in after:
                return REASONING not in after or (EARLIER in asked and EARLIER not in after)
        return False


@dataclass(frozen=True, slots=True)
class _Tail:
    end: str
    text: str
    """what follows, with stand-ins"""
    pattern: Pattern | None
    tools: bool = False
    """with tools in the prompt"""


def _agree(found: Sequence[_Tail], messages: Sequence[Message], strips: bool) -> Proof:
    first, n = found[0], len(found)
    if any((t.end, t.text) != (first.end, first.text) for t in found):
        alike = all(len({(t.end, t.text) for t in found if t.tools is with_tools}) <= 1 for with_tools in (False, True))
        return Proof(
            "the template moves its list of tools"
            if alike
            else "the template's text between turns depends on the history",
            histories=n,
        )
    stand_ins = stand_ins_of(messages)
    if missing := [i for i in shape_of(messages)[2] if stand_ins[i] not in first.text]:
        return Proof(f"the template leaves content out (text {missing[0]} of the new messages)", histories=n)
    patterns = [t.pattern for t in found if t.pattern is not None]
    if len(patterns) < n or any(p.parts != patterns[0].parts for p in patterns):
        return Proof(None, first.end, None, strips, n)
    conditions = tuple(c for p in patterns for c in p.conditions)
    return Proof(None, first.end, Pattern(patterns[0].parts, tuple(dict.fromkeys(conditions))), strips, n)


def _thinking_in_content(message: Message, thought: str) -> Message:
    return {**message, "content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}


def _thinking_as_data(message: Message, thought: str) -> Message:
    return {**message, "reasoning_content": thought, "thinking": thought}


def _filled(messages: Sequence[Message], stand_ins: Sequence[str], trace: Trace | None) -> list[Message]:
    """The messages with holes (if there is a trace) or stand-ins for their texts."""
    return with_texts(messages, lambda i, _: stand_ins[i] if trace is None else Hole.of(stand_ins[i], [Part(i)], trace))


def histories(kind: str, arguments: Any) -> list[list[Message]]:
    """Three synthetic conversations up to the assistant's turn. `arguments` of calls: some templates want an object, some a string."""
    call: Message = {"role": "assistant", "content": "", "tool_calls": [_call("f", "abcdefgh0", arguments)]}
    result: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefgh0", "content": "r"}
    if kind == "fresh":
        return [[_U], [_S, _U, _A, _U], [_U, _A, {"role": "user", "content": "b"}, _A, _U]]
    if kind == "using":
        return [[_U, call, result], [_S, _U, call, result, call, result], [_U, _A, _U, call, result]]
    return [
        [_U, call, result, _A, _U],
        [_S, _U, call, result, call, result, _A, _U],
        [_U, _A, _U, call, result, _A, _U],
    ]


def assistants(messages: Sequence[Message]) -> Iterator[Message]:
    """Assistant turns that `messages` may follow, the likeliest first: before tools' messages, one that calls them."""
    calling = [m for m in messages if m["role"] == "tool"] if messages and messages[0]["role"] == "tool" else []
    for arguments in ({"x": PLACEHOLDER}, f'{{"x": "{PLACEHOLDER}"}}') if calling else ():
        for these in dict.fromkeys((len(calling), 1)):
            calls = [_call(m.get("name", "f"), m.get("tool_call_id", "abcdefgh0"), arguments) for m in calling[:these]]
            yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": PLACEHOLDER}


def _call(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def stand_ins_of(messages: Sequence[Message]) -> list[str]:
    """A text for each text of the messages: a word of its own for what must appear, something as long for names and ids."""
    _, texts, shown = shape_of(messages)
    return [f"Content{i}x6be2" if i in shown else chr(0xE000 + i % 0x1000) * len(t) for i, t in enumerate(texts)]
