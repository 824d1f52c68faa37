"""`@reward`: functions of a finished trajectory, or of a whole group, whose weighted sum is the episode's score.

    @reward(weight=1.0)
    def exact_match(trajectory):
        return float(trajectory.answer == trajectory.label)

A reward may be sync or async and returns a number, a dict of named components, or None (it abstains: left out of the score, and
counted). Rewards read structured actions and environment state, never prompt text or tool output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, overload

from agentrl.core.name_syntax import split_weight
from agentrl.core.registry import Registry
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.errors import ConfigError, ContractError, RewardFailure, boundary
from agentrl.types import Trajectory


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight. Calling it calls the function."""

    fn: Callable[..., Any]
    name: str
    weight: float = 1.0
    """0: reported, not part of the score"""
    group: bool = False
    """takes a list of trajectories of one task and returns a list as long"""
    timeout_s: float = 60.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.fn(*args, **kwargs)


@overload
def reward(fn: Callable[..., Any], /) -> Reward: ...
@overload
def reward(
    *, weight: float = 1.0, name: str | None = None, group: bool = False, timeout_s: float = 60.0
) -> Callable[[Callable[..., Any]], Reward]: ...
def reward(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    weight: float = 1.0,
    name: str | None = None,
    group: bool = False,
    timeout_s: float = 60.0,
) -> Any:
    """Make a function a reward, and register it under its name for `--reward`."""

    def make(f: Callable[..., Any]) -> Reward:
        made = Reward(f, name or str(getattr(f, "__name__", "reward")), weight, group, timeout_s)
        REWARDS.register(made.name)(made)
        return made

    return make(fn) if fn is not None else make


REWARDS = Registry("reward", {"em": "agentrl.rewards.answers:em", "f1": "agentrl.rewards.answers:f1"})
"""Rewards by name."""


def resolve_rewards(items: Sequence[Any]) -> tuple[Reward, ...]:
    """Reward objects from Reward objects, plain functions or specs 'NAME', 'NAME=WEIGHT', 'module:fn', 'file.py:fn'."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ContractError(f"rewards must be a list of functions or names, found {items!r:.80}; write rewards = [...]")
    found: list[Reward] = []
    for item in items:
        made = _resolve(item)
        if any(r.name == made.name for r in found):
            raise ConfigError(f"two rewards are called {made.name!r}; give one of them another name")
        found.append(made)
    return tuple(found)


def _resolve(item: Any) -> Reward:
    if isinstance(item, Reward):
        return item
    if isinstance(item, str):
        spec, weight = split_weight(item)
        made = _resolve(REWARDS.resolve(spec))
        try:
            number = float(weight or made.weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--reward {item}: the weight after '=' must be a number, found {weight!r}")
        return replace(made, weight=number)
    if callable(item):
        return Reward(item, getattr(item, "__name__", "reward"))
    raise ContractError(f"a reward must be a function, found {type(item).__name__}")


class Scorer:
    """Runs rewards over trajectories under their time limits; sync ones in a pool of their own."""

    def __init__(self, rewards: Sequence[Reward], threads: int = 8) -> None:
        self.single = tuple(r for r in rewards if not r.group)
        self.group = tuple(r for r in rewards if r.group)
        self.pool = TimeoutPool("reward", threads=threads)

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the components of all single rewards.

        Raises:
            RewardFailure: a reward raised, ran out of time or returned something that is no number.
        """
        values, weights = dict(trajectory.rewards), dict(trajectory.weights)
        for r in self.single:
            with boundary(RewardFailure, f"reward {r.name}"):
                out = await self.pool.call(r.fn, trajectory, timeout_s=r.timeout_s)
            _add(r, out, values, weights)
        return replace(trajectory, rewards=values, weights=weights)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the components of all group rewards.

        Raises:
            RewardFailure: as in `score`, or not one value per trajectory.
        """
        done = list(trajectories)
        for r in self.group:
            with boundary(RewardFailure, f"reward {r.name}"):
                outs = list(await self.pool.call(r.fn, list(done), timeout_s=r.timeout_s))
            if len(outs) != len(done):
                raise RewardFailure(
                    f"group reward {r.name} returned {len(outs)} values for {len(done)} trajectories",
                    f"reward {r.name}: length",
                )
            for i, out in enumerate(outs):
                values, weights = dict(done[i].rewards), dict(done[i].weights)
                _add(r, out, values, weights)
                done[i] = replace(done[i], rewards=values, weights=weights)
        return done

    def close(self) -> None:
        """Let the pool's idle threads end."""
        self.pool.close()


def _add(r: Reward, out: Any, values: dict[str, float | None], weights: dict[str, float]) -> None:
    components: Mapping[str, Any] = out if isinstance(out, Mapping) else {"": out}
    for key, value in components.items():
        name = f"{r.name}.{key}" if key else r.name
        values[name] = None if value is None else _number(name, value)
        weights[name] = r.weight


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer beyond a float's range
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(
            f"reward {name} must be a finite number or None, found {value!r:.60}", f"reward {name}: not a number"
        )
    return number
