"""What sampling needs without torch: counter-based uniforms, and stop strings found as the text grows.

The law of draws: the number that decides a token follows from `SamplingParams.seed` and the token's position in the context,
never from a generator that several requests share. So neither load nor order of completion changes an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from struct import pack

Decode = Callable[[Sequence[int]], str]
"""ids -> text; special tokens must not vanish if a stop string is to match them"""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` (any integer) and `position` (tokens before it) and on nothing else."""
    data = pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, position)
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class StopFinder:
    """Looks for stop strings in the text of a generation, token by token.

    Only a window at the end is decoded anew: long enough in characters for the longest stop string plus a margin, so a match that
    begins or ends inside a token, or inside a character made of several tokens, is found.
    """

    MARGIN = 16
    """characters kept before the longest stop string: text at the very start of a window may decode differently"""
    MAX_WINDOW = 64
    """tokens after which a window is shortened"""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._need = max(map(len, self._stop), default=0) + self.MARGIN
        self._start = 0

    def find(self, ids: Sequence[int]) -> str | None:
        """The stop string in the text of `ids` that ends first, or None. Call it after every new id."""
        if not self._stop:
            return None
        text = self._decode(ids[self._start :])
        found = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            return min(found)[2]
        if len(ids) - self._start > self.MAX_WINDOW:
            self._shorten(ids)
        return None

    def _shorten(self, ids: Sequence[int]) -> None:
        """Move the window's start up as far as its text stays long enough."""
        start = len(ids) - self.MAX_WINDOW // 4
        while start > self._start and len(self._decode(ids[start:])) < self._need:
            start -= self.MAX_WINDOW // 4
        self._start = max(self._start, start)
