"""The trainer's ranks against plain transformers: log-probs, loss, every gradient, weights; checkpoints; death."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import numpy as np
import torch
from models import hf_log_probs, hf_loss, hf_model, make_model, make_rows
from processes import read_line
from safetensors.torch import load_file

from agentrl.core.child_process import children_of
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.errors import ConfigError, InvariantError, NonFiniteError, StoreError, WorkerError
from agentrl.train.base import LossConfig
from agentrl.train.megatron.trainer import MegatronTrainer

pytestmark = pytest.mark.slow
EVERYTHING = LossConfig(
    eps_clip_high=0.28, eps_clip_c=1.5, kl_loss_coef=0.1, entropy_coef=0.01, use_tis=True, tis_threshold=1.1
)
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
FULL = pytest.mark.full
LAYOUTS = [
    pytest.param({"family": "qwen3", "vocab": 97}, TP2, 2, None, id="qwen3-TP2-padded-vocabulary"),
    pytest.param({"family": "qwen2"}, PP2, 2, 48, id="qwen2-tied-PP2"),
    pytest.param({"family": "llama", "tied": False}, {}, 2, 48, id="llama-DP2-uneven-micro-batches"),
    pytest.param({"family": "qwen3", "tied": False}, {}, 1, 1, id="qwen3-one-rank-single-rows", marks=FULL),
    pytest.param({"family": "llama"}, {**TP2, "sequence_parallel": True}, 2, 90, id="llama-TP2-SP", marks=FULL),
    pytest.param(
        {"family": "qwen3", "layers": 4},
        {**TP2, **PP2, "sequence_parallel": True},
        4,
        48,
        id="qwen3-TP2-SP-PP2",
        marks=FULL,
    ),
    pytest.param({"family": "qwen2", "tied": False}, {**PP2}, 4, 64, id="qwen2-PP2-DP2", marks=FULL),
    pytest.param({"family": "qwen2", "vocab": 97}, {**TP2}, 4, 48, id="qwen2-TP2-DP2", marks=FULL),
    pytest.param(
        {"family": "qwen3"},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        2,
        48,
        id="DP2-overlap",
        marks=FULL,
    ),
    pytest.param(
        {"family": "llama"}, {"recompute_granularity": "selective"}, 1, 48, id="recompute-selective", marks=FULL
    ),
    pytest.param(
        {"family": "llama"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        1,
        48,
        id="recompute-full",
        marks=FULL,
    ),
]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def start(model: Path, run_dir: Path, **options) -> MegatronTrainer:
    return MegatronTrainer(model, run_dir=run_dir, threads=1, **{"timeout_s": 120.0, **options})


@pytest.mark.usefixtures("reused_ranks")
@pytest.mark.parametrize(("kind", "settings", "world", "micro_batch_tokens"), LAYOUTS)
def test_a_layout_equals_transformers(tmp_path, kind, settings, world, micro_batch_tokens):
    """Log-probs, loss, every gradient and its norm, at temperatures 1 and 0.7, and the weights exported and stepped."""
    model = make_model(tmp_path / "model", **kind)
    options = {
        "megatron": {**settings, "clip_grad": 0.5},
        "world_size": world,
        "micro_batch_tokens": micro_batch_tokens,
        "reference": True,
    }
    vocab = kind.get("vocab", 96)
    with start(model, tmp_path, **options) as trainer:
        shards = settings["tensor_model_parallel_size"] if settings.get("sequence_parallel") else 1
        assert trainer.multiple == shards * (16 if torch.cuda.is_available() else 1)
        for temperature in (1.0, 0.7):
            hf, rows = hf_model(model), make_rows(model, temperature=temperature, vocab=vocab)
            check_log_probs(trainer, hf, rows)
            metrics = check_gradients(trainer, hf, rows, tmp_path / f"gradients-{temperature}", EVERYTHING)
            assert 0.1 < metrics["clip_fraction"] < 0.9
            assert metrics["kl_loss"] > 0.01
            assert metrics["tis_max"] == pytest.approx(1.1)
        check_gradients(trainer, hf_model(model), rows, tmp_path / "gradients-sft", LossConfig(kind="sft"))
        first = trainer.export_weights(tmp_path / "first")
        assert first.fingerprint == fingerprint(tmp_path / "first")
        original = read(model)
        assert read(tmp_path / "first").keys() == original.keys()
        assert all(torch.equal(t, original[n]) for n, t in read(tmp_path / "first").items())
        check_step(trainer, hf, rows, tmp_path / "second")
        assert fingerprint(tmp_path / "second") != first.fingerprint
        check_log_probs(trainer, hf, rows, reference=True)


def check_log_probs(trainer, hf, rows, *, reference=False):
    got, chosen = (
        trainer.log_probs(rows, reference=reference),
        trainer.log_probs(rows, reference=reference, trained_only=True),
    )
    with torch.no_grad():
        for row, all_of_it, some in zip(rows, got, chosen, strict=True):
            want = hf_log_probs(hf, row).numpy()
            np.testing.assert_allclose(all_of_it, want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(some, want * (row.weights > 0), rtol=1e-5, atol=1e-5)


def check_gradients(trainer, hf, rows, folder, loss):
    metrics = trainer.gradients(rows, loss, folder)
    want = hf_loss(hf, rows, loss)
    want.backward()
    assert metrics["loss"] == pytest.approx(want.item(), rel=1e-5)
    got, gradients = read(folder), {n: p.grad for n, p in hf.named_parameters()}
    assert got.keys() == gradients.keys()
    errors = {n: ((got[n] - g).norm() / g.norm()).item() for n, g in gradients.items()}
    assert max(errors.values()) <= 1e-5, errors
    return metrics


def check_family(trainer, model, hf, rows, folder, by_file_name):
    """Loss and gradients of a model of some family, and the bit-equal export of all its weights, which are returned.

    `hf` gives transformers' log-probs; `by_file_name` gives its gradients, once they are there, by their names in the model's folder.
    """
    metrics = trainer.gradients(rows, EVERYTHING, folder / "gradients")
    loss = hf_loss(hf, rows, EVERYTHING)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    want, got = by_file_name(), read(folder / "gradients")
    assert got.keys() == want.keys()
    errors = {n: ((got[n] - g).norm() / (g.norm() + 1e-6)).item() for n, g in want.items()}
    assert max(errors.values()) <= 1e-3, errors
    trainer.export_weights(folder / "exported")
    exported, original = read(folder / "exported"), read(model)
    assert exported.keys() == original.keys()
    assert all(torch.equal(t, original[n]) and t.dtype == original[n].dtype for n, t in exported.items())
    return original


def check_step(trainer, hf, rows, folder):
    """One AdamW step with the gradient clipped to norm 0.5; norms and biases are not decayed."""
    before_it = trainer.log_probs(rows, trained_only=True)
    metrics = trainer.step(rows, LossConfig(), 1e-2)
    for got, want in zip(metrics["log_probs"], before_it, strict=True):  # from the forward of the step itself
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    hf.zero_grad()
    hf_loss(hf, rows, LossConfig()).backward()
    norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert norm > 0.5
    before = {n: p.detach().clone() for n, p in hf.named_parameters()}
    decayed = [p for p in hf.parameters() if p.dim() > 1]
    plain = [p for p in hf.parameters() if p.dim() == 1]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    ).step()
    delivered = trainer.deliver("checksums", kind="sha256")
    trainer.export_weights(folder)
    assert trainer.deliver("checksums", kind="sha256") == delivered, "what a sync sends at once is what is exported"
    after = read(folder)
    for name, parameter in hf.named_parameters():
        assert (after[name] - before[name]).abs().max() > 5e-3, name
        firm = (
            parameter.grad.abs() > 1e-5
        )  # Adam's first step is lr × sign: rounding decides where the gradient is next to nothing
        assert firm.any(), name
        torch.testing.assert_close(after[name][firm], parameter.detach()[firm], rtol=0, atol=2e-5)
    with torch.no_grad():  # the reference is still the old model
        for name, parameter in hf.named_parameters():
            parameter.copy_(before[name])


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        pytest.param({}, 1, id="one-rank"),
        pytest.param({}, 2, id="DP2", marks=FULL),
        pytest.param(TP2, 2, id="TP2", marks=FULL),
        pytest.param(PP2, 2, id="PP2", marks=FULL),
    ],
)
def test_a_resumed_run_continues_bit_exactly(tmp_path, rank_stock, settings, world):
    model = make_model(tmp_path / "model")
    rows, options = make_rows(model), {"megatron": settings, "world_size": world, "micro_batch_tokens": 64}
    with rank_stock.used(), start(model, tmp_path / "a", **options) as trainer:
        for lr in (1e-2, 2e-2):
            trainer.step(rows, LossConfig(), lr)
        complete = trainer.begin_save(tmp_path / "checkpoint")  # written while the trainer goes on
        marks = [trainer.export_weights(tmp_path / "saved").fingerprint]
        metrics = [numbers(trainer, rows, lr) for lr in (1e-2, 5e-3, 2e-3)]
        complete()
        assert not any(children_of(rank.process.pid) for rank in trainer.pool.processes), (
            "a rank starts no process to save"
        )
        marks.append(trainer.export_weights(tmp_path / "went-on").fingerprint)
        assert marks[0] != marks[1]
        trainer.offload()  # nothing where there is no GPU
        trainer.onload()
        assert (trainer.free_mib() is None) is not torch.cuda.is_available()
        trainer.load(tmp_path / "checkpoint")  # in the same process, over other state
        assert trainer.export_weights(tmp_path / "again").fingerprint == marks[0]
        with pytest.raises(StoreError, match="already exists"):
            trainer.save(tmp_path / "checkpoint")
    with start(model, tmp_path / "b", **options) as fresh:  # in new processes
        fresh.load(tmp_path / "checkpoint")
        assert [numbers(fresh, rows, lr) for lr in (1e-2, 5e-3, 2e-3)] == metrics
        assert fresh.export_weights(tmp_path / "resumed").fingerprint == marks[1]
        assert list(tmp_path.glob(".*.tmp")) == []
        refusals(fresh, rows)
        not_finite(fresh, rows, tmp_path)
        hung(fresh, rows)


def numbers(trainer, rows, lr):
    metrics = trainer.step(rows, LossConfig(), lr)
    assert metrics.pop("rates")["tokens_per_s"] > 0
    return metrics | {"log_probs": [a.tolist() for a in metrics["log_probs"]]}


def refusals(trainer, rows):
    """Invalid requests are refused before any rank receives them."""
    with pytest.raises(InvariantError, match="empty"):
        trainer.log_probs([])
    bare = [replace(r, old_log_probs=None, ref_log_probs=None) for r in rows]
    with pytest.raises(InvariantError, match="ref_log_probs"):
        trainer.step(bare, LossConfig(kl_loss_coef=0.1), 1e-3)
    with pytest.raises(InvariantError, match="all or none"):
        trainer.step([*rows, bare[0]], LossConfig(), 1e-3)
    with pytest.raises(ConfigError, match="eps_clip_c"):
        trainer.step(rows, LossConfig(eps_clip_c=0.5), 1e-3)


def not_finite(trainer, rows, tmp_path):
    """A step whose loss is not finite names its token and changes nothing; the next step works."""
    before = trainer.export_weights(tmp_path / "before").fingerprint
    token = int(np.flatnonzero(rows[2].weights)[1])
    old, advantages = rows[2].old_log_probs.copy(), rows[2].advantages.copy()
    old[token], advantages[token] = -1000.0, -1.0
    length = len(old)
    odd = replace(
        rows[2],
        old_log_probs=old,
        advantages=advantages,
        source=("e-7", 1),
        turns=((0, token - 3), (1, length - token)),
    )
    with pytest.raises(NonFiniteError, match=rf"ratio of episode e-7, segment 1, turn 1, token {token} is exp\("):
        trainer.step([*rows[:2], odd, *rows[3:]], LossConfig(), 1e-2)
    assert trainer.export_weights(tmp_path / "after").fingerprint == before
    assert np.isfinite(trainer.step(rows, LossConfig(), 1e-3)["grad_norm"])


def hung(trainer, rows):
    """A rank that does not answer in time is a WorkerError, and all are stopped."""
    processes = [rank.process for rank in trainer.pool.processes]
    os.kill(processes[0].pid, signal.SIGSTOP)
    trainer.timeout_s = 1.0
    with pytest.raises(WorkerError, match="did not answer within 1 s"):
        trainer.step(rows, LossConfig(), 1e-3)
    assert all(p.poll() is not None for p in processes)
    with pytest.raises(WorkerError, match="have been stopped, since step: rank 0 did not answer within 1 s"):
        trainer.step(rows, LossConfig(), 1e-3)


@pytest.mark.usefixtures("reused_ranks")
def test_a_rank_killed_during_a_step_is_named_soon(tmp_path):
    model = make_model(tmp_path / "model")
    rows = make_rows(model) * 300
    with start(model, tmp_path, world_size=2, micro_batch_tokens=1) as trainer:
        processes, killed = [rank.process for rank in trainer.pool.processes], []

        def kill() -> None:
            time.sleep(1.0)
            os.kill(processes[1].pid, signal.SIGKILL)
            killed.append(time.monotonic())

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            trainer.step(rows, LossConfig(), 1e-3)
        took = time.monotonic() - killed[0]
        thread.join()
        assert took < 10
        assert all(p.poll() is not None for p in processes)


@pytest.mark.usefixtures("reused_ranks")
def test_invalid_settings_are_a_usage_error(tmp_path):
    model = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="not a multiple"):
        MegatronTrainer(model, megatron=TP2, world_size=3, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_siez.*did you mean"):
        start(model, tmp_path, megatron={"tensor_model_parallel_siez": 2})


@pytest.mark.full
def test_workers_end_when_the_controller_is_killed(tmp_path):
    import subprocess
    import sys

    model = make_model(tmp_path / "model")
    code = (
        "import sys, time; from pathlib import Path; from agentrl.train.megatron.trainer import MegatronTrainer as T\n"
        f"t = T(Path({str(model)!r}), run_dir=Path({str(tmp_path)!r}), world_size=2, threads=1)\n"
        "print(*[p.process.pid for p in t.pool.processes], flush=True); time.sleep(600)"
    )
    controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(p) for p in read_line(controller).split()]
    assert len(pids) == 2
    controller.kill()
    controller.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{p}").exists() for p in pids):
        assert time.monotonic() < deadline, "a worker outlived its controller by 10 s"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.usefixtures("reused_ranks")
@pytest.mark.parametrize(("settings", "world"), [({}, 2), (TP2, 2)], ids=["DP2", "TP2"])
def test_a_checkpoint_opens_at_another_parallel_size(tmp_path, settings, world):
    model = make_model(tmp_path / "model")
    rows = make_rows(model)
    with start(model, tmp_path / "a", megatron=settings, world_size=world) as trainer:
        trainer.step(rows, LossConfig(), 1e-2)
        trainer.save(tmp_path / "checkpoint")
        mark = trainer.export_weights(tmp_path / "saved").fingerprint
        trainer.step(rows, LossConfig(), 1e-2)
        trainer.export_weights(tmp_path / "next")
    with start(model, tmp_path / "b") as alone:
        alone.load(tmp_path / "checkpoint")
        assert alone.export_weights(tmp_path / "opened").fingerprint == mark
        alone.step(rows, LossConfig(), 1e-2)
        alone.export_weights(tmp_path / "stepped")
    one, two = read(tmp_path / "next"), read(tmp_path / "stepped")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-4, msg=name)
