"""`@reward` functions, their registry, and the scorer that calls them.

Rewards read structured actions and the environment's state, never prompt text or tool output.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, overload

from agentrl.core.name_syntax import split_weight
from agentrl.core.real_number import MAX_MAGNITUDE, real_number
from agentrl.core.registry import Registry
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.errors import ConfigError, ContractError, RewardFailure, boundary, shown
from agentrl.tool import check_limit
from agentrl.types import Trajectory, by_role, split_role_id


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and weight, as made by `@reward`. It is callable like the function."""

    fn: Callable[..., Any]
    name: str
    """name of the component in records and metrics"""
    weight: float = 1.0
    """factor in the score; 0: reported, not part of the score"""
    group: bool = False
    """True: called with all trajectories of a group, and returns one value for each"""
    timeout_s: float = 60.0
    """time limit of one call, in seconds"""

    def __post_init__(self) -> None:
        where, weight = f"reward {self.name}", real_number(self.weight)
        if not callable(self.fn):
            raise ContractError(f"{where} must be a function, found {type(self.fn).__name__}")
        if weight is None:
            raise ContractError(
                f"{where}: weight must be a finite number of at most {MAX_MAGNITUDE:g}, found {shown(self.weight)}"
            )
        object.__setattr__(self, "weight", weight)
        check_limit(where, "timeout_s", self.timeout_s)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
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
    """Decorator that makes a function a reward and registers its name for `--reward`.

    The function is called with the finished `Trajectory` of each episode that did not fail, and may be sync or async. It returns a number, a
    dict of named components, or None, which leaves the episode out of the component's mean and its score.

    Args:
        fn: the function.
        weight: factor of the component in the score; 0: reported, not part of the score.
        name: of the component; None: the function's name.
        group: the function is called with a list of all trajectories of a group, and returns a list with one value for each.
        timeout_s: time limit of one call, in seconds.

    Returns:
        A `Reward`, callable like the function.

    Raises:
        RewardFailure: when the reward is called: it raised, timed out, or returned something else. The episode is then not scored.

    Example:
        >>> from types import SimpleNamespace
        >>> @reward(weight=0.5)
        ... def exact_match(trajectory):
        ...     return float(trajectory.answer == trajectory.label)
        >>> exact_match(SimpleNamespace(answer="Paris", label="Paris"))
        1.0
        >>> exact_match.name, exact_match.weight
        ('exact_match', 0.5)
    """

    def make(f: Callable[..., Any]) -> Reward:
        made = Reward(f, name or str(getattr(f, "__name__", "reward")), weight, group, timeout_s)
        REWARDS.register(made.name)(made)
        return made

    return make(fn) if fn is not None else make


def _only_reward(module: Any) -> Any:
    """The reward that a file defines, if there is exactly one: a `@reward`, or else a public function."""
    rewards = {id(value): value for value in vars(module).values() if isinstance(value, Reward)}
    functions = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    candidates = list(rewards.values()) or functions
    return candidates[0] if len(candidates) == 1 else None


REWARDS = Registry(
    "reward",
    {
        "code": "agentrl.rewards.code_tests:code",
        "em": "agentrl.rewards.answers:em",
        "f1": "agentrl.rewards.answers:f1",
        "math": "agentrl.rewards.math_answers:math_correct",
        "well_formed": "agentrl.rewards.formats:well_formed",
    },
    default=_only_reward,
)


def resolve_rewards(items: Sequence[Any]) -> tuple[Reward, ...]:
    """The rewards of Reward objects, functions, or names 'NAME', 'module:fn', 'file.py:fn', each optionally with '=WEIGHT'.

    Raises:
        ConfigError, ContractError, UnknownNameError: an item is not a reward, or two have the same name.
    """
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ContractError(f"rewards must be a list of functions or names, found {items!r:.80}; write rewards = [...]")
    rewards: list[Reward] = []
    for item in items:
        resolved = _resolve(item)
        if any(r.name == resolved.name for r in rewards):
            raise ConfigError(f"two rewards are called {resolved.name!r}; give one of them another name")
        rewards.append(resolved)
    return tuple(rewards)


def _resolve(item: Any) -> Reward:
    if isinstance(item, Reward):
        return item
    if isinstance(item, str):
        spec, weight = split_weight(item)
        resolved = _resolve(REWARDS.resolve(spec))
        try:
            number = float(weight or resolved.weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--reward {item}: the weight after '=' must be a number, found {weight!r}")
        return replace(resolved, weight=number)
    if callable(item):
        return Reward(item, getattr(item, "__name__", "reward"))
    raise ContractError(f"a reward must be a function, found {type(item).__name__}")


class Scorer:
    """Calls rewards under their time limits; sync ones run in a separate thread pool.

    `reward_key` names the component that counts, of rewards that return a dict; None: all of them.
    """

    def __init__(self, rewards: Sequence[Reward], threads: int = 8, reward_key: str | None = None) -> None:
        self.reward_key = reward_key
        self.single = tuple(r for r in rewards if not r.group)
        self.group = tuple(r for r in rewards if r.group)
        self.pool = TimeoutPool("reward", threads=threads)
        self.judgements: Mapping[str, Any] = {}

    def with_judgements(self, recorded: Mapping[str, Any]) -> Scorer:
        """This scorer, whose rewards are given the recorded answers of servers (`Trajectory.judgements`)."""
        scorer = copy(self)
        scorer.judgements = recorded
        return scorer

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the components of all single rewards; unchanged if it was not `played`.

        Of several roles, the components of each (`Trajectory.of_role`), as NAME.ROLE.

        Raises:
            RewardFailure: a reward raised, timed out or did not return a number.
        """
        if not trajectory.played:
            return trajectory
        if trajectory.roles:
            return _with_sides(trajectory, [await self.score(trajectory.of_role(role)) for role in trajectory.roles])
        values, weights = dict(trajectory.rewards), dict(trajectory.weights)
        given = self._with_own(trajectory) if self.single or self.judgements else trajectory
        for r in self.single:
            with boundary(RewardFailure, f"reward {r.name}"):
                out = await self.pool.call(r.fn, given, timeout_s=r.timeout_s)
                self._add(r, out, values, weights)
        return replace(trajectory, rewards=values, weights=weights, judgements=given.judgements)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the components of all group rewards; those that were not `played` are not offered to them.

        Raises:
            RewardFailure: as in `score`, or a reward did not return one value per trajectory.
        """
        if self.group and any(t.roles for t in trajectories):
            parts = [side for part in by_role(trajectories) for side in await self.score_group(part)]
            sides = [[s for s in parts if split_role_id(s.episode_id)[0] == t.episode_id] for t in trajectories]
            return [_with_sides(t, own) for t, own in zip(trajectories, sides, strict=True)]
        scored = list(trajectories)
        played = [i for i, t in enumerate(scored) if t.played]
        for r in self.group if played else ():
            with boundary(RewardFailure, f"reward {r.name}"):
                given = [self._with_own(scored[i]) for i in played]
                returned = await self.pool.call(r.fn, list(given), timeout_s=r.timeout_s)
                outs = _group_values(r, returned, len(played))
            for i, out, member in zip(played, outs, given, strict=True):
                values, weights = dict(scored[i].rewards), dict(scored[i].weights)
                self._add(r, out, values, weights)
                scored[i] = replace(scored[i], rewards=values, weights=weights, judgements=member.judgements)
        return scored

    def _with_own(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with copies of its task and judgements, which the reward may change."""
        return replace(trajectory, task=trajectory.task.copy(), judgements={**self.judgements, **trajectory.judgements})

    def _add(self, r: Reward, out: Any, values: dict[str, float | None], weights: dict[str, float]) -> None:
        """Add what a reward returned to the components and their weights."""
        components: Mapping[Any, Any] = out if isinstance(out, Mapping) else {"": out}
        counting = self.reward_key if isinstance(out, Mapping) else None
        if counting is not None and counting not in components:
            raise RewardFailure(
                f"reward {r.name} returned no component {counting!r} (--reward-key), found {shown(sorted(map(str, components)))}",
                f"reward {r.name}: no component {counting}",
            )
        for key, value in components.items():
            if not isinstance(key, str):
                raise RewardFailure(
                    f"reward {r.name}: the names of its components must be text, found {shown(key)}",
                    f"reward {r.name}: not a name",
                )
            if counting not in (None, key) and value is not None and real_number(value) is None:
                continue
            name = f"{r.name}.{key}" if key else r.name
            values[name] = None if value is None else _number(name, value, r.weight)
            weights[name] = r.weight if counting in (None, key) else 0.0

    def close(self) -> None:
        """Let the pool's idle threads end."""
        self.pool.close()


def _with_sides(trajectory: Trajectory, sides: Sequence[Trajectory]) -> Trajectory:
    """An episode with the components of its roles' sides."""
    rewards = {f"{name}.{side.role}": value for side in sides for name, value in side.rewards.items()}
    weights = {f"{name}.{side.role}": weight for side in sides for name, weight in side.weights.items()}
    judgements = {key: answer for side in sides for key, answer in side.judgements.items()}
    return replace(trajectory, rewards=rewards, weights=weights, judgements=judgements)


def _group_values(r: Reward, returned: Any, members: int) -> list[Any]:
    """The values that a group reward returned, one per member.

    Raises:
        RewardFailure: it is not a list, tuple or array of that length.
    """
    ordered = isinstance(returned, Sequence) or hasattr(
        returned, "__array__"
    )  # sets and mappings have no order of members
    if (
        not ordered
        or isinstance(returned, (str, bytes, bytearray, memoryview))
        or getattr(returned, "shape", None) == ()
    ):
        raise RewardFailure(
            f"group reward {r.name} must return a list with one value for each of the {members} trajectories, "
            f"found {type(returned).__name__}: {shown(returned)}",
            f"reward {r.name}: not a list",
        )
    values = list(returned)
    if len(values) != members:
        raise RewardFailure(
            f"group reward {r.name} returned {len(values)} values for {members} trajectories",
            f"reward {r.name}: length",
        )
    return values


def _number(name: str, value: Any, weight: float) -> float:
    number = real_number(value)
    if number is None or abs(number * weight) > MAX_MAGNITUDE:
        raise RewardFailure(
            f"reward {name} must be a finite number or None, at most {MAX_MAGNITUDE:g} with its weight; found {shown(value)}",
            f"reward {name}: not a number" if number is None else f"reward {name}: too large",
        )
    return number


def component_means(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each reward component over the episodes in which it did not abstain."""
    values: dict[str, list[float]] = {}
    for t in episodes:
        for name, value in t.rewards.items():
            values.setdefault(name, [])
            if value is not None:
                values[name].append(value)
    return {name: fmean(v) for name, v in values.items() if v}
