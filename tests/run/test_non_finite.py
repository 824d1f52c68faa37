"""An optimizer step that is not finite stops the run, or is left out, by --non-finite-step; its token is named."""

import logging

import numpy as np
import pytest

from agentrl.config import build_config
from agentrl.errors import InvariantError, NonFiniteError
from agentrl.run.training import skip_or_stop
from agentrl.train.base import Row
from agentrl.train.megatron.trainer import _why_not_finite


def row(**more):
    zero = np.zeros(6, np.float32)
    weights = np.array([0, 0, 1, 1, 0, 1], np.float32)
    given = {"weights": weights, "advantages": zero, "rollout_log_probs": zero, "temperature": zero + 1, **more}
    return Row(tokens=np.arange(6, dtype=np.int32), source=("7-0", 2), turns=((0, 2), (1, 2)), **given)


@pytest.mark.parametrize(
    ("token", "turn"),
    [(0, "the prompt"), (1, "the prompt"), (2, "turn 0"), (3, "turn 0"), (4, "turn 1"), (5, "turn 1")],
)
def test_a_token_is_named_by_episode_segment_and_turn(token, turn):
    assert row().place(token) == f"episode 7-0, segment 2, {turn}, token {token}"


def test_the_first_token_without_a_finite_log_prob_is_named():
    values = np.array([0, 0, -1, np.nan, 0, np.inf], np.float32)
    text = _why_not_finite([row(), row()], [np.zeros(6, np.float32), values])
    assert text.startswith("the log-prob of episode 7-0, segment 2, turn 0, token 3 is nan")
    assert "weights are unchanged" in text


def test_a_ratio_that_overflows_is_named():
    old = np.array([0, 0, -1, -1, -900, -100], np.float32)
    text = _why_not_finite([row(old_log_probs=old)], [np.zeros(6, np.float32)])
    assert "the probability ratio of episode 7-0, segment 2, turn 1, token 5 is exp(100)" in text, (
        "token 4 is not trained"
    )


def test_a_gradient_alone_may_be_at_fault():
    assert "a gradient is not finite" in _why_not_finite([row()], [np.zeros(6, np.float32)])


def test_stop_raises_and_skip_logs(caplog):
    error = NonFiniteError("the log-prob of … is nan")
    with pytest.raises(NonFiniteError, match=r"optimizer step 3: .*--non-finite-step skip"):
        skip_or_stop(build_config({}), 3, error)
    with caplog.at_level(logging.WARNING):
        skip_or_stop(build_config({"non_finite_step": "skip"}), 3, error)
    assert "optimizer step 3 is left out: the log-prob of … is nan" in caplog.text


def test_a_row_that_is_not_finite_is_refused_with_its_place():
    old = np.array([0, 0, 0, np.nan, 0, 0], np.float32)
    with pytest.raises(InvariantError, match="old_log_probs is not finite at episode 7-0, segment 2, turn 0, token 3"):
        row(old_log_probs=old)
