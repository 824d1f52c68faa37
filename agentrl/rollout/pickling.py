"""Values of user code on their way between processes. One that cannot be pickled becomes what its record would hold."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from agentrl.errors import ContractError
from agentrl.store.episode_record import json_default
from agentrl.store.json_values import plain
from agentrl.types import (
    Action,
    Observation,
    ParseError,
    Segment,
    Span,
    StepResult,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


def _as_call(cls: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    names = [f.name for f in fields(cls)]
    values = attrgetter(*names)
    return (lambda obj: (cls, (values(obj),))) if len(names) == 1 else (lambda obj: (cls, values(obj)))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: _as_call(cls)
    for cls in (Trajectory, Segment, Span, Turn, Action, Observation, ToolCall, ToolResult, ParseError, StepResult)
}
"""these are pickled as calls of their classes, which takes half as long as the dataclasses' own way"""


def picklable(value: Any) -> bytes:
    """Pickle a value; inside `info` and `state`, a value that cannot be pickled becomes the JSON values that its record would hold.

    Raises:
        ContractError: something else in it cannot be pickled.
    """
    data = _dumps(value)
    if isinstance(data, bytes):
        return data
    again = _dumps(_with_plain_values(value))
    if isinstance(again, bytes):
        return again
    raise ContractError(
        f"a {type(value).__name__} cannot be sent to another process: {again}; return plain values, or let the "
        "environment and its tools run in the process of the run (isolation thread, --runner-processes 1)"
    ) from again


def _dumps(value: Any) -> bytes | Exception:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    try:
        pickler.dump(value)
    except Exception as e:  # noqa: BLE001  user code: the reduction of its values; also RecursionError
        return e
    return buffer.getvalue()


def _with_plain_values(value: Any) -> Any:
    if isinstance(value, StepResult) and isinstance(value.info, Mapping):
        return replace(value, info=_plain_values(value.info))
    if isinstance(value, Trajectory):
        turns = tuple(replace(t, info=_plain_values(t.info)) for t in value.turns)
        return replace(value, turns=turns, state=_plain_values(value.state))
    return _plain_values(value) if isinstance(value, Mapping) else value


def _plain_values(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: v if isinstance(_dumps((k, v)), bytes) else plain(v, json_default) for k, v in values.items()}
