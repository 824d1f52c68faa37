"""Optimizer steps to the optimum of every estimator, on a bandit and on a two-turn task of credit. Writes benchmarks/results/estimators_cpu.json.

python benchmarks/estimators.py [--seeds 0 1 2 3 4] [--only grpo …] [--out FILE]

The policy is a table of logits: the distribution of a token given the token before. Episodes are `Trajectory` objects; advantages, rows, ratios
and losses are those of `agentrl train` (`train.steps.prepare`, `token_loss`), the optimizer is Adam. curves of search_r1: estimator_curves.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from result_record import result_record

from agentrl.config import build_config
from agentrl.train.base import LossConfig, Row
from agentrl.train.distillation import Teachers
from agentrl.train.megatron.loss import token_loss
from agentrl.train.megatron.micro_batch import collate
from agentrl.train.steps import Models, critic_loss, loss_config, prepare, with_sequence_ratios
from agentrl.types import Action, Group, Provenance, Segment, Span, StopReason, Task, Trajectory, Turn

START, ARMS, LR, CRITIC_LR = 0, 8, 0.1, 0.1
NEAR = 0.95
"""share of the optimum at which the steps are counted"""
LIMIT = 500
"""optimizer steps at most"""
GROUPS, MEMBERS, STEPS = 2, 8, 2
"""groups in a rollout, episodes in a group, optimizer steps per rollout"""


@dataclass(frozen=True)
class Problem:
    """A task of one or two turns. A turn is one token: the arm; the observation after the first turn is a token that names the arm."""

    name: str
    first: np.ndarray
    """[ARMS]: the mean reward of the first turn's arms"""
    second: np.ndarray | None
    """[ARMS, ARMS]: the reward of the second turn's arms, by the first's; None: one turn"""
    noise: float
    """standard deviation of the first turn's reward"""

    @property
    def turns(self) -> int:
        """One or two."""
        return 1 if self.second is None else 2

    @property
    def totals(self) -> np.ndarray:
        """[ARMS, …]: the mean reward of an episode."""
        return self.first if self.second is None else self.first[:, None] + self.second

    @property
    def optimum(self) -> float:
        """The largest mean reward."""
        return float(self.totals.max())

    def expected(self, policy: np.ndarray) -> float:
        """The expected reward of a table of probabilities."""
        first = policy[START, 1 : 1 + ARMS]
        if self.turns == 1:
            return float(first @ self.totals)
        seconds = policy[1 + ARMS : 1 + 2 * ARMS, 1 : 1 + ARMS]
        return float((first[:, None] * seconds * self.totals).sum())


def problems() -> list[Problem]:
    """Two tasks whose optimum is 1.

    bandit: eight arms with means from 0 to 0.6, and 1, and noise. credit: eight doors, four of which cost 1, with noise as large; behind each door
    another one of eight keys pays 1. The noise of the door is in the reward of the first turn, and the second turn did not cause it.
    """
    keys = np.eye(ARMS)[(np.arange(ARMS) * 3) % ARMS]
    return [
        Problem("bandit", np.append(np.linspace(0.0, 0.6, ARMS - 1), 1.0), None, 0.3),
        Problem("credit", -1.0 * (np.arange(ARMS) % 2), keys, 1.0),
    ]


class TableTrainer:
    """The policy, or with `critic` a table of values; the parts of `Trainer` and `Critic` that preparation and steps use."""

    def __init__(self, *, critic: bool = False) -> None:
        size = 1 + 2 * ARMS
        self.table = torch.zeros(size if critic else (size, 1 + ARMS), dtype=torch.float32, requires_grad=True)
        self.critic = critic
        self.optimizer = torch.optim.Adam([self.table], lr=CRITIC_LR if critic else LR)

    def outputs(self, row: Row) -> torch.Tensor:
        """The log-probs of a row's trained tokens; a critic's values."""
        at = torch.from_numpy(np.flatnonzero(row.weights))
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        if self.critic:
            return self.table[ids[at - 1]]
        return self.distribution().log()[ids[at - 1], ids[at]]

    def distribution(self) -> torch.Tensor:
        """Probabilities by the token before; only arms are sampled."""
        arms = self.table[:, 1:].softmax(-1)
        return torch.cat([torch.zeros(len(arms), 1), arms], dim=1)

    def log_probs(self, rows: Sequence[Row], *, reference: bool = False, trained_only: bool = False) -> list[Any]:
        """See `Trainer.log_probs`; values of a critic."""
        found = []
        with torch.no_grad():
            for row in rows:
                values = np.zeros(len(row.tokens), np.float32)
                values[row.weights != 0] = self.outputs(row).numpy()
                found.append(values)
        return found

    values = log_probs

    def step(self, rows: Sequence[Row], loss: LossConfig) -> None:
        """One optimizer step."""
        data = collate(list(rows), trained_only=True).data
        now = torch.cat([self.outputs(row) for row in rows])
        total, _, _ = token_loss(now, torch.zeros_like(now), data, loss)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()


class OptimalTeacher:
    """Takes the best arms with a probability of 0.99 or more."""

    def __init__(self, problem: Problem) -> None:
        logits = np.zeros((1 + 2 * ARMS, 1 + ARMS))
        logits[START, 1:][problem.first == problem.first.max()] = 7.0
        if problem.second is not None:
            logits[np.arange(1 + ARMS, 1 + 2 * ARMS), 1 + problem.second.argmax(1)] = 7.0
        self.log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    async def score(self, ids: Sequence[int]) -> list[float]:
        """See `Teacher.score`; 0 for tokens that are not sampled."""
        return [float(self.log_probs[a, b]) if b <= ARMS else 0.0 for a, b in pairwise(ids)]

    async def close(self) -> None:
        """Nothing is held."""


class Player:
    """Samples episodes, and their branches."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.random, self.count = problem, np.random.default_rng(seed), 0

    def episode(self, table: np.ndarray, group: int, parent: Trajectory | None = None, number: int = 0) -> Trajectory:
        """An episode, or with `parent` another second turn of it."""
        spans, turns = [Span(Provenance.PROMPT, (START,))], []
        before, arms = START, []
        for turn in range(self.problem.turns):
            if parent is not None and turn == 0:
                spans += parent.segments[0].spans[1:3]
                arms, before, turns = [spans[1].ids[0] - 1], spans[2].ids[0], [parent.turns[0]]
                continue
            arm = int(self.random.choice(1 + ARMS, p=table[before]))
            said = float(np.log(table[before, arm]))
            arms.append(arm - 1)
            at = len([i for s in spans for i in s.ids])
            spans.append(Span(Provenance.SAMPLED, (arm,), turn, (said,), policy_version=0))
            turns.append(Turn(turn, 0, at, Action("x"), reward=self.reward(arms), state_key=str(arm)))
            if turn + 1 < self.problem.turns:
                before = ARMS + arm
                spans.append(Span(Provenance.OBSERVATION, (before,), turn))
        index = self.count if parent is None else parent.index
        self.count += parent is None
        name = f"{index}-0" if parent is None else f"branch/1.{number}/{index}-0"
        return Trajectory(
            episode_id=name,
            group_index=group,
            index=index,
            attempt=0,
            task=Task("t", "x"),
            env="table",
            segments=(Segment(tuple(spans)),),
            turns=tuple(turns),
            stop_reason=StopReason.TERMINATED,
            parent=None if parent is None else parent.episode_id,
            branch_turn=0 if parent is None else 1,
        )

    def reward(self, arms: Sequence[int]) -> float:
        """The reward of the last turn."""
        if len(arms) == 2:
            assert self.problem.second is not None
            return float(self.problem.second[tuple(arms)])
        return float(self.problem.first[arms[0]] + self.problem.noise * self.random.standard_normal())

    def rollout(self, table: np.ndarray, branches: int) -> list[Group]:
        """Groups of one task. With branches half as many episodes: about the same number of sampled tokens."""
        groups = []
        for group in range(GROUPS):
            members = [self.episode(table, group) for _ in range(MEMBERS // 2 if branches else MEMBERS)]
            members += [self.episode(table, group, root, n) for root in members for n in range(branches)]
            groups.append(Group(group, Task("t", "x"), tuple(members)))
        return groups


ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "gspo": {},
    "cispo": {},
    "ppo": {},
    "gigpo": {},
    "branch_rloo": {"branch_at": ["1"], "branch_samples": 2},
    "distillation": {"opd_teacher": ["the best arms"]},
}


def steps_to_optimum(problem: Problem, name: str, seed: int) -> tuple[int | None, int]:
    """Optimizer steps until the expected reward is near the optimum (None: not within the limit), and the tokens sampled until then."""
    torch.manual_seed(seed)
    config = build_config({"advantage_estimator": name, "num_steps_per_rollout": STEPS, **ESTIMATORS[name]})
    policy, player = TableTrainer(), Player(problem, seed)
    critic = TableTrainer(critic=True) if name == "ppo" else None
    teachers = Teachers({"t": OptimalTeacher(problem)}) if name == "distillation" else None
    models: Any = Models(trainer=policy, critic=critic, teachers=teachers)  # type: ignore[arg-type]
    loss, steps, tokens = loss_config(config.train), 0, 0
    while steps < LIMIT:
        table = policy.distribution().detach().double().numpy()
        table /= table.sum(-1, keepdims=True)
        groups = player.rollout(table, config.rollout.branch_samples if config.rollout.branch_at else 0)
        tokens += sum(len(t.turns) - t.branch_turn for g in groups for t in g.trajectories)
        batches = asyncio.run(prepare(groups, config, models))
        for rows in batches.critic:
            assert critic is not None
            critic.step(rows, critic_loss(config.train))
        for number, rows in enumerate(batches.policy):
            if number and loss.policy_loss == "sequence":
                rows = asyncio.run(with_sequence_ratios(models.trainer, rows))
            policy.step(rows, loss)
        steps += STEPS
        if problem.expected(policy.distribution().detach().double().numpy()) >= NEAR * problem.optimum:
            return steps, tokens
    return None, tokens


def measure(problem: Problem, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The steps of all seeds."""
    started = time.perf_counter()
    found = [steps_to_optimum(problem, name, seed) for seed in seeds]
    steps = [s for s, _ in found if s is not None]
    return {
        "estimator": name,
        "task": problem.name,
        "steps": [s for s, _ in found],
        "reached": len(steps),
        "median_steps": median(s if s is not None else LIMIT for s, _ in found),
        "mean_tokens": fmean(tokens for _, tokens in found),
        "seconds": round(time.perf_counter() - started, 1),
    }


def line(of: Callable[[str], dict[str, Any] | None], name: str) -> str:
    """A row of the table."""
    cells = []
    for task in ("bandit", "credit"):
        made = of(task)
        if made is None:
            cells += ["–", "–"]
            continue
        steps = sorted(made["steps"], key=lambda s: LIMIT if s is None else s)
        low, high = ("> " + str(LIMIT) if s is None else str(s) for s in (steps[0], steps[-1]))
        cells += [f"{made['median_steps']:g} ({low} to {high})", f"{made['mean_tokens']:.0f}"]
    return f"| `{name}` | {' | '.join(cells)} |"


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, as in docs/estimators.md."""
    lines = ["| estimator | bandit: steps | tokens | credit: steps | tokens |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["estimator"] for row in rows):
        by_task = {row["task"]: row for row in rows if row["estimator"] == name}
        lines.append(line(by_task.get, name))
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--only", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "estimators_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for problem in problems():
        for name in args.only:
            if name == "branch_rloo" and problem.turns == 1:
                continue  # a single turn has no branches
            rows.append(measure(problem, name, args.seeds))
            print(json.dumps(rows[-1]), flush=True)
    print(table_of(rows))
    settings = {"lr": LR, "critic_lr": CRITIC_LR, "groups": GROUPS, "members": MEMBERS, "steps_per_rollout": STEPS}
    settings |= {"arms": ARMS, "limit": LIMIT, "near": NEAR, "seeds": args.seeds, "cores": os.cpu_count()}
    record = result_record(
        "share of runs that reach 95 % of the optimum",
        fmean(row["reached"] / len(args.seeds) for row in rows),
        None,
        "python benchmarks/estimators.py",
        settings=settings,
        rows=rows,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
