"""The data of an episode: task, action, observation, turn, span, segment, trajectory.

A `Trajectory` has two views of one episode: `turns`, in terms of messages and actions, and `segments`, in terms of token ids. Its docstring
holds an example. `Sample`, the training data made of a segment, is in `train/sample.py`. Nothing here imports a tokenizer or torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from agentrl.core.episode_ends import FinishReason as FinishReason
from agentrl.core.episode_ends import Provenance as Provenance
from agentrl.core.episode_ends import Status as Status
from agentrl.core.episode_ends import StopReason as StopReason
from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RoutedExperts
from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import ContractError, InvariantError, describe, shown

_IMMUTABLE = (str, int, float, bytes, type(None))
Message = dict[str, Any]
"""A chat message: `role` (system, user, assistant, tool), `content` (str or a list of parts); optional: `tool_calls`, `name`, `tool_call_id`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: the input of `Env.reset`, and one row of a data file.

    Example:
        >>> Task("paris", "What is the capital of France?", label="Paris").messages
        [{'role': 'user', 'content': 'What is the capital of France?'}]
    """

    id: str
    """unique within its data set"""
    prompt: str | tuple[Message, ...]
    """a question (one user message), or a conversation that the policy continues"""
    label: Any = None
    """the reference for rewards; never shown to the policy"""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """further columns of the data file"""

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages; copies, since the members of a group share the task."""
        return (
            [{"role": "user", "content": self.prompt}]
            if isinstance(self.prompt, str)
            else [dict(m) for m in self.prompt]
        )

    def copy(self) -> Task:
        """A copy whose prompt, label and metadata user code may change; the task itself if nothing in it can be changed.

        Raises:
            ContractError: they hold an object that cannot be copied.
        """
        if not self.metadata and isinstance(self.prompt, str) and isinstance(self.label, _IMMUTABLE):
            return self
        try:
            prompt, label, metadata = deepcopy((self.prompt, self.label, self.metadata))
        except Exception as e:
            raise ContractError(
                f"task {self.id!r} cannot be copied for each episode: {describe(e)}; "
                "keep plain data in its label and metadata, and open resources in reset"
            ) from e
        return replace(self, prompt=prompt, label=label, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run, as issued by the data source."""

    task: Task
    group_index: int
    index: int
    """ordinal of the episode, unique in the run"""
    attempt: int = 0
    """number of retries so far, each after a failure of infrastructure"""
    prefix: str = ""
    """'eval/NAME/STEP/' for episodes of an evaluation, which have separate ordinals"""
    env: str = ""
    """label of the environment that plays it, in a run of several; empty: the run has one"""

    @property
    def episode_id(self) -> str:
        """'{prefix}{ordinal}-{attempt}'."""
        return f"{self.prefix}{self.index}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed tool call of the policy."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ParseError:
    """A part of a generation that could not be parsed as a call."""

    kind: str
    """'structure' (markup), 'content' (arguments) or 'surplus' (more calls than allowed); of a summary 'empty' or 'call'"""
    message: str
    """what is wrong, for the policy to read"""
    text: str = ""
    """the part itself"""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call. An error is a result too, which the policy reads."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    full_bytes: int | None = None
    """size of the full result, in bytes of UTF-8, if `content` is truncated; None: it is complete"""
    sha256: str | None = None
    """hash of the full result, if `content` is truncated"""
    duration_s: float = 0.0
    parts: tuple[Mapping[str, Any], ...] | None = None
    """texts and images in order, as parts of a message's content; `content` holds the texts alone. None: no images"""


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did in a turn: one generation, parsed by the action format.

    Example:
        >>> Action("<answer>Paris</answer>", answer="Paris").valid
        True
    """

    text: str
    """the generation, decoded"""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    answer: str | None = None
    """the final answer; None: the format marks none in this turn"""
    results: tuple[ToolResult, ...] = ()
    """results of `calls`, in order, set before `Env.step` is called; calls beyond the allowed number are in `errors` and are not made"""

    @property
    def valid(self) -> bool:
        """False if a part could not be parsed, or the generation is empty."""
        return not self.errors and bool(self.text.strip() or self.calls)


@dataclass(frozen=True, slots=True)
class Observation:
    """The messages that an environment adds to the conversation.

    `Env.reset` and `Env.step` may return a str, a message or a list of messages instead; `of` converts them.

    Example:
        >>> Observation.of("The number is higher.").messages
        ({'role': 'user', 'content': 'The number is higher.'},)
    """

    messages: tuple[Message, ...] = ()
    to: str = ""
    """the role that reads it and acts next, in an environment of several (`Env.roles`); empty: the one that acted, at first the first"""

    @classmethod
    def of(cls, value: Observation | str | Message | Sequence[Message], to: str = "") -> Observation:
        """Convert a value to an observation.

        Args:
            value: an Observation, a text (which becomes one user message), a message, or a list of messages.
            to: the role that reads it and acts next; see `Observation.to`.

        Raises:
            ContractError: the value is none of these.
        """
        if isinstance(value, Observation):
            to = to or value.to
            messages: Any = value.messages
            if isinstance(messages, tuple) and all(map(_is_message, messages)):
                return value if to == value.to else replace(value, to=to)
            value = messages
        if isinstance(value, str):
            return cls(({"role": "user", "content": value},), to)
        items = [value] if isinstance(value, (dict, Mapping)) else value
        if isinstance(items, (list, tuple)) and all(map(_is_message, items)):
            return cls(tuple(dict(m) for m in items), to)
        raise ContractError(
            "an observation must be a str, a message or a list of messages, each with a role and content "
            f"(text or a list of parts, each a mapping); found {type(value).__name__}: {shown(value, 80)}"
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The return value of `Env.step`.

    Example:
        >>> StepResult("higher", reward=-0.1)
        StepResult(observation='higher', reward=-0.1, terminated=False, truncated=False, info={}, state_key=None, rewards={})
    """

    observation: Observation | str | Sequence[Message] = ()
    """the messages for the policy; may be empty only if the episode ends"""
    reward: float = 0.0
    """added to the score of the episode, of several roles to that of the role that acted; a finite number"""
    terminated: bool = False
    """True: the task has ended by its own rules"""
    truncated: bool = False
    """True: the environment ends the episode early, for example by its own limit on moves"""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the record and for rewards; never shown to the policy"""
    state_key: str | None = None
    """equal keys mark equal environment states within a group, for turn-level estimators; None: unknown"""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """added to the scores of roles, by role, in an environment of several (`Env.roles`)"""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one provenance and one turn."""

    provenance: Provenance
    ids: tuple[int, ...]
    turn: int = -1
    """-1: before the first turn"""
    log_probs: tuple[float, ...] | None = None
    """natural logarithms at `temperature`, one per id, from the engine; None: not SAMPLED"""
    policy_version: int | None = None
    """version of the weights that sampled it; None: not SAMPLED"""
    temperature: float = 1.0
    """sampling temperature"""

    def __post_init__(self) -> None:
        if not self.ids:
            raise InvariantError("a span must hold at least one token")
        sampled = self.provenance is Provenance.SAMPLED
        if sampled != (self.log_probs is not None) or sampled != (self.policy_version is not None):
            raise InvariantError(
                "SAMPLED spans, and only these, have log_probs and a policy_version; "
                f"this one is {self.provenance.name}"
            )
        if self.log_probs is not None:
            if len(self.log_probs) != len(self.ids):
                raise InvariantError(f"a span of {len(self.ids)} tokens has {len(self.log_probs)} log-probs")
            if not math.isfinite(sum(self.log_probs)):
                raise InvariantError("a sampled token has a log-prob that is not finite")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the trajectory in which each turn's context is an exact token prefix of the next turn's."""

    spans: tuple[Span, ...]
    agent_id: str = "policy"
    images: tuple[PlacedImage, ...] = ()
    """images and the places of their placeholder tokens, in order"""
    routed_experts: RoutedExperts | None = None
    """the experts of the first tokens in the engine, for router replay; None: not recorded"""

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return list(chain.from_iterable(s.ids for s in self.spans))

    def __len__(self) -> int:
        return sum(len(s.ids) for s in self.spans)


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and the environment's answer to it."""

    index: int
    segment: int
    """index of the segment that holds the generation; -1: the turn is text without tokens, of a player that is not a model of this run"""
    context_length: int
    """number of ids sent to the engine: the first `context_length` of the segment"""
    action: Action
    observation: Observation = Observation()
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    matched_stop: str | int | None = None
    context_crc: int = 0
    """CRC-32 of the ids that left for the engine, as little-endian int32; compared with the segment to verify exactness"""
    observation_cut_tokens: int = 0
    """tokens of the observation that did not fit into the context"""
    seed: int = 0
    """seed of the generation"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds: start_s since the episode's start, generate_s, tools_s, env_s; and cached_tokens, and the counts of `Speculation` as
    spec_verify_steps, spec_accepted, spec_proposed"""
    agent_id: str = "policy"
    """who acted: 'policy', or a role of `Env.roles`, or an agent at the gateway"""
    context: tuple[Message, ...] | None = None
    """the conversation that the context policy returned for the next turn; None: unchanged"""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """`StepResult.rewards`"""
    summary: SummaryRequest | None = None
    """the request that the generation answers with a summary, which the environment does not see; None: it is an action"""

    def reward_of(self, role: str) -> float:
        """What the turn adds to the score of a role."""
        return self.rewards.get(role, 0.0) + (self.reward if self.agent_id == role else 0.0)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The immutable record of one episode.

    Example:
        An episode of two turns: the policy searches, reads the result and answers. These are its ids, with the embedded model's tokenizer.
        The policy sampled the underlined ones; only they are trained:

            turn  provenance   text                                     ids
            -1    PROMPT       <|im_start|>user⏎Swiss capital?<|im_…      1 452 279 201 53 89 530 328 33 2 201 1 547 353 666 201
             0    SAMPLED      <search>Swiss capital</search>           2042 53 89 530 328 2043
                                                                        -----------------------
             0    TEMPLATE     ⏎<information>                           201 2044
             0    OBSERVATION  Bern                                     36 340
             0    TEMPLATE     </information>⏎                          2045 201
             1    SAMPLED      <answer>Bern</answer>                    2046 36 340 2047
                                                                        ----------------

        >>> from agentrl.types import Action, Observation, Provenance, Segment, Span, StopReason, ToolCall, ToolResult, Turn
        >>> segment = Segment((
        ...     Span(Provenance.PROMPT, (1, 452, 279, 201, 53, 89, 530, 328, 33, 2, 201, 1, 547, 353, 666, 201)),
        ...     Span(Provenance.SAMPLED, (2042, 53, 89, 530, 328, 2043), 0, (-0.9, -0.1, -0.9, -0.9, -0.2, -0.4), policy_version=3),
        ...     Span(Provenance.TEMPLATE, (201, 2044), 0),
        ...     Span(Provenance.OBSERVATION, (36, 340), 0),
        ...     Span(Provenance.TEMPLATE, (2045, 201), 0),
        ...     Span(Provenance.SAMPLED, (2046, 36, 340, 2047), 1, (-1.3, -0.9, -1.2, -0.6), policy_version=3),
        ... ))
        >>> call = ToolCall("search", {"query": "Swiss capital"}, "call_0")
        >>> result = ToolResult("call_0", "search", "Bern")
        >>> search = Action("<search>Swiss capital</search>", calls=(call,), results=(result,))
        >>> message = {"role": "tool", "name": "search", "tool_call_id": "call_0", "content": "Bern"}
        >>> trajectory = Trajectory(
        ...     episode_id="0-0", group_index=0, index=0, attempt=0, env="Quiz",
        ...     task=Task("swiss", "Swiss capital?", "Bern"),
        ...     segments=(segment,),
        ...     turns=(
        ...         Turn(0, segment=0, context_length=16, action=search, observation=Observation((message,))),
        ...         Turn(1, segment=0, context_length=28, action=Action("<answer>Bern</answer>", answer="Bern")),
        ...     ),
        ...     stop_reason=StopReason.TERMINATED, rewards={"correct": 1.0}, weights={"correct": 1.0},
        ... )
        >>> trajectory.score, trajectory.answer, trajectory.sampled_tokens, trajectory.status.value
        (1.0, 'Bern', 10, 'completed')

        `Sample` shows the training data made of it.
    """

    episode_id: str
    """'{prefix}{index}-{attempt}'; see `EpisodeSpec`"""
    group_index: int
    """the episodes of one group have the same task, and are compared with each other"""
    index: int
    """ordinal of the episode, unique in the run"""
    attempt: int
    """number of retries before it"""
    task: Task
    env: str
    """label of the environment"""
    segments: tuple[Segment, ...]
    """token ids; more than one segment where the history was rewritten"""
    turns: tuple[Turn, ...]
    """actions and observations, in order"""
    stop_reason: StopReason
    cause: str | None = None
    """short name of a failure, for the table of causes; None: no failure"""
    state: Mapping[str, Any] = field(default_factory=dict)
    """the return value of `Env.state` at the end"""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """value of each component; None: the component abstained"""
    weights: Mapping[str, float] = field(default_factory=dict)
    """weight of each component"""
    seed: int = 0
    """seed of the episode, from which all its other seeds are derived"""
    demonstration: bool = False
    """True: an expert wrote the turns"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds: generate_s, tools_s, env_s, episode_s, non_generation_s; and ended_at, the time of its end since 1970"""
    detail: str | None = None
    """full error message of a failure, and where it was raised; None: no failure"""
    parent: str | None = None
    """id of the episode that this one branched from; None: it was played from the beginning"""
    branch_turn: int = 0
    """first turn of a branch that it sampled itself; the turns before are its parent's, and are trained there"""
    roles: tuple[str, ...] = ()
    """the roles that the policy played, in an environment of several speakers; each is trained by its own rewards (`of_role`)"""
    role: str = ""
    """the role whose side of an episode this is; empty: the whole episode"""
    judgements: Mapping[str, Any] = field(default_factory=dict)
    """answers of servers that rewards asked, by the hash of the request; a reward that asks again is given these"""

    def of_role(self, role: str) -> Trajectory:
        """The episode as the role's own: its tokens, its rewards. All turns stay, with what they added to the role's score.

        Its id is that of the episode with the role (`role_id`); segments of others are empty, so that indices of segments and turns stay the same.
        """
        own = f".{role}"
        return replace(
            self,
            episode_id=role_id(self.episode_id, role),
            parent=None if self.parent is None else role_id(self.parent, role),
            segments=tuple(s if s.agent_id == role else Segment((), s.agent_id) for s in self.segments),
            turns=tuple(replace(t, reward=t.reward_of(role), rewards={}) for t in self.turns),
            rewards={k.removesuffix(own): v for k, v in self.rewards.items() if k.endswith(own)},
            weights={k.removesuffix(own): v for k, v in self.weights.items() if k.endswith(own)},
            roles=(),
            role=role,
        )

    @property
    def status(self) -> Status:
        """The outcome that follows from the stop reason."""
        return self.stop_reason.status

    @property
    def played(self) -> bool:
        """False if the episode's time was over before the policy sampled a token; rewards are not called for it."""
        return self.stop_reason is not StopReason.EPISODE_TIMEOUT or self.sampled_tokens > 0

    @property
    def label(self) -> Any:
        """The task's label."""
        return self.task.label

    @property
    def answer(self) -> str | None:
        """The policy's last answer; None: it gave none, or its action format marks none."""
        own = [t for t in self.turns if not self.role or t.agent_id == self.role]
        return next((t.action.answer for t in reversed(own) if t.action.answer is not None), None)

    @property
    def score(self) -> float:
        """Σ step rewards + Σ weight × component, without components that abstained; of several roles, the mean of their scores."""
        if self.roles:
            return math.fsum(self.of_role(role).score for role in self.roles) / len(self.roles)
        steps = math.fsum(t.reward for t in self.turns)
        return steps + math.fsum(self.weights.get(k, 1.0) * v for k, v in self.rewards.items() if v is not None)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return count_tokens(self.segments, Provenance.SAMPLED)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one group. Sizes may differ, since lost episodes are left out."""

    index: int
    task: Task
    trajectories: tuple[Trajectory, ...]


def _is_message(value: Any) -> bool:
    """True for a mapping with a role and with text or parts as content; an assistant's tool calls need no content."""
    if not isinstance(value, (dict, Mapping)) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, (list, tuple)):
        return all(isinstance(part, (dict, Mapping)) for part in content)
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def role_id(episode_id: str, role: str) -> str:
    """The id of one role's side of an episode."""
    return f"{episode_id}#{role}"


def split_role_id(text: str) -> tuple[str, str]:
    """The episode and the role of `role_id`; the role is empty in the id of a whole episode."""
    match = re.fullmatch(r"(.*\d-\d+)#([^#/]+)", text)
    return (match[1], match[2]) if match else (text, "")


def by_role(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, ...]]:
    """The members of a group as they are compared: each role with the same role of the others, in episodes of several."""
    roles = dict.fromkeys(role for t in trajectories for role in t.roles)
    if not roles:
        return [tuple(trajectories)]
    return [tuple(t.of_role(role) for t in trajectories if role in t.roles) for role in roles]


def count_tokens(segments: Iterable[Segment], provenance: Provenance) -> int:
    """Number of tokens of one provenance in segments."""
    return sum(len(s.ids) for g in segments for s in g.spans if s.provenance is provenance)
