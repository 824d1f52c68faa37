"""The losses, against numbers worked out by hand; plans and batches."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from agentrl.errors import InvariantError  # noqa: E402
from agentrl.train.base import LossConfig, Row  # noqa: E402
from agentrl.train.megatron.loss import TokenData, kl_estimate, surrogate, token_loss  # noqa: E402
from agentrl.train.megatron.micro_batch import collate  # noqa: E402
from agentrl.train.megatron.step_metrics import MAXIMA, SUMS, step_metrics  # noqa: E402


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def token_data(weights, advantages, **more) -> TokenData:
    """Inputs of the loss for tokens whose rollout log-probs are 0."""
    zeros = torch.zeros(len(weights))
    return TokenData(weights=tensor(*weights), advantages=tensor(*advantages), rollout_log_probs=zeros, **more)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "value", "clipped"),
    [
        (1.5, 2.0, LossConfig(eps_clip=0.2), -2.4, True),
        (1.5, 2.0, LossConfig(eps_clip=0.2, eps_clip_high=0.6), -3.0, False),
        (0.5, 2.0, LossConfig(eps_clip=0.2), -1.0, False),
        (0.5, -2.0, LossConfig(eps_clip=0.2), 1.6, True),
        (1.5, -2.0, LossConfig(eps_clip=0.2), 3.0, False),
        (5.0, -2.0, LossConfig(eps_clip=0.2, eps_clip_c=3.0), 6.0, True),
        (2.0, -2.0, LossConfig(eps_clip=0.2, eps_clip_c=3.0), 4.0, False),
        (5.0, 2.0, LossConfig(eps_clip=0.2, eps_clip_c=3.0), -2.4, True),
    ],
)
def test_surrogate_by_hand(ratio, advantage, loss, value, clipped):
    got, active = surrogate(tensor(ratio), tensor(advantage), loss)
    assert got.item() == pytest.approx(value, rel=1e-6)
    assert bool(active) is clipped


def test_a_clipped_token_has_no_gradient():
    log_probs = tensor(math.log(1.5), math.log(1.1)).requires_grad_()
    data = token_data((1, 1), (1, 1), old_log_probs=tensor(0, 0))
    token_loss(log_probs, tensor(0, 0), data, LossConfig())[0].backward()
    assert log_probs.grad.tolist() == pytest.approx([0.0, -1.1])


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)])
def test_kl_by_hand(kind, value):
    assert kl_estimate(tensor(-1.0), tensor(-1.5), kind).item() == pytest.approx(value, rel=1e-6)


def test_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3 or low_var_kl"):
        kl_estimate(tensor(0), tensor(0), "k4")


def test_all_terms_and_statistics_by_hand():
    """Two trained tokens and one of weight 0, which counts nowhere."""
    now = tensor(math.log(0.5), math.log(0.2), -9.0)
    data = TokenData(
        weights=tensor(0.25, 0.5, 0.0),
        advantages=tensor(1.0, -1.0, 7.0),
        rollout_log_probs=tensor(math.log(0.1), 0.0, -3.0),
        old_log_probs=tensor(math.log(0.4), math.log(0.2), -5.0),
        ref_log_probs=tensor(math.log(0.5), math.log(0.4), -1.0),
        sampled=torch.tensor([True, False, True]),
    )
    loss = LossConfig(eps_clip=0.2, kl_loss_coef=0.1, entropy_coef=0.01, use_tis=True, tis_threshold=2.0)
    total, sums, maxima = token_loss(now, tensor(1.0, 2.0, 50.0), data, loss)
    s, m = dict(zip(SUMS, sums.tolist(), strict=True)), dict(zip(MAXIMA, maxima.tolist(), strict=True))
    pg = (
        0.25 * -1.2 * 2.0 + 0.5 * 1.0 * 0.2
    )  # token 0: ratio 1.25 clipped at 1.2, TIS 4 cut to 2; token 1: ratio 1, TIS 0.2 / 1
    kl = 0.5 * (2 - math.log(2) - 1)
    assert s["pg_loss"] == pytest.approx(pg, rel=1e-5)
    assert s["kl"] == pytest.approx(kl, rel=1e-5)
    assert s["entropy"] == pytest.approx(1.25)
    assert total.item() == pytest.approx(pg + 0.1 * kl - 0.01 * 1.25, rel=1e-5)
    assert (s["weight"], s["tokens"], s["sampled"], s["clipped"]) == (0.75, 2, 1, 0.25)
    assert s["diff"] == pytest.approx(math.log(4), rel=1e-5)
    assert m["diff_max"] == pytest.approx(math.log(4), rel=1e-5)
    assert m["ratio_max"] == pytest.approx(1.25, rel=1e-5)
    told = step_metrics(s, m, loss)
    assert told["clip_fraction"] == pytest.approx(1 / 3)
    assert told["tis_mean"] == pytest.approx((0.25 * 2 + 0.5 * 0.2) / 0.75, rel=1e-5)
    assert told["rollout_log_prob_diff_mean"] == pytest.approx(math.log(4), rel=1e-5)


@pytest.mark.parametrize("sampled", [None, torch.ones(6, dtype=torch.bool)], ids=["not stated", "stated"])
def test_a_sampled_token_of_log_prob_0_counts_in_the_difference(sampled):
    """The engine was certain where the trainer is not: that is the largest difference of all."""
    now, zero = tensor(-6.954, 0, 0, 0, 0, 0), tensor(*[0] * 6)
    data = TokenData(weights=tensor(*[1 / 6] * 6), advantages=zero, rollout_log_probs=zero, sampled=sampled)
    _, sums, maxima = token_loss(now, zero, data, LossConfig())
    told = step_metrics(
        dict(zip(SUMS, sums.tolist(), strict=True)), dict(zip(MAXIMA, maxima.tolist(), strict=True)), LossConfig()
    )
    assert told["rollout_log_prob_diff_mean"] == pytest.approx(1.159)
    assert told["rollout_log_prob_diff_max"] == pytest.approx(6.954)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_reinforce():
    now = tensor(-1.0, -2.0).requires_grad_()
    total, _, _ = token_loss(now, tensor(0, 0), token_data((0.5, 0.25), (2, -4)), LossConfig())
    total.backward()
    assert total.item() == pytest.approx(-0.5 * 2 + 0.25 * 4, abs=1e-6)
    assert now.grad.tolist() == pytest.approx([-1.0, 1.0])


def test_sft_is_cross_entropy():
    now = tensor(-1.0, -2.0)
    total, _, _ = token_loss(now, tensor(0, 0), token_data((0.5, 0.25), (0, 0)), LossConfig(kind="sft"))
    assert total.item() == pytest.approx(1.0)


def row(n: int, trained: list[int], **more: object) -> Row:
    weights = np.zeros(n, np.float32)
    weights[trained] = 0.5
    zero = np.zeros(n, np.float32)
    return Row(
        tokens=np.arange(n, dtype=np.int32) + 10,
        weights=weights,
        advantages=zero,
        rollout_log_probs=zero,
        temperature=np.full(n, 0.7, np.float32),
        **more,
    )


def test_collate_takes_sampled_tokens_from_the_row_and_else_the_trained_ones():
    stated = row(5, [2, 4], sampled=np.array([0, 0, 1, 0, 0], bool))
    batch = collate([stated, row(3, [1])], trained_only=True)
    assert batch.data.sampled.tolist() == [True, False, True]
    assert batch.data.sampled.dtype == torch.bool


def test_collate_points_at_the_token_before_each_chosen_token():
    batch = collate([row(5, [2, 4]), row(3, [1])], trained_only=True, tree=False, multiple=4)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 10, 11, 0, 0]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    labels = batch.labels[batch.prediction]
    assert labels.tolist() == [12, 14, 11]
    assert batch.inputs[0, batch.index][batch.prediction].tolist() == [11, 13, 10]
    assert batch.places.tolist() == [0, 1, 2]
    everything = collate([row(5, [2]), row(1, [])], trained_only=False)
    assert everything.labels[everything.prediction].tolist() == [11, 12, 13, 14]


def test_collate_computes_what_rows_share_once_and_keeps_the_loss_of_each():
    """Equal context, token and temperature: one prediction for both rows; another temperature: another prediction."""
    rows = [row(5, [2, 4]), row(3, [1, 2]), replace(row(3, [2]), temperature=np.full(3, 0.5, np.float32))]
    batch = collate(rows, trained_only=True)
    assert batch.inputs.tolist() == [[10, 11, 12, 13]]
    assert len(batch.labels) == 4
    assert batch.labels[batch.prediction].tolist() == [12, 14, 11, 12, 12]
    assert batch.temperature[batch.prediction].tolist() == pytest.approx([0.7, 0.7, 0.7, 0.7, 0.5])
    assert batch.prediction[0] == batch.prediction[3] != batch.prediction[4]
    assert len(batch.data.weights) == 5


def test_each_row_clips_a_shared_token_by_its_own_advantage_and_old_log_prob():
    """One log-prob of ratio 1.5 to two of the rows: it is clipped for the first, whose advantage is positive, alone; to the third the ratio is 1."""
    ones, low = np.ones(3, np.float32), np.full(3, -math.log(1.5), np.float32)
    terms = [(1.0, low), (-1.0, low), (3.0, 0 * ones)]
    rows = [replace(row(3, [2]), advantages=a * ones, old_log_probs=old) for a, old in terms]
    batch = collate(rows, trained_only=True)
    assert batch.prediction.tolist() == [0, 0, 0]
    shared = tensor(0).requires_grad_()
    token_loss(shared[batch.prediction], shared[batch.prediction] * 0, batch.data, LossConfig())[0].backward()
    assert shared.grad.item() == pytest.approx(0.5 * (0 + 1.5 - 3))


def test_context_parallel_ranks_have_the_chosen_tokens_once_in_total():
    rows = [row(9, [2, 4, 8]), row(6, [1, 5]), row(4, [2])]
    for tree in (True, False):
        parts = [collate(rows, trained_only=True, tree=tree, multiple=4, context=(r, 2)) for r in range(2)]
        assert sorted(np.concatenate([p.places for p in parts]).tolist()) == list(range(6))
        assert len({p.inputs.shape for p in parts}) == 1
        whole = collate(rows, trained_only=True, tree=tree, multiple=4)
        for part in parts:
            want = whole.labels[whole.prediction][part.places]
            assert part.labels[part.prediction][: len(part.places)].tolist() == want.tolist()


@pytest.mark.parametrize("rows", [[], [row(4, [])]])
def test_an_empty_batch_is_one_token_of_weight_0(rows):
    batch = collate(rows, trained_only=True)
    assert (batch.data.weights.tolist(), batch.index.tolist(), len(batch.places)) == ([0.0], [0], 0)


def test_the_bounded_kl_is_k3_up_to_its_bound():
    far, near = torch.tensor(-30.0), torch.tensor(-0.5)
    assert kl_estimate(far, torch.tensor(0.0), "low_var_kl") == 10
    assert kl_estimate(near, torch.tensor(0.0), "low_var_kl") == kl_estimate(near, torch.tensor(0.0), "k3")


def test_the_first_token_cannot_be_trained():
    with pytest.raises(InvariantError, match="first token"):
        row(3, [0])
