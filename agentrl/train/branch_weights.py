"""Weights of the tokens of branched episodes.

A tree weighs as much as an episode without branches. Its episodes have shares (`Episodes.shares`), and a token weighs what it would as a token of
independent rows of the whole episodes that hold it: the sum over these of share × weight. Its advantage is their mean by share. Each token is
in one row only. The expected gradient is then that of episodes without branches (tests/train/test_branches.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.train.advantage import Compared
from agentrl.train.base import Row
from agentrl.train.rows import with_tokens


def with_branch_weights(rows: Sequence[Row], compared: Compared, normalisation: str, constant: int) -> list[Row]:
    """The rows of one optimizer step with the weights of their trees, as `make_rows` normalises episodes."""
    data = compared.data
    tree_of = {t.episode_id: t.parent or t.episode_id for t in compared.trajectories}
    trees = len({tree_of[row.source[0]] for row in rows})
    each = 1.0 / np.maximum(data.whole_lengths(), 1.0) if normalisation == "sequence" else np.ones(len(data.scores))
    shares = data.token_shares(each)
    of_episodes = compared.by_episode(shares)
    if normalisation == "token":
        total = sum(float(of_episodes[episode].sum()) for episode in {row.source[0] for row in rows})
    else:
        total = trees * (constant if normalisation == "constant" else 1)
    return with_tokens(rows, "weights", {episode: values / total for episode, values in of_episodes.items()})
