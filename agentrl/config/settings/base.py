"""What the sections share."""

from pydantic import ConfigDict

STRICT = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""nothing is coerced; the text under a field is its help"""


def check_top_k(value: int | None) -> int | None:
    """A number of tokens, or -1."""
    if value is not None and value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1 (off)")
    return value
