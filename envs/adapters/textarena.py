"""TextArena games: `--env textarena:Wordle-v0`. The policy's text is the move; the game's messages are the observations.

Arguments (`--env-arg`): `size`, the tasks of a split, and those of the game itself, such as `word_length=4`.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from agentrl.envs.adapters.base import Adapted, seed_of, seed_tasks
from agentrl.errors import ConfigError, describe, suggest
from agentrl.types import Action, StepResult, Task

_RANDOM = threading.Lock()
"""held while a game runs, because the games draw from Python's global random generator"""


class TextArena(Adapted):
    """A game of TextArena for one player. The reward is the game's, at its end."""

    prefix, extra, example = "textarena", "textarena", "GuessTheNumber-v0"

    def __init__(self, size: int = 1000, **kwargs: Any) -> None:
        arena = self.package("textarena")
        target = self.target if self.target.endswith("-raw") else f"{self.target}-raw"
        self._random = random.Random(0).getstate()
        try:
            with self._own_random():
                self.game = arena.make(target, **kwargs)
        except Exception as e:  # whatever a game raises on bad arguments or missing word lists
            raise ConfigError(f"--env {self.label()} cannot be made: {describe(e)}") from e

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """The arguments of the adapter and of the game."""
        registry = cls.package("textarena.envs.registration").ENV_REGISTRY
        if target not in registry:
            raise ConfigError(f"--env textarena:{target}: no such game{suggest(target, registry)}")
        spec = registry[target]
        module, _, name = str(spec.entry_point).partition(":")
        game = spec.entry_point if callable(spec.entry_point) else getattr(import_module(module), name)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
        more = [
            p.replace(kind=p.KEYWORD_ONLY, default=spec.kwargs.get(p.name, p.default))
            for p in inspect.signature(game).parameters.values()
            if p.name != "size" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        return {"__signature__": inspect.Signature([*own, *more])}

    @classmethod
    def tasks(cls, split: str, size: int = 1000) -> Iterable[Task]:
        """Tasks that differ in their seed."""
        return seed_tasks("", split, size)

    def check_ready(self) -> None:
        """Refuse a game that one player cannot play."""
        self._reset(0)

    def reset(self, task: Task, *, seed: int, group_seed: int) -> str:
        """Reset the game with the task's seed, else the group's."""
        self._reset(seed_of(task, group_seed))
        return self._messages() or "The game begins."

    def step(self, action: Action) -> StepResult:
        """Play a move."""
        with self._own_random():
            done, _ = self.game.step(action.text)
        if not done:
            return StepResult(self._messages() or "Your move.")
        rewards, info = self.game.close()
        reason = str(info.get(0, {}).get("reason", "")) if isinstance(info, dict) else ""
        return StepResult(reward=float((rewards or {}).get(0, 0.0)), terminated=True, info={"reason": reason})

    def _reset(self, seed: int) -> None:
        try:
            with self._own_random():
                self.game.reset(num_players=1, seed=seed)
        except AssertionError as e:
            raise ConfigError(
                f"--env {self.label()}: one player cannot play this game: {describe(e)}; choose a game for one player"
            ) from e

    def _messages(self) -> str:
        """What the game has said since the last move, without the move itself."""
        with self._own_random():
            _, messages = self.game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender < 0)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Give the game a separate random state, and restore that of everything else afterwards."""
        with _RANDOM:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)
