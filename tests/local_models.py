"""Tiny random models for the local engine, and their log-probs by transformers."""

from pathlib import Path

import pytest

from agentrl.engine.base import WeightsManifest


def decode(ids) -> str:
    """Three letters per token, so that stop strings begin and end inside tokens. All ids have a text."""
    return "".join(f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}." for i in ids)


KINDS = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}


def build(folder: Path, kind: str = "qwen3", seed: int = 0, **kw) -> Path:
    """A tiny random model with logits far enough apart that log-probs matter."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 700,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        **({"head_dim": 16} if kind == "qwen3" else {}),
        **kw,
    }
    config = getattr(transformers, f"{KINDS[kind]}Config")(**shape)
    getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).save_pretrained(folder)
    return folder


async def local(folder: Path, **kw):
    from agentrl.engine.local.engine import LocalEngine

    engine = LocalEngine(folder, **{"decode": decode, "threads": 1, **kw})
    await engine.start()
    return engine


def manifest_of(folder: Path) -> WeightsManifest:
    from agentrl.core.weights_fingerprint import fingerprint

    return WeightsManifest(folder, fingerprint(folder))


_loaded: dict[Path, object] = {}


def full_log_probs(folder: Path, context, ids, temperature: float):
    """Log-probs of `ids` after `context` by one full forward of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    if folder not in _loaded:
        _loaded[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = _loaded[folder]
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1].double()
    return torch.log_softmax(logits / (temperature or 1), -1).gather(1, torch.tensor(ids)[:, None])[:, 0], logits
