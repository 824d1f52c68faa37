"""Estimators with credit for single turns: equal states in a group (gigpo), and siblings at a branch (branch_rloo)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from agentrl.train.estimators.base import EQUAL, Doubles, Episodes, Options, estimator
from agentrl.train.estimators.group import standardised

Place = tuple[int, int]
"""episode and step of the environment: a turn, and the summaries before it"""


def turn_returns(episodes: Episodes, gamma: float) -> dict[Place, float]:
    """R_k = Σ_{j ≥ k} γ^(j − k) r_j of each step k that sampled a trained token, r_j the sum of its tokens' rewards."""
    sums: dict[Place, float] = {}
    steps = episodes.step
    for episode, tokens in enumerate(episodes.starts()):
        turns, after = steps[tokens], 0.0
        rewards = episodes.rewards[tokens]
        previous = None
        for turn in sorted(set(turns.tolist()), reverse=True):
            after *= gamma ** (previous - turn) if previous is not None else 1.0
            sums[episode, turn] = after = after + float(rewards[turns == turn].sum())
            previous = turn
    return sums


def anchor_groups(episodes: Episodes) -> list[list[Place]]:
    """The steps of a group that begin in the same state; a step whose state is unknown is in none."""
    anchors: dict[tuple[int, str], list[Place]] = defaultdict(list)
    steps = episodes.step
    for episode, tokens in enumerate(episodes.starts()):
        keys = episodes.state_keys[episode]
        turns = dict(zip(steps[tokens].tolist(), episodes.turn[tokens].tolist(), strict=True))
        for step, turn in turns.items():
            if (key := keys[turn]) is not None:
                anchors[int(episodes.groups[episode]), key].append((episode, step))
    return list(anchors.values())


@estimator("gigpo", needs=["group", "state_keys"])
def gigpo(episodes: Episodes, options: Options) -> Doubles:
    """A^E + ω A^S: grpo's advantage of the episode, and that of the turn's return among the turns of the group that begin in the same state.

    Feng et al. 2025 (GiGPO, arXiv:2505.10978), eq. 3 to 8, with the standard deviation as the normalisation of both. A summary of the context is
    not a step of the environment: its tokens belong to the action after it, which begins in the same state.
    """
    advantages = episodes.on_tokens(episodes.by_group(standardised))
    returns = turn_returns(episodes, options.gamma)
    turn_advantages: dict[Place, float] = {}
    for places in anchor_groups(episodes):
        values = [returns[place] for place in places]
        if len(values) > 1 and max(values) - min(values) >= EQUAL:
            turn_advantages |= zip(places, standardised(values), strict=True)
    of_tokens = zip(episodes.episode.tolist(), episodes.step.tolist(), strict=True)
    return advantages + options.step_weight * np.array([turn_advantages.get(place, 0.0) for place in of_tokens])


@estimator("branch_rloo", needs=["branches"], normalisation="constant")
def branch_rloo(episodes: Episodes, options: Options) -> Doubles:
    """Leave-one-out among siblings: the mean score below this branch, less the mean of the siblings at the last branching point.

    The siblings of a trunk's tokens before its first branch are the other episodes of the group. Siblings are independent samples from the same
    state, so the baseline does not depend on the action. Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free), applied at each
    branch as Tree-GRPO (Ji et al. 2025, arXiv:2509.21240) and TreeRL (Hou et al. 2025, arXiv:2506.11902) do.
    """
    values = episodes.on_tokens(episodes.scores)
    baselines = np.empty_like(values)
    for members in episodes.group_members():
        roots = [int(e) for e in members if episodes.parents[e] < 0]
        whole = {root: _subtree(episodes, root, -1) for root in roots}
        for root in roots:
            _subtract_siblings(episodes, root, [v for other, v in whole.items() if other != root], values, baselines)
    return values - baselines


def _subtree(episodes: Episodes, root: int, turn: int) -> float:
    """Mean score of an episode and its branches after `turn`, by their shares."""
    members = episodes.below(root, turn)
    return float(np.average(episodes.scores[members], weights=episodes.shares()[members]))


def _subtract_siblings(episodes: Episodes, root: int, others: list[float], values: Doubles, baselines: Doubles) -> None:
    """Fill the baselines of a tree's tokens; without a sibling the baseline is the value itself."""
    own = episodes.episode == root
    baselines[own] = np.mean(others) if others else values[own]
    children = np.flatnonzero(episodes.parents == root)
    for turn in np.unique(episodes.branch_turns[children]).tolist():
        siblings = children[episodes.branch_turns[children] == turn].tolist()
        scores = [_subtree(episodes, root, turn), *episodes.scores[siblings].tolist()]
        total = sum(scores)
        for episode, score in zip([root, *siblings], scores, strict=True):
            tokens = (episodes.episode == episode) & (episodes.turn >= turn)
            baselines[tokens] = (total - score) / (len(scores) - 1)
