"""Qwen2-VL and Qwen2.5-VL: the decoder of Qwen2 with rotary positions of three numbers (M-RoPE; arXiv:2409.12191, section 2.1).

The vision tower is transformers' and stays as it is: see vision_tower.py.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.errors import ConfigError
from agentrl.train.megatron.families.base import HuggingFaceConfig, ModelConfig, Vision, decoder
from agentrl.train.megatron.families.qwen2 import layer

__all__ = ["layer", "read"]
_SECTIONS = (16, 24, 24)
"""of M-RoPE, where config.json names none"""


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    if not config.get("vision_config"):
        raise ConfigError(f"{config.path} has no key vision_config, without which the model cannot be trained")
    vision = Vision(config["image_token_id"], config["video_token_id"], "visual.")
    text = config.text()
    model = decoder(text, add_qkv_bias=True, rope=text.rope(sections=_SECTIONS))
    if sum(model.rope.sections or ()) * 2 != model.head_dim:
        raise ConfigError(
            f"{config.path}: mrope_section {list(model.rope.sections or ())} must add up to half of the {model.head_dim} channels of a head"
        )
    return replace(model, vision=vision)
