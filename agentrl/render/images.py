"""Images for a model: as many placeholder tokens as an image has merged patches, and its pixels as the model's forward pass expects them.

For processors of the Qwen-VL shape. The template writes one placeholder token per image; it is expanded once, here, to grid / merge²
copies (Qwen2-VL, arXiv:2409.12191, §2.1). Pixels are computed when a `Sample` is built, by the model's own processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.core.message_images import Image, PlacedImage
from agentrl.errors import TemplateError
from agentrl.render.base import Pieces
from agentrl.render.delta_template import merged
from agentrl.types import Provenance

_PLACEHOLDERS = ("<|image_pad|>", "<image_pad>")


class Images:
    """A model's image processor and placeholder token."""

    def __init__(self, processor: Any, placeholder_id: int) -> None:
        """`processor`: called with `images` and `return_tensors="np"`, returns pixel_values and image_grid_thw; has merge_size."""
        self._processor = processor
        self._patches_per_token = int(processor.merge_size) ** 2
        self.placeholder_id = placeholder_id

    @classmethod
    def load(cls, folder: str | Path, added: Mapping[str, int]) -> Images | None:
        """The processor of a model folder, or None if the model has none. `added`: the tokenizer's added tokens.

        Raises:
            TemplateError: the processor is not like Qwen-VL's, or the tokenizer lacks its placeholder token.
        """
        if not (Path(folder) / "preprocessor_config.json").exists():
            return None
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(str(folder))
        except (OSError, ValueError, ImportError) as e:
            raise TemplateError(f"{folder}: its image processor could not be loaded: {str(e).splitlines()[0]}") from e
        placeholder = next((p for p in _PLACEHOLDERS if p in added), None)
        required = ("merge_size", "get_number_of_image_patches")
        if placeholder is None or not all(hasattr(processor, name) for name in required):
            raise TemplateError(
                f"{folder}: only image processors like Qwen-VL's are supported, with the token {_PLACEHOLDERS[0]} and a merge_size; "
                f"found {type(processor).__name__}"
            )
        return cls(processor, added[placeholder])

    def token_count(self, image: Image) -> int:
        """The number of placeholder tokens of an image."""
        width, height = image.size
        return int(self._processor.get_number_of_image_patches(height, width, {})) // self._patches_per_token

    def grid(self, image: Image) -> tuple[int, int]:
        """Height and width of an image in placeholder tokens.

        Raises:
            TemplateError: the processor resizes images in another way than Qwen2-VL's.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, (width, height) = self._processor, image.size
        unit = int(processor.patch_size) * int(processor.merge_size)
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        rows, columns = (side // unit for side in smart_resize(height, width, unit, min_pixels=least, max_pixels=most))
        if rows * columns != self.token_count(image):
            raise TemplateError(
                f"{type(processor).__name__} makes {self.token_count(image)} tokens of an image of {width} x {height} pixels, expected "
                f"{rows} x {columns}"
            )
        return rows, columns

    def expand(self, pieces: Pieces, images: Sequence[Image], provenance: Provenance) -> Pieces:
        """The pieces with each placeholder repeated as often as its image has tokens, with this provenance.

        Raises:
            TemplateError: the numbers of placeholders and images differ.
        """
        written = sum(ids.count(self.placeholder_id) for _, ids in pieces)
        if written != len(images):
            raise TemplateError(f"the template wrote {written} placeholders for {len(images)} images")
        remaining = iter(images)
        expanded: list[tuple[Provenance, tuple[int, ...]]] = []
        for kind, ids in pieces:
            start = 0
            for i, token in enumerate(ids):
                if token == self.placeholder_id:
                    placeholders = (token,) * self.token_count(next(remaining))
                    expanded += [(kind, ids[start:i]), (provenance, placeholders)]
                    start = i + 1
            expanded.append((kind, ids[start:]))
        return merged(expanded)

    def placed(self, pieces: Pieces, images: Sequence[Image]) -> list[PlacedImage]:
        """The positions of images in expanded pieces, counted from their first token."""
        ids = list(itertools.chain.from_iterable(part for _, part in pieces))
        placed: list[PlacedImage] = []
        end = 0
        for image in images:
            placed.append(PlacedImage(image, ids.index(self.placeholder_id, end), self.token_count(image)))
            end = placed[-1].at + placed[-1].tokens
        return placed

    def pixels(self, images: Sequence[Image]) -> dict[str, Any] | None:
        """What the model's forward pass needs besides the ids (`Sample.multimodal_train_inputs`), or None without images."""
        if not images:
            return None
        answer = self._processor(images=[image.open() for image in images], return_tensors="np")
        return {
            "pixel_values": np.asarray(answer["pixel_values"], np.float32),
            "image_grid_thw": np.asarray(answer["image_grid_thw"], np.int64),
        }


def images_of_model(folder: str | Path, added: Mapping[str, int]) -> Images | TemplateError | None:
    """The result of `Images.load`, or its error: it is raised at the first image, since most models are never shown any."""
    try:
        return Images.load(folder, added)
    except TemplateError as e:
        return e
