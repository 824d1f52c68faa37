"""A policy that is a table of bigrams, random rollouts for it, and the trainer of that policy: small enough to write every objective out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from doubles import OBSERVATION, PROMPT, SAMPLED, trajectory
from hypothesis import strategies as st

from agentrl.config import build_config
from agentrl.train.base import LossConfig, Row
from agentrl.train.megatron.loss import token_loss
from agentrl.train.megatron.micro_batch import collate
from agentrl.train.steps import Batches, Models, loss_config, prepare, with_sequence_ratios
from agentrl.types import Action, Group, Span, StopReason, Task, Trajectory, Turn

VOCAB = 7


@dataclass
class Bigram:
    """Tables of logits by previous token: the current policy, the one before the step, the reference, the engine's; and a critic."""

    now: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    engine: torch.Tensor
    value: torch.Tensor

    @classmethod
    def random(cls, seed: int, spread: float = 0.3) -> Bigram:
        made = torch.Generator().manual_seed(seed)
        base = torch.randn(VOCAB, VOCAB, generator=made, dtype=torch.float64)
        near = [base + spread * torch.randn(VOCAB, VOCAB, generator=made, dtype=torch.float64) for _ in range(3)]
        value = torch.randn(VOCAB, generator=made, dtype=torch.float64)
        return cls(base.requires_grad_(), near[0], near[1], near[0] + 0.2 * (near[2] - base.detach()), value)


def log_probs(table: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Of tokens[1:], each after the one before; 0 for the first."""
    ids = torch.as_tensor(np.asarray(tokens, np.int64))
    picked = table.log_softmax(-1)[ids[:-1], ids[1:]]
    return torch.cat([picked.new_zeros(1), picked])


class BigramTrainer:
    """The models of a rollout over the tables."""

    def __init__(self, model: Bigram) -> None:
        self.model, self.current = model, False

    def log_probs(self, rows: Sequence[Row], *, reference: bool = False, trained_only: bool = False) -> list[Any]:
        table = self.model.ref if reference else self.model.now if self.current else self.model.old
        with torch.no_grad():
            return [(log_probs(table, r.tokens).numpy() * (r.weights != 0)).astype(np.float32) for r in rows]

    def values(self, rows: Sequence[Row]) -> list[Any]:
        values = self.model.value.numpy()
        return [np.where(r.weights != 0, values[np.roll(r.tokens, 1)], 0.0).astype(np.float32) for r in rows]


def made_batches(
    groups: Sequence[Group], model: Bigram, settings: dict[str, Any], version: int = 0, teachers: Any = None
) -> Batches:
    """The optimizer steps of a rollout. `settings` by name."""
    config = build_config(settings)
    trainer: Any = BigramTrainer(model)
    critic = trainer if config.train.advantage_estimator == "ppo" else None
    return asyncio.run(
        prepare(groups, config, Models(trainer=trainer, critic=critic, teachers=teachers), policy_version=version)
    )


def gradient(rows: Sequence[Row], model: Bigram, loss: LossConfig, splits: int = 1) -> torch.Tensor:
    """The gradient of the current table, summed over micro-batches."""
    if loss.policy_loss == "sequence" and rows[0].old_log_probs is not None:
        trainer: Any = BigramTrainer(model)
        trainer.current = True
        rows = asyncio.run(with_sequence_ratios(trainer, rows))
    model.now.grad = None
    for part in np.array_split(np.arange(len(rows)), splits):
        if len(part):
            some = [rows[i] for i in part]
            batch = collate(some, trained_only=True)
            now = torch.cat([log_probs(model.now, r.tokens)[torch.from_numpy(r.weights != 0)] for r in some])
            probs = torch.cat(
                [
                    model.now.log_softmax(-1)[torch.from_numpy(np.roll(r.tokens, 1).astype(np.int64))][
                        torch.from_numpy(r.weights != 0)
                    ]
                    for r in some
                ]
            )
            entropy = -(probs.exp() * probs).sum(-1)
            total, _, _ = token_loss(now, entropy, batch.data, loss)
            total.backward()
    assert model.now.grad is not None
    return model.now.grad.clone()


def loss_of(settings: dict[str, Any]) -> LossConfig:
    return loss_config(build_config(settings).train)


# -- random rollouts ------------------------------------------------------------------------------------------------------


@st.composite
def rollouts(draw: Any, *, truncated: bool = True, groups: int = 3) -> tuple[list[Group], Bigram]:
    """Ragged groups: episodes of several turns and segments, with turn rewards, states that recur, and some cut by a limit."""
    model = Bigram.random(draw(st.integers(0, 1000)))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    made = []
    for g in range(draw(st.integers(1, groups))):
        members = [
            episode(model, rng, index=10 * g + i, group=g, cut=truncated and rng.random() < 0.2)
            for i in range(draw(st.integers(1, 4)))
        ]
        made.append(Group(g, Task(f"t{g}", "x"), tuple(members)))
    return made, model


def episode(model: Bigram, rng: np.random.Generator, *, index: int, group: int, cut: bool = False) -> Trajectory:
    """A random episode: one to three turns in one or two segments; its tokens have the engine's log-probs."""
    count = int(rng.integers(1, 4))
    split = int(rng.integers(1, 4))
    segments: list[list[Span]] = []
    turns = []
    for turn in range(count):
        if turn in (0, split):
            segments.append([Span(PROMPT, tuple(rng.integers(0, VOCAB, 2).tolist()), turn - 1 if turn else -1)])
        before = [i for s in segments[-1] for i in s.ids][-1]
        ids = tuple(rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist())
        said = log_probs(model.engine, [before, *ids])[1:].tolist()
        segments[-1].append(Span(SAMPLED, ids, turn, tuple(said), policy_version=int(rng.integers(0, 3))))
        if turn < count - 1:
            segments[-1].append(Span(OBSERVATION, tuple(rng.integers(0, VOCAB, 2).tolist()), turn))
        turns.append(
            Turn(
                turn,
                len(segments) - 1,
                1,
                Action("x"),
                reward=float(rng.choice([0.0, 0.0, 0.5, -0.25])),
                state_key=str(rng.choice(["a", "b"])) if rng.random() < 0.8 else None,
            )
        )
    reason = StopReason.MAX_TURNS if cut else StopReason.TERMINATED
    score = float(rng.choice([0.0, 1.0, rng.normal()]))
    return trajectory(segments, index=index, group=group, reason=reason, score=score, turns=turns)


def tree():
    """Two episodes of three turns; the first has two branches from turn 1 and one from turn 2."""
    rng, model = np.random.default_rng(1), Bigram.random(1)

    def three_turns(index, score, **more):
        while True:
            t = episode(model, rng, index=index, group=0)
            if len(t.turns) == 3 and len(t.segments) == 1:
                bare = tuple(replace(turn, reward=0.0) for turn in t.turns)
                return replace(t, turns=bare, rewards={"r": score}, **more)

    def branch(name, index, score, turn):
        return replace(three_turns(index, score), episode_id=name, parent="0-0", branch_turn=turn)

    members = [
        three_turns(0, 1.0),
        three_turns(1, 0.5),
        branch("b1", 0, 0.0, 1),
        branch("b2", 0, 2.0, 1),
        branch("c1", 0, 4.0, 2),
    ]
    return [Group(0, Task("x", "x"), tuple(members))]
