"""`Sample`: one segment of an episode as training data, and how a Trajectory becomes Samples.

Masks, log-probs and policy versions are derived from spans. Field names are those of slime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any

from agentrl.core.message_images import Image
from agentrl.core.routed_experts import RoutedExperts
from agentrl.errors import InvariantError
from agentrl.types import Message, Provenance, Span, Status, Trajectory, Turn

Runs = list[tuple[int, int]]
"""run-length encoding: (value, count), in order"""

Pixels = Callable[[Sequence[Image]], dict[str, Any] | None]

_NEVER_TRAINED = (
    Provenance.PROMPT,
    Provenance.OBSERVATION,
    Provenance.TEMPLATE,
    Provenance.FORCED,
    Provenance.OTHER_AGENT,
)
_PROVENANCES = frozenset(map(int, Provenance))


@dataclass
class Sample:
    """One segment of an episode as training data.

    `tokens` are the prompt's, then the response's. The response is everything after the prompt: the sampled tokens of all turns, and the
    observations and template tokens between them. Per-token fields have one entry per response token.

    Raises:
        InvariantError: fields contradict each other (see `check`).

    Example:
        The episode of two turns in the docstring of `agentrl.Trajectory` gives one sample. Its response is six sampled tokens, six tokens
        of template and observation, and four sampled tokens (log-probs rounded):

            Sample(
                tokens=[1, 452, 279, 201, 53, 89, 530, 328, 33, 2, 201, 1, 547, 353, 666, 201,
                        2042, 53, 89, 530, 328, 2043, 201, 2044, 36, 340, 2045, 201, 2046, 36, 340, 2047],
                response_length=16,
                loss_mask=[1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
                rollout_log_probs=[-0.9, -0.1, -0.9, -0.9, -0.2, -0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.3, -0.9, -1.2, -0.6],
                provenance=[(1, 6), (3, 2), (2, 2), (3, 2), (1, 4)],
                turn_of=[(0, 12), (1, 4)],
                policy_versions=[(3, 6), (-1, 6), (3, 4)],
                reward=1.0,
                status=Status.COMPLETED,
            )
    """

    group_index: int | None = None
    """index of the group: all samples of the same task in one rollout"""
    index: int | None = None
    """index of the episode in the run"""
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    """`images`: a list of `Image` in the order of their placeholders in `tokens`; None: no images"""
    image_places: Runs = field(default_factory=list)
    """of each of these images the index in `tokens` of its first placeholder, and the number of its placeholders"""
    multimodal_train_inputs: dict[str, Any] | None = None
    """the model's inputs besides `tokens`: pixel_values and image_grid_thw"""
    response: str = ""
    response_length: int = 0
    """number of tokens after the prompt"""
    label: Any = None
    reward: float | dict[str, float] | None = None
    """reward of the episode, or of the role in it, equal in all its samples; a dict has named components"""
    loss_mask: list[int] | None = None
    """[response_length] of 0 and 1; None: not known yet (status PENDING)"""
    rollout_log_probs: list[float] | None = None
    """[response_length], the engine's; 0.0 where not sampled"""
    rollout_routed_experts: RoutedExperts | None = None
    """the experts of the first tokens in the engine (`array()`: [n, layers, topk]); None: not recorded"""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    """train on none of its tokens, but keep it in the group's baseline"""
    non_generation_time: float = 0.0
    """seconds of the episode spent outside the engine"""
    episode_id: str = ""
    segment_index: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    """step reward of each of the episode's turns"""
    policy_versions: Runs = field(default_factory=list)
    """version of the weights that sampled each response token; -1 where not sampled"""
    provenance: Runs = field(default_factory=list)
    """Provenance of each response token"""
    turn_of: Runs = field(default_factory=list)
    """turn index of each response token"""
    temperature: float = 1.0
    """sampling temperature; 0: greedy"""
    seeds: dict[str, int] = field(default_factory=dict)
    spec_info: dict[str, int] = field(default_factory=dict)
    """counts of speculative decoding in the segment's turns: spec_verify_ct, spec_accept_token_num, spec_draft_token_num, completion_token_num;
    empty: the engine did not speculate"""
    allow_demonstration: bool = False
    """DEMONSTRATION tokens may have mask 1 (SFT)"""

    def __post_init__(self) -> None:
        self.check()

    @property
    def weight_versions(self) -> list[str]:
        """Versions of the weights that sampled it, in order of appearance, as strings."""
        return [str(v) for v in dict.fromkeys(v for v, _ in self.policy_versions if v >= 0)]

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with mask 1; 0 if `remove_sample`."""
        return 0 if self.remove_sample else sum(self.loss_mask or ())

    def check(self) -> None:
        """Check the fields against each other; called by the constructor and again before training.

        Raises:
            InvariantError: which field is wrong, and what was expected.
        """
        length = self.response_length
        if not isinstance(self.status, Status):
            raise InvariantError(f"Sample.status must be a Status, found {self.status!r}")
        if length < 0 or length > len(self.tokens):
            raise InvariantError(f"Sample.response_length {length} does not fit its {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise InvariantError(f"Sample.{name} has {len(values)} entries, response_length is {length}")
        for name in ("policy_versions", "provenance", "turn_of"):
            runs: Runs = getattr(self, name)
            counts = [count for _, count in runs]
            if runs and (sum(counts) != length or min(counts) <= 0):
                raise InvariantError(f"Sample.{name} covers {sum(counts)} tokens, response_length is {length}")
        if self.rollout_routed_experts is not None and self.rollout_routed_experts.tokens > len(self.tokens):
            raise InvariantError(
                f"Sample.rollout_routed_experts has {self.rollout_routed_experts.tokens} entries for {len(self.tokens)} tokens"
            )
        images = (self.multimodal_inputs or {}).get("images", ())
        if len(images) != len(self.image_places):
            raise InvariantError(f"Sample.image_places has {len(self.image_places)} entries for {len(images)} images")
        if self.loss_mask is not None and not set(self.loss_mask) <= {0, 1}:
            raise InvariantError("Sample.loss_mask must hold only 0 and 1")
        if self.rollout_log_probs is not None and not all(map(math.isfinite, self.rollout_log_probs)):
            raise InvariantError("Sample.rollout_log_probs holds a value that is not finite")
        rewards = self.reward.values() if isinstance(self.reward, dict) else [self.reward]
        if not all(r is None or (isinstance(r, Real) and math.isfinite(r)) for r in rewards):
            raise InvariantError(f"Sample.reward must be finite numbers, found {self.reward!r:.80}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvariantError(f"Sample.temperature must be a finite number ≥ 0, found {self.temperature!r}")
        if self.status in (Status.FAILED, Status.ABORTED) and any(self.loss_mask or ()):
            raise InvariantError(f"a Sample of status {self.status.value} must not be trained on")
        self._check_mask()

    def _check_mask(self) -> None:
        if not self.provenance or self.loss_mask is None:
            return
        start = 0
        for value, count in self.provenance:
            if value not in _PROVENANCES:
                raise InvariantError(f"Sample.provenance holds {value!r}; it must be one of {sorted(_PROVENANCES)}")
            never = value in _NEVER_TRAINED or (value == Provenance.DEMONSTRATION and not self.allow_demonstration)
            if never and any(self.loss_mask[start : start + count]):
                raise InvariantError(f"Sample has mask 1 on a token of provenance {Provenance(value).name}")
            start += count


def to_samples(
    trajectory: Trajectory,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    demonstrations: bool = False,
    pixels: Pixels | None = None,
) -> list[Sample]:
    """One Sample per segment that has a sampled token; with `demonstrations`, a demonstrated one. Of several roles, those of each (`of_role`).

    The tokens that a branch shares with the episode it branched from have mask 0 in the branch: each token is trained once.
    FAILED and ABORTED trajectories have no samples: a failure is never turned into reward 0.
    `pixels` (`Renderer.pixels`) computes `multimodal_train_inputs` from images.
    """
    if trajectory.status in (Status.FAILED, Status.ABORTED):
        return []
    if trajectory.roles:
        sides = map(trajectory.of_role, trajectory.roles)
        return [s for t in sides for s in to_samples(t, decode=decode, demonstrations=demonstrations, pixels=pixels)]
    samples = [segment_sample(trajectory, i, decode, demonstrations) for i in range(len(trajectory.segments))]
    samples = [s for s in samples if any(s.loss_mask or ())]
    for sample in samples:
        if sample.multimodal_inputs and pixels:
            sample.multimodal_train_inputs = pixels(sample.multimodal_inputs["images"])
    return samples


def segment_sample(
    t: Trajectory, index: int, decode: Callable[[Sequence[int]], str] | None, demonstrations: bool
) -> Sample:
    """The sample of one segment, also if nothing in it is trained; see `to_samples`."""
    spans = t.segments[index].spans
    placed = t.segments[index].images
    first = next((i for i, s in enumerate(spans) if s.provenance is not Provenance.PROMPT), len(spans))
    prompt, response = spans[:first], spans[first:]
    ids = list(chain.from_iterable(s.ids for s in response))
    trained = {Provenance.SAMPLED, *([Provenance.DEMONSTRATION] if demonstrations else [])}
    return Sample(
        group_index=t.group_index,
        index=t.index,
        prompt=t.task.prompt if isinstance(t.task.prompt, str) else t.task.messages,
        multimodal_inputs={"images": [p.image for p in placed]} if placed else None,
        image_places=[(p.at, p.tokens) for p in placed],
        tokens=[*chain.from_iterable(s.ids for s in prompt), *ids],
        response=decode(ids) if decode else "",
        response_length=len(ids),
        label=t.label,
        reward=t.score,
        loss_mask=_expand(response, lambda s: int(s.provenance in trained and s.turn >= t.branch_turn)),
        rollout_log_probs=list(chain.from_iterable(s.log_probs or (0.0,) * len(s.ids) for s in response)),
        rollout_routed_experts=t.segments[index].routed_experts,
        status=t.status,
        metadata=dict(t.task.metadata),
        non_generation_time=float(t.timings.get("non_generation_s", 0.0)),
        episode_id=t.episode_id,
        segment_index=index,
        turn_rewards=[turn.reward for turn in t.turns],
        policy_versions=_runs((-1 if s.policy_version is None else s.policy_version, len(s.ids)) for s in response),
        provenance=_runs((int(s.provenance), len(s.ids)) for s in response),
        turn_of=_runs((s.turn, len(s.ids)) for s in response),
        temperature=next((s.temperature for s in response if s.provenance is Provenance.SAMPLED), 1.0),
        seeds={"episode": t.seed},
        spec_info=spec_info([turn for turn in t.turns if turn.segment == index], response),
        allow_demonstration=demonstrations,
    )


def spec_info(turns: Sequence[Turn], spans: Sequence[Span]) -> dict[str, int]:
    """The sums of the turns in which the engine speculated, and the tokens that they sampled; empty if there is none."""
    told = {turn.index: turn.timings for turn in turns if "spec_verify_steps" in turn.timings}
    if not told:
        return {}
    names = {"spec_verify_ct": "verify_steps", "spec_accept_token_num": "accepted", "spec_draft_token_num": "proposed"}
    sums = {name: int(sum(counts[f"spec_{count}"] for counts in told.values())) for name, count in names.items()}
    sampled = (len(s.ids) for s in spans if s.turn in told and s.provenance is Provenance.SAMPLED)
    return {**sums, "completion_token_num": sum(sampled)}


def _expand(spans: Iterable[Span], value: Callable[[Span], int]) -> list[int]:
    return [v for s in spans for v in (value(s),) * len(s.ids)]


def _runs(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Run-length encoding of (value, count) pairs: neighbours of equal value are merged."""
    runs: Runs = []
    for value, count in pairs:
        if runs and runs[-1][0] == value:
            count += runs.pop()[1]
        runs.append((value, count))
    return runs
