"""Tiny random models of images, rows with images, and their log-probs in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hf_log_probs

from agentrl.core.message_images import PlacedImage, as_image
from agentrl.render.images import Images
from agentrl.train.base import Row

Pil = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", exc_type=ImportError)

PROCESSOR = pil.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
PAD, VIDEO = 90, 91
IMAGES = Images(PROCESSOR, PAD)
SIZES = ((56, 84), (28, 28), (84, 56), (112, 60))
"""width and height of pictures"""


def picture(seed: int) -> Any:
    """An `Image` of random pixels."""
    width, height = SIZES[seed % len(SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return as_image({"image": Pil.fromarray(pixels)})


def make_vision_model(
    folder: Path, kind: str = "qwen2_5_vl", *, tied: bool = False, layers: int = 2, **more: Any
) -> Path:
    """Save a tiny random model with its image processor; `more`: keys of its config, such as `text_config`."""
    import transformers

    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        **{f"{name}_token_id": None for name in ("bos", "eos")},
        **more.pop("text_config", {}),
    }
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    if kind == "qwen2_vl":
        sizes = {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[kind]
    config = getattr(transformers, name + "Config")(
        text_config=text,
        vision_config={"depth": 2, "num_heads": 2, **sizes},
        tie_word_embeddings=tied,
        **{
            "image_token_id": PAD,
            "video_token_id": VIDEO,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
            **more,
        },
    )
    torch.manual_seed(0)
    model = getattr(transformers, name + "ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter += 0.2 * torch.randn_like(parameter)
            elif key.endswith("bias"):
                parameter.normal_(0, 0.2)
            else:
                parameter *= 4
    model.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return folder


def vision_model(folder: Path) -> Any:
    """The model as transformers reads it, fp32, with the plainest attention."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


class Seeing:
    """A transformers model that is shown the images of the row whose tokens it gets."""

    def __init__(self, hf: Any, rows: list[Row]) -> None:
        self.hf, self.rows = hf, {tuple(row.tokens): row.images for row in rows}

    def __call__(self, ids: torch.Tensor) -> Any:
        images = self.rows[tuple(ids[0].tolist())]
        pixels = {k: torch.from_numpy(v) for k, v in (IMAGES.pixels([p.image for p in images]) or {}).items()}
        kinds = torch.zeros_like(ids)
        for placed in images:
            kinds[:, placed.at : placed.at + placed.tokens] = 1
        return self.hf(input_ids=ids, mm_token_type_ids=kinds, **pixels)


def bare_row(parts: list[Any], **values: Any) -> Row:
    """A row of parts: numbers of tokens, or images. Its last token is trained."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            images.append(PlacedImage(part, len(tokens), IMAGES.token_count(part)))
            tokens += [PAD] * images[-1].tokens
    zero = np.zeros(len(tokens), np.float32)
    weights = zero.copy()
    weights[-1] = 1
    arrays = {"weights": weights, "advantages": zero, "rollout_log_probs": zero, "temperature": zero + 1}
    return Row(tokens=np.array(tokens, np.int32), images=tuple(images), **{**arrays, **values})


def image_rows(model: Path, *, seed: int = 0) -> list[Row]:
    """Rows that share prefixes up to an image, through it, and past it; rows of the same text with other images; and one without any."""
    rng = np.random.default_rng(seed)

    def text(n: int) -> list[int]:
        return rng.integers(0, 80, n).tolist()

    start, middle = text(5), text(4)
    a, b, c, d = map(picture, range(4))
    same_size = as_image({"image": Pil.fromarray(255 - np.asarray(a.open()))})
    parts = [
        [*start, a, *middle, b, *text(6)],
        [*start, a, *middle, b, *text(9)],
        [*start, a, *middle, c, *text(7)],
        [*start, same_size, *middle, b, *text(6)],
        [*start, d, *text(8), d, 7, a, *text(5)],
        [a, *text(6)],
        text(17),
    ]
    rows = [bare_row(p) for p in parts]
    reference = Seeing(vision_model(model), rows)
    return [_with_losses(row, reference, rng) for row in rows]


def _with_losses(row: Row, reference: Seeing, rng: Any) -> Row:
    n = len(row.tokens)
    mask = ((row.tokens < PAD) & (rng.random(n) < 0.6)).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    heat = np.where(mask > 0, np.float32(0.7), np.float32(1)).astype(np.float32)
    zero = np.zeros(n, np.float32)
    arrays = {"advantages": zero, "rollout_log_probs": zero, "temperature": heat, "images": row.images}
    with torch.no_grad():
        now = hf_log_probs(reference, Row(tokens=row.tokens, weights=mask, **arrays)).numpy()

    def off(scale: float) -> np.ndarray:
        return ((now + scale * rng.standard_normal(n)) * mask).astype(np.float32)

    arrays |= {"advantages": (rng.standard_normal(n) * mask).astype(np.float32), "rollout_log_probs": off(0.1)}
    return Row(
        tokens=row.tokens,
        weights=(mask / 50).astype(np.float32),
        old_log_probs=off(0.3),
        ref_log_probs=off(0.5),
        **arrays,
    )


def by_vision_file_name(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors by transformers' parameters -> by the names in a folder."""
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    return {
        next((n + k.removeprefix(o) for o, n in names.items() if k.startswith(o)), k): v for k, v in tensors.items()
    }
