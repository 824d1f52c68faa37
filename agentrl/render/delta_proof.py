"""Proves what a template puts between one generation and the next, or gives the reason why that cannot be proven.

For new messages M the template renders synthetic conversations `H, assistant(P), M` with the header of the next turn. The text after the
placeholder P, from the assistant's end token on, is `tail(M)`. It is proven if it is equal over several histories H of the same kind:
short and long, with and without a system message, with tool calls where the conversation had some. M's texts are symbolic
(template_trace.py), so the tail holds for all contents that take the template down the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import Family
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.message_shape import map_message_texts, shape_of
from agentrl.render.template_trace import Pattern, Slot, SymbolicText, Trace
from agentrl.types import Message

PLACEHOLDER = "Placeholder7d1f"
DUMMY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
HISTORY_KINDS = ("fresh", "used", "using")
"""no tool was called so far; one was called earlier; the message before the assistant's turn is a tool's"""
_REASONING = "Reasoning3c9a"
_EARLIER_REASONING = "Earlier8d2e"
_SYSTEM: Message = {"role": "system", "content": "s"}
_USER: Message = {"role": "user", "content": "a question"}
_USER_B: Message = {"role": "user", "content": "b"}
_ASSISTANT: Message = {"role": "assistant", "content": "an answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaProof:
    """What is known about messages of one shape after histories of some kinds."""

    reason: str | None = None
    """why the delta is not proven; None: it is"""
    end: str = ""
    """the added token with which the tail begins: the end of the assistant's turn, or the next header where a family has no end token"""
    pattern: Pattern | None = None
    """the tail after `end`; None: it is proven to be the template's, but must be rendered for each content"""
    drops_reasoning: bool = False
    """the template drops the reasoning of the assistant's turn once these messages follow"""
    histories: int = 0
    """how many synthetic conversations agreed"""

    def preview(self) -> str:
        """The tail for a person to read, contents as […]."""
        parts = self.pattern.parts if self.pattern is not None else ("…",)
        return "".join(repr(p)[1:-1] if isinstance(p, str) else "[…]" for p in parts)


def history_kind(history: Sequence[Message]) -> str:
    """The kind of a history (the messages before the assistant's turn)."""
    if history and history[-1]["role"] == "tool":
        return "using"
    return "used" if any(m["role"] == "tool" for m in reversed(history)) else "fresh"


class DeltaProver:
    """Proves deltas against one template."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str], family: Family) -> None:
        """`ends`: the added tokens that may end an assistant's turn."""
        self._template = template
        self._ends = tuple(ends)
        self._reasoning_in_field = family.structured and any(
            key in template.source for key in ("reasoning_content", "thinking")
        )

    def prove(self, messages: Sequence[Message], kinds: Sequence[str], with_tools: Sequence[bool]) -> DeltaProof:
        """Prove the delta of `messages` (adapted) after histories of these kinds, with and without tools in the prompt."""
        tails: list[tuple[bool, _Tail]] = []
        drops_reasoning = False
        for kind, has_tools in product(kinds, with_tools):
            tools = [DUMMY_TOOL] if has_tools else None
            for history in self._accepted_histories(kind, tools):
                try:
                    tails.append((has_tools, self._tail(history, messages, tools)))
                except TemplateError as e:
                    return DeltaProof(reason=str(e))
                drops_reasoning = drops_reasoning or self._drops_reasoning(history, messages, tools)
        if not tails:
            return DeltaProof(reason="the template refuses every synthetic conversation")
        return _conclude(tails, messages, drops_reasoning)

    def render_tail(self, messages: Sequence[Message], kind: str, proof: DeltaProof) -> str:
        """The tail after its end token, rendered for these messages."""
        for history in self._accepted_histories(kind, None):
            for turn in _assistant_turns(messages):
                try:
                    text = self._template.render([*history, turn, *messages], generate=True)
                except TemplateError:
                    continue
                if PLACEHOLDER in text:
                    return text.rpartition(PLACEHOLDER)[2].partition(proof.end)[2]
        raise TemplateError("the template refuses messages although it rendered others of the same shape")

    def _accepted_histories(self, kind: str, tools: Any) -> Iterator[list[Message]]:
        """The histories of a kind that the template renders, with calls' arguments as an object or as a string."""
        for as_object, as_string in zip(_histories(kind, {"x": "x"}), _histories(kind, '{"x": "x"}'), strict=True):
            for history in (as_object, as_string):
                try:
                    self._template.render(history, tools=tools, generate=True)
                except TemplateError:
                    continue
                yield history
                break

    def _tail(self, history: Sequence[Message], messages: Sequence[Message], tools: Any) -> _Tail:
        """The tail after the first assistant turn that the template accepts. If symbolic texts cannot be traced, stand-ins replace them."""
        refusal = TemplateError("the template cannot be followed")
        stand_ins = _stand_ins(messages)
        for symbolic in (True, False):
            trace = Trace()
            filled = _filled(messages, stand_ins, trace if symbolic else None)
            for turn in _assistant_turns(filled):
                trace.reset()
                try:
                    pattern = self._template.trace([*history, turn, *filled], trace, tools=tools, generate=True)
                    if pattern is None:
                        break
                    end, parts = self._after_placeholder(pattern.parts)
                except TemplateError as e:
                    refusal = e
                    continue
                tail = Pattern(parts, pattern.conditions)
                if symbolic and tail.leaks(stand_ins):
                    break
                return _Tail(end, tail.fill(stand_ins), tail if symbolic else None)
        raise refusal

    def _after_placeholder(self, parts: Sequence[str | Slot]) -> tuple[str, tuple[str | Slot, ...]]:
        """The first end token after the placeholder, and everything after it."""
        at = max((i for i, p in enumerate(parts) if isinstance(p, str) and PLACEHOLDER in p), default=-1)
        if at < 0:
            raise TemplateError("the template leaves the assistant's text out")
        text = str(parts[at]).rpartition(PLACEHOLDER)[2]
        start, end = min(((text.find(e), e) for e in self._ends if e in text), default=(-1, ""))
        if start < 0:
            raise TemplateError(
                "the template does not end the assistant's turn with an added token of the tokenizer before these messages"
            )
        rest = text[start + len(end) :]
        return end, (*((rest,) if rest else ()), *parts[at + 1 :])

    def _drops_reasoning(self, history: Sequence[Message], messages: Sequence[Message], tools: Any) -> bool:
        """Whether the template leaves out the last turn's reasoning, or that of earlier turns, once the messages follow."""
        filled = _filled(messages, _stand_ins(messages), None)
        add = _add_reasoning_field if self._reasoning_in_field else _add_reasoning_text
        history = [add(m, _EARLIER_REASONING) if m["role"] == "assistant" else m for m in history]
        turns = list(_assistant_turns(filled))
        if not self._reasoning_in_field:  # calls are in the content
            turns.insert(0, {"role": "assistant", "content": PLACEHOLDER})
        for turn in turns:
            try:
                before = self._template.render(history, tools=tools, generate=True)
                after = self._template.render([*history, add(turn, _REASONING), *filled], tools=tools, generate=True)
            except TemplateError:
                continue
            if PLACEHOLDER in after:
                return _REASONING not in after or (_EARLIER_REASONING in before and _EARLIER_REASONING not in after)
        return False


@dataclass(frozen=True, slots=True)
class _Tail:
    end: str
    text: str
    """what follows the end token, with stand-ins for the contents"""
    pattern: Pattern | None


def _conclude(tails: Sequence[tuple[bool, _Tail]], messages: Sequence[Message], drops_reasoning: bool) -> DeltaProof:
    """The proof if all tails (each with whether tools were in the prompt) are equal, else the reason why there is none."""
    count, first = len(tails), tails[0][1]
    texts = {has_tools: {(t.end, t.text) for h, t in tails if h is has_tools} for has_tools in (False, True)}
    if len(texts[False] | texts[True]) > 1:
        if all(len(alternatives) <= 1 for alternatives in texts.values()):
            return DeltaProof(reason="the template moves its list of tools", histories=count)
        return DeltaProof(reason="the template's text between turns depends on the history", histories=count)
    stand_ins = _stand_ins(messages)
    for i in shape_of(messages)[2]:
        if stand_ins[i] not in first.text:
            return DeltaProof(reason=f"the template leaves content out (text {i} of the new messages)", histories=count)
    pattern = None
    patterns = [t.pattern for _, t in tails if t.pattern is not None]
    if len(patterns) == count and all(p.parts == patterns[0].parts for p in patterns):
        conditions = dict.fromkeys(condition for p in patterns for condition in p.conditions)
        pattern = Pattern(patterns[0].parts, tuple(conditions))
    return DeltaProof(end=first.end, pattern=pattern, drops_reasoning=drops_reasoning, histories=count)


def _add_reasoning_text(message: Message, reasoning: str) -> Message:
    return {**message, "content": f"<think>\n{reasoning}\n</think>\n\n{message.get('content') or ''}"}


def _add_reasoning_field(message: Message, reasoning: str) -> Message:
    return {**message, "reasoning_content": reasoning, "thinking": reasoning}


def _histories(kind: str, arguments: Any) -> list[list[Message]]:
    """Three synthetic conversations up to the assistant's turn. `arguments`: of calls; some templates want an object, some a string."""
    call: Message = {"role": "assistant", "content": "", "tool_calls": [_call("f", "abcdefgh0", arguments)]}
    result: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefgh0", "content": "r"}
    if kind == "fresh":
        return [[_USER], [_SYSTEM, _USER, _ASSISTANT, _USER], [_USER, _ASSISTANT, _USER_B, _ASSISTANT, _USER]]
    using = [
        [_USER, call, result],
        [_SYSTEM, _USER, call, result, call, result],
        [_USER, _ASSISTANT, _USER, call, result],
    ]
    return using if kind == "using" else [[*history, _ASSISTANT, _USER] for history in using]


def _assistant_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Assistant turns that `messages` may follow, the likeliest first: before tools' messages, one that calls the tools."""
    results = [m for m in messages if m["role"] == "tool"] if messages and messages[0]["role"] == "tool" else []
    for arguments in ({"x": PLACEHOLDER}, f'{{"x": "{PLACEHOLDER}"}}') if results else ():
        for count in dict.fromkeys((len(results), 1)):
            calls = [_call(m.get("name", "f"), m.get("tool_call_id", "abcdefgh0"), arguments) for m in results[:count]]
            yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": PLACEHOLDER}


def _call(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _filled(messages: Sequence[Message], stand_ins: Sequence[str], trace: Trace | None) -> list[Message]:
    """The messages with stand-ins for their texts, symbolic ones if there is a trace."""
    texts = iter(
        stand_ins if trace is None else [SymbolicText.of(text, [Slot(i)], trace) for i, text in enumerate(stand_ins)]
    )
    return [map_message_texts(m, lambda _: next(texts)) for m in messages]


def _stand_ins(messages: Sequence[Message]) -> list[str]:
    """A text for each text of the messages: a unique word for contents, something of equal length for names and ids."""
    _, texts, contents = shape_of(messages)
    return [f"Content{i}x6be2" if i in contents else chr(0xE000 + i % 0x1000) * len(t) for i, t in enumerate(texts)]
