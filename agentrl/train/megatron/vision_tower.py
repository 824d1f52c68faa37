"""The vision tower of a model of images: transformers' own module with the weights of the model folder, frozen.

Every rank of the first pipeline stage holds it whole and computes it for its micro-batches. Its output for an image does not depend on other
images, and never changes, so that of recent images is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.core.message_images import Image
from agentrl.errors import DataError
from agentrl.render.images import Images
from agentrl.train.megatron.hf_weights import CarriedTensors, HuggingFaceWeights
from agentrl.train.megatron.image_layout import processor
from agentrl.train.megatron.micro_batch import ImagePlan
from agentrl.train.megatron.model_config import ModelConfig

KEPT_TOKENS = 16384
"""tokens of images whose features are kept"""


class VisionTower:
    """Computes the features of images."""

    def __init__(self, module: Any, images: Images, device: torch.device) -> None:
        """`module`: returns `pooler_output` [tokens, h] of pixel values and `grid_thw`; `images`: the model's image processor."""
        self.module, self._images, self._device = module, images, device
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def with_features(self, plan: ImagePlan) -> ImagePlan:
        """The plan with the features of its images."""
        features = torch.cat([self._features(image) for image in plan.images])
        self.forget(KEPT_TOKENS)
        return replace(plan, features=features)

    @torch.no_grad()
    def _features(self, image: Image) -> Tensor:
        """[tokens, h] of an image."""
        if image.sha256 in self._kept:
            self._kept.move_to_end(image.sha256)
            return self._kept[image.sha256]
        pixels = self._images.pixels([image])
        assert pixels is not None
        values = torch.from_numpy(pixels["pixel_values"]).to(self._device, self.module.dtype)
        grid = torch.from_numpy(pixels["image_grid_thw"]).to(self._device)
        features: Tensor = self.module(values, grid_thw=grid).pooler_output
        self._kept[image.sha256] = features
        return features

    def forget(self, most: int = 0) -> None:
        """Keep the features of at most so many tokens."""
        while sum(map(len, self._kept.values())) > most:
            self._kept.popitem(last=False)


def load_vision_tower(model: ModelConfig, weights: HuggingFaceWeights, dtype: torch.dtype) -> VisionTower | None:
    """The vision tower of a model; None: it is a text model.

    Raises:
        DataError: its tensors are not those that config.json describes.
    """
    if model.vision is None:
        return None
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    kinds = {
        "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
        "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    }
    config: Any = AutoConfig.from_pretrained(weights.folder)
    module: Any = kinds[model.family]._from_config(config.vision_config, dtype=dtype)
    prefix = model.vision.prefix
    tensors = {name.removeprefix(prefix): tensor for name, tensor in CarriedTensors(weights, prefix).items()}
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        reason = str(e).splitlines()[1].strip()
        raise DataError(f"{weights.folder}: the tensors {prefix}… are not those of its config.json: {reason}") from e
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    module = module.to(device).eval().requires_grad_(False)
    return VisionTower(module, processor(weights.folder, model.vision), device)
