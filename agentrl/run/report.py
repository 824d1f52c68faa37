"""What a person sees of a run: a line per rollout, a bar within it, TensorBoard, the curve, the summary and the table of causes."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from agentrl.config import Config
from agentrl.rollout.failures import CauseTable
from agentrl.types import Group

COUNTS = ("rollouts", "steps", "episodes", "turns", "exactness_violations")
"""totals of a run that are whole numbers; `steps` are the optimizer's"""
SIZES = ("questions", "episodes")
"""numbers of an evaluation that are no score; nor are those that begin with `abstained/`"""


class Report:
    """Collects a run's numbers. Its state travels with checkpoints, so that a resumed run's summary covers the whole run."""

    def __init__(self, eval_score: str = "reward") -> None:
        """`eval_score`: the evaluation score shown in the closing summary and the curve, where an evaluation has it; else the reward."""
        self.eval_score = eval_score
        self.rewards: list[tuple[int, float]] = []
        self.evals: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.table = CauseTable()
        self.totals: dict[str, float] = dict.fromkeys(
            (*COUNTS, "rollout_s", "train_s", "sync_s", "eval_s", "wall_s"), 0.0
        )
        self._since = time.perf_counter()
        self._last: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})
        self._latest = CauseTable()
        self._board: Any = None

    def open(self, folder: Path, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin, or go on after these rows of metrics: TensorBoard's events are made anew of them, so none is of a rollout that was lost."""
        if config.run.tensorboard:
            from tensorboard.summary import Writer

            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            self._board = Writer(str(folder / "tensorboard"))
            for row in rows:
                self._events(row["step"], {k: v for k, v in row.items() if k != "step"})

    def count(self, groups: Sequence[Group], table: CauseTable, violations: int) -> None:
        """Add the episodes, the causes and the exactness violations of a rollout or an evaluation."""
        self._latest = table
        self.table.merge(table)
        self.totals["episodes"] += sum(len(g.trajectories) for g in groups)
        self.totals["exactness_violations"] += violations
        self.totals["turns"] += sum(len(t.turns) for g in groups for t in g.trajectories)

    def step(self, step: int, row: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Add a finished rollout's numbers."""
        if "reward" in row:
            self.rewards.append((step, row["reward"]))
        self.totals["rollouts"] += 1
        self.totals["steps"] += row.get("train/steps", 0)
        for name, value in seconds.items():
            self.totals[name] += value
        self._last = (row, seconds)
        self._events(step, row)

    def evaluation(self, step: int, name: str, row: Mapping[str, float], seconds: float) -> None:
        """Add an evaluation's numbers."""
        short = {k.removeprefix(f"eval/{name}/"): v for k, v in row.items()}
        self.evals.setdefault(name, []).append((step, short))
        self.totals["eval_s"] += seconds
        self._events(step, row)

    def line(self, step: int) -> str:
        """One line for the rollout just finished, and the table of causes below it if it says more than that episodes terminated."""
        row, seconds = self._last
        parts = [
            f"rollout {step + 1:>4}",
            f"reward {row.get('reward', float('nan')):.3f}",
            f"turns {row.get('turns', 0):.2f}",
        ]
        parts += [
            f"tokens {row.get('sampled_tokens', 0):.0f}/{row.get('total_tokens', 0):.0f}",
            f"rows {row['train/rows']:.0f}",
        ]
        if "train/grad_norm" in row:
            parts += [
                f"grad {row['train/grad_norm']:.2f}",
                f"|engine-trainer| {row.get('train/rollout_log_prob_diff_max', 0):.1e}",
            ]
        parts += [f"{name[:-2]} {value:.1f} s" for name, value in seconds.items()]
        if row["failures"]:
            parts.append(f"FAILURES {row['failures']:.0f}")
        return self._with_causes("  ".join(parts))

    def eval_line(self, step: int, name: str, seconds: float) -> str:
        """The same for the evaluation just finished."""
        _, row = self.evals[name][-1]
        shown = "  ".join(f"{k} {v:.3f}" for k, v in row.items() if _is_score(k))
        size = f"{row.get('questions', 0):.0f} questions, {row.get('episodes', 0):.0f} episodes"
        return self._with_causes(f"eval {name} after {step} rollouts: {shown}  ({size}, {seconds:.1f} s)")

    def _with_causes(self, line: str) -> str:
        return line if self._latest.unremarkable else f"{line}\n{textwrap.indent(str(self._latest), '    ')}"

    def progress(self, total: int, what: str) -> Any:
        """A bar over a rollout's episodes, on terminals only."""
        return tqdm(total=total, desc=what, unit="episode", leave=False, disable=not sys.stderr.isatty())

    def summary(self, config: Config) -> dict[str, Any]:
        """What goes into summary.json."""
        out: dict[str, Any] = {
            "env": config.env.env,
            "model": config.model.hf_checkpoint,
            "seed": config.run.seed,
        }
        for name, rows in self.evals.items():
            prefix = "eval" if name == "test" or len(self.evals) == 1 else f"eval_{name}"
            for key in rows[0][1]:
                if _is_score(key):
                    out[f"{prefix}_{key}_first"], out[f"{prefix}_{key}_last"] = rows[0][1][key], rows[-1][1].get(key)
            out |= {f"{prefix}_{key}": int(rows[-1][1].get(key, 0)) for key in SIZES}
        if self.rewards:
            n = max(1, min(5, len(self.rewards) // 2))
            means = [r for _, r in self.rewards]
            out |= {
                "train_reward_first": sum(means[:n]) / n,
                "train_reward_last": sum(means[-n:]) / n,
                "train_reward_window": n,
            }
        totals = {**self.totals, "wall_s": self._wall()}
        out |= {k: int(v) if k in COUNTS else round(v, 2) for k, v in totals.items()}
        return out | {
            "stop_reasons": self.table.by_reason(),
            "failures": self.table.failures,
            "retried": self.table.retried,
            "dropped_groups": self.table.dropped_groups,
            "causes": [dict(zip(("stop_reason", "cause", "count"), r, strict=True)) for r in self.table.rows()],
        }

    def finish(self, folder: Path, config: Config) -> None:
        """Write summary.json and draw curve.png."""
        (folder / "summary.json").write_bytes(orjson.dumps(self.summary(config), option=orjson.OPT_INDENT_2))
        draw_curve(folder / "curve.png", self.rewards, self.evals, config, self.eval_score)

    def closing(self, folder: Path) -> str:
        """The last words: the table of causes, the curve in characters, where things are."""
        lines = ["", str(self.table), ""]
        for name, rows in self.evals.items():
            key = self.eval_score if self.eval_score in rows[0][1] else "reward"
            points = "  ".join(f"{step}: {row[key]:.3f}" for step, row in rows if key in row)
            lines.append(f"eval {name} {key} by rollout  {points}")
        if self.rewards:
            lines.append(
                f"training reward  {spark([r for _, r in self.rewards])}  {self.rewards[0][1]:.3f} -> {self.rewards[-1][1]:.3f}"
            )
        lines.append(
            f"{self.totals['episodes']:.0f} episodes, {self.totals['exactness_violations']:.0f} exactness violations; curve and summary in {folder}"
        )
        return "\n".join(lines)

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {
            "rewards": self.rewards,
            "evals": self.evals,
            "causes": self.table.rows(),
            "retried": self.table.retried,
            "dropped_groups": self.table.dropped_groups,
            "totals": {**self.totals, "wall_s": self._wall()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.rewards = [(s, r) for s, r in state["rewards"]]
        self.evals = {name: [(s, row) for s, row in rows] for name, rows in state["evals"].items()}
        self.table = CauseTable()
        for reason, cause, n in state["causes"]:
            self.table.counts[reason, cause] = n
        self.table.retried, self.table.dropped_groups = state["retried"], state["dropped_groups"]
        self.totals |= state["totals"]

    def _wall(self) -> float:
        return self.totals["wall_s"] + time.perf_counter() - self._since

    def _events(self, step: int, row: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, step=step)


def spark(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of block characters."""
    blocks = "▁▂▃▄▅▆▇█"
    picked = [values[i * len(values) // min(width, len(values))] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    return "".join(blocks[int((v - low) / (high - low) * 7.999)] if high > low else blocks[0] for v in picked)


def draw_curve(
    path: Path,
    rewards: Sequence[tuple[int, float]],
    evals: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]],
    config: Config,
    eval_score: str,
) -> None:
    """Training reward and held-out scores over rollouts, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        axes.plot(
            [s + 1 for s, _ in rewards],
            [r for _, r in rewards],
            color="#9db4c8",
            linewidth=1,
            label="training reward (temperature 1)",
        )
    for name, rows in evals.items():
        key = eval_score if any(eval_score in row for _, row in rows) else "reward"
        points = [(s, row[key]) for s, row in rows if key in row]
        axes.plot(
            [s for s, _ in points], [v for _, v in points], marker="o", linewidth=2, label=f"held-out {key} ({name})"
        )
    axes.set_xlabel("rollouts")
    axes.set_ylabel("reward")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{config.env.env}, {config.train.advantage_estimator}, seed {config.run.seed}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _is_score(name: str) -> bool:
    return name not in SIZES and not name.startswith("abstained/")
