"""Numbers of a rollout: means over episodes, deterministic ones apart from timings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from agentrl.rollout.failures import CauseTable
from agentrl.train.advantage import EQUAL
from agentrl.types import Group, Status, Trajectory


def rollout_metrics(groups: Sequence[Group], table: CauseTable, violations: int) -> dict[str, float]:
    """Means over the episodes that stand, and counts of the rest; `violations` of exactness are those of every attempt."""
    done = [t for g in groups for t in g.trajectories]
    out: dict[str, float] = {
        "episodes": len(done),
        "failures": table.failures,
        "retried": table.retried,
        "dropped_groups": table.dropped_groups,
        "exactness_violations": violations,
    }
    out |= {f"stop/{reason}": n for reason, n in table.by_reason().items()}
    if not done:
        return out
    out |= {
        "reward": fmean(t.score for t in done),
        "turns": fmean(len(t.turns) for t in done),
        "sampled_tokens": fmean(t.sampled_tokens for t in done),
        "total_tokens": fmean(sum(len(s) for s in t.segments) for t in done),
        "truncated_share": fmean(t.status is Status.TRUNCATED for t in done),
        "flat_groups": fmean(max(s) - min(s) < EQUAL for s in ([t.score for t in g.trajectories] for g in groups)),
        "invalid_turns": fmean(sum(not u.action.valid for u in t.turns) for t in done),
    }
    out |= {f"abstained/{name}": n for name, n in abstentions(done).items()}
    return out | {f"reward/{name}": value for name, value in component_means(done).items()}


def component_means(done: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of every reward component over the episodes in which it did not abstain."""
    values: dict[str, list[float]] = {}
    for t in done:
        for name, value in t.rewards.items():
            values.setdefault(name, [])
            if value is not None:
                values[name].append(value)
    return {name: fmean(v) for name, v in values.items() if v}


def abstentions(done: Sequence[Trajectory]) -> dict[str, float]:
    """In how many episodes a reward component abstained, for those that did."""
    return dict(Counter(name for t in done for name, value in t.rewards.items() if value is None))


def eval_metrics(name: str, groups: Sequence[Group], group_by: Sequence[str] = ()) -> dict[str, float]:
    """avg@k of score and components, pass@k of the score (any of a question's k episodes above 0.5) if k > 1, and the mean score for each
    value of the metadata keys `group_by`.
    """
    done = [t for g in groups for t in g.trajectories]
    if not done:
        return {}
    k = max(len(g.trajectories) for g in groups)
    out = {f"eval/{name}/reward": fmean(t.score for t in done)}
    out |= {f"eval/{name}/questions": float(len(groups)), f"eval/{name}/episodes": float(len(done))}
    out |= {f"eval/{name}/{c}": v for c, v in component_means(done).items()}
    out |= {f"eval/{name}/abstained/{c}": n for c, n in abstentions(done).items()}
    if k > 1:
        out[f"eval/{name}/pass@{k}"] = fmean(any(t.score > 0.5 for t in g.trajectories) for g in groups)
    for key in group_by:
        scores: dict[str, list[float]] = {}
        for t in done:
            if key in t.task.metadata:
                scores.setdefault(str(t.task.metadata[key]), []).append(t.score)
        out |= {f"eval/{name}/reward_{key}{value}": fmean(group) for value, group in sorted(scores.items())}
    return out


def flatten(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a rollout (maxima of *_max)."""
    keys = dict.fromkeys(k for r in rows for k in r)
    return {k: (max if k.endswith("_max") else fmean)([r[k] for r in rows if k in r]) for k in keys}
