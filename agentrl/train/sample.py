"""`Sample`, the training row, and how a Trajectory becomes Samples. Masks, log-probs and versions are derived from spans, never kept by hand.

Field names are those users of slime know; a constructor check makes an inconsistent Sample impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any

from agentrl.core.message_images import Image
from agentrl.errors import InvariantError
from agentrl.types import Message, Provenance, Span, Status, Trajectory

Runs = list[tuple[int, int]]
"""run-length encoding: (value, count), in order"""

Pixels = Callable[[Sequence[Image]], dict[str, Any] | None]

_NEVER = (Provenance.PROMPT, Provenance.OBSERVATION, Provenance.TEMPLATE, Provenance.FORCED)
_KNOWN = frozenset(map(int, Provenance))


@dataclass
class Sample:
    """One segment of an episode as a training row. `tokens` = prompt tokens + response tokens; per-token fields speak of the response.

    Raises:
        InvariantError: fields that contradict each other (see `check`).
    """

    group_index: int | None = None
    index: int | None = None
    """the episode's ordinal"""
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    """`images`: a list of `Image`, in the order of their placeholders in `tokens`; None without images"""
    multimodal_train_inputs: dict[str, Any] | None = None
    """what the model's forward takes beside `tokens`: pixel_values and image_grid_thw"""
    response: str = ""
    response_length: int = 0
    """tokens after the prompt, ≥ 0"""
    label: Any = None
    reward: float | dict[str, float] | None = None
    """of the episode (all its samples carry the same); a dict has named components"""
    loss_mask: list[int] | None = None
    """[response_length] of 0 and 1; None: not known yet (status PENDING)"""
    rollout_log_probs: list[float] | None = None
    """[response_length], by the engine when it sampled; 0.0 where not sampled"""
    rollout_routed_experts: Any = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    """keep it in the group's baseline, train on none of its tokens"""
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0
    """seconds of the episode spent outside the engine"""
    spec_info: dict[str, Any] | None = None
    episode_id: str = ""
    segment_index: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    """step reward of each of the episode's turns"""
    policy_versions: Runs = field(default_factory=list)
    """per response token, run-length encoded; -1 where not sampled"""
    provenance: Runs = field(default_factory=list)
    """per response token, run-length encoded Provenance"""
    turn_of: Runs = field(default_factory=list)
    """per response token, run-length encoded index of its turn"""
    temperature: float = 1.0
    seeds: dict[str, int] = field(default_factory=dict)
    allow_demonstration: bool = False
    """SFT: DEMONSTRATION tokens may have mask 1"""

    def __post_init__(self) -> None:
        self.check()

    @property
    def weight_versions(self) -> list[str]:
        """The versions of the weights that sampled it, in order of appearance (slime's name and type)."""
        return [str(v) for v in dict.fromkeys(v for v, _ in self.policy_versions if v >= 0)]

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return 0 if self.remove_sample else sum(self.loss_mask or ())

    def check(self) -> None:
        """Raise InvariantError if the fields contradict each other. Called by the constructor and again before training."""
        n = self.response_length
        if not isinstance(self.status, Status):
            raise InvariantError(f"Sample.status must be a Status, found {self.status!r}")
        if n < 0 or n > len(self.tokens):
            raise InvariantError(f"Sample.response_length {n} does not fit its {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise InvariantError(f"Sample.{name} has {len(values)} entries, response_length is {n}")
        for name in ("policy_versions", "provenance", "turn_of"):
            runs: Runs = getattr(self, name)
            if runs and (sum(c for _, c in runs) != n or any(c <= 0 for _, c in runs)):
                raise InvariantError(f"Sample.{name} covers {sum(c for _, c in runs)} tokens, response_length is {n}")
        if self.loss_mask is not None and not set(self.loss_mask) <= {0, 1}:
            raise InvariantError("Sample.loss_mask must hold only 0 and 1")
        if self.rollout_log_probs is not None and not all(map(math.isfinite, self.rollout_log_probs)):
            raise InvariantError("Sample.rollout_log_probs holds a value that is not finite")
        rewards = self.reward.values() if isinstance(self.reward, dict) else [self.reward]
        if not all(r is None or (isinstance(r, Real) and math.isfinite(r)) for r in rewards):
            raise InvariantError(f"Sample.reward must be finite numbers, found {self.reward!r:.80}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvariantError(f"Sample.temperature must be a number from 0 up, found {self.temperature!r}")
        if self.status in (Status.FAILED, Status.ABORTED) and any(self.loss_mask or ()):
            raise InvariantError(f"a Sample of status {self.status.value} must not be trained on")
        self._check_mask()

    def _check_mask(self) -> None:
        if not self.provenance or self.loss_mask is None:
            return
        at = 0
        for value, count in self.provenance:
            if value not in _KNOWN:
                raise InvariantError(f"Sample.provenance holds {value!r}; it must be one of {sorted(_KNOWN)}")
            never = value in _NEVER or (value == Provenance.DEMONSTRATION and not self.allow_demonstration)
            if never and any(self.loss_mask[at : at + count]):
                raise InvariantError(f"Sample has mask 1 on a token of provenance {Provenance(value).name}")
            at += count


def to_samples(
    trajectory: Trajectory,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    demonstrations: bool = False,
    pixels: Pixels | None = None,
) -> list[Sample]:
    """One Sample per segment that has a sampled (or, with `demonstrations`, demonstrated) token.

    `pixels` (`Renderer.pixels`) makes `multimodal_train_inputs` of images.

    FAILED and ABORTED trajectories give none: a failure is never turned into reward 0.
    """
    if trajectory.status in (Status.FAILED, Status.ABORTED):
        return []
    made = [_segment_sample(trajectory, i, decode, demonstrations) for i in range(len(trajectory.segments))]
    kept = [s for s in made if any(s.loss_mask or ())]
    for s in kept:
        if s.multimodal_inputs and pixels:
            s.multimodal_train_inputs = pixels(s.multimodal_inputs["images"])
    return kept


def _segment_sample(
    t: Trajectory, index: int, decode: Callable[[Sequence[int]], str] | None, demonstrations: bool
) -> Sample:
    spans = t.segments[index].spans
    first = next((i for i, s in enumerate(spans) if s.provenance is not Provenance.PROMPT), len(spans))
    prompt, response = spans[:first], spans[first:]
    ids = list(chain.from_iterable(s.ids for s in response))
    trained = {Provenance.SAMPLED, *([Provenance.DEMONSTRATION] if demonstrations else [])}
    return Sample(
        group_index=t.group_index,
        index=t.index,
        prompt=t.task.prompt if isinstance(t.task.prompt, str) else t.task.messages,
        multimodal_inputs={"images": [p.image for p in t.segments[index].images]} if t.segments[index].images else None,
        tokens=[*chain.from_iterable(s.ids for s in prompt), *ids],
        response=decode(ids) if decode else "",
        response_length=len(ids),
        label=t.label,
        reward=t.score,
        loss_mask=_expand(response, lambda s: int(s.provenance in trained)),
        rollout_log_probs=list(chain.from_iterable(s.log_probs or (0.0,) * len(s.ids) for s in response)),
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
        allow_demonstration=demonstrations,
    )


def _expand(spans: Iterable[Span], value: Callable[[Span], int]) -> list[int]:
    return [v for s in spans for v in (value(s),) * len(s.ids)]


def _runs(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Merge neighbours of equal value."""
    out: Runs = []
    for value, count in pairs:
        if out and out[-1][0] == value:
            out[-1] = (value, out[-1][1] + count)
        else:
            out.append((value, count))
    return out
