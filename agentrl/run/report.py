"""The report of a run: a line per rollout and evaluation, the trackers, the summary, the curve and the table of causes."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from agentrl.config import Config
from agentrl.core.atomic_write import new_file
from agentrl.rollout.failures import CauseTable
from agentrl.run.telemetry import Telemetry, open_telemetry
from agentrl.run.trackers import Tracker, open_trackers
from agentrl.types import Group

Evaluations = list[tuple[int, dict[str, float]]]
"""(rollouts done, metrics) of each evaluation of a set"""
COUNTS = ("rollouts", "steps", "episodes", "turns", "exactness_violations")
"""Totals of a run that are integers; `steps` are optimizer steps."""
LEGEND = (
    "in each rollout's line: reward (mean score), turns (mean), tokens (mean sampled / mean in all), rows (trained), grad (norm of the "
    "gradient), |engine-trainer| (largest difference of a token's log-prob), seconds of each stage; rollout N is step N - 1 in the files"
)
"""Explains the lines of rollouts; shown once."""
SIZES = ("questions", "episodes")
"""Evaluation metrics that are counts, besides `abstained/…`; the others are scores."""


class Report:
    """Collects the metrics of a run. Checkpoints hold its state, so the summary of a resumed run covers the whole run."""

    def __init__(self, eval_score: str = "reward") -> None:
        """`eval_score` names the score that the closing summary and the curve show. For evaluations without it they show the reward."""
        self.eval_score = eval_score
        self.rewards: list[tuple[int, float]] = []
        self.evals: dict[str, Evaluations] = {}
        self.causes = CauseTable()
        self.totals: dict[str, float] = dict.fromkeys(
            (*COUNTS, "rollout_s", "train_s", "sync_s", "eval_s", "wall_s"), 0.0
        )
        self._started = time.perf_counter()
        self._last: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})
        self._rates: Mapping[str, float] = {}
        self._last_causes = CauseTable()
        self._trackers: list[Tracker] = []
        self.telemetry: Telemetry | None = None
        """what sends spans and metrics to OpenTelemetry; None: nobody receives them"""
        self._legend_shown = False

    def open(self, folder: Path, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Open the trackers. They get the `rows` of metrics.jsonl again, so they hold no rollout that was cut off."""
        self._trackers = open_trackers(folder, config)
        for row in rows:
            self._track(row["step"], {k: v for k, v in row.items() if k != "step"})
        self.telemetry = open_telemetry(folder, config)
        if self.telemetry is not None:  # it sends what happens from now on
            self._trackers.append(self.telemetry)

    def add_episodes(self, groups: Sequence[Group], causes: CauseTable, violations: int) -> None:
        """Add the episodes, causes and exactness violations of a rollout or an evaluation."""
        self._last_causes = causes
        self.causes.merge(causes)
        self.totals["episodes"] += sum(len(g.trajectories) for g in groups)
        self.totals["exactness_violations"] += violations
        self.totals["turns"] += sum(len(t.turns) for g in groups for t in g.trajectories)

    def add_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Add the metrics of a finished step of the loop. `rates` are what else was measured; TensorBoard and the step's line show them."""
        if "reward" in metrics:
            self.rewards.append((step, metrics["reward"]))
        self.totals["rollouts"] += 1
        self.totals["steps"] += metrics.get("train/steps", 0)
        for name, value in seconds.items():
            self.totals[name] += value
        self._last = (metrics, seconds)
        self._rates = rates
        self._track(step, {**metrics, **rates})

    def add_evaluation(self, step: int, name: str, metrics: Mapping[str, float], seconds: float) -> None:
        """Add the metrics of an evaluation set."""
        self.evals.setdefault(name, []).append((step, {k.removeprefix(f"eval/{name}/"): v for k, v in metrics.items()}))
        self.totals["eval_s"] += seconds
        self._track(step, metrics)

    def step_line(self, step: int) -> str:
        """The line of the step just added, after a legend at the first; the table of causes follows if it needs attention."""
        metrics, seconds = self._last
        parts = [
            f"rollout {step + 1:>4}",
            f"reward {metrics.get('reward', float('nan')):.3f}",
            f"turns {metrics.get('turns', 0):.2f}",
            f"tokens {metrics.get('sampled_tokens', 0):.0f}/{metrics.get('total_tokens', 0):.0f}",
            f"rows {metrics['train/rows']:.0f}",
        ]
        if "train/grad_norm" in metrics:
            parts += [
                f"grad {metrics['train/grad_norm']:.2f}",
                f"|engine-trainer| {metrics.get('train/rollout_log_prob_diff_max', 0):.1e}",
            ]
        parts += [f"{name[:-2]} {value:.1f} s" for name, value in seconds.items()]
        if "train/tokens_per_s" in self._rates:
            parts.append(f"{self._rates['train/tokens_per_s']:.0f} tokens/s")
        if "train/mfu" in self._rates:
            parts.append(f"MFU {self._rates['train/mfu']:.2f}")
        if metrics["failures"]:
            parts.append(f"FAILURES {metrics['failures']:.0f}")
        lines = [] if self._legend_shown else [LEGEND]
        self._legend_shown = True
        lines.append(self._with_causes("  ".join(parts)))
        if "train/steps" in metrics and not metrics["train/rows"]:
            lines.append(f"    {_why_nothing_trained(metrics)}")
        return "\n".join(lines)

    def eval_line(self, step: int, name: str, seconds: float) -> str:
        """The line of the evaluation just added."""
        _, metrics = self.evals[name][-1]
        scores = "  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if _is_score(k))
        size = f"{metrics.get('questions', 0):.0f} questions, {metrics.get('episodes', 0):.0f} episodes"
        return self._with_causes(f"eval {name} after {step} rollouts: {scores}  ({size}, {seconds:.1f} s)")

    def _with_causes(self, line: str) -> str:
        causes = self._last_causes
        return line if not causes.needs_attention else f"{line}\n{textwrap.indent(str(causes), '    ')}"

    def summary(self, config: Config) -> dict[str, Any]:
        """The contents of summary.json."""
        summary: dict[str, Any] = {
            "env": config.env.env,
            "model": config.model.hf_checkpoint,
            "seed": config.run.seed,
        }
        for name, rows in self.evals.items():
            prefix = "eval" if name == "test" or len(self.evals) == 1 else f"eval_{name}"
            (_, first), (_, last) = rows[0], rows[-1]
            for key in filter(_is_score, first):
                summary[f"{prefix}_{key}_first"], summary[f"{prefix}_{key}_last"] = first[key], last.get(key)
            summary |= {f"{prefix}_{key}": int(last.get(key, 0)) for key in SIZES}
        if self.rewards:
            window = max(1, min(5, len(self.rewards) // 2))
            means = [reward for _, reward in self.rewards]
            summary |= {
                "train_reward_first": sum(means[:window]) / window,
                "train_reward_last": sum(means[-window:]) / window,
                "train_reward_window": window,
            }
        totals = {**self.totals, "wall_s": self._wall()}
        summary |= {k: int(v) if k in COUNTS else round(v, 2) for k, v in totals.items()}
        return summary | {
            "stop_reasons": self.causes.by_reason(),
            "failures": self.causes.failures,
            "retried": self.causes.retried,
            "dropped_groups": self.causes.dropped_groups,
            "causes": [dict(zip(("stop_reason", "cause", "count"), r, strict=True)) for r in self.causes.rows()],
        }

    def finish(self, folder: Path, config: Config) -> None:
        """Write summary.json and draw curve.png."""
        with new_file(folder / "summary.json") as file:
            file.write_bytes(orjson.dumps(self.summary(config), option=orjson.OPT_INDENT_2))
        draw_curve(folder / "curve.png", self.rewards, self.evals, config, self.eval_score)

    def closing_summary(self, folder: Path) -> str:
        """The table of causes, the evaluations, the reward curve as characters, and where the run folder is."""
        lines = ["", str(self.causes), ""]
        for name, rows in self.evals.items():
            key = self.eval_score if self.eval_score in rows[0][1] else "reward"
            points = "  ".join(f"{step}: {metrics[key]:.3f}" for step, metrics in rows if key in metrics)
            lines.append(f"eval {name} {key} by rollout  {points}")
        if self.rewards:
            rewards = [reward for _, reward in self.rewards]
            lines.append(f"training reward  {sparkline(rewards)}  {rewards[0]:.3f} -> {rewards[-1]:.3f}")
        lines.append(
            f"{self.totals['episodes']:.0f} episodes, {self.totals['exactness_violations']:.0f} exactness violations; curve and summary in {folder}"
        )
        return "\n".join(lines)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {
            "rewards": self.rewards,
            "evals": self.evals,
            "causes": self.causes.rows(),
            "retried": self.causes.retried,
            "dropped_groups": self.causes.dropped_groups,
            "totals": {**self.totals, "wall_s": self._wall()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.rewards = [(step, reward) for step, reward in state["rewards"]]
        self.evals = {name: [(step, metrics) for step, metrics in rows] for name, rows in state["evals"].items()}
        self.causes = CauseTable()
        for reason, cause, count in state["causes"]:
            self.causes.counts[reason, cause] = count
        self.causes.retried, self.causes.dropped_groups = state["retried"], state["dropped_groups"]
        self.totals |= state["totals"]

    def _wall(self) -> float:
        return self.totals["wall_s"] + time.perf_counter() - self._started

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve as one line of block characters."""
    blocks = "▁▂▃▄▅▆▇█"
    columns = min(width, len(values))
    sampled = [values[i * len(values) // columns] for i in range(columns)]
    low, high = min(sampled), max(sampled)
    return "".join(blocks[int((v - low) / (high - low) * 7.999)] if high > low else blocks[0] for v in sampled)


def draw_curve(
    path: Path,
    rewards: Sequence[tuple[int, float]],
    evals: Mapping[str, Evaluations],
    config: Config,
    eval_score: str,
) -> None:
    """Draw training reward and evaluation scores over rollouts as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        rollouts, means = [step + 1 for step, _ in rewards], [reward for _, reward in rewards]
        axes.plot(rollouts, means, color="#9db4c8", linewidth=1, label="training reward (temperature 1)")
    for name, rows in evals.items():
        key = eval_score if any(eval_score in metrics for _, metrics in rows) else "reward"
        points = [(step, metrics[key]) for step, metrics in rows if key in metrics]
        rollouts, scores = [step for step, _ in points], [score for _, score in points]
        axes.plot(rollouts, scores, marker="o", linewidth=2, label=f"held-out {key} ({name})")
    axes.set_xlabel("rollouts")
    axes.set_ylabel("reward")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{config.label}, {config.train.advantage_estimator}, seed {config.run.seed}")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _why_nothing_trained(metrics: Mapping[str, float]) -> str:
    if not metrics.get("episodes"):
        return "nothing was trained: no group is complete"
    if metrics.get("flat_groups") == 1:
        return (
            "nothing was trained: in every group all episodes scored the same, so no episode is better than another; "
            "the tasks are too easy or too hard, or the reward does not tell answers apart"
        )
    return "nothing was trained: the episodes whose score differs from their group's were cut by a limit and are masked"


def _is_score(name: str) -> bool:
    return name not in SIZES and not name.startswith("abstained/")
