"""Odd values, and JSON values with one or more of their parts replaced by them. Each seed gives the same mutation everywhere."""

from __future__ import annotations

import copy
from random import Random

QUICK, FULL = 100, 2000
"""cases of each fuzzer in `make test` and in `make test-full`"""
ODD = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**40, 0.0, -0.0, 0.5, -0.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "7", "nan", "none", "\x00", "\x1b]0;x\x07", "\ud800", "<|im_end|>", "../../x", "é" * 3000, [], [None], [[]], [1, 2, 3], [-0.5, 4, None],
    {}, {"": 0}, {"type": "stop"}, {"role": "system", "content": "x"}, (), (1,),
)  # fmt: skip


def odd(random: Random):
    """One odd value, sometimes inside another."""
    value = copy.deepcopy(random.choice(ODD))
    if random.random() < 0.1:
        return random.choice(([value], {"x": value}, [value] * 300))
    return value


def mutated(value, random: Random, rounds: int | None = None):
    """A copy of a JSON value in which one to three parts are replaced, removed, repeated or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(rounds or random.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return odd(random)
        holder, key = random.choice(places)
        action = random.randrange(4)
        if action == 0 and isinstance(holder, dict):
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(random.choice(holder)))
        elif action == 2 and isinstance(holder, list):
            del holder[key]
        else:
            holder[key] = odd(random)
    return value


def _places(value):
    """Every (container, key) below a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def damaged(data: bytes, random: Random, other: bytes) -> bytes:
    """Bytes of a file after a truncation, a flipped bit, a hole, a foreign end, or another file in its place."""
    if not data:
        return other
    at = random.randrange(len(data))
    action = random.randrange(6)
    if action == 0:
        return data[:at]
    if action == 1:
        return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
    if action == 2:
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
    if action == 3:
        return data[:at] + other[at:]
    if action == 4:
        return other
    return data + data[at:]
