"""`SlimeSample`: the sample that functions written for slime receive and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from agentrl.errors import ContractError, shown
from agentrl.train.sample import Sample, segment_sample
from agentrl.types import Message, Status, Task, Trajectory

STATE_KEY = "slime"
"""key of `Trajectory.state` under which the attributes of the returned sample are recorded"""


@dataclass
class SlimeSample(Sample):
    """A `Sample` with the nested name `Sample.Status` that slime's functions use. Functions may set further attributes."""

    Status: ClassVar[type[Status]] = Status

    def __post_init__(self) -> None:
        """Check nothing yet: functions make samples in any order of their fields, and the samples that they return are checked."""


_ENDED = (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
_FIELDS = {f.name for f in fields(Sample)}


def new_sample(task: Task, prompt: str | list[Message], group_index: int, index: int) -> SlimeSample:
    """The sample of an episode that begins. `prompt` is rendered, or as it is in the data."""
    return SlimeSample(
        group_index=group_index, index=index, prompt=prompt, label=task.label, metadata=dict(task.metadata)
    )


def recorded_attributes(sample: Sample) -> dict[str, Any]:
    """What rewards may need of a returned sample besides its tokens: response, metadata, and attributes that the function set."""
    own = {name: value for name, value in vars(sample).items() if name not in _FIELDS}
    return {"response": sample.response, "metadata": sample.metadata, "attributes": own}


def sample_of(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> SlimeSample:
    """The sample of a finished episode, for a reward function; the last segment, if there are several."""
    last = segment_sample(trajectory, len(trajectory.segments) - 1, decode, demonstrations=False)
    sample = SlimeSample(**{name: getattr(last, name) for name in _FIELDS if name != "reward"})
    recorded = trajectory.state.get(STATE_KEY)
    if isinstance(recorded, Mapping):
        sample.response, sample.metadata = recorded["response"], dict(recorded["metadata"])
        for name, value in recorded["attributes"].items():
            setattr(sample, name, value)
    return sample


def samples_in(returned: object) -> list[Sample] | str:
    """The samples that a function returned, or what it returned instead, in words. Their status may be a text, such as 'completed'.

    Raises:
        ContractError: a sample has no status of an ended episode.
    """
    items = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    samples = [item for item in items if isinstance(item, Sample)]
    if items and len(samples) == len(items):
        for sample in samples:
            if sample.status not in _ENDED:
                status = getattr(sample.status, "value", sample.status)
                raise ContractError(
                    f"the function returned a sample of status {status}; set COMPLETED, TRUNCATED, ABORTED or FAILED"
                )
            sample.status = Status(sample.status)
        return samples
    return f"{type(returned).__name__}: {shown(returned)}"
