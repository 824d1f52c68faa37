"""Numbers that user code returns: rewards, and their weights."""

from __future__ import annotations

import math
from typing import Any

MAX_MAGNITUDE = 1e30
"""Largest absolute value of a reward: beyond it, advantages leave the range of float32."""


def real_number(value: Any) -> float | None:
    """Return a value as a float; None if it is not a finite real number of at most `MAX_MAGNITUDE`.

    Accepts what `float()` accepts (bool, int, Decimal, Fraction, numpy's scalars) except text, and arrays and tensors of one element.
    """
    if type(value) is float:
        return value if abs(value) <= MAX_MAGNITUDE else None
    try:
        if hasattr(value, "shape") and hasattr(value, "item"):  # an array, a tensor or a scalar of numpy
            value = value.item()
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            return None
        number = float(value)
    except Exception:  # noqa: BLE001  user code: its __float__ or item
        return None
    return number if math.isfinite(number) and abs(number) <= MAX_MAGNITUDE else None
