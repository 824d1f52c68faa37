"""REINFORCE++ and its variant with a group baseline: returns without a critic, normalised over the tokens of the rollout."""

from __future__ import annotations

import numpy as np

from agentrl.train.estimators.base import Doubles, Episodes, Options, estimator, whiten
from agentrl.train.estimators.group import centred


def returns(episodes: Episodes, gamma: float) -> Doubles:
    """Σ_{i ≥ t} γ^(i − t) r_i over the trained tokens of each episode."""
    sums = np.empty_like(episodes.rewards)
    for tokens in episodes.starts():
        rewards = episodes.rewards[tokens]
        if gamma == 1.0:
            sums[tokens] = rewards[::-1].cumsum()[::-1]
            continue
        after = 0.0
        for t in range(tokens.stop - 1, tokens.start - 1, -1):
            sums[t] = after = episodes.rewards[t] + gamma * after
    return sums


@estimator("reinforce_plus_plus")
def reinforce_plus_plus(episodes: Episodes, options: Options) -> Doubles:
    """The return from each token on, less the mean and divided by the deviation over all tokens. Hu et al. 2025 (arXiv:2501.03262)."""
    return whiten(returns(episodes, options.gamma), episodes.trained_tokens)


@estimator("reinforce_plus_plus_baseline", needs=["group"])
def reinforce_plus_plus_baseline(episodes: Episodes, options: Options) -> Doubles:
    """r − mean of the group, then normalised over all tokens. Hu et al. 2025 (arXiv:2501.03262), REINFORCE++ with baseline."""
    return whiten(episodes.on_tokens(episodes.by_group(centred)), episodes.trained_tokens)
