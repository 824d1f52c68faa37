"""The words of a delivery of weights, for both the controller and the ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes weights."""

    address: str
    ranks: int
    """of tensor parallelism"""


@dataclass
class Sent:
    """What became of a stage's delivery."""

    failed: dict[str, str] = field(default_factory=dict)
    """by address, what went wrong"""
    bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0
