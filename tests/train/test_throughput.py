"""FLOPs of a step against matrix products counted by torch in transformers' own model; rates; the trace of a step."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from models import hf_model, make_model  # noqa: E402

from agentrl.train.base import Row  # noqa: E402
from agentrl.train.megatron.model_config import read_model_config  # noqa: E402
from agentrl.train.megatron.throughput import Work, mfu, peak_flops, plan_work, row_work, step_flops  # noqa: E402


def row(length, trained):
    weights = np.zeros(length, np.float32)
    weights[trained] = 1
    zero = np.zeros(length, np.float32)
    tokens = np.zeros(length, np.int32)
    return Row(tokens=tokens, weights=weights, advantages=zero, rollout_log_probs=zero, temperature=zero + 1)


def test_the_work_of_rows_has_no_padding_and_predicts_trained_tokens_only():
    assert row_work([row(4, [1, 3]), row(1, []), row(3, [2])]) == Work(tokens=5, keys=6 + 3, predictions=3)


@pytest.mark.parametrize("family", ["qwen3", "llama", "glm4", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_flops_are_those_of_the_matrix_products(tmp_path, family):
    """torch counts attention without regard to the causal mask: for each of n tokens, n keys."""
    from torch.utils.flop_counter import FlopCounterMode

    model = hf_model(make_model(tmp_path / "model", family))
    model.set_experts_implementation("eager")  # torch does not count grouped products
    n = 16
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n, dtype=torch.long)).logits.sum().backward()
    config = read_model_config(tmp_path / "model")
    counted = counter.get_total_flops()
    assert step_flops(config, Work(tokens=n, keys=n * n, predictions=n)) == pytest.approx(counted, rel=0.01)


def test_flops_of_adapters_alone_are_those_of_peft(tmp_path):
    from peft import LoraConfig, get_peft_model
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model(tmp_path / "model", "qwen3")
    adapted = get_peft_model(hf_model(model), LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"]))
    adapted.enable_input_require_grads()  # as in the trainer
    n = 16
    with FlopCounterMode(display=False) as counter:
        adapted(torch.zeros(1, n, dtype=torch.long)).logits.sum().backward()
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    work = Work(tokens=n, keys=n * n, predictions=n)
    want = step_flops(read_model_config(model), work, trained)
    assert want == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert want < 0.8 * step_flops(read_model_config(model), work)
    assert mfu(read_model_config(model), work, 1.0, "H200", 1, trained) == pytest.approx(want / 990e12)


def test_a_shared_prefix_counts_once_in_each_micro_batch():
    """Rows 1 2 3 4, 1 2 3 5 and 1 2 9 have the inputs 1 2 3, 1 2 3 and 1 2."""
    rows = [of([1, 2, 3, 4]), of([1, 2, 3, 5]), of([1, 2, 9])]
    assert plan_work(rows, [[[0, 1, 2]]], tree=True) == Work(tokens=3, keys=6, predictions=3)
    assert plan_work(rows, [[[0], [1, 2]]], tree=True) == Work(tokens=6, keys=12, predictions=3)
    assert plan_work(rows, [[[0, 1, 2]]], tree=False) == Work(tokens=8, keys=15, predictions=3)


def of(tokens):
    plain = row(len(tokens), [len(tokens) - 1])
    return replace(plain, tokens=np.array(tokens, np.int32))


def test_utilisation_by_hand(tmp_path):
    config = read_model_config(make_model(tmp_path / "model"))
    work = Work(tokens=1000, keys=0, predictions=0)
    assert mfu(config, work, 0.5, "NVIDIA H200", 2) == pytest.approx(step_flops(config, work) / 0.5 / 2 / 990e12)
    assert mfu(config, work, 0.5, "", 2) is None, "a CPU has no peak"
    assert (peak_flops("NVIDIA H100 PCIe"), peak_flops("NVIDIA H100 80GB HBM3")) == (756e12, 990e12)


def test_a_profiled_block_leaves_a_trace_and_a_table(tmp_path):
    from agentrl.train.megatron.profile import profiled

    with profiled(tmp_path / "profile", 3):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert (tmp_path / "profile" / "rank3.json.gz").stat().st_size > 0
    assert "aten::mm" in (tmp_path / "profile" / "rank3.txt").read_text()
