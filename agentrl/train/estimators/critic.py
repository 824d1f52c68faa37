"""PPO: generalised advantage estimation over the tokens that the policy sampled."""

from __future__ import annotations

import numpy as np

from agentrl.train.estimators.base import Doubles, Episodes, Options, estimator


def gae(episodes: Episodes, options: Options) -> Doubles:
    """A_t = Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γ V_{t+1} − V_t. Schulman et al. 2016 (arXiv:1506.02438), eq. 16.

    t + 1 is the next token of the episode that the policy sampled: observations and template tokens between turns are not actions, and
    have no value. After the last token the value is 0.
    """
    assert episodes.values is not None, "the estimator's needs are checked before"
    advantages = np.empty_like(episodes.values)
    for tokens in episodes.starts():
        later = next_value = 0.0
        for t in range(tokens.stop - 1, tokens.start - 1, -1):
            value = float(episodes.values[t])
            delta = float(episodes.rewards[t]) + options.gamma * next_value - value
            later = delta + options.gamma * options.lambd * later
            next_value = value
            advantages[t] = later
    return advantages


@estimator("ppo", needs=["critic"])
def ppo(episodes: Episodes, options: Options) -> Doubles:
    """The advantage of `gae`. Schulman et al. 2017 (arXiv:1707.06347); the critic's targets are advantage + value."""
    return gae(episodes, options)
