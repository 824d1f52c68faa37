"""What an advantage estimator is: a function of `Episodes` that returns one advantage for each trained token.

Where a paper speaks of a sequence, it is the episode: the trained tokens of all its segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.core.registry import Registry
from agentrl.errors import ConfigError, ContractError

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Need = Literal["group", "critic", "state_keys", "branches", "teacher"]
PolicyLoss = Literal["clip", "sequence", "cispo"]
Normalisation = Literal["setting", "constant", "token", "sequence"]

EQUAL = 1e-6
"""Scores that differ by less are equal. A group of equal scores has advantage 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings that estimators read."""

    gamma: float = 1.0
    """discount per token; of gigpo, per turn"""
    lambd: float = 1.0
    """λ of generalised advantage estimation"""
    step_weight: float = 1.0
    """weight ω of gigpo's turn-level advantage"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The E episodes of a rollout that are compared, and their T trained tokens in order of episodes, segments and positions."""

    scores: Doubles
    """[E] scores, with the KL penalty and the overlong penalty, if any"""
    groups: Ints
    """[E] index of the group"""
    trained: NDArray[np.bool_]
    """[E] False: in the baseline of its group, but not trained on"""
    episode: Ints
    """[T] the token's episode, an index into the arrays of size E; ascending"""
    turn: Ints
    """[T] the turn that sampled the token"""
    rewards: Doubles
    """[T] rewards of single tokens, which add up to the score: a turn's reward and the reward of the episode lie on the last token of the
    turn and of the episode"""
    state_keys: tuple[tuple[str | None, ...], ...]
    """for each episode and turn, the key of the environment's state before the turn; None: unknown"""
    parents: Ints
    """[E] the episode that this one branched from; -1: none. A branch holds only the tokens from its own first turn on"""
    branch_turns: Ints
    """[E] first turn of a branch; 0 if it has no parent"""
    steps: tuple[tuple[int, ...], ...] = ()
    """for each episode and turn, the number of the environment's step: a summary belongs to that of the turn after it; (): each turn is one"""
    values: Doubles | None = None
    """[T] the critic's value of the context before each token; None: no critic"""

    @property
    def trained_tokens(self) -> NDArray[np.bool_]:
        """[T] whether the token's episode is trained on."""
        return self.trained[self.episode]

    @property
    def step(self) -> Ints:
        """[T] the environment's step to which the token belongs."""
        if not self.steps:
            return self.turn
        tokens = zip(self.episode.tolist(), self.turn.tolist(), strict=True)
        return np.array([self.steps[episode][turn] for episode, turn in tokens], np.int64)

    def starts(self) -> list[slice]:
        """The tokens of each episode."""
        bounds = np.searchsorted(self.episode, np.arange(len(self.scores) + 1))
        return [slice(int(a), int(b)) for a, b in pairwise(bounds)]

    def group_members(self) -> list[Ints]:
        """The episodes of each group, in order."""
        return [np.flatnonzero(self.groups == group) for group in dict.fromkeys(self.groups.tolist())]

    def by_group(self, compare: Callable[[Sequence[float]], Sequence[float]]) -> Doubles:
        """[E] values that `compare` returns for the scores of each group; 0 in a group of one or of equal scores."""
        values = np.zeros(len(self.scores))
        for members in self.group_members():
            scores = self.scores[members].tolist()
            if len(scores) > 1 and max(scores) - min(scores) >= EQUAL:
                values[members] = compare(scores)
        return values

    def shares(self) -> Doubles:
        """[E] the share of an episode in its tree, whose shares add up to 1.

        At each branching turn the rest of the parent and the branches have equal shares of what is left.
        """
        shares = np.ones(len(self.scores))
        for parent in np.unique(self.parents[self.parents >= 0]).tolist():
            children = np.flatnonzero(self.parents == parent)
            for turn in np.unique(self.branch_turns[children]).tolist():
                siblings = children[self.branch_turns[children] == turn]
                shares[parent] /= 1 + len(siblings)
                shares[siblings] = shares[parent]
        return shares

    def below(self, parent: int, turn: int) -> Ints:
        """The episodes that hold the parent's tokens of a turn: itself, and its branches at later turns."""
        return np.concatenate([[parent], np.flatnonzero((self.parents == parent) & (self.branch_turns > turn))])

    def over_holders(self, combine: Callable[[Ints], float], values: Doubles) -> Doubles:
        """[T] the episodes' values [E] on their tokens; on tokens that branches share, what `combine` returns for the episodes that hold them."""
        tokens = values[self.episode]
        for parent in np.unique(self.parents[self.parents >= 0]).tolist():
            own = np.flatnonzero(self.episode == parent)
            for turn in np.unique(self.turn[own]).tolist():
                holders = self.below(parent, turn)
                if len(holders) > 1:
                    tokens[own[self.turn[own] == turn]] = combine(holders)
        return tokens

    def on_tokens(self, values: Doubles) -> Doubles:
        """[T] the episodes' values on their tokens. A token that branches share gets the mean over the episodes that hold it, by `shares`."""
        shares = self.shares()
        return self.over_holders(lambda holders: float(np.average(values[holders], weights=shares[holders])), values)

    def token_shares(self, per_episode: Doubles) -> Doubles:
        """[T] the sum of shares × per_episode [E] over the episodes that hold a token: what independent rows of whole episodes would add up to."""
        terms = self.shares() * per_episode
        return self.over_holders(lambda holders: float(terms[holders].sum()), terms)

    def whole_lengths(self) -> Doubles:
        """[E] trained tokens of each episode; of a branch, with those of its parent that it repeats."""
        lengths = np.bincount(self.episode, minlength=len(self.scores)).astype(np.float64)
        whole = lengths.copy()
        for branch in np.flatnonzero(self.parents >= 0).tolist():
            whole[branch] += np.sum((self.episode == self.parents[branch]) & (self.turn < self.branch_turns[branch]))
        return whole


Compute = Callable[[Episodes, Options], Doubles]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A registered estimator, made by the decorator `estimator`."""

    name: str
    compute: Compute
    needs: frozenset[str]
    policy_loss: PolicyLoss
    normalisation: Normalisation

    def __call__(self, episodes: Episodes, options: Options | None = None) -> Doubles:
        """The advantages [T].

        Raises:
            ConfigError: the episodes lack values of a critic.
            ContractError: the function returned another shape, or values that are not finite.
        """
        if "critic" in self.needs and episodes.values is None:
            raise ConfigError(f"the estimator {self.name!r} needs the values of a critic, and there are none")
        with np.errstate(over="ignore", invalid="ignore"):
            advantages = np.asarray(self.compute(episodes, options or Options()), np.float64)
        if advantages.shape != episodes.episode.shape:
            raise ContractError(
                f"estimator {self.name!r} returned shape {advantages.shape}; expected one advantage per token, {episodes.episode.shape}"
            )
        if not np.isfinite(advantages).all():
            raise ContractError(f"estimator {self.name!r} returned an advantage that is not finite")
        return advantages


def _only_estimator(module: ModuleType) -> Any:
    members = [value for value in vars(module).values() if isinstance(value, Estimator)]
    return members[0] if len(members) == 1 else None


_HERE = "agentrl.train.estimators"
ESTIMATORS = Registry(
    "estimator",
    {
        "grpo": f"{_HERE}.group:grpo",
        "dr_grpo": f"{_HERE}.group:dr_grpo",
        "rloo": f"{_HERE}.group:rloo",
        "gspo": f"{_HERE}.group:gspo",
        "cispo": f"{_HERE}.group:cispo",
        "reinforce_plus_plus": f"{_HERE}.reinforce:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": f"{_HERE}.reinforce:reinforce_plus_plus_baseline",
        "ppo": f"{_HERE}.critic:ppo",
        "gigpo": f"{_HERE}.turns:gigpo",
        "branch_rloo": f"{_HERE}.turns:branch_rloo",
        "distillation": f"{_HERE}.group:distillation",
    },
    default=_only_estimator,
)
"""Estimators by name; `ESTIMATORS.names()` lists them."""


def estimator(
    name: str,
    *,
    needs: Sequence[Need] = (),
    policy_loss: PolicyLoss = "clip",
    normalisation: Normalisation = "setting",
) -> Callable[[Compute], Estimator]:
    """Register a function of `Episodes` and `Options` as an advantage estimator.

    Args:
        name: its name for `--advantage-estimator`; users' own are given as `file.py:function` or `module:function`.
        needs: what a run must have: 'group' (at least two episodes per task), 'critic', 'state_keys' (of the environment), 'branches' (--branch-at),
            'teacher' (--opd-teacher).
        policy_loss: 'clip' (PPO), 'sequence' (GSPO) or 'cispo'; see train/megatron/loss.py.
        normalisation: 'setting': by --calculate-per-token-loss; 'token': mean over all tokens; 'sequence': mean over each episode's tokens,
            then over episodes; 'constant': sum over an episode's tokens divided by the response budget, then mean over episodes.

    Returns:
        A decorator that returns an `Estimator`, which can be called as the function can.

    Example:
        >>> @estimator("centred", needs=["group"])
        ... def centred(episodes, options):
        ...     return episodes.on_tokens(episodes.by_group(lambda scores: [s - sum(scores) / len(scores) for s in scores]))
        >>> centred.name
        'centred'
    """

    def register(compute: Compute) -> Estimator:
        made = Estimator(
            name=name,
            compute=compute,
            needs=frozenset(needs),
            policy_loss=policy_loss,
            normalisation=normalisation,
        )
        return ESTIMATORS.register(name)(made)

    return register


def find_estimator(name: str) -> Estimator:
    """The estimator of `--advantage-estimator`.

    Args:
        name: a registered name, module:function or file.py:function.

    Raises:
        UnknownNameError: no estimator has that name.
        ConfigError: the module cannot be imported, or the object is not an estimator.
    """
    known = ESTIMATORS.resolve(name)
    if not isinstance(known, Estimator):
        raise ConfigError(
            f"--advantage-estimator {name}: expected a function with the decorator @estimator, found {type(known).__name__}"
        )
    return known


def whiten(values: Doubles, used: NDArray[np.bool_] | None = None) -> Doubles:
    """(x − mean) / √(variance + 1e-8), with mean and variance (n − 1) over the `used` values, as slime and verl whiten. Equal values become 0."""
    of = values if used is None else values[used]
    if of.size < 2:
        return np.zeros_like(values)
    return np.asarray((values - of.mean()) / np.sqrt(of.var(ddof=1) + 1e-8), np.float64)
