"""Tiny models and batches for the trainer's tests, and the same loss in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.train.base import LossConfig, Row

VOCAB = 96
FAMILIES = ("llama", "qwen2", "qwen3")
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
}
_HEADS = {"head_dim": 16}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": _HEADS,
    "qwen3_moe": {
        **_HEADS,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "glm4": {**_HEADS, "attention_bias": True, "rms_norm_eps": 1e-5},
    "glm4_moe": {**_HEADS, **_SIGMOID, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {
        **_SIGMOID,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Further keys of a family's config.json."""


def make_model(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    layers: int = 2,
    seed: int = 0,
    vocab: int = VOCAB,
    **options: Any,
) -> Path:
    """Save a tiny random model with norms and biases that are not 1 and 0."""
    import transformers

    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        **({"pad_token_id": None} if family.startswith("glm") else {}),
    }
    name = _CLASSES[family]
    config = getattr(transformers, name + "Config")(**{**shape, **OPTIONS.get(family, {}), **options})
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
            elif name.endswith(("bias", "mlp.gate.weight")):
                parameter.normal_(0, 0.2)
            else:
                parameter *= 4
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def by_file_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by transformers' parameters -> by the names in a folder: transformers joins the experts of a layer in memory."""
    separate = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj" and prefix.endswith("experts"):
            for i, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                separate |= {f"{prefix}.{i}.gate_proj.weight": gate, f"{prefix}.{i}.up_proj.weight": up}
        elif part == "down_proj" and prefix.endswith("experts"):
            separate |= {f"{prefix}.{i}.down_proj.weight": down for i, down in enumerate(tensor)}
        else:
            separate[name] = tensor
    return separate


def hf_model(folder: Path) -> Any:
    """The model as transformers reads it, fp32, with the plainest attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def hf_log_probs(model: Any, row: Row) -> torch.Tensor:
    """Log-probs of every token of a row; entry 0 is 0."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0, :-1] / torch.from_numpy(row.temperature)[1:, None]
    picked = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


def make_rows(
    model: Path, count: int = 7, *, temperature: float = 1.0, seed: int = 0, vocab: int = VOCAB, shared: float = 0.0
) -> list[Row]:
    """Rows of ragged lengths and masks, with old, rollout and reference log-probs some way off, so ratios clip and the KL term is not 0.

    `shared`: probability that a row starts with a prefix of an earlier one; prefixes branch at any depth.
    """
    rng = np.random.default_rng(seed)
    hf, rows = hf_model(model), []
    for i in range(count):
        n = int(rng.integers(5, 40))
        tokens = rng.integers(0, vocab, n).astype(np.int32)
        if shared and rows and rng.random() < shared:
            other = rows[rng.integers(len(rows))].tokens
            prefix = int(rng.integers(1, min(n, len(other)) + 1))
            tokens[:prefix] = other[:prefix]
        mask = (rng.random(n) < 0.5).astype(np.float32)
        mask[0], mask[-1] = 0, float(i != 0)
        if i == 3:
            mask[:] = 0
        heat = np.where(mask > 0, np.float32(temperature), np.float32(1)).astype(np.float32)
        zero = np.zeros(n, np.float32)
        bare = Row(tokens=tokens, weights=mask, advantages=zero, rollout_log_probs=zero, temperature=heat)
        with torch.no_grad():
            now = hf_log_probs(hf, bare).numpy()

        def off(scale: float, n: int = n, now: np.ndarray = now, mask: np.ndarray = mask) -> np.ndarray:
            return ((now + scale * rng.standard_normal(n)) * mask).astype(np.float32)

        advantages = (rng.standard_normal(n) * mask).astype(np.float32)
        rows.append(
            Row(
                tokens=tokens,
                weights=(mask / 50).astype(np.float32),
                advantages=advantages,
                rollout_log_probs=off(0.1),
                temperature=heat,
                old_log_probs=off(0.3),
                ref_log_probs=off(0.5),
            )
        )
    return rows


def hf_loss(model: Any, rows: list[Row], loss: LossConfig) -> torch.Tensor:
    """The policy loss written out a second time, token by token, over whole rows; formulas as in the papers named in train/megatron/loss.py."""
    total = torch.zeros(())
    for row in rows:
        now = hf_log_probs(model, row)
        w, adv, old, ref, rollout = (
            torch.from_numpy(x)
            for x in (row.weights, row.advantages, row.old_log_probs, row.ref_log_probs, row.rollout_log_probs)
        )
        if loss.kind == "sft":
            total = total - (w * now).sum()
            continue
        for t in torch.nonzero(w)[:, 0].tolist():
            ratio = torch.exp(now[t] - old[t])
            high = 1 + (loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high)
            pg = -torch.min(ratio * adv[t], torch.clip(ratio, 1 - loss.eps_clip, high) * adv[t])
            if loss.eps_clip_c is not None and adv[t] < 0:
                pg = torch.min(pg, -adv[t] * loss.eps_clip_c)
            if loss.use_tis:
                pg = pg * min(float(torch.exp(old[t] - rollout[t])), loss.tis_threshold)
            kl = torch.exp(ref[t] - now[t]) - (ref[t] - now[t]) - 1
            total = total + w[t] * (pg + loss.kl_loss_coef * kl)
        if loss.entropy_coef:
            tokens = torch.from_numpy(row.tokens.astype(np.int64))
            p = (model(tokens[None]).logits[0, :-1] / torch.from_numpy(row.temperature)[1:, None]).log_softmax(-1)
            total = total + loss.entropy_coef * (w[1:] * (p.exp() * p).sum(-1)).sum()
    return total
