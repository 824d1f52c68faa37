"""Conversion to megatron's layout and back is bit-exact at any tensor-parallel size."""

import pytest

torch = pytest.importorskip("torch")
from agentrl.errors import ConfigError, DataError  # noqa: E402
from agentrl.train.megatron.hf_weights import WeightLayout, conversion, final_shape, to_hugging_face, to_megatron  # noqa: E402
from agentrl.train.megatron.model_config import read_model_config  # noqa: E402

LAYOUT = WeightLayout(
    table={}, groups=4, queries_per_group=2, head_dim=8, vocab_size=50, padded_vocab_size=52, tied=False
)
SHAPES = {
    "copy": [(16,)],
    "vocab": [(50, 16)],
    "columns": [(16, 24)],
    "glu": [(24, 16)] * 2,
    "qkv": [(64, 16), (32, 16), (32, 16)],
    "rows": [(24, 16)],
    "glu_joined": [(48, 16)],
    "expert_rows": [(24, 16)] * 3,
    "expert_columns": [(16, 24)] * 3,
    "router_bias": [(16,)],
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_conversion_and_its_inverse_are_bit_exact(kind, world):
    torch.manual_seed(0)
    tensors = [torch.randn(s) for s in SHAPES[kind]]
    shards = [to_megatron(tensors, kind, LAYOUT, r, world) for r in range(world)]
    back = [t.reshape(final_shape(t, kind)) for t in to_hugging_face(shards, kind, LAYOUT)]
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    if kind not in ("copy", "router_bias"):
        assert sum(s.numel() for s in shards) >= sum(t.numel() for t in tensors)
        assert len({s.shape for s in shards}) == 1


def test_biases_are_grouped_like_their_weights():
    """Row i of q, k, v and entry i of their biases land in the same place."""
    rows = [torch.arange(n, dtype=torch.float32) + 1000 * i for i, n in enumerate((64, 32, 32))]
    weight = to_megatron([r[:, None].expand(-1, 16) for r in (x.clone() for x in rows)], "qkv", LAYOUT, 1, 2)
    bias = to_megatron(rows, "qkv", LAYOUT, 1, 2)
    assert torch.equal(weight[:, 0], bias)
    assert bias[:16].tolist() == [float(i) for i in range(32, 48)]  # the third group's two query heads come first


def test_a_parameter_without_counterpart_is_refused():
    with pytest.raises(DataError, match="router"):
        conversion("decoder.layers.0.mlp.router.weight", LAYOUT)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "sliding_attention"),
    ],
)
def test_models_that_cannot_be_built_exactly_are_refused(tmp_path, config, what):
    import json

    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=what):
        read_model_config(tmp_path)
