"""Trees in every layout against plain transformers in fp64: log-probs, loss, every gradient, and the update of three steps."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_log_probs, hf_loss, hf_model, make_model, make_rows
from test_megatron import EVERYTHING, read, start

from agentrl.train.base import LossConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_ranks")]
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "data")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LR = 1e-3
PRODUCT = [
    (sizes, tree, recompute)
    for sizes in product((1, 2), repeat=4)
    for tree in (True, False)
    for recompute in (False, True)
    if np.prod(sizes) <= 4
]
QUICK = [
    ((2, 2, 1, 1), True, False),
    ((2, 1, 2, 1), True, True),
    ((1, 2, 1, 2), False, True),
    ((1, 1, 2, 2), True, False),
]
"""Each parallel size with two others, trees on and off, recompute on and off."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A model, rows that share prefixes, and what transformers computes from them in fp64."""
    model = make_model(tmp_path_factory.mktemp("model") / "model", "qwen3", tied=False, layers=2)
    rows = make_rows(model, 9, shared=0.8, temperature=0.7)
    hf = hf_model(model).double()
    loss = hf_loss(hf, rows, EVERYTHING)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in hf.named_parameters()}
    with torch.no_grad():
        log_probs = [hf_log_probs(hf, row).numpy() for row in rows]
    return model, rows, loss.item(), gradients, log_probs, three_steps(hf, rows)


def three_steps(hf, rows):
    """The change of every weight in three steps of AdamW, as the trainer is set: weight decay 0.01 on matrices, clipping at 1."""
    before = {n: p.detach().clone() for n, p in hf.named_parameters()}
    groups = [[p for p in hf.parameters() if p.dim() > 1], [p for p in hf.parameters() if p.dim() == 1]]
    options = [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(options, lr=LR)
    for _ in range(3):
        optimizer.zero_grad()
        hf_loss(hf, rows, LossConfig()).backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
    return {n: p.detach() - before[n] for n, p in hf.named_parameters()}


def check_layout(reference, folder, sizes, tree, recompute):
    model, rows, loss, gradients, log_probs, update = reference
    settings = {n: s for n, s in zip(SIZES, sizes, strict=True) if n != "data"} | (RECOMPUTE if recompute else {})
    settings["sequence_parallel"] = sizes[0] > 1
    name = "-".join(map(str, (*sizes, tree, recompute)))
    options = {"megatron": settings, "world_size": int(np.prod(sizes)), "tree_packing": tree, "micro_batch_tokens": 64}
    with start(model, folder, **options) as trainer:
        for got, want, row in zip(trainer.log_probs(rows), log_probs, rows, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
            assert len(got) == len(row.tokens)
        metrics = trainer.gradients(rows, EVERYTHING, folder / f"gradients-{name}")
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        got = read(folder / f"gradients-{name}")
        errors = relative_errors(got, gradients)
        assert max(errors.values()) <= 2e-6, errors
        assert relative_errors({"all": flat(got, gradients)}, {"all": flat(gradients, gradients)})["all"] <= 1e-6
        before = read(model)
        for _ in range(3):
            metrics = trainer.step(rows, LossConfig(), LR)
        assert metrics["row_tokens"] == sum(len(r.tokens) - 1 for r in rows)
        assert (metrics["tree_tokens"] < metrics["row_tokens"]) is tree
        trainer.export_weights(folder / f"stepped-{name}")
        after = read(folder / f"stepped-{name}")
        errors = relative_errors({n: after[n] - before[n] for n in before}, update)
        assert max(errors.values()) <= 1e-3, errors


def flat(tensors, order):
    return torch.cat([tensors[name].flatten() for name in order])


def relative_errors(got, want):
    assert got.keys() == want.keys()
    return {n: ((got[n].double() - w).norm() / w.norm()).item() for n, w in want.items()}


@pytest.mark.parametrize(("sizes", "tree", "recompute"), QUICK)
def test_pairs_of_parallel_sizes_with_and_without_trees_equal_transformers(reference, tmp_path, sizes, tree, recompute):
    check_layout(reference, tmp_path, sizes, tree, recompute)


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "tree", "recompute"), [layout for layout in PRODUCT if layout not in QUICK])
def test_every_layout_of_at_most_4_ranks_equals_transformers(reference, tmp_path, sizes, tree, recompute):
    check_layout(reference, tmp_path, sizes, tree, recompute)


def test_a_row_without_weight_changes_nothing_and_a_first_step_has_ratio_1(reference, tmp_path):
    """In one tree with rows that have a weight; the ratio is exactly 1 where the loss uses its own log-probs."""
    model, rows, *_ = reference
    masked = [replace(r, weights=0 * r.weights, advantages=0 * r.advantages) for r in rows[:2]]
    own = [replace(r, old_log_probs=None) for r in rows]
    with start(model, tmp_path) as trainer:
        trainer.gradients(rows, LossConfig(), tmp_path / "without")
        trainer.gradients([*rows, *masked], LossConfig(), tmp_path / "with")
        a, b = read(tmp_path / "without"), read(tmp_path / "with")
        assert all(torch.equal(a[n], b[n]) for n in a)
        metrics = trainer.gradients(own, LossConfig(), tmp_path / "own")
        assert (metrics["ratio_max"], metrics["clip_fraction"]) == (1.0, 0.0)
