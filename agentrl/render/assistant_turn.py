"""The assistant's turn of a data set as ids: what a policy would have had to sample after the header that it would have seen.

The ids follow from two renderings of the model's template: the conversation so far with the header of the next turn, and the same
conversation with the turn. What the second adds to the first, up to the token that ends the turn, is the turn. Where the header opens a
thought (`<think>`) that the template leaves out of history, the turn begins with the rest of the thought and its closing tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import Family
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.injection_guard import InjectionGuard
from agentrl.render.message_shape import map_texts
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message

REASONING_KEYS = ("reasoning_content", "thinking")
_OPEN, _CLOSE = "<think>", "</think>"
_HEADER_CHARACTERS = 16
"""characters at the end of a context that show that two generations have the same header"""
_REASONING = "its reasoning"
_ARGUMENTS = "arguments"
_PROBE = "Reasoning6b1d"
_EMPTY_THOUGHT = re.compile(r"(\s*<think>)\s*</think>")
_TAGS = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """An assistant's turn as ids."""

    ids: tuple[int, ...]
    """with the token that ends the turn"""
    reasoning_left_out: bool = False
    """the message has reasoning, but the header has already closed the thought (enable_thinking=False)"""


class TurnWriter:
    """Writes assistant's turns for one model."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        guard: InjectionGuard,
        family: Family,
        ends: Mapping[str, int],
        where: str,
    ) -> None:
        """`ends`: the tokens that end an assistant's turn, the usual one first."""
        self._template = template
        self._tokenizer = tokenizer
        self._guard = guard
        self._family = family
        self._ends = ends
        self._where = where

    def write(self, history: Sequence[Message], turn: Message, tools: Sequence[Mapping[str, Any]]) -> WrittenTurn:
        """The turn after `history`.

        Raises:
            TemplateError: the template refuses the turn, leaves a part of it out, or writes another header than it would have shown.
        """
        escaped, message, schemas, base = self._guard.demonstration(history, turn, tools, self._ends)
        header = self._template.render(escaped, tools=schemas, generate=True)
        if self._reads_reasoning:
            message = _reasoning_as_field(message)
        text, end = self._without_end(self._after(header, escaped, message, schemas), message)
        missing = list(dict.fromkeys(_left_out(message, text)))
        if any(m.startswith(_ARGUMENTS) for m in missing) and self._shows_arguments(escaped, message, schemas):
            missing = [m for m in missing if not m.startswith(_ARGUMENTS)]
        if missing == [_REASONING] and (
            empty := _EMPTY_THOUGHT.match(text)
        ):  # the template drops that of a last answer too
            text, missing = f"{empty[1]}{reasoning_of(message)}{_CLOSE}{text[empty.end() :]}", []
        closed = header.rstrip().endswith(_CLOSE)
        if missing and not (closed and missing == [_REASONING] and text.strip()):
            raise TemplateError(
                f"{self._where}: its chat template leaves {' and '.join(missing)} out of an assistant's turn; remove it from the "
                "data, or write it into the content as the model would"
            )
        return WrittenTurn(tuple(self._tokenizer.encode_escaped(text + end, base)), bool(missing))

    def _shows_arguments(self, history: Sequence[Message], turn: Message, tools: Sequence[Any]) -> bool:
        """Whether the template writes every text in the arguments, escaped in any way: each gets a mark."""
        marks: list[str] = []

        def mark(text: str) -> str:
            marks.append(f"Leaf{len(marks)}a5c")
            return f"{text} {marks[-1]}"

        calls = [
            {**c, "function": {**c["function"], "arguments": map_texts(c["function"]["arguments"], mark)}}
            for c in turn["tool_calls"]
        ]
        text = self._template.render([*history, {**turn, "tool_calls": calls}], tools=tools, generate=False)
        return all(m in text for m in marks)

    @cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the template reads reasoning from a field: of the turn, or of one that calls a tool."""
        user: Message = {"role": "user", "content": "a"}
        call = {"type": "function", "id": "abcdefgh0", "function": {"name": "f", "arguments": {"x": "x"}}}
        fields: Message = {"role": "assistant", **dict.fromkeys(REASONING_KEYS, _PROBE)}
        for turn in ({**fields, "content": "b"}, {**fields, "content": "", "tool_calls": [call]}):
            try:
                if _PROBE in self._template.render([user, turn], generate=False):
                    return True
            except TemplateError:
                continue
        return False

    def write_inline(self, turn: Message) -> tuple[int, ...]:
        """The content alone, for action formats in which observations continue the turn.

        Raises:
            TemplateError: the message has calls or reasoning beside its content.
        """
        if extra := [k for k in ("tool_calls", *REASONING_KEYS) if turn.get(k)]:
            raise TemplateError(
                f"the action format writes calls and thoughts into the content of a turn; found {' and '.join(extra)} beside it: write "
                "it into the content, or give another --action-format"
            )
        _, message, _, base = self._guard.demonstration((), turn, (), self._ends)
        return tuple(self._tokenizer.encode_escaped(message["content"], base))

    def _after(self, header: str, history: Sequence[Message], turn: Message, tools: Sequence[Any]) -> str:
        """What the policy writes after the header."""
        if header.rstrip().endswith(_CLOSE):
            turn = without_reasoning(turn)
        whole = self._template.render([*history, turn], tools=tools, generate=False)
        if whole.startswith(header):
            return whole[len(header) :]
        at = header.rfind(_OPEN)
        opened = header[at:] if at >= 0 else ""
        if opened and not opened.removeprefix(_OPEN).strip() and whole.startswith(header[:at]):
            return _continue_thought(opened, reasoning_of(turn), whole[at:])
        shown = [*history, {"role": "assistant", "content": _PROBE}]
        begun = self._template.render(shown, tools=tools, generate=False).partition(_PROBE)[0]
        extra = header.removeprefix(begun)  # text that the template writes for a generation only
        if header.startswith(begun) and not self._tokenizer.has_token(extra) and whole.startswith(begun):
            return whole[len(begun) :]
        earlier = [without_reasoning(m) if m["role"] == "assistant" else m for m in history]
        if earlier != list(history):  # the turn may remove earlier reasoning: look at it after a history without
            shorter = self._template.render(earlier, tools=tools, generate=True)
            if header[-_HEADER_CHARACTERS:] == shorter[-_HEADER_CHARACTERS:]:
                return self._after(shorter, earlier, turn, tools)
        raise TemplateError(
            f"{self._where}: its chat template writes an assistant's turn that does not begin with the header that the policy would "
            f"have seen ({header[-40:]!r})"
        )

    def _without_end(self, text: str, turn: Message) -> tuple[str, str]:
        """The turn without its end token and what follows that, and the end token."""
        at, end = max(((text.rfind(e), e) for e in self._ends if e in text), default=(-1, ""))
        if at >= 0 and not self._tokenizer.pattern.sub("", text[at + len(end) :]).strip():
            return text[:at], end
        if self._family.headers:  # the next header ends the turn: that of a tool's result, or of the user
            known = [e for e in self._family.headers if e in self._ends]
            return text, known[-1 if turn.get("tool_calls") else 0]
        return text, next(iter(self._ends))


def with_call_ids(messages: Sequence[Message], form: str) -> list[Message]:
    """The messages with calls and results renamed by `form`, counted from 0 over the conversation."""
    names: dict[str, str] = {}
    count = 0
    renamed: list[Message] = []
    for m in messages:
        if m.get("tool_calls"):
            calls = []
            for call in m["tool_calls"]:
                new = form.format(name=call["function"]["name"], index=count)
                names[call["id"]] = new
                calls.append({**call, "id": new})
                count += 1
            m = {**m, "tool_calls": calls}
        elif m.get("tool_call_id") in names:
            m = {**m, "tool_call_id": names[m["tool_call_id"]]}
        renamed.append(m)
    return renamed


def reasoning_of(message: Message) -> str:
    """The reasoning of a message, from its field or from the content before `</think>`."""
    for key in REASONING_KEYS:
        if message.get(key):
            return str(message[key])
    before, tag, _ = str(message.get("content") or "").rpartition(_CLOSE)
    return before.removeprefix(_OPEN).strip("\n") if tag else ""


def _reasoning_as_field(message: Message) -> Message:
    """The message with a thought at the beginning of its content in the fields that templates read."""
    content = str(message.get("content") or "")
    if not content.lstrip().startswith(_OPEN) or _CLOSE not in content:
        return message
    reasoning = reasoning_of({"content": content.lstrip()})
    return {**without_reasoning(message), **dict.fromkeys(REASONING_KEYS, reasoning)}


def without_reasoning(message: Message) -> Message:
    """The message without its reasoning."""
    rest = {k: v for k, v in message.items() if k not in REASONING_KEYS}
    _, tag, answer = str(rest.get("content") or "").rpartition(_CLOSE)
    return {**rest, "content": answer.lstrip("\n")} if tag else rest


def _continue_thought(opened: str, reasoning: str, rest: str) -> str:
    """The turn after a header that ends with `opened`, where the template writes `rest` instead."""
    if rest.startswith(_OPEN):
        return rest.removeprefix(_OPEN).removeprefix(opened.removeprefix(_OPEN))
    if rest.startswith(_CLOSE):
        return reasoning + rest
    if not opened.endswith("\n"):
        return reasoning + _CLOSE + rest
    return f"{reasoning}\n{_CLOSE}{rest if rest.startswith(chr(10)) else chr(10) * 2 + rest}"


def _left_out(message: Message, text: str) -> Iterator[str]:
    """The parts of a message that the text does not contain."""
    content = str(message.get("content") or "")
    reasoning = reasoning_of(message).strip()
    if reasoning and any(piece.strip() not in text for piece in _TAGS.split(reasoning)):
        yield _REASONING
    if any(piece.strip() not in text for piece in _TAGS.split(content.rpartition(_CLOSE)[2])):
        yield "its content"
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if function["name"] not in text:
            yield f"its call of {function['name']!r}"
        elif not all(_shown(leaf, text) for leaf in _leaves(function["arguments"])):
            yield f"{_ARGUMENTS} of its call of {function['name']!r}"


def _leaves(value: Any) -> Iterator[str]:
    """The texts and keys of a call's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _shown(leaf: str, text: str) -> bool:
    forms = (leaf.strip(), json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1], repr(leaf)[1:-1])
    return any(form in text for form in forms)
