"""The seed law (design §8): every draw's seed follows from where it is, never from when it happens.

(run seed, episode ordinal, attempt, agent, turn, generation) -> 63-bit seed. Retries and epochs draw anew, members of a
group differ, and neither concurrency nor order of completion changes anything.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *path: int | str) -> int:
    """A 63-bit seed for a place in the run; any change of any part gives an unrelated seed."""
    text = "/".join([str(run_seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
