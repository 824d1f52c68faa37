"""Comparison of sequences, and the checksum of token ids."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two sequences differ; the length of the shorter one if it begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids_checksum(ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of token ids as int32. `ids` may be packed in an array. `before`: the checksum of the ids that precede them.

    Raises:
        OverflowError: an id is outside int32 and uint32.
        TypeError: an id is not an integer.
    """
    if isinstance(ids, array):
        return zlib.crc32(ids, before)
    try:
        packed = array("I", ids)  # the same bytes as int32 for ids of at least 0, and several times faster
    except OverflowError:
        packed = array("i", ids)
    return zlib.crc32(packed, before)
