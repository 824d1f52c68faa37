"""The tag format of Search-R1 (Jin et al. 2025, arXiv:2503.09516, §3.1): `<search>query</search>`, `<answer>…</answer>`, results inline.

A generation stops at a closing tag; results are inserted as `<information>…</information>` in the same assistant turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.render.formats.call_json import SURROGATE
from agentrl.render.formats.scan import TextParser
from agentrl.types import Action, FinishReason, Message, ParseError, ToolCall

_THINK = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class TagFormat:
    """Calls and answers written as XML-like tags. `calls` maps a tag to (tool name, argument name)."""

    name: str = "search_r1"
    calls: Mapping[str, tuple[str, str]] = field(default_factory=lambda: {"search": ("search", "query")})
    answer_tag: str = "answer"
    inline: bool = True
    needs_tools: bool = False
    own: tuple[str, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags."""
        return tuple(f"</{t}>" for t in (*self.calls, self.answer_tag))

    def parser(self, max_calls: int) -> TextParser:
        """A parser to be fed."""
        return TextParser(self.parse, max_calls)

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """Tags outside thinking, in order; an answer ends the reading."""
        visible = _THINK.sub("", text)
        tags = "|".join(map(re.escape, (*self.calls, self.answer_tag)))
        found: list[ToolCall] = []
        errors: list[ParseError] = []
        for match in re.finditer(rf"<({tags})>(.*?)</\1>", visible, re.DOTALL):
            tag, body = match.group(1), match.group(2).strip()
            if tag == self.answer_tag:
                return Action(text, tuple(found), tuple(errors), finish_reason, answer=body)
            tool, argument = self.calls[tag]
            if len(found) >= max_calls:
                errors.append(
                    ParseError(
                        "surplus",
                        f"at most {max_calls} calls in one turn; this one was not made: {body[:80]}",
                        match.group(),
                    )
                )
            elif not body:
                errors.append(ParseError("content", f"<{tag}> is empty", match.group()))
            elif SURROGATE.search(body):
                errors.append(
                    ParseError(
                        "content", f"<{tag}> holds half of a surrogate pair, which is no character", match.group()
                    )
                )
            else:
                found.append(ToolCall(tool, {argument: body}, f"call_{len(found)}"))
        if not found and not errors and finish_reason is not FinishReason.LENGTH:
            errors.append(
                ParseError(
                    "structure",
                    f"expected one of {', '.join(f'<{t}>…</{t}>' for t in (*self.calls, self.answer_tag))}",
                    text,
                )
            )
        return Action(text, tuple(found), tuple(errors), finish_reason)

    def message(self, action: Action) -> Message:
        """As the policy wrote it."""
        return {"role": "assistant", "content": action.text}

    def as_data(self, action: Action) -> Message:
        """Tags are text to every template."""
        return self.message(action)

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Everything the environment says goes into one `<information>` block."""
        body = "\n".join(text_of(m) for m in messages)
        return [("\n<information>", False), (body, True), ("</information>\n", False)]


def text_of(message: Message) -> str:
    """The text of a message's content, images left out."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(p.get("text", "")) for p in content)
