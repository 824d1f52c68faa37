"""gpt-oss (Harmony): messages with channels; `<|return|>` ends a final message, `<|call|>` a call, `<|end|>` any message in history.

Sources: OpenAI's description of the Harmony response format, and gpt-oss's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat, answer_in
from agentrl.render.formats.json_calls import ParsedCall, as_tool_calls, json_end, read_arguments
from agentrl.types import Action, FinishReason, Message, ParseError

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_START = "<|start|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")


@dataclass(frozen=True)
class _HarmonyMessage:
    header: str
    body: str | None
    """None: the header is not followed by `<|message|>`"""

    @property
    def channel(self) -> str:
        match = _CHANNEL.search(self.header)
        return match.group(1) if match else ""

    @property
    def recipient(self) -> str | None:
        """The function that it calls, or None if it is not a call."""
        match = _RECIPIENT.search(self.header)
        return match.group(1) if match else None


@dataclass(frozen=True)
class HarmonyFormat(BlockFormat):
    """A turn is a sequence of messages `<|channel|>NAME<|message|>BODY<|end|><|start|>assistant…`; one with a recipient is a call."""

    name: str = "gpt_oss"
    opening: str = _START

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """See `ActionFormat.parse`. Calls are taken from every channel but `analysis`, the answer from `final`."""
        answer = None
        calls: list[ParsedCall] = []
        messages = list(_split_messages(text))
        for message in messages:
            unfinished = finish_reason is FinishReason.LENGTH and message is messages[-1]
            if message.body is None:
                if not unfinished:
                    error = "expected <|message|> after the header of a message"
                    calls.append(ParseError("structure", error, message.header))
            elif message.channel == "analysis":
                continue
            elif message.recipient is not None:
                if not unfinished:
                    calls.append(read_arguments(message.recipient, message.body, message.body))
            elif message.channel == "final":
                answer = answer_in(message.body)
        return self.action(text, finish_reason, calls, max_calls, answer)

    def structured_message(self, action: Action) -> Message:
        """Reasoning, text and calls in separate fields; the template writes the channels itself."""
        said = [m for m in _split_messages(action.text) if m.channel and m.recipient is None]
        texts = [m.body or "" for m in said if m.channel != "analysis"]
        thoughts = [m.body or "" for m in said if m.channel == "analysis"]
        message: Message = {"role": "assistant", "content": "" if action.calls else "\n".join(texts)}
        if thoughts:
            message["thinking"] = "\n".join(thoughts)
        return {**message, "tool_calls": as_tool_calls(action.calls)} if action.calls else message


def _split_messages(text: str) -> Iterator[_HarmonyMessage]:
    """The messages of a turn; the first header begins after `<|start|>assistant`."""
    at = 0
    while at >= 0:
        start = text.find(_START, at)
        header, separator, _ = (text[at:] if start < 0 else text[at:start]).partition("<|message|>")
        if not separator:
            if header.strip():
                yield _HarmonyMessage(header, None)
        else:
            begin = at + len(header) + len(separator)
            end = begin
            if _RECIPIENT.search(header):  # its body is JSON, in whose strings markers are text
                end = json_end(text, begin) or begin
            start = text.find(_START, end)
            rest = text[end:] if start < 0 else text[end:start]
            yield _HarmonyMessage(header, text[begin:end] + _END.split(rest)[0])
        at = start + len(_START) if start >= 0 else -1


FAMILY = Family(
    name="gpt_oss",
    marks=("<|channel|>",),
    format="gpt_oss",
    ends=("<|return|>", "<|call|>"),
    other_stops=("<|endoftext|>",),
    writes_markup=True,
    structured=True,
)
