"""Gymnasium environments: `--env gymnasium:FrozenLake-v1`. Spaces are rendered as text, and actions are parsed from text or tool calls.

Arguments (`--env-arg`): `act_by` (text or tool), `names` (of discrete actions), `size` (tasks of a split), `render` (false: observations by
their space, even where the environment draws text), and those of the environment itself, such as `is_slippery=false`.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from agentrl.envs.adapters.actions import ActBy, ActingEnv, Outcome, RefusedActionError, as_text, json_value
from agentrl.envs.adapters.base import seed_of, seed_tasks
from agentrl.errors import ConfigError, describe, suggest
from agentrl.types import Task

_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""names of the actions of Gymnasium's toy_text environments, in the order of their documentation"""
_MAX_ELEMENTS = 256
"""numbers of an observation that are written as text"""
_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
_OWN = ("act_by", "names", "size", "render")


class Gymnasium(ActingEnv):
    """A Gymnasium environment."""

    prefix, example = "gymnasium", "FrozenLake-v1"

    def __init__(
        self,
        act_by: ActBy = "text",
        names: Sequence[str] | None = None,
        size: int = 1000,
        render: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(act_by)
        modes = getattr(_creator(self.target), "metadata", {}).get("render_modes", ())
        self._draws = render and "ansi" in modes
        try:
            self.game = gymnasium.make(self.target, **(kwargs | ({"render_mode": "ansi"} if self._draws else {})))
        except (TypeError, ValueError, AssertionError, KeyError, gymnasium.error.Error) as e:
            raise ConfigError(f"--env {self.label()} cannot be made: {describe(e)}") from e
        self.names = self._checked_names(names)
        self._check_spaces()

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """The arguments of the adapter and of the environment."""
        try:
            spec = gymnasium.spec(target)
        except gymnasium.error.Error as e:
            raise ConfigError(f"--env gymnasium:{target}: {e}{suggest(target, gymnasium.registry)}") from e
        own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
        theirs = inspect.signature(_creator(target)).parameters.values()
        more = [
            p.replace(kind=p.KEYWORD_ONLY, default=spec.kwargs.get(p.name, p.default))
            for p in theirs
            if p.name not in (*_OWN, "render_mode") and p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD
        ]
        return {"__signature__": inspect.Signature([*own, *more])}

    @classmethod
    def tasks(cls, split: str, size: int = 1000) -> Iterable[Task]:
        """Tasks that differ in their seed."""
        return seed_tasks(f"Play {cls.target}.", split, size)

    def reset(self, task: Task, *, seed: int, group_seed: int) -> str:
        """Reset the environment with the task's seed, else the group's."""
        observation, _ = self.game.reset(seed=seed_of(task, group_seed))
        self.game.action_space.seed(seed_of(task, group_seed))
        prompt = task.prompt if isinstance(task.prompt, str) else ""
        return f"{prompt}\n\n{self._describe_actions()}\n\n{self._show(observation)}".strip()

    def act(self, action: Any) -> Outcome:
        """Step the environment."""
        observation, reward, terminated, truncated, _ = self.game.step(action)
        return Outcome(
            observation=self._show(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def close(self) -> None:
        """Close the environment."""
        self.game.close()

    @property
    def parameters(self) -> dict[str, Any]:
        """The action, by name if actions have names."""
        space = self.game.action_space
        if self.names:
            schema: dict[str, Any] = {"type": "string", "enum": list(self.names)}
        elif isinstance(space, spaces.Discrete):
            schema = {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
        else:
            schema = {}
        schema["description"] = f"the action, of {space}"
        return {"type": "object", "properties": {"action": schema}, "required": ["action"]}

    def from_arguments(self, arguments: Mapping[str, Any]) -> Any:
        """See `ActingEnv.from_arguments`."""
        if "action" not in arguments:
            raise RefusedActionError("the call needs the argument action")
        value = arguments["action"]
        return self.parse(value) if isinstance(value, str) else self._from_json(value)

    def parse(self, text: str) -> Any:
        """The action that a text writes: its name, its number, or the JSON form of its space."""
        space = self.game.action_space
        if isinstance(space, spaces.Discrete):
            return self._discrete(text, space)
        if isinstance(space, spaces.Text):
            return self._from_json(text)
        try:
            return self._from_json(json_value(text))
        except json.JSONDecodeError as e:
            raise RefusedActionError(f"expected an action of {space} as JSON, found {text[:80]!r}") from e

    def _discrete(self, text: str, space: spaces.Discrete) -> Any:
        """The last name or number in the text."""
        pattern = "|".join([*map(re.escape, sorted(self.names, key=len, reverse=True)), r"-?\d+"])
        words = re.findall(rf"(?<![\w])(?:{pattern})(?![\w])", text, re.IGNORECASE)
        if not words:
            raise RefusedActionError(f"expected one of {', '.join(self._choices(space))}, found {text[:80]!r}")
        lowered = [name.lower() for name in self.names]
        word = words[-1].lower()
        return self._from_json(int(space.start) + lowered.index(word) if word in lowered else int(word))

    def _from_json(self, value: Any) -> Any:
        space = self.game.action_space
        try:
            action = space.from_jsonable([value])[0]
            if space.contains(action):
                return action
        except (TypeError, ValueError, KeyError, IndexError, AssertionError, OverflowError):
            pass
        allowed = ", ".join(self._choices(space)) if isinstance(space, spaces.Discrete) else str(space)
        raise RefusedActionError(f"expected one of {allowed}, found {str(value)[:80]!r}")

    def _choices(self, space: spaces.Discrete) -> list[str]:
        return list(self.names) or [str(n) for n in range(int(space.start), int(space.start + space.n))]

    def _describe_actions(self) -> str:
        space = self.game.action_space
        if isinstance(space, spaces.Discrete):
            choices = self._choices(space)
            what = (
                f"one of {', '.join(choices)}" if len(choices) <= 32 else f"a number from {choices[0]} to {choices[-1]}"
            )
        else:
            what = f"a value of {space}, as JSON"
        return f"Your action is {what}. " + ("Call the tool act." if self.act_by == "tool" else "Write: Action: …")

    def _show(self, observation: Any) -> str:
        if self._draws:
            return _COLOURED.sub(r"[\1]", str(self.game.render())).strip()
        return as_text(self.game.observation_space.to_jsonable([observation])[0])

    def _checked_names(self, names: Sequence[str] | None) -> tuple[str, ...]:
        space = self.game.action_space
        chosen = tuple(_NAMES.get(self.target.partition("-")[0], ())) if names is None else tuple(names)
        if chosen and not (isinstance(space, spaces.Discrete) and len(chosen) == space.n):
            if names is None:
                return ()
            raise ConfigError(f"--env-arg names={list(chosen)} of {self.label()}: its actions are {space}")
        return chosen

    def _check_spaces(self) -> None:
        """Refuse spaces that have no text.

        Raises:
            ConfigError: the observation is too large, or a space has no JSON form.
        """
        for kind, space in (("observation", self.game.observation_space), ("action", self.game.action_space)):
            if kind == "observation" and self._draws:
                continue
            if not isinstance(space, (spaces.Discrete, spaces.Text)) and _elements(space) > _MAX_ELEMENTS:
                raise ConfigError(
                    f"--env {self.label()}: its {kind} space {space} does not fit into text "
                    f"(at most {_MAX_ELEMENTS} numbers); wrap it in an environment of your own"
                )


def _elements(space: Any) -> float:
    """The numbers in a value of the space."""
    try:
        return spaces.flatdim(space)
    except (NotImplementedError, ValueError):
        return math.inf


def _creator(target: str) -> Any:
    """The class or function that makes the environment.

    Raises:
        ConfigError: it cannot be imported.
    """
    entry = gymnasium.spec(target).entry_point
    try:
        return entry if callable(entry) else load_env_creator(str(entry))
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"--env gymnasium:{target} cannot be imported: {describe(e)}") from e
