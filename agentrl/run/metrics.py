"""Metrics of a rollout, an evaluation and a training step. They are equal in equal runs; timings are kept apart from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agentrl.reward import component_means
from agentrl.rollout.branching import LEFT_RECORD
from agentrl.rollout.failures import CauseTable
from agentrl.train.advantage import EQUAL
from agentrl.train.sample import spec_info
from agentrl.types import FinishReason, Group, Provenance, Status, Trajectory, by_role


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage of a step reports."""

    metrics: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=dict)


def rollout_metrics(groups: Sequence[Group], causes: CauseTable, violations: int) -> dict[str, float]:
    """Means over the episodes of all complete groups, and counts over all attempts.

    Args:
        groups: the groups to train on.
        causes: the stop reasons of all attempts.
        violations: exactness violations in all attempts.
    """
    every = [t for g in groups for t in g.trajectories]
    episodes = [t for t in every if t.parent is None]
    metrics: dict[str, float] = {
        "episodes": len(episodes),
        "failures": causes.failures,
        "retried": causes.retried,
        "dropped_groups": causes.dropped_groups,
        "exactness_violations": violations,
    }
    metrics |= {f"stop/{reason}": count for reason, count in causes.by_reason().items()}
    metrics |= branch_metrics(every, causes)
    if not episodes:
        return metrics
    return metrics | _means(groups)


def branch_metrics(episodes: Sequence[Trajectory], causes: CauseTable) -> dict[str, float]:
    """The number of branches, of the tokens that they sampled themselves, and of those that were refused; {} without branches."""
    branches = [t for t in episodes if t.parent is not None]
    refused = sum(count for (_, cause), count in causes.counts.items() if cause == LEFT_RECORD)
    if not (branches or refused):
        return {}
    own = (s for t in branches for g in t.segments for s in g.spans if s.turn >= t.branch_turn)
    sampled = sum(len(s.ids) for s in own if s.provenance is Provenance.SAMPLED)
    return {"branches": len(branches), "branch_tokens": sampled, "branches_refused": refused}


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the episodes of complete groups, without their branches; a group is flat if these have equal scores too."""
    episodes = [t for g in groups for t in g.trajectories if t.parent is None]
    metrics: dict[str, float] = {
        "reward": _mean_score(episodes),
        "turns": fmean(len(t.turns) for t in episodes),
        "sampled_tokens": fmean(t.sampled_tokens for t in episodes),
        "total_tokens": fmean(sum(len(s) for s in t.segments) for t in episodes),
        "truncated_share": fmean(t.status is Status.TRUNCATED for t in episodes),
        "flat_groups": fmean(
            max(s) - min(s) < EQUAL
            for s in ([t.score for t in part] for g in groups for part in by_role(g.trajectories))
        ),
        "invalid_turns": fmean(
            sum(not turn.action.valid for turn in t.turns if turn.summary is None) for t in episodes
        ),
    }
    metrics |= role_rewards(episodes)
    metrics |= speculation_metrics(episodes)
    metrics |= summary_metrics(episodes)
    metrics |= {f"abstained/{name}": count for name, count in abstentions(episodes).items()}
    return metrics | {f"reward/{name}": mean for name, mean in component_means(episodes).items()}


def speculation_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Share of draft tokens that were accepted, and tokens per verification; {} if the engine did not speculate."""
    totals: Counter[str] = Counter()
    for t in episodes:
        spans = [span for segment in t.segments for span in segment.spans]
        totals.update(spec_info(t.turns, spans))
    if not totals["spec_verify_ct"]:
        return {}
    accepted = totals["spec_accept_token_num"] / max(totals["spec_draft_token_num"], 1)
    return {
        "spec_accept_rate": accepted,
        "spec_accept_length": totals["completion_token_num"] / totals["spec_verify_ct"],
    }


def summary_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The number of summaries that the policy wrote of its context, of their tokens, and of those with a flaw; {} without summaries."""
    turns = [(t, turn) for t in episodes for turn in t.turns if turn.summary is not None]
    if not turns:
        return {}
    flaws = Counter(error.kind for _, turn in turns for error in turn.action.errors)
    return {
        "summaries": len(turns),
        "summary_tokens": sum(
            len(s.ids)
            for t, turn in turns
            for s in t.segments[turn.segment].spans
            if s.turn == turn.index and s.provenance is Provenance.SAMPLED
        ),
        "summaries_cut": sum(turn.action.finish_reason is FinishReason.LENGTH for _, turn in turns),
        "summaries_empty": flaws["empty"],
        "summaries_with_calls": flaws["call"],
    }


def metrics_by_env(groups: Sequence[Group]) -> dict[str, float]:
    """The means of each environment, as `ENV/reward` …, and `ENV/groups`, in a run of several."""
    by_env: dict[str, list[Group]] = {}
    for group in groups:
        by_env.setdefault(group.trajectories[0].env, []).append(group)
    metrics: dict[str, float] = {}
    for env, members in sorted(by_env.items()):
        means = {"groups": len(members)} | _means(members)
        metrics |= {f"{env}/{name}": value for name, value in means.items()}
    return metrics


def role_rewards(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The mean score of each role that the policy played, as `role/ROLE/reward`; {} without roles."""
    sides = [part for part in by_role(episodes) if part[0].role]
    return {f"role/{part[0].role}/reward": _mean_score(part) for part in sides}


def abstentions(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The number of episodes in which a reward component abstained, for each component that did."""
    return dict(Counter(name for t in episodes for name, value in t.rewards.items() if value is None))


def eval_metrics(name: str, groups: Sequence[Group], group_by: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of an evaluation set: avg@k of score and components, and pass@k of the score if k > 1.

    A question passes if any of its k episodes scores above 0.5.

    Args:
        name: the set, as in the metrics' names.
        groups: the k episodes of each question.
        group_by: metadata keys; for each of their values the mean score is reported too.
    """
    episodes = [t for g in groups for t in g.trajectories]
    if not episodes:
        return {}
    k = max(len(g.trajectories) for g in groups)
    metrics = {"reward": _mean_score(episodes)}
    metrics |= {"questions": float(len(groups)), "episodes": float(len(episodes))}
    metrics |= role_rewards(episodes)
    metrics |= component_means(episodes)
    metrics |= {f"abstained/{component}": count for component, count in abstentions(episodes).items()}
    if k > 1:
        metrics[f"pass@{k}"] = fmean(any(t.score > 0.5 for t in g.trajectories) for g in groups)
    for key in group_by:
        scores: dict[str, list[float]] = {}
        for t in episodes:
            if key in t.task.metadata:
                scores.setdefault(str(t.task.metadata[key]), []).append(t.score)
        metrics |= {f"reward_{key}{value}": fmean(group) for value, group in sorted(scores.items())}
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def _mean_score(episodes: Sequence[Trajectory]) -> float:
    """Mean score of the episodes that were played; 0 if there is none."""
    scores = [t.score for t in episodes if t.played]
    return fmean(scores) if scores else 0.0


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a rollout; of metrics named `*_max` the maximum."""
    keys = dict.fromkeys(k for metrics in steps for k in metrics)
    return {k: (max if k.endswith("_max") else fmean)([m[k] for m in steps if k in m]) for k in keys}
