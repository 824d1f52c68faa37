"""Images in messages. An episode holds each as an `Image`: a PNG, identified by the hash of its pixels.

Users put PIL images, encoded bytes or data URLs into the parts of a content. Paths and web addresses are refused, since a tool's output
could choose them. The runner converts each image to an `Image` before anything else reads it; records return `Image` objects too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.plain_files import read_plain_file
from agentrl.errors import ContractError, StoreError

_CACHE_SIZE = 256
_cache: OrderedDict[bytes, Image] = OrderedDict()
"""images by the hash of their encoded bytes; the members of a group share a task's images"""
_loaded: OrderedDict[tuple[str, Path, int, int], Image] = OrderedDict()
"""images that were compared with their hash, by it and the state of their file"""


class Image:
    """One image. Two images of the same size and pixels are equal."""

    __slots__ = ("_source", "sha256")

    def __init__(self, sha256: str, source: bytes | Path | None) -> None:
        """`sha256`: of its size and RGB pixels; `source`: the PNG, or its file, or None where only the hash is known."""
        self.sha256 = sha256
        self._source = source

    @property
    def png(self) -> bytes:
        """The image as a PNG.

        Raises:
            StoreError: its file cannot be read.
        """
        if isinstance(self._source, bytes):
            return self._source
        try:
            return read_plain_file(self._source or Path(f"{self.sha256}.png"))
        except OSError as e:
            raise StoreError(f"the image {self.sha256[:12]}… of an episode cannot be read: {e}") from e

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()

    def open(self) -> Any:
        """The image as a PIL image in RGB."""
        from PIL import Image as Pil

        return Pil.open(io.BytesIO(self.png)).convert("RGB")

    def loaded(self) -> Image:
        """The image with its PNG in memory, after a comparison of a file's pixels with the hash.

        Raises:
            StoreError: its file cannot be read, or holds another image.
        """
        if isinstance(self._source, bytes):
            return self
        file = self._source or Path(f"{self.sha256}.png")
        try:
            state = file.stat()
        except OSError as e:
            raise StoreError(f"the image {self.sha256[:12]}… of an episode cannot be read: {e}") from e
        key = self.sha256, file, state.st_mtime_ns, state.st_size
        known = _loaded.get(key)
        if known is None:
            png = self.png
            try:
                same = _of_bytes(png).sha256 == self.sha256
            except ContractError:  # not an image
                same = False
            if not same:
                raise StoreError(f"{file}: this is not the image that the episode refers to; was the file changed?")
            known = _remember(_loaded, key, Image(self.sha256, png))
        return known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and other.sha256 == self.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"Image({self.sha256[:12]}…)"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a segment, and the placeholder tokens that stand for it."""

    image: Image
    at: int
    """index of its first placeholder in the segment"""
    tokens: int
    """number of placeholders"""


def is_image(value: Any) -> bool:
    """True if this part of a content is an image."""
    return isinstance(value, (dict, Mapping)) and (
        value.get("type") in ("image", "image_url") or "image" in value or "image_url" in value
    )


def image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The image parts of the messages' contents."""
    for m in messages:
        if isinstance(m.get("content"), (list, tuple)):
            yield from (p for p in m["content"] if is_image(p))


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[Image]:
    """The images in messages, in order.

    Raises:
        ContractError: a part does not hold a readable image.
    """
    return [as_image(p) for p in image_parts(messages)]


async def load_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every image as an `Image`, read in a thread, since decoding takes time.

    Raises:
        ContractError: a part does not hold a readable image.
    """
    if next(image_parts(messages), None) is None:
        return list(messages)
    return await asyncio.to_thread(_load_all, messages)


def _load_all(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**m, "content": load_parts(m["content"])} if isinstance(m.get("content"), (list, tuple)) else m
        for m in messages
    ]


def load_parts(parts: Iterable[Any]) -> list[Any]:
    """The parts of one content with every image as an `Image`."""
    return [
        {**{k: v for k, v in p.items() if k != "image_url"}, "type": "image", "image": as_image(p)}
        if is_image(p)
        else p
        for p in parts
    ]


def parts_of(value: Any) -> list[Any] | None:
    """A tool's value as parts of a content, if it is an image or a list of text and image parts; else None."""
    if isinstance(value, Image) or _is_pil(value):
        return [{"type": "image", "image": value}]
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(p, Mapping) and p.get("type") in ("text", "image", "image_url") for p in value
    ):
        return None
    return list(value) if any(map(is_image, value)) else None


def as_image(part: Mapping[str, Any]) -> Image:
    """The image of a part.

    Raises:
        ContractError: the part does not hold a readable image.
    """
    value = part.get("image", part.get("image_url"))
    value = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(value, Image):
        return value
    if _is_pil(value):
        return _of_pil(value)
    try:
        if isinstance(value, str) and value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2], validate=True)
    except (ValueError, binascii.Error) as e:
        raise ContractError(f"an image in a message cannot be read: {e}") from e
    if isinstance(value, bytes):
        return _of_bytes(value)
    raise ContractError(
        f"an image must be a PIL image, encoded bytes or a data: URL, found {type(value).__name__}: {value!r:.60}"
    )


def _of_bytes(encoded: bytes) -> Image:
    from PIL import Image as Pil
    from PIL import UnidentifiedImageError

    key = hashlib.sha256(encoded).digest()
    image = _cache.get(key)
    if image is None:
        try:
            image = _of_pil(Pil.open(io.BytesIO(encoded)))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Pil.DecompressionBombError) as e:
            raise ContractError(f"an image in a message cannot be read: {e}") from e
        _remember(_cache, key, image)
    return image


def _remember(cache: OrderedDict[Any, Image], key: Any, image: Image) -> Image:
    cache[key] = image
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)
    return image


def _of_pil(image: Any) -> Image:
    image = image.convert("RGB")
    digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return Image(digest, buffer.getvalue())


def _is_pil(value: Any) -> bool:
    """True for a PIL image; checked by name, so that PIL is imported only where it is used."""
    return any(c.__module__ == "PIL.Image" and c.__name__ == "Image" for c in type(value).__mro__)
