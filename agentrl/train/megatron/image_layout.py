"""The images of rows in a micro-batch: the positions of their tokens, and which features stand at them. The checks of rows with images. No torch.

A token of text has one position; an image has the positions of its grid, and the positions of the text after it begin after its longer side (M-RoPE,
arXiv:2409.12191, section 2.1):

    token of an image at p, row y, column x of a grid of h rows and w columns: (p, p + y, p + x); the next token has the position p + max(h, w)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.core.message_images import Image
from agentrl.errors import ConfigError, DataError, InvariantError, TemplateError
from agentrl.render.images import Images
from agentrl.train.base import Row
from agentrl.train.megatron.families.base import Vision

Grid = Callable[[Image], tuple[int, int]]
"""height and width of an image in tokens"""
Ints = NDArray[np.int64]


def processor(folder: Path, vision: Vision) -> Images:
    """The image processor of a model folder.

    Raises:
        ConfigError: it has none, or one that is not like Qwen-VL's.
    """
    try:
        images = Images.load(folder, {"<|image_pad|>": vision.image_token})
    except TemplateError as e:
        raise ConfigError(str(e)) from e
    if images is None:
        raise ConfigError(f"{folder} has no preprocessor_config.json, without which its images cannot be trained")
    return images


def positions_of(row: Row, grid: Grid) -> Ints:
    """[3, tokens]: time, height and width of each token of a row."""
    positions = np.zeros((3, len(row.tokens)), np.int64)
    token, position = 0, 0
    for placed in row.images:
        text = placed.at - token
        positions[:, token : placed.at] = position + np.arange(text)
        position += text
        token = placed.at + placed.tokens
        height, width = grid(placed.image)
        positions[0, placed.at : token] = position
        positions[1:, placed.at : token] = position + np.indices((height, width)).reshape(2, -1)
        position += max(height, width)
    positions[:, token:] = position + np.arange(len(row.tokens) - token)
    return positions


def image_layout(
    rows: Sequence[Row], where: Sequence[Ints], length: int, grid: Grid
) -> tuple[Ints, Ints, tuple[Image, ...]]:
    """Positions [3, length] and sources [length] (see `ImagePlan.source`) of the tokens of a layout, and the different images in it.

    Args:
        rows: the rows.
        where: for each row, where its input tokens are in the layout.
        length: tokens of the layout.
        grid: height and width of an image in tokens.

    Raises:
        InvariantError: rows share a token of different images or positions.
    """
    first: dict[Image, int] = {}
    total = 0
    for placed in (placed for row in rows for placed in row.images):
        if placed.image not in first:
            first[placed.image] = total
            total += placed.tokens
    values = np.full((4, length), -1, np.int64)
    own: list[Ints] = []
    for row, places in zip(rows, where, strict=True):
        source = np.full((1, len(row.tokens)), -1, np.int64)
        for placed in row.images:
            source[0, placed.at : placed.at + placed.tokens] = first[placed.image] + np.arange(placed.tokens)
        own.append(np.concatenate([positions_of(row, grid), source])[:, : len(places)])
        values[:, places] = own[-1]
    for row, places, expected in zip(rows, where, own, strict=True):
        if not np.array_equal(values[:, places], expected):
            raise InvariantError(f"{row.place(0)}: the row shares tokens with another, whose images differ")
    return values[:3], values[3], tuple(first)


def check_images(rows: Sequence[Row], vision: Vision | None, grid: Grid | None) -> None:
    """Refuse rows whose images do not fit their tokens or the model, before any rank receives them.

    A placeholder that the policy sampled is text: the engine read no image there.

    Raises:
        DataError: an image has no placeholders, or too many, or a placeholder has no image.
    """
    for row in rows:
        if row.images and (vision is None or grid is None):
            raise DataError(f"{row.place(row.images[0].at)}: it has an image, but the model is a text model")
        if vision is None or grid is None:
            continue
        text = row.tokens.copy()
        for placed in row.images:
            own, (height, width) = row.tokens[placed.at : placed.at + placed.tokens], grid(placed.image)
            if placed.tokens != height * width or (own != vision.image_token).any():
                raise DataError(
                    f"{row.place(placed.at)}: {placed.image} needs {height * width} placeholders (token {vision.image_token}) with this model's "
                    f"image processor, and {int((own == vision.image_token).sum())} of {placed.tokens} recorded tokens are; give the model that "
                    "the episodes were recorded with"
                )
            text[placed.at : placed.at + placed.tokens] = -1
        written = np.ones(len(text), np.bool_) if row.sampled is None else ~row.sampled
        stray = np.flatnonzero(written & np.isin(text, (vision.image_token, vision.video_token)))
        if len(stray):
            token = int(stray[0])
            what = (
                "a video, which cannot be trained"
                if text[token] == vision.video_token
                else "an image, but none was recorded"
            )
            raise DataError(f"{row.place(token)}: the token {text[token]} stands for {what}")
