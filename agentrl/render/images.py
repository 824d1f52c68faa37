"""Images for a model: one placeholder for each in the template, as many tokens as it has patches, pixels as the model takes them.

For processors of the Qwen-VL shape. The template writes one placeholder token for each image; it is expanded once, here, to grid / merge²
copies (Qwen2-VL, arXiv:2409.12191, §2.1). Pixels are made when a `Sample` is, with the model's own processor.
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
    """Knows images as the model's own processor does."""

    def __init__(self, processor: Any, placeholder_id: int) -> None:
        """`processor`: called with `images` and `return_tensors="np"`, answers pixel_values and image_grid_thw; has merge_size."""
        self._processor = processor
        self._merge = int(processor.merge_size) ** 2
        self.placeholder_id = placeholder_id

    @classmethod
    def load(cls, folder: str | Path, added: Mapping[str, int]) -> Images | None:
        """The processor of a model folder; None if the model has none.

        Raises:
            TemplateError: it has one that is not of this shape, or a tokenizer without its placeholder.
        """
        if not (Path(folder) / "preprocessor_config.json").exists():
            return None
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(str(folder))
        except (OSError, ValueError, ImportError) as e:
            raise TemplateError(f"{folder}: its image processor could not be loaded: {str(e).splitlines()[0]}") from e
        name = next((p for p in _PLACEHOLDERS if p in added), None)
        if (
            name is None
            or not hasattr(processor, "merge_size")
            or not hasattr(processor, "get_number_of_image_patches")
        ):
            raise TemplateError(
                f"{folder}: images are read for processors of the Qwen-VL shape ({_PLACEHOLDERS[0]}, merge_size); this is another"
            )
        return cls(processor, added[name])

    def tokens(self, image: Image) -> int:
        """How many placeholders stand for it."""
        width, height = image.size
        return int(self._processor.get_number_of_image_patches(height, width, {})) // self._merge

    def expand(self, pieces: Pieces, images: Sequence[Image], provenance: Provenance) -> Pieces:
        """Each placeholder replaced by as many as its image has tokens, of this provenance.

        Raises:
            TemplateError: the template wrote another number of placeholders than there are images.
        """
        found = sum(ids.count(self.placeholder_id) for _, ids in pieces)
        if found != len(images):
            raise TemplateError(f"the template wrote {found} placeholders for {len(images)} images")
        rest = iter(images)
        out: list[tuple[Provenance, tuple[int, ...]]] = []
        for kind, ids in pieces:
            at = 0
            for i, token in enumerate(ids):
                if token == self.placeholder_id:
                    out += [(kind, ids[at:i]), (provenance, (token,) * self.tokens(next(rest)))]
                    at = i + 1
            out.append((kind, ids[at:]))
        return merged(out)

    def placed(self, pieces: Pieces, images: Sequence[Image]) -> list[PlacedImage]:
        """Where the images stand in pieces that were expanded, counted from their beginning."""
        ids = list(itertools.chain.from_iterable(part for _, part in pieces))
        out: list[PlacedImage] = []
        end = 0
        for image in images:
            at, n = ids.index(self.placeholder_id, end), self.tokens(image)
            out.append(PlacedImage(image, at, n))
            end = at + n
        return out

    def pixels(self, images: Sequence[Image]) -> dict[str, Any] | None:
        """What the model's forward takes beside the ids, for `Sample.multimodal_train_inputs`. None without images."""
        if not images:
            return None
        answer = self._processor(images=[image.open() for image in images], return_tensors="np")
        return {
            "pixel_values": np.asarray(answer["pixel_values"], np.float32),
            "image_grid_thw": np.asarray(answer["image_grid_thw"], np.int64),
        }


def images_of_model(folder: str | Path, added: Mapping[str, int]) -> Images | TemplateError | None:
    """What a model knows of images (see `Images.load`). Why it knows none is said when there is one: most models are never shown any."""
    try:
        return Images.load(folder, added)
    except TemplateError as e:
        return e
