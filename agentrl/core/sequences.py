"""Comparison of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two sequences differ; the length of the shorter one if it begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
