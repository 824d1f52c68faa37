"""The incremental scanner that the action formats share: thinking, call blocks between two markers, and everything else.

A parser is fed text in pieces of any size and gives the same Action for the same whole text. It is total: nothing makes it raise.
Faults of markup are errors of kind 'structure', faults inside a call 'content', calls over the limit 'surplus'. Calls inside thinking
are not calls, also when the `<think>` itself was not part of the text (a lone `</think>` closes what came before it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from agentrl.render.formats.call_json import Read, as_tool_calls
from agentrl.types import Action, FinishReason, Message, ParseError, ToolCall

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class BlockFormat:
    """Calls between an opening and a closing marker; a subclass says how a block's body is read."""

    name: str
    open: str
    close: str | None = None
    """None: a block reaches to the end of the text"""
    stop: tuple[str, ...] = ()
    inline: bool = False
    needs_tools: bool = True
    wrappers: tuple[str, ...] = ()
    """markers around blocks that mean nothing by themselves"""
    own: tuple[str, ...] = ()
    """markers that stay tokens when a turn is rendered anew"""

    def read(self, body: str) -> list[Read]:
        """The calls in one block."""
        raise NotImplementedError

    def read_bare(self, visible: str) -> list[Read] | None:
        """Calls in a text without blocks; None: it is no call."""
        return None

    def call_id(self, index: int) -> str:
        """The id of a call that brought none."""
        return f"call_{index}"

    def parser(self, max_calls: int) -> BlockParser:
        """A parser to be fed."""
        return BlockParser(self, max_calls)

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """Read a whole text."""
        parser = self.parser(max_calls)
        parser.feed(text)
        return parser.finish(finish_reason)

    def message(self, action: Action) -> Message:
        """As the policy wrote it: calls are not serialised anew."""
        return {"role": "assistant", "content": action.text}

    def as_data(self, action: Action) -> Message:
        """For templates that tell calls and reasoning by their fields."""
        parser = self.parser(len(action.calls))
        parser.feed(action.text)
        parser.finish(FinishReason.LENGTH)
        message: Message = {"role": "assistant", "content": parser.visible.strip()}
        thought = action.text.partition(_THINK_OPEN)[2].partition(_THINK_CLOSE)[0].strip()
        if thought:
            message["reasoning_content"] = thought
        return {**message, "tool_calls": as_tool_calls(action)} if action.calls else message

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Observations of these formats open a new turn."""
        raise TypeError(f"the {self.name} format is not inline")


class BlockParser:
    """Reads one generation, piece by piece."""

    def __init__(self, fmt: BlockFormat, max_calls: int) -> None:
        self._format = fmt
        self._max_calls = max_calls
        self._text = ""
        self._at = 0
        """all before it has been read"""
        self._mode = "text"
        self._visible: list[str] = []
        self.calls: list[ToolCall] = []
        """so far; a later `</think>` may show that they were thought, not made"""
        self.errors: list[ParseError] = []
        self.visible = ""
        """all but thinking and calls; known once it is finished"""
        self._opening = _opening(fmt.open)
        self._longest = max(map(len, (_THINK_CLOSE, fmt.open, fmt.close or ""))) - 1
        self._seen = 0

    def feed(self, text: str) -> None:
        """The next piece."""
        self._text += text
        while self._step():
            pass
        self._seen = max(self._at, len(self._text) - self._longest)

    def finish(self, finish_reason: FinishReason) -> Action:
        """The action, now that nothing follows."""
        cut = finish_reason is FinishReason.LENGTH
        while self._mode == "block":
            self._mode = "text"
            self._close(self._text[self._at :], closed=self._format.close is None, cut=cut)
        if self._mode == "text":
            self._visible.append(self._text[self._at :])
        visible = "".join(self._visible)
        for marker in self._format.wrappers:
            visible = visible.replace(marker, "")
        self.visible = visible
        if not self.calls and not self.errors and not cut:
            self._add(self._format.read_bare(visible) or [])
        answer = None if self.calls or self.errors or cut else answer_in(visible)
        return Action(self._text, tuple(self.calls), tuple(self.errors), finish_reason, answer=answer)

    def _step(self) -> bool:
        """Read up to the next marker; False if it is not there yet."""
        start = max(self._at, self._seen)
        if self._mode == "think":
            at = self._text.find(_THINK_CLOSE, start)
            if at >= 0:
                self._go(at + len(_THINK_CLOSE), "text")
            return at >= 0
        if self._mode == "block":
            at = self._text.find(self._format.close, start) if self._format.close is not None else -1
            if at >= 0:
                body, end = self._text[self._at : at], at + len(self._format.close or "")
                self._go(end, "text")
                self._close(body, closed=True, cut=False)
            return at >= 0
        match = self._opening.search(self._text, start)
        if match is None:
            return False
        self._visible.append(self._text[self._at : match.start()])
        if match.group() == _THINK_CLOSE:
            self._forget()
        self._go(match.end(), {_THINK_OPEN: "think", _THINK_CLOSE: "text"}.get(match.group(), "block"))
        return True

    def _go(self, at: int, mode: str) -> None:
        self._at, self._seen, self._mode = at, 0, mode

    def _close(self, body: str, *, closed: bool, cut: bool) -> None:
        """A block has ended, at its closing marker or (not `closed`) at the end of the text."""
        read = self._format.read(body) if closed else []
        if cut and closed:  # the end of the text was not the policy's doing: only what is whole counts
            read = [r for r in read if not isinstance(r, ParseError)]
        broken = not closed or any(isinstance(r, ParseError) for r in read)
        if broken and self._format.open in body:
            first, _, rest = body.partition(self._format.open)
            self._unclosed(first)
            self._close(rest, closed=closed, cut=cut)
        elif broken and _THINK_CLOSE in body:
            self._unclosed(body)
        elif closed:
            self._add(read)
        elif not cut:
            self.errors.append(ParseError("structure", f"{self._format.open} is not closed", body))
        if not closed:
            self._at = len(self._text)

    def _unclosed(self, body: str) -> None:
        """A block that another one, or the end of thinking, cut off."""
        if _THINK_CLOSE in body:
            self._forget()
            self._visible.append(body.rpartition(_THINK_CLOSE)[2])
        else:
            self.errors.append(ParseError("structure", f"{self._format.open} is not closed", body))

    def _forget(self) -> None:
        self._visible.clear()
        self.calls.clear()
        self.errors.clear()

    def _add(self, read: Sequence[Read]) -> None:
        for item in read:
            if isinstance(item, ParseError):
                self.errors.append(item)
            elif len(self.calls) >= self._max_calls:
                self.errors.append(
                    ParseError(
                        "surplus",
                        f"at most {self._max_calls} calls in one turn; this one was not made: {item[0][:80]}",
                        item[0],
                    )
                )
            else:
                self.calls.append(ToolCall(item[0], item[1], item[2] or self._format.call_id(len(self.calls))))


@cache
def _opening(mark: str) -> re.Pattern[str]:
    """Finds where something other than text begins."""
    return re.compile("|".join(map(re.escape, (_THINK_OPEN, _THINK_CLOSE, mark))))


class TextParser:
    """For formats that are read as a whole: collects, and reads at the end."""

    def __init__(self, parse: Callable[[str, FinishReason, int], Action], max_calls: int) -> None:
        self._parse = parse
        self._max_calls = max_calls
        self._pieces: list[str] = []

    def feed(self, text: str) -> None:
        """The next piece."""
        self._pieces.append(text)

    def finish(self, finish_reason: FinishReason) -> Action:
        """The action, now that nothing follows."""
        return self._parse("".join(self._pieces), finish_reason, self._max_calls)


def answer_in(visible: str) -> str:
    """The text of an answer tag, else all that was said."""
    found = _ANSWER.findall(visible)
    return str(found[-1] if found else visible).strip()


def spoken(text: str, markers: Callable[[str], str] = str) -> str:
    """The text less its thinking."""
    return markers(re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).rpartition(_THINK_CLOSE)[2])
