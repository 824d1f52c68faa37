"""Images in messages, for processors of the Qwen-VL shape: one placeholder per image in the template, as many tokens as it has patches.

The template writes one placeholder token for each image; it is expanded once, here, to grid / merge² copies (Qwen2-VL, arXiv:2409.12191,
§2.1). Pixels are kept by the image's hash and handed to the engine and, in `Sample.multimodal_train_inputs`, to the trainer. Images come
as PIL images, encoded bytes, or data URLs: never as a path or an address, which a tool's output could choose.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ContractError, TemplateError
from agentrl.render.base import Pieces
from agentrl.render.shape import is_image
from agentrl.types import Message, Provenance

_KEPT = 256
_PLACEHOLDERS = ("<|image_pad|>", "<image_pad>")


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as the model takes it."""

    sha256: str
    """of its RGB pixels and size"""
    pixels: NDArray[np.float32]
    """[patches, values of a patch]"""
    grid: tuple[int, int, int]
    """patches in time, height and width"""
    tokens: int
    """placeholders that stand for it"""


class Images:
    """Reads images with the model's own processor."""

    def __init__(self, processor: Any, placeholder_id: int) -> None:
        """`processor`: called with `images` and `return_tensors="np"`, answers pixel_values and image_grid_thw; has merge_size."""
        self._processor = processor
        self._merge = int(processor.merge_size) ** 2
        self.placeholder_id = placeholder_id
        self._known: OrderedDict[str, Picture] = OrderedDict()

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
        if name is None or not hasattr(processor, "merge_size"):
            raise TemplateError(
                f"{folder}: images are read for processors of the Qwen-VL shape ({_PLACEHOLDERS[0]}, merge_size); this is another"
            )
        return cls(processor, added[name])

    def pictures(self, messages: Iterable[Message]) -> list[Picture]:
        """The images in messages, in order.

        Raises:
            ContractError: an image that is none.
        """
        return [self._read(part) for part in image_parts(messages)]

    def expand(self, pieces: Pieces, pictures: Sequence[Picture], provenance: Provenance) -> Pieces:
        """Each placeholder replaced by as many as its image has tokens, of this provenance.

        Raises:
            TemplateError: the template wrote another number of placeholders than there are images.
        """
        found = sum(ids.count(self.placeholder_id) for _, ids in pieces)
        if found != len(pictures):
            raise TemplateError(f"the template wrote {found} placeholders for {len(pictures)} images")
        rest = iter(pictures)
        out: list[tuple[Provenance, tuple[int, ...]]] = []
        for kind, ids in pieces:
            at = 0
            for i, token in enumerate(ids):
                if token == self.placeholder_id:
                    out += [(kind, ids[at:i]), (provenance, (token,) * next(rest).tokens)]
                    at = i + 1
            out.append((kind, ids[at:]))
        return _merged(out)

    def _read(self, part: Mapping[str, Any]) -> Picture:
        image = _decoded(part)
        digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        answer = self._processor(images=[image], return_tensors="np")
        t, h, w = (int(n) for n in np.asarray(answer["image_grid_thw"])[0])
        picture = Picture(digest, np.asarray(answer["pixel_values"], np.float32), (t, h, w), t * h * w // self._merge)
        self._known[digest] = picture
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return picture


def train_inputs(pictures: Sequence[Picture]) -> dict[str, Any] | None:
    """What a model's forward takes beside the ids: for `Sample.multimodal_train_inputs`. None without images."""
    if not pictures:
        return None
    return {
        "pixel_values": np.concatenate([p.pixels for p in pictures]),
        "image_grid_thw": np.asarray([p.grid for p in pictures], np.int64),
    }


def image_parts(messages: Iterable[Message]) -> Iterator[Mapping[str, Any]]:
    """The parts of contents that are images."""
    for m in messages:
        if isinstance(m.get("content"), (list, tuple)):
            yield from (p for p in m["content"] if is_image(p))


def _decoded(part: Mapping[str, Any]) -> Any:
    """A PIL image in RGB."""
    from PIL import Image, UnidentifiedImageError

    value = part.get("image", part.get("image_url"))
    value = value.get("url") if isinstance(value, Mapping) else value
    try:
        if isinstance(value, Image.Image):
            return value.convert("RGB")
        if isinstance(value, str) and value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2], validate=True)
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value)).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, binascii.Error, Image.DecompressionBombError) as e:
        raise ContractError(f"an image in a message cannot be read: {e}") from e
    raise ContractError(
        f"an image must be a PIL image, encoded bytes or a data: URL, found {type(value).__name__}: {value!r:.60}"
    )


def _merged(pieces: Iterable[tuple[Provenance, tuple[int, ...]]]) -> Pieces:
    out: list[tuple[Provenance, tuple[int, ...]]] = []
    for kind, ids in pieces:
        if ids and out and out[-1][0] is kind:
            out[-1] = kind, out[-1][1] + ids
        elif ids:
            out.append((kind, ids))
    return tuple(out)
