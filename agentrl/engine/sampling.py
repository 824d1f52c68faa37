"""The parts of sampling that need no torch: counter-based uniform numbers, and stop strings in growing text.

The number that decides a token depends only on `SamplingParams.seed` and on the token's position in the context. No requests share a random
generator, so neither load nor order of completion changes a generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from struct import pack

Decode = Callable[[Sequence[int]], str]
"""ids -> text; it must keep special tokens if a stop string contains them"""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on `seed` (any integer) and `position` (the number of tokens before it)."""
    data = pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, position)
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class StopFinder:
    """Finds stop strings in the text of a generation, token by token.

    Each time only a window at the end is decoded. It has enough characters for the longest stop string plus a margin, so that matches are found
    that begin or end inside a token, or inside a character made of several tokens.
    """

    MARGIN = 16
    """characters kept before the longest stop string, since the first characters of a window may decode differently"""
    MAX_WINDOW = 64
    """maximum tokens of a window"""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._min_characters = max(map(len, self._stop), default=0) + self.MARGIN
        self._start = 0

    def find(self, ids: Sequence[int]) -> str | None:
        """The stop string that ends first in the text of `ids`, or None. Call it after every new id."""
        if not self._stop:
            return None
        text = self._decode(ids[self._start :])
        matches = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            return min(matches)[2]
        if len(ids) - self._start > self.MAX_WINDOW:
            self._shorten(ids)
        return None

    def _shorten(self, ids: Sequence[int]) -> None:
        """Move the window's start forward as far as its text stays long enough."""
        start = len(ids) - self.MAX_WINDOW // 4
        while start > self._start and len(self._decode(ids[start:])) < self._min_characters:
            start -= self.MAX_WINDOW // 4
        self._start = max(self._start, start)
