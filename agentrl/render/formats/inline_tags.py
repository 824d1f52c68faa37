"""The tag format of Search-R1 (Jin et al. 2025, arXiv:2503.09516, §3.1): `<search>query</search>`, `<answer>…</answer>`, results inline.

A generation stops at a closing tag; results are inserted as `<information>…</information>` in the same assistant turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.render.formats.block_format import THINKING, surplus_error
from agentrl.render.formats.json_calls import SURROGATE
from agentrl.types import Action, FinishReason, Message, ParseError, ToolCall


@dataclass(frozen=True)
class TagFormat:
    """Calls and answers in XML-like tags. `calls` maps a tag to (tool name, argument name).

    `Env.action_format` may be such a format, and `register_format` gives it a name for `--action-format`.

    Example:
        >>> retool = TagFormat("retool", calls={"code": ("python", "code")}, result_tag="interpreter")
        >>> retool.parse("<code>print(1)</code>", FinishReason.STOP, max_calls=1).calls
        (ToolCall(name='python', arguments={'code': 'print(1)'}, id='call_0'),)
    """

    name: str = "search_r1"
    calls: Mapping[str, tuple[str, str]] = field(default_factory=lambda: {"search": ("search", "query")})
    answer_tag: str = "answer"
    result_tag: str = "information"
    """the tag around tool results and observations"""
    inline: bool = True
    needs_tools: bool = False
    text_values: bool = False
    markers: tuple[str, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags."""
        return tuple(f"</{tag}>" for tag in self._tags)

    @property
    def _tags(self) -> tuple[str, ...]:
        return (*self.calls, self.answer_tag)

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """See `ActionFormat.parse`. Tags outside thinking are read in order, up to an answer."""
        calls: list[ToolCall] = []
        errors: list[ParseError] = []
        tags = "|".join(map(re.escape, self._tags))
        for match in re.finditer(rf"<({tags})>(.*?)</\1>", THINKING.sub("", text), re.DOTALL):
            block, tag, body = match.group(), match.group(1), match.group(2).strip()
            if tag == self.answer_tag:
                return Action(text, tuple(calls), tuple(errors), finish_reason, answer=body)
            tool, argument = self.calls[tag]
            if not body:
                errors.append(ParseError("content", f"<{tag}> is empty", block))
            elif SURROGATE.search(body):
                flaw = f"<{tag}> holds half of a surrogate pair, which is no character"
                errors.append(ParseError("content", flaw, block))
            elif len(calls) >= max_calls:
                errors.append(surplus_error(max_calls, body, block))
            else:
                calls.append(ToolCall(tool, {argument: body}, f"call_{len(calls)}"))
        if not calls and not errors and finish_reason is not FinishReason.LENGTH:
            expected = ", ".join(f"<{tag}>…</{tag}>" for tag in self._tags)
            errors.append(ParseError("structure", f"expected one of {expected}", text))
        return Action(text, tuple(calls), tuple(errors), finish_reason)

    def message(self, action: Action) -> Message:
        """See `ActionFormat.message`."""
        return {"role": "assistant", "content": action.text}

    structured_message = message

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """All messages in one block of the result tag."""
        body = "\n".join(map(_text_of, messages))
        return [(f"\n<{self.result_tag}>", False), (body, True), (f"</{self.result_tag}>\n", False)]


def _text_of(message: Message) -> str:
    """The text of a message's content, without images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(p.get("text", "")) for p in content)
