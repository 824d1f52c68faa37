"""Conversations of a data set as trajectories: the assistant's turns are DEMONSTRATION tokens, the others PROMPT, TEMPLATE and OBSERVATION."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.data.row_files import Row, parse_json, read_rows
from agentrl.errors import DataError, UsageError
from agentrl.render import Renderer
from agentrl.render.base import Pieces
from agentrl.rollout.recorder import Recorder
from agentrl.types import Action, Message, Provenance, StopReason, Task, Trajectory, Turn

_NAMED = 5
"""lines that are named of each kind in a count"""


@dataclass
class Census:
    """What became of the conversations of a data set."""

    read: int = 0
    cut: list[str] = field(default_factory=list)
    """the rows cut after the last turn that fits"""
    left_out: list[str] = field(default_factory=list)
    """the rows of which not even the first assistant's turn fits"""
    without_reasoning: list[str] = field(default_factory=list)
    """the rows whose reasoning is not trained, as the model's header closes the thought"""

    def lines(self, source: str, max_tokens: int) -> list[str]:
        """The counts in words: one line for the source, and one for whatever was not taken as it is."""
        counts = [
            (self.cut, f"cut after the last turn that fits into {max_tokens} tokens"),
            (self.left_out, f"left out: not even the first assistant's turn fits into {max_tokens} tokens"),
            (
                self.without_reasoning,
                "trained without their reasoning, as the template closes the thought before the turn",
            ),
        ]
        used = self.read - len(self.left_out)
        return [
            f"{source}: {self.read} conversations read, {used} used",
            *(f"{source}: {len(rows)} {what} ({_named(rows)})" for rows, what in counts if rows),
        ]


def _named(rows: Sequence[str]) -> str:
    return "; ".join(rows[:_NAMED]) + ("; …" if len(rows) > _NAMED else "")


def read_conversations(
    source: Path | str, renderer: Renderer, max_tokens: int, census: Census | None = None
) -> Iterator[Trajectory]:
    """Yield the conversations of a data set (see `read_rows`).

    A row is {"messages": […], "tools": […]} (tools are optional and may be JSON text), {"conversations": [{"from", "value"}, …]},
    {"prompt": …, "completion": …} or {"instruction": …, "input": …, "output": …}. A conversation longer than `max_tokens` is truncated after
    the last turn that fits; `census` counts what is cut and left out.

    Raises:
        DataError: the file is missing, a row is malformed, or the model's template cannot express it.
    """
    census = census if census is not None else Census()
    for number, row in enumerate(read_rows(str(source))):
        index = int(row.index) if row.index.isdecimal() else number
        try:
            messages = renderer.with_call_ids(conversation_of(row))
            tools = normal_tools(row.values.get("tools"), arrow=row.arrow)
            trajectory = to_trajectory(
                index,
                messages,
                tools,
                renderer,
                max_tokens,
                on_reasoning_left_out=lambda where=row.where: census.without_reasoning.append(where),  # type: ignore[misc]
            )
        except UsageError as e:
            raise DataError(f"{row.where}: {e}") from e
        census.read += 1
        turns = sum(m["role"] == "assistant" for m in messages)
        if not trajectory.turns:
            census.left_out.append(row.where)
        elif len(trajectory.turns) < turns:
            census.cut.append(row.where)
        yield trajectory


def read_conversation(path: Path) -> tuple[tuple[Message, ...], list[dict[str, Any]]]:
    """The messages and tools of one conversation: a JSON file of messages, or of {"messages", "tools"}.

    Raises:
        DataError: the file is not a conversation.
    """
    try:
        value = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: expected a JSON file of messages: {e}") from e
    messages, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (value, None)
    try:
        return normal_messages(messages), normal_tools(tools)
    except DataError as e:
        raise DataError(f"{path}: {e}") from e


def conversation_of(row: Row) -> tuple[Message, ...]:
    """The conversation of a row in the normal form.

    Raises:
        DataError: the row holds none, or one that cannot be trained on.
    """
    values = row.values
    if values.get("messages") is not None:
        found: Any = values["messages"]
    elif values.get("conversations") is not None:
        found = values["conversations"]
        if isinstance(values.get("system"), str) and isinstance(found, (list, tuple)):
            found = [{"role": "system", "content": values["system"]}, *found]
    elif values.get("instruction") is not None and values.get("output") is not None:
        found = _alpaca(values)
    elif values.get("prompt") is not None and values.get("completion") is not None:
        found = [*_side(values["prompt"], "user"), *_side(values["completion"], "assistant")]
    else:
        raise DataError(
            'expected {"messages": [{"role", "content"}, …]}, {"conversations": [{"from", "value"}, …]}, {"prompt", "completion"} '
            f'or {{"instruction", "input", "output"}}, found the columns {", ".join(map(str, values))}'
        )
    messages = normal_messages(found, arrow=row.arrow)
    roles = [m["role"] for m in messages]
    if "assistant" not in roles or roles[0] == "assistant" or not all(isinstance(m["content"], str) for m in messages):
        raise DataError(
            "a conversation needs an assistant message, a message before it, and only text contents; "
            f"found the roles {', '.join(roles)}"
        )
    return messages


def _alpaca(values: Mapping[str, Any]) -> list[Message]:
    """The conversation of {"instruction", "input", "output"}: the input, if there is one, follows the instruction after an empty line.

    Raises:
        DataError: a value is not text, or there are earlier turns in a column `history`.
    """
    if values.get("history"):
        raise DataError(
            'the column history holds earlier turns; write the conversation as {"messages": [{"role", "content"}, …]}'
        )
    texts = {name: values.get(name) or "" for name in ("system", "instruction", "input", "output")}
    if wrong := next((name for name, text in texts.items() if not isinstance(text, str)), None):
        raise DataError(f"{wrong} must be text, found {type(texts[wrong]).__name__}: {texts[wrong]!r:.60}")
    request = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": request}, {"role": "assistant", "content": texts["output"]}]


def _side(value: Any, role: str) -> Sequence[Any]:
    """A prompt or a completion as messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Pieces:
    """The context before an assistant's turn, with every content and call in it. Reasoning of earlier turns may be left out, as in use."""
    renderer.require_whole(messages, tools)
    return renderer.prompt(messages, tools)


def to_trajectory(
    index: int,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    renderer: Renderer,
    max_tokens: int,
    *,
    on_reasoning_left_out: Callable[[], None] = lambda: None,
) -> Trajectory:
    """Return a conversation as a trajectory. Turns are joined by the renderer's deltas, so its tokens are those of a rollout.

    Raises:
        TemplateError: the template cannot express the conversation.
    """
    recorder = Recorder()
    turns: list[Turn] = []
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    recorder.open(_prompt(renderer, messages[:first], tools))
    before: list[Message] = []
    said: tuple[int, ...] = ()
    for position, message in enumerate(messages[first:], first):
        if message["role"] != "assistant":
            before.append(message)
            continue
        number = len(turns)
        if number:
            answered = position - 1 - len(before)
            delta = renderer.delta(before, said, history=messages[:answered], tools=tools) if before else None
            if delta is not None and delta.new_segment is None:
                recorder.extend(delta.pieces, turn=number - 1)
            else:
                recorder.open(_prompt(renderer, messages[:position], tools), turn=number - 1)
        written = renderer.write_turn(message, history=messages[:position], tools=tools)
        said = written.ids
        if recorder.length() + len(said) > max_tokens:
            break
        if written.reasoning_left_out:
            on_reasoning_left_out()
        context = recorder.length()
        recorder.extend([(Provenance.DEMONSTRATION, said)], turn=number)
        turns.append(Turn(number, recorder.segment_index(), context, Action(message["content"])))
        before = []
    return Trajectory(
        episode_id=f"{index}-0",
        group_index=index,
        index=index,
        attempt=0,
        task=Task(str(index), tuple(messages[:first])),
        env="conversation",
        segments=recorder.segments(),
        turns=tuple(turns),
        stop_reason=StopReason.TERMINATED,
        demonstration=True,
    )
