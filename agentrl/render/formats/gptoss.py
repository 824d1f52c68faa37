"""gpt-oss (Harmony): messages with channels; `<|return|>` ends a final message, `<|call|>` a call, `<|end|>` any message in history.

Source: OpenAI's description of the Harmony response format, and gpt-oss's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, as_tool_calls, read_arguments, read_json
from agentrl.render.formats.scan import BlockFormat, BlockParser, answer_in
from agentrl.types import Action, FinishReason, Message, ParseError

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")


@dataclass(frozen=True)
class HarmonyFormat(BlockFormat):
    """A turn is a row of messages `<|channel|>NAME<|message|>BODY<|end|><|start|>assistant…`; one with a recipient is a call."""

    name: str = "gpt_oss"
    open: str = "<|start|>"

    def parser(self, max_calls: int) -> HarmonyParser:
        """A parser to be fed."""
        return HarmonyParser(self, max_calls)

    def as_data(self, action: Action) -> Message:
        """The reasoning, what was said, and the calls as data: the template writes the channels itself."""
        said: list[str] = []
        thought: list[str] = []
        for header, body, _ in messages_in(action.text):
            channel = _CHANNEL.search(header)
            if channel is not None and not _TO.search(header):
                (thought if channel.group(1) == "analysis" else said).append(body)
        message: Message = {"role": "assistant", "content": "" if action.calls else "\n".join(said)}
        if thought:
            message["thinking"] = "\n".join(thought)
        return {**message, "tool_calls": as_tool_calls(action)} if action.calls else message


class HarmonyParser(BlockParser):
    """Collects the turn; its messages are read at the end of each."""

    def feed(self, text: str) -> None:
        """The next piece."""
        self._text += text

    def finish(self, finish_reason: FinishReason) -> Action:
        """The action: calls in the commentary channel, the answer in the final one."""
        cut = finish_reason is FinishReason.LENGTH
        answer = None
        listed = messages_in(self._text)
        for i, (header, body, whole) in enumerate(listed):
            last_and_cut = cut and i == len(listed) - 1
            channel = _CHANNEL.search(header)
            to = _TO.search(header)
            if not whole:
                if not last_and_cut:
                    self.errors.append(
                        ParseError("structure", "expected <|message|> after the header of a message", header)
                    )
            elif channel is not None and channel.group(1) == "analysis":
                continue
            elif to is not None:
                if not last_and_cut:
                    self._add([_call(to.group(1), body)])
            elif channel is not None and channel.group(1) == "final":
                answer = answer_in(body)
        if self.calls or self.errors or cut:
            answer = None
        return Action(self._text, tuple(self.calls), tuple(self.errors), finish_reason, answer=answer)


def messages_in(text: str) -> Sequence[tuple[str, str, bool]]:
    """(header, body, did it have a body?) of each message in a turn; the first header begins after `<|start|>assistant`."""
    found = []
    for part in text.split("<|start|>"):
        header, sep, body = part.partition("<|message|>")
        if header.strip() or sep:
            found.append((header, _END.split(body)[0], bool(sep)))
    return found


def _call(name: str, body: str) -> Read:
    value = read_json(body)
    return value if isinstance(value, ParseError) else read_arguments(name, value, body)


FAMILY = Family(
    "gpt_oss",
    ("<|channel|>",),
    "gpt_oss",
    ends=("<|return|>", "<|call|>"),
    other_stops=("<|endoftext|>",),
    templated=True,
    fields=True,
)
