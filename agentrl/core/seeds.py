"""The seed law: the seed of every random draw is derived from its place in the run, never from when it happens.

(run seed, episode index, attempt, agent, turn, generation) -> 63-bit seed. Retries and epochs get new seeds, members of a
group differ, and neither concurrency nor order of completion changes anything. An environment can also have the seed of its group, from
(run seed, "group", group index, "env"), which members and retries share.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for a place in the run. Any change of any part gives an unrelated seed."""
    text = f"{int(run_seed)}"
    for (
        part
    ) in path:  # a str with its length first, so that different paths differ ('a', 'b/c' and 'a/b', 'c'; 1 and '1')
        text += f"/{len(part)}:{part}" if isinstance(part, str) else f"/{int(part)}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1
