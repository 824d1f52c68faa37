"""Router replay: the trainer uses the experts that an engine recorded, with the weights of its own routers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import by_file_name, hf_log_probs, hf_loss, hf_model, make_rows
from test_megatron import EVERYTHING, PP2, TP2, read, start
from test_model_families import EP2, SP, make

from agentrl.core.routed_experts import RouterShape, joined
from agentrl.engine.base import SamplingParams
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.kv_cache import BlockPool, Session
from agentrl.errors import InvariantError
from agentrl.train.base import Row
from agentrl.train.batch_plan import micro_batch_sizes, trainer_plan
from agentrl.train.megatron import micro_batch
from agentrl.train.megatron.micro_batch import collate
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.routing import NOT_RECORDED, RecordedChoice
from agentrl.train.megatron.throughput import plan_work
from agentrl.train.megatron.trainer import _check_experts

ranks = pytest.mark.usefixtures("reused_ranks")


def gates(hf):
    """The routers of a transformers model by their layers."""
    layers = enumerate(hf.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts")}


def recorded(hf, tokens):
    """[tokens, layers, topk]: the experts that a transformers model chooses; in dense layers 0."""
    found, handles = {}, []
    for i, gate in gates(hf).items():
        handles.append(gate.register_forward_hook(lambda _, __, out, i=i: found.update({i: out[2]})))
    with torch.no_grad():
        hf(torch.from_numpy(tokens.astype(np.int64))[None])
    for handle in handles:
        handle.remove()
    shape = next(iter(found.values())).shape
    experts = np.zeros((len(tokens), len(hf.model.layers), shape[1]), np.uint8)
    for i, chosen in found.items():
        experts[:, i] = chosen.numpy()
    return experts


class Forced:
    """A transformers model that sends each row's tokens to its recorded experts, with weights from the model's own scores."""

    def __init__(self, hf, rows):
        self.hf, self.rows = hf, {tuple(row.tokens): row.routed_experts for row in rows}
        for i, gate in gates(hf).items():
            gate.register_forward_hook(lambda gate, _, out, i=i: self.choose(gate, out[0].float(), i))

    def __call__(self, ids):
        self.experts = self.rows[tuple(ids[0].tolist())]
        return self.hf(ids)

    def choose(self, gate, logits, layer):
        experts = torch.from_numpy(self.experts[:, layer].astype(np.int64))
        if hasattr(gate, "e_score_correction_bias"):
            weights = logits.sigmoid().gather(1, experts)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
        else:
            weights = logits.softmax(-1).gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights
        return logits, weights, experts


def engine_of(model):
    """The model with noise in its routers, as an engine has it that computes in another precision."""
    engine = hf_model(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for gate in gates(engine).values():
            gate.weight += 0.05 * torch.randn_like(gate.weight)
    return engine


def distance(a, b):
    return np.abs(np.concatenate(a) - np.concatenate(b)).mean()


def check(model, folder, settings, world):
    """Log-probs and gradients equal those of transformers under forced routing, and are closer to the engine's than without replay."""
    engine, plain = engine_of(model), make_rows(model, 6, shared=0.8, temperature=0.7)
    rows = [replace(row, routed_experts=recorded(engine, row.tokens)) for row in plain]
    hf = hf_model(model)
    reference = Forced(hf, rows)
    with torch.no_grad():
        expected = [hf_log_probs(reference, row).numpy() for row in rows]
        sampled = [hf_log_probs(engine, row).numpy() for row in rows]
    with start(model, folder, megatron=settings, world_size=world, micro_batch_tokens=48, reference=True) as trainer:
        replayed, free = trainer.log_probs(rows), trainer.log_probs(plain)
        for own, want in zip(replayed, expected, strict=True):
            np.testing.assert_allclose(own, want, atol=1e-5, rtol=0)
        assert distance(replayed, sampled) < 0.8 * distance(free, sampled)
        assert distance(trainer.log_probs(rows, reference=True), free) < 1e-6  # the reference model routes by itself
        metrics = trainer.gradients(rows, EVERYTHING, folder / "gradients")
        loss = hf_loss(reference, rows, EVERYTHING)
        loss.backward()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        want = by_file_name({n: p.grad for n, p in hf.named_parameters()})
        got = read(folder / "gradients")
        errors = {n: ((got[n] - g).norm() / (g.norm() + 1e-6)).item() for n, g in want.items()}
        assert max(errors.values()) <= 1e-3, errors
        routers = [n for n in got if n.endswith("mlp.gate.weight")]
        assert len(routers) == len(gates(hf))
        assert all(got[n].norm() > 0 for n in routers)


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = [
    pytest.param("qwen3_moe", {}, 1, id="qwen3_moe"),
    pytest.param("deepseek_v3", {}, 1, id="deepseek_v3", marks=pytest.mark.full),
    pytest.param("glm4_moe", {}, 1, id="glm4_moe", marks=pytest.mark.full),
    pytest.param("qwen3_moe", {**PP2, **RECOMPUTE}, 2, id="PP2-recompute", marks=pytest.mark.full),
    pytest.param(
        "qwen3_moe", {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1}, 2, id="TP2-SP-EP2", marks=pytest.mark.full
    ),
    pytest.param("qwen3_moe", {"context_parallel_size": 2, **EP2}, 2, id="CP2-EP2", marks=pytest.mark.full),
    pytest.param(
        "qwen3_moe",
        {**PP2, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        2,
        id="PP2-moe",
        marks=pytest.mark.full,
    ),
]


@ranks
@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "world"), LAYOUTS)
def test_recorded_experts_are_used_with_the_weights_of_the_current_router(tmp_path, family, settings, world):
    layers = {"layers": 4} if settings.get("pipeline_model_parallel_size") else {}
    check(make(tmp_path / family, family, **layers), tmp_path, settings, world)


# -- with the local engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
async def test_the_local_engine_returns_the_experts_of_every_input_token(tmp_path, family):
    """Those that transformers chooses, over two turns of which the second asks for what is not known, and beside another session."""
    model = make(tmp_path / family, family)
    hf, router = hf_model(model), read_model_config(model).router
    engine = LocalEngine(model, threads=1, records_experts=True)
    await engine.start()
    try:
        context = list(range(3, 20))
        sampling = SamplingParams(5, ignore_eos=True, seed=1, routed_experts_from=0)
        first, _ = await asyncio.gather(
            engine.generate(context, sampling, session="a"), engine.generate([9, 8, 7], sampling, session="b")
        )
        context = [*context, *first.ids, 30, 31]
        second = await engine.generate(context, replace(sampling, routed_experts_from=21), session="a")
        free = await engine.generate([1, 2], replace(sampling, routed_experts_from=None), session="c")
    finally:
        await engine.close()
    assert (first.routed_experts.tokens, second.routed_experts.tokens) == (21, 7)
    experts = joined([first.routed_experts, second.routed_experts]).array()
    assert router.fault(experts) is None
    ids = np.array([*context, *second.ids[:-1]])
    assert np.array_equal(np.sort(experts, -1), np.sort(recorded(hf, ids), -1))
    assert free.routed_experts is None


def test_experts_that_were_known_stay_when_keys_and_values_are_computed_again():
    """The tokens after them were sampled with these, perhaps under older weights."""
    pool, session = BlockPool("cpu"), Session("a")
    session.set_context([1, 2, 3], pool, 2)
    session.record_experts(0, np.full((2, 1, 2), 4, np.uint16))
    session.record_experts(0, np.full((3, 1, 2), 5, np.uint16))
    assert session.experts_from(0).array()[:, 0, 0].tolist() == [4, 4, 5]
    assert session.experts_from(2).array()[:, 0, 0].tolist() == [5]
    assert session.experts_from(None) is None
    session.set_context([1, 7, 8], pool, 2)
    session.record_experts(0, np.full((3, 1, 2), 6, np.uint16))
    assert session.experts_from(0).array()[:, 0, 0].tolist() == [6, 6, 6]


# -- without ranks ---------------------------------------------------------------------------------------------------


def row_of(tokens, experts=None, **values):
    """A row whose last token is trained. `experts`: a number for each token that has recorded ones, which are that and the next one."""
    n = len(tokens)
    zero = np.zeros(n, np.float32)
    weights = np.array([0.0] * (n - 1) + [1.0], np.float32)
    if experts is not None:
        experts = np.array([[[e, e + 1], [e + 1, e]] for e in experts], np.uint8)
    arrays = {"weights": weights, "advantages": zero, "rollout_log_probs": zero, "temperature": zero + 1}
    return Row(tokens=np.array(tokens, np.int32), **{**arrays, "routed_experts": experts, **values})


def test_rows_share_a_prefix_only_where_the_same_experts_were_recorded():
    rows = [row_of([5, 6, 7, 8], [1, 2, 3]), row_of([5, 6, 7, 9], [1, 4, 3]), row_of([5, 6, 7, 9], [1, 2, 3])]
    batch = collate(rows, trained_only=True)
    assert batch.inputs.tolist() == [[5, 6, 7, 6, 7]]
    assert batch.positions.tolist() == [0, 1, 2, 1, 2]
    first, second = batch.routing.recorded[0], batch.routing.recorded[1]
    assert sorted(first.tolist()) == [[1, 2], [2, 3], [3, 4], [3, 4], [4, 5]]
    assert first[0].tolist() == [1, 2]
    assert second.equal(first.flip(1))
    free = collate([replace(row, routed_experts=None) for row in rows], trained_only=True)
    assert free.inputs.tolist() == [[5, 6, 7]]
    assert free.routing.recorded is None
    trainer = SimpleNamespace(tree_packing=True, copies=1, micro_batch_tokens=5, micro_batch_rows=None, multiple=1)
    assert micro_batch_sizes(trainer, rows, trainer_plan(trainer, rows)) == [[5]]
    assert plan_work(rows, [[[0, 1, 2]]], tree=True).tokens == 5


def test_tokens_without_recorded_experts_and_padding_are_routed_by_the_router():
    """The last token of a generation was no input of the engine, nor what follows it."""
    rows = [row_of([5, 6, 7, 8], [1, 2], weights=np.array([0, 0, 1, 0], np.float32)), row_of([5, 6, 8], [1, 2])]
    batch = collate(rows, trained_only=True, multiple=4)
    assert batch.inputs.tolist() == [[5, 6, 7, 0]]
    assert batch.routing.recorded[0].tolist() == [[1, 2], [2, 3], [NOT_RECORDED] * 2, [NOT_RECORDED] * 2]
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4)
    choice = RecordedChoice(batch.routing.recorded[0])
    picked, chosen = choice.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k))
    assert chosen.tolist() == [[1, 2], [2, 3], [3, 2], [3, 2]]
    assert torch.equal(picked, scores.gather(1, chosen))


def test_a_plan_is_divided_over_sequence_parallel_ranks_and_context_parallel_ones():
    rows = [row_of(range(9), range(8))]
    plan = collate(rows, trained_only=True).routing
    assert torch.cat([plan.part(i, 2).recorded for i in range(2)], 1).equal(plan.recorded)
    assert torch.cat([plan.part(i, 2).valid for i in range(2)]).equal(plan.valid)
    first = collate(rows, trained_only=True, context=(0, 2)).routing.recorded
    assert first[0, :, 0].tolist() == [0, 1, 6, 7]


def test_experts_that_rows_share_by_a_collision_of_hashes_are_refused(monkeypatch):
    rows = [row_of([5, 6, 7], [1, 2]), row_of([5, 6, 8], [1, 3])]
    monkeypatch.setattr(micro_batch, "prefix_keys", lambda rows: [row.tokens for row in rows])
    with pytest.raises(InvariantError, match="shares tokens with another, whose recorded experts differ"):
        collate(rows, trained_only=True)


def test_recorded_experts_must_cover_every_token_before_a_trained_one():
    row_of([5, 6, 7], [1, 2])
    with pytest.raises(
        InvariantError, match="experts were recorded for 1 tokens; the row has 3, and those of the first 2 are needed"
    ):
        row_of([5, 6, 7], [1])
    with pytest.raises(InvariantError, match="recorded for 4 tokens"):
        row_of([5, 6, 7], [1, 2, 3, 4])


SHAPE = RouterShape(layers=2, experts=6, topk=2, mixtures=(0, 1))


@pytest.mark.parametrize(
    ("rows", "shape", "what"),
    [
        ([row_of([5, 6], [1]), row_of([5, 6])], SHAPE, "1 of 2 rows have routed experts; all or none must"),
        ([row_of([5, 6], [1])], None, "the model is dense"),
        ([row_of([5, 6], [5])], SHAPE, "they go from 5 to 6, expected 0 to 5"),
        (
            [row_of([5, 6], [1])],
            replace(SHAPE, layers=3),
            r"shape \(1, 2, 2\), expected \(tokens, 3 layers, 2 experts\)",
        ),
        (
            [row_of([5, 6], routed_experts=np.array([[[0, 1], [2, 2]]], np.uint8))],
            SHAPE,
            r"token 0 has the experts \[2, 2\] in layer 1, one of them twice",
        ),
    ],
)
def test_experts_that_are_not_the_models_are_refused_before_a_rank_gets_them(rows, shape, what):
    with pytest.raises(InvariantError, match=what):
        _check_experts(rows, shape)


def test_nothing_is_read_in_layers_without_experts():
    assert replace(SHAPE, mixtures=(0,)).fault(np.array([[[0, 1], [0, 0]]], np.uint8)) is None
