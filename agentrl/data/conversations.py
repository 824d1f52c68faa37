"""Conversations of a data set as trajectories: the assistant's turns are DEMONSTRATION tokens, the others PROMPT, TEMPLATE and OBSERVATION."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.data.data_files import json_rows
from agentrl.errors import DataError
from agentrl.render import Renderer
from agentrl.rollout.recorder import Recorder
from agentrl.types import Action, Message, Provenance, StopReason, Task, Trajectory, Turn


def read_conversations(path: Path, renderer: Renderer, max_tokens: int) -> Iterator[Trajectory]:
    """Yield the conversations of a JSONL file with rows {"messages": […], "tools": […]} (tools are optional).

    A conversation longer than `max_tokens` is truncated after the last turn that fits.

    Raises:
        DataError: the file is missing, or a row is malformed.
    """
    for line, row in json_rows(path):
        try:
            messages = row["messages"]
            roles = [m["role"] for m in messages]
            contents = [m["content"] for m in messages]
        except (KeyError, TypeError) as e:
            raise DataError(
                f'{path}, line {line}: expected {{"messages": [{{"role", "content"}}, …]}}: {type(e).__name__}: {e}'
            ) from e
        if "assistant" not in roles or roles[0] == "assistant" or not all(isinstance(c, str) for c in contents):
            raise DataError(
                f"{path}, line {line}: a conversation needs an assistant message, a message before it, and only text contents"
            )
        yield to_trajectory(line - 1, messages, row.get("tools") or [], renderer, max_tokens)


def to_trajectory(
    index: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]], renderer: Renderer, max_tokens: int
) -> Trajectory:
    """Return a conversation as a trajectory. Turns are joined by the renderer's deltas, so its tokens are those of a rollout."""
    recorder = Recorder()
    turns: list[Turn] = []
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    recorder.open(renderer.prompt(messages[:first], tools))
    before: list[Message] = []
    said: tuple[int, ...] = ()
    for position, message in enumerate(messages[first:], first):
        if message["role"] != "assistant":
            before.append(message)
            continue
        number = len(turns)
        if number:
            answered = position - 1 - len(before)
            delta = renderer.delta(before, said, history=messages[:answered], tools=tools)
            if delta.new_segment is None:
                recorder.extend(delta.pieces, turn=number - 1)
            else:
                recorder.open(renderer.prompt(messages[:position], tools), turn=number - 1)
        inline = renderer.format.inline  # no end token within one assistant turn
        said = tuple(renderer.tokenizer.encode(message["content"])) if inline else renderer.encode_turn(message)
        if recorder.length() + len(said) > max_tokens:
            break
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
