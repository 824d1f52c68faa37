"""The words of design §2–§6 as types: task, message, action, observation, span, segment, turn, trajectory.

Nothing here knows a tokenizer, an engine or torch. `Sample`, the training row, is in `train/sample.py`.

One worked example, the ids of one episode of one segment (mask 1 is underlined)::

    PROMPT            SAMPLED(turn 0)          TEMPLATE  OBSERVATION  TEMPLATE     SAMPLED(turn 1)
    1 15 92 11 2 1 7  40 41 42 2               3 1 9     55 56 57     2 3 1 7      44 45 2
                      ^^^^^^^^^^                                                   ^^^^^^^
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import chain
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.errors import ContractError, InvariantError

Message = dict[str, Any]
"""A chat message: `role` (system, user, assistant, tool), `content` (str or a list of parts), optionally `tool_calls`, `name`, `tool_call_id`."""


class Provenance(IntEnum):
    """Where a token came from. In RL only SAMPLED tokens may have loss_mask 1."""

    PROMPT = 0
    """the first rendering of the conversation by the model's own template"""
    SAMPLED = 1
    """sampled by the policy, exactly as the engine returned it"""
    OBSERVATION = 2
    """content that the environment or a tool added"""
    TEMPLATE = 3
    """scaffold of the chat template between turns"""
    FORCED = 4
    """appended by us in the policy's place (an end token after a stop string), not sampled"""
    DEMONSTRATION = 5
    """written by an expert or a data set in the policy's place; may be trained on in SFT only"""


class FinishReason(str, Enum):
    """Why one generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(str, Enum):
    """What became of an episode, in the words of slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(str, Enum):
    """Why an episode ended (design §6). `status` says what follows from it."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    EPISODE_TIMEOUT = "episode_timeout"
    INVALID_ACTION_LIMIT = "invalid_action_limit"
    ENGINE_ABORT = "engine_abort"
    ENV_FAILURE = "env_failure"
    TOOL_FAILURE = "tool_failure"
    REWARD_FAILURE = "reward_failure"
    ENGINE_FAILURE = "engine_failure"

    @property
    def status(self) -> Status:
        """The Sample status of this stop reason."""
        return _STATUS[self]


_STATUS = {
    StopReason.TERMINATED: Status.COMPLETED,
    StopReason.INVALID_ACTION_LIMIT: Status.COMPLETED,
    StopReason.ENV_TRUNCATED: Status.TRUNCATED,
    StopReason.MAX_TURNS: Status.TRUNCATED,
    StopReason.MAX_TOKENS: Status.TRUNCATED,
    StopReason.CONTEXT_FULL: Status.TRUNCATED,
    StopReason.EPISODE_TIMEOUT: Status.TRUNCATED,
    StopReason.ENGINE_ABORT: Status.ABORTED,
    StopReason.ENV_FAILURE: Status.FAILED,
    StopReason.TOOL_FAILURE: Status.FAILED,
    StopReason.REWARD_FAILURE: Status.FAILED,
    StopReason.ENGINE_FAILURE: Status.FAILED,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One row of data."""

    id: str
    prompt: str | tuple[Message, ...]
    """a question, or a conversation that the policy goes on from"""
    label: Any = None
    """what rewards compare with; the environment never shows it"""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages: copies, since the members of a group share the task."""
        return (
            [{"role": "user", "content": self.prompt}]
            if isinstance(self.prompt, str)
            else [dict(m) for m in self.prompt]
        )


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to be run, as the data source issued it."""

    task: Task
    group_index: int
    index: int
    """ordinal: counts every episode of the run, never given twice"""
    attempt: int = 0
    """0, then one more for each retry after a failure of infrastructure"""
    prefix: str = ""
    """'eval/NAME/STEP/' for episodes of an evaluation, whose ordinals count on their own"""

    @property
    def episode_id(self) -> str:
        """'{prefix}{ordinal}-{attempt}'."""
        return f"{self.prefix}{self.index}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy made, parsed."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ParseError:
    """What could not be read as a call. `kind`: 'structure' (markup), 'content' (arguments), 'surplus' (too many calls)."""

    kind: str
    message: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call gave. An error is the policy's doing and reads like any other result."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    full_bytes: int | None = None
    """size of the whole result when `content` holds only its head; None: it is whole"""
    sha256: str | None = None
    """of the whole result, when it was cut"""
    duration_s: float = 0.0
    parts: tuple[Mapping[str, Any], ...] | None = None
    """where the result holds images: its texts and images in order, as parts of a content (`content` is the texts alone)"""


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did in a turn, read from its text by the action format."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    answer: str | None = None
    """the final answer, where the format marks one; else None"""
    results: tuple[ToolResult, ...] = ()
    """of `calls`, in order; filled in by the runner before `Env.step` (surplus calls are not made: they are in `errors`)"""

    @property
    def valid(self) -> bool:
        """False if something in it could not be parsed, or it is empty."""
        return not self.errors and bool(self.text.strip() or self.calls)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment adds to the conversation: messages."""

    messages: tuple[Message, ...] = ()

    @classmethod
    def of(cls, value: Observation | str | Message | Sequence[Message]) -> Observation:
        """Accept an Observation, a text (one user message), a message, or a list of messages."""
        if isinstance(value, Observation):
            return value
        if isinstance(value, str):
            return cls(({"role": "user", "content": value},))
        items = [value] if isinstance(value, (dict, Mapping)) else value
        if isinstance(items, (list, tuple)) and all(map(_is_message, items)):
            return cls(tuple(dict(m) for m in items))
        raise ContractError(
            "an observation must be a str, a message or a list of messages, each with a role and content (text or parts); "
            f"found {type(value).__name__}: {value!r:.80}"
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `Env.step` returns."""

    observation: Observation | str | Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    """the task ended by its own rules"""
    truncated: bool = False
    """cut from outside (turns, time)"""
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    """equal keys mark equal environment states within a group (turn-level estimators)"""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of one provenance, from one turn (-1: before the first)."""

    provenance: Provenance
    ids: tuple[int, ...]
    turn: int = -1
    log_probs: tuple[float, ...] | None = None
    """natural logs at the turn's temperature, one per id, by the engine; SAMPLED only"""
    policy_version: int | None = None
    """weights that sampled it; SAMPLED only"""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.ids:
            raise InvariantError("a span must hold at least one token")
        sampled = self.provenance is Provenance.SAMPLED
        if sampled != (self.log_probs is not None) or sampled != (self.policy_version is not None):
            raise InvariantError(
                f"log_probs and policy_version belong to SAMPLED spans and only to them; this one is {self.provenance.name}"
            )
        if self.log_probs is not None:
            if len(self.log_probs) != len(self.ids):
                raise InvariantError(f"a span of {len(self.ids)} tokens has {len(self.log_probs)} log-probs")
            if not math.isfinite(sum(self.log_probs)):
                raise InvariantError("a sampled token has a log-prob that is not finite")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the trajectory in which each turn's context is an exact token prefix of the next."""

    spans: tuple[Span, ...]
    agent_id: str = "policy"
    images: tuple[PlacedImage, ...] = ()
    """where images stand, in order"""

    @property
    def ids(self) -> list[int]:
        """All its token ids, in order."""
        return list(chain.from_iterable(s.ids for s in self.spans))

    def __len__(self) -> int:
        return sum(len(s.ids) for s in self.spans)


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation plus what the environment answered."""

    index: int
    segment: int
    context_length: int
    """tokens sent to the engine: the first that many ids of the segment"""
    action: Action
    observation: Observation = Observation()
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    matched_stop: str | int | None = None
    context_crc: int = 0
    """CRC-32 of the ids as they were sent to the engine (little-endian int32); recomputed from the segment to check exactness"""
    observation_cut_tokens: int = 0
    """tokens of the observation that did not fit and were left out"""
    seed: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds: generate_s, tools_s, env_s; and cached_tokens"""
    agent_id: str = "policy"
    context: tuple[Message, ...] | None = None
    """the conversation that the context policy made for the next turn; None: it left it as it was"""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The immutable record of one episode."""

    episode_id: str
    """'{prefix}{ordinal}-{attempt}'"""
    group_index: int
    index: int
    """the episode's ordinal, issued by the data source; never twice in a run"""
    attempt: int
    task: Task
    env: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    cause: str | None = None
    """of a failure, in a few words, for the table of causes"""
    state: Mapping[str, Any] = field(default_factory=dict)
    """what `Env.state()` said at the end"""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """by component; None: the component abstained"""
    weights: Mapping[str, float] = field(default_factory=dict)
    """of the components"""
    seed: int = 0
    demonstration: bool = False
    """its turns were written by an expert, not sampled"""
    timings: Mapping[str, float] = field(default_factory=dict)
    detail: str | None = None
    """of a failure: what was raised, and where"""

    @property
    def status(self) -> Status:
        """What follows from the stop reason."""
        return self.stop_reason.status

    @property
    def label(self) -> Any:
        """The task's label."""
        return self.task.label

    @property
    def answer(self) -> str | None:
        """The last answer the policy gave, where its action format marks one."""
        return next((t.action.answer for t in reversed(self.turns) if t.action.answer is not None), None)

    @property
    def score(self) -> float:
        """Σ step rewards + Σ weight × component, components that abstained left out (design §4)."""
        steps = math.fsum(t.reward for t in self.turns)
        return steps + math.fsum(self.weights.get(k, 1.0) * v for k, v in self.rewards.items() if v is not None)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return count_tokens(self.segments, Provenance.SAMPLED)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, by group id; sizes may differ (lost members are gone)."""

    index: int
    task: Task
    trajectories: tuple[Trajectory, ...]


def _is_message(value: Any) -> bool:
    """A role, and content that is text or parts; an assistant's tool calls may stand without content."""
    if not isinstance(value, (dict, Mapping)) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, (str, list, tuple)) or (content is None and bool(value.get("tool_calls")))


def count_tokens(segments: Iterable[Segment], provenance: Provenance) -> int:
    """Tokens of one provenance over segments."""
    return sum(len(s.ids) for g in segments for s in g.spans if s.provenance is provenance)
