"""What most action formats share: a generation is thinking, call blocks between two markers, and visible text.

Markers inside the strings and values of a well-formed call are text: they neither end the call nor begin another, nor are they thinking.

Parsing is total: any text gives an Action. Errors in the markup have kind 'structure', errors inside a call 'content', calls over the limit
'surplus'. Calls inside thinking are not calls, also when the `<think>` itself is not part of the text (a lone `</think>` closes all that
precedes it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from agentrl.render.accelerators.memo import Memo
from agentrl.render.formats.json_calls import ParsedCall, as_tool_calls
from agentrl.types import Action, FinishReason, Message, ParseError, ToolCall

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_MAX_MARKS = 256
"""marks of the format inside one value; the limit keeps the reading of any text linear"""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_SCANNED: Memo[str, tuple[object, str, str]] = Memo(1 << 18)
"""format, visible text and thinking of the generations that were parsed last: they become messages next"""


@dataclass(frozen=True)
class BlockFormat:
    """An action format with calls between an opening and a closing marker. Subclasses define how a block is read."""

    name: str
    opening: str
    closing: str | None = None
    """None: a block extends to the end of the text"""
    stop: tuple[str, ...] = ()
    inline: bool = False
    needs_tools: bool = True
    text_values: bool = False
    value_closing: str = ""
    """the mark after a value that is text; where one follows a block, the call in that block was cut off inside a value"""
    wrappers: tuple[str, ...] = ()
    """markers around blocks, without a meaning of their own"""
    markers: tuple[str, ...] = ()

    def read_block(self, body: str) -> list[ParsedCall]:
        """The calls in one block."""
        raise NotImplementedError

    def body_end(self, text: str, at: int) -> int:
        """Return where a block's content ends if it begins at `at` and is well-formed, else `at`: the closing marker is looked for from there on."""
        return at

    def read_unmarked(self, visible: str) -> list[ParsedCall]:
        """The calls in a text that has no blocks."""
        return []

    def default_call_id(self, index: int) -> str:
        """The id of a call for which the policy wrote none."""
        return f"call_{index}"

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """See `ActionFormat.parse`."""
        cut = finish_reason is FinishReason.LENGTH
        bare = [] if cut else self._bare_calls(text)
        if bare:
            return self.action(text, finish_reason, bare, max_calls, None)
        scan = BlockScan(self, text, cut)
        calls = scan.calls
        if cut or self.closing is not None:  # `cut` makes no difference to them where blocks are closed
            _SCANNED.put(text, (self, scan.visible, scan.thought), len(text) + 1)
        if not calls and not cut:
            calls = self.read_unmarked(scan.visible)
        return self.action(text, finish_reason, calls, max_calls, answer_in(scan.visible))

    def _bare_calls(self, text: str) -> list[ParsedCall]:
        """The calls of a text that consists of them, apart from a thought before them; [] if anything is wrong with it."""
        for call_text in (text, text.partition(THINK_CLOSE)[2]):
            calls = self.read_unmarked(call_text) if call_text else []
            if calls and not any(isinstance(c, ParseError) for c in calls):
                return calls
        return []

    def action(
        self, text: str, finish_reason: FinishReason, calls: Iterable[ParsedCall], max_calls: int, answer: str | None
    ) -> Action:
        """An Action with at most `max_calls` calls. The answer is dropped when there are calls or errors, or the text was cut."""
        made: list[ToolCall] = []
        errors: list[ParseError] = []
        for call in calls:
            if isinstance(call, ParseError):
                errors.append(call)
            elif len(made) >= max_calls:
                errors.append(surplus_error(max_calls, call[0], call[0]))
            else:
                name, arguments, call_id = call
                made.append(ToolCall(name, arguments, call_id or self.default_call_id(len(made))))
        if made or errors or finish_reason is FinishReason.LENGTH:
            answer = None
        return Action(text, tuple(made), tuple(errors), finish_reason, answer=answer)

    def message(self, action: Action) -> Message:
        """The text as the policy wrote it: calls are not serialised again."""
        return {"role": "assistant", "content": action.text}

    def structured_message(self, action: Action) -> Message:
        """See `ActionFormat.structured_message`."""
        scanned = _SCANNED.get(action.text)
        if scanned is None or scanned[0] is not self:
            scan = BlockScan(self, action.text, cut=True)
            scanned = self, scan.visible, scan.thought
        _, visible, thought = scanned
        message: Message = {"role": "assistant", "content": visible.strip()}
        if thought:
            message["reasoning_content"] = thought
        return {**message, "tool_calls": as_tool_calls(action.calls)} if action.calls else message

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Not supported: observations open a new turn."""
        raise TypeError(f"the {self.name} format is not inline")


class BlockScan:
    """One generation, scanned.

    `calls` are all parsed calls and errors in order, `visible` is everything except thinking and calls, `thought` the first thinking.
    """

    def __init__(self, fmt: BlockFormat, text: str, cut: bool) -> None:
        """`cut`: the text ended because of its length, so an unfinished block is not an error."""
        self.calls: list[ParsedCall] = []
        self._format = fmt
        self._cut = cut
        self._visible: list[str] = []
        self._thoughts: list[str] = []
        self._scan(text)
        self.visible = "".join(self._visible)
        self.thought = self._thoughts[0].strip() if self._thoughts else ""
        for marker in fmt.wrappers:
            self.visible = self.visible.replace(marker, "")

    def _scan(self, text: str) -> None:
        opening, closing = self._format.opening, self._format.closing
        begin, at = _marker_pattern(opening), 0
        while match := begin.search(text, at):
            self._visible.append(text[at : match.start()])
            at = match.end()
            if match.group() == THINK_CLOSE:
                self._discard()
            elif match.group() == THINK_OPEN:
                end = text.find(THINK_CLOSE, at)
                self._thoughts.append(text[at:] if end < 0 else text[at:end])
                if end < 0:
                    return
                at = end + len(THINK_CLOSE)
            elif closing is None:
                self._end_block(text[at:], closed=True, at_end=True)
                return
            else:
                end = text.find(closing, self._format.body_end(text, at))
                if end < 0:
                    self._end_block(text[at:], closed=False, at_end=True)
                    return
                calls_before = len(self.calls)
                self._end_block(text[at:end], closed=True, at_end=False)
                at = end + len(closing)
                self._check_rest(text[at:], calls_before)
        self._visible.append(text[at:])

    def _end_block(self, body: str, *, closed: bool, at_end: bool) -> None:
        """Read a block that ended at its closing marker or (`at_end`) with the text."""
        cut = self._cut and at_end
        opening = self._format.opening
        while True:
            calls = self._format.read_block(body) if closed else []
            if cut:  # the policy did not end the text: only whole calls are taken, and nothing is an error
                calls = [c for c in calls if not isinstance(c, ParseError)]
            broken = not closed or any(isinstance(c, ParseError) for c in calls)
            if not broken or opening not in body:
                break
            unfinished, _, body = body.partition(opening)  # another block began before this one was closed
            self._drop_unfinished(unfinished)
        if broken and THINK_CLOSE in body:
            self._drop_unfinished(body)
        elif closed:
            self.calls += calls
        elif not cut:
            self.calls.append(self._not_closed(body))

    def _check_rest(self, rest: str, calls_before: int) -> None:
        """Refuse the calls of a block if what follows shows that one of their values went on."""
        closing = self._format.value_closing
        if closing and closing in rest.partition(self._format.opening)[0] and self.calls[calls_before:]:
            message = f"{closing} after the end of the call: a value holds marks of the call format"
            self.calls[calls_before:] = [ParseError("structure", message, rest)]

    def _drop_unfinished(self, body: str) -> None:
        """Drop a block that another block or the end of thinking interrupted."""
        if THINK_CLOSE in body:
            self._discard()
            self._visible.append(body.rpartition(THINK_CLOSE)[2])
        else:
            self.calls.append(self._not_closed(body))

    def _not_closed(self, body: str) -> ParseError:
        return ParseError("structure", f"{self._format.opening} is not closed", body)

    def _discard(self) -> None:
        """All so far was thinking."""
        self._visible.clear()
        self.calls.clear()


@cache
def _marker_pattern(opening: str) -> re.Pattern[str]:
    """Finds where something other than visible text begins."""
    return re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, opening))))


def value_end(text: str, at: int, mark: re.Pattern[str], continuation: re.Pattern[str]) -> int:
    """Where the closing mark of a value that begins at `at` is. -1: nowhere.

    Args:
        text: The generation.
        at: Where the value begins.
        mark: Finds the marks round values; group 1 matches those that open. Marks in pairs inside the value belong to it.
        continuation: Matches what follows the closing mark of a value.
    """
    depth = 0
    for m in islice(mark.finditer(text, at), _MAX_MARKS):
        if m.group(1):
            depth += 1
        elif depth:
            depth -= 1
        elif continuation.match(text, m.end()):
            return m.start()
    return -1


def surplus_error(max_calls: int, label: str, text: str) -> ParseError:
    """The error for a call over the limit."""
    return ParseError("surplus", f"at most {max_calls} calls in one turn; this one was not made: {label[:80]}", text)


def answer_in(visible: str) -> str:
    """The text of the last answer tag, or the whole text if there is none."""
    answers = _ANSWER.findall(visible)
    return str(answers[-1] if answers else visible).strip()


def without_thinking(text: str) -> str:
    """The text without its thinking."""
    return THINKING.sub("", text).rpartition(THINK_CLOSE)[2]
