"""TextArena games: `--env textarena:Wordle-v0`. The policy's text is the move; the game's messages are the observations.

Arguments (`--env-arg`): `size`, the tasks of a split, `players`, their number, and those of the game itself, such as `word_length=4`. A game of
several players has the roles `player_0`, `player_1` …
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from agentrl.envs.adapters.base import Adapted, seed_of, seed_tasks
from agentrl.errors import ConfigError, describe, suggest
from agentrl.types import Action, Observation, StepResult, Task

_MOST_TRIED = 6
"""players that are tried when no number is given"""
_RANDOM = threading.Lock()
"""held while a game runs, because the games draw from Python's global random generator"""


class TextArena(Adapted):
    """A game of TextArena. The rewards are the game's, at its end."""

    prefix, extra, example = "textarena", "textarena", "GuessTheNumber-v0"

    fewest: ClassVar[int | None] = None
    """the fewest players of the game; None: not known yet"""

    def __init__(self, size: int = 1000, players: int | None = None, **kwargs: Any) -> None:
        arena = self.package("textarena")
        target = self.target if self.target.endswith("-raw") else f"{self.target}-raw"
        self._random = random.Random(0).getstate()
        try:
            with self._own_random():
                self.game = arena.make(target, **kwargs)
        except Exception as e:  # whatever a game raises on bad arguments or missing word lists
            raise ConfigError(f"--env {self.label()} cannot be made: {describe(e)}") from e
        self.count = players if players is not None else self._fewest_players()
        self.roles = tuple(f"player_{i}" for i in range(self.count)) if self.count > 1 else ()

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
            if p.name not in ("size", "players") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        return {"__signature__": inspect.Signature([*own, *more])}

    @classmethod
    def tasks(cls, split: str, size: int = 1000) -> Iterable[Task]:
        """Tasks that differ in their seed."""
        return seed_tasks("", split, size)

    def check_ready(self) -> None:
        """Refuse a number of players that cannot play this game."""
        self._reset(0)

    def reset(self, task: Task, *, seed: int, group_seed: int) -> Observation:
        """Reset the game with the task's seed, else the group's."""
        self._reset(seed_of(task, group_seed))
        return self._observation("The game begins.")

    def step(self, action: Action) -> StepResult:
        """Play a move."""
        with self._own_random():
            done, _ = self.game.step(action.text)
        if not done:
            return StepResult(self._observation("Your move."))
        rewards, info = self.game.close()
        reason = str(info.get(0, {}).get("reason", "")) if isinstance(info, dict) else ""
        scores = {i: float((rewards or {}).get(i, 0.0)) for i in range(self.count)}
        if not self.roles:
            return StepResult(reward=scores[0], terminated=True, info={"reason": reason})
        of_roles = {role: scores[i] for i, role in enumerate(self.roles)}
        return StepResult(rewards=of_roles, terminated=True, info={"reason": reason})

    def _reset(self, seed: int) -> None:
        try:
            with self._own_random():
                self.game.reset(num_players=self.count, seed=seed)
        except AssertionError as e:
            number = "one player" if self.count == 1 else f"{self.count} players"
            raise ConfigError(
                f"--env {self.label()}: {number} cannot play this game: {describe(e)}; give --env-arg players=N that fits, or leave it out"
            ) from e

    def _fewest_players(self) -> int:
        """The fewest players that the game accepts, at most `_MOST_TRIED`."""
        if type(self).fewest is None:
            type(self).fewest = next((n for n in range(1, _MOST_TRIED + 1) if self._accepts(n)), 1)
        return type(self).fewest or 1

    def _accepts(self, players: int) -> bool:
        try:
            with self._own_random():
                self.game.reset(num_players=players, seed=0)
        except AssertionError:
            return False
        return True

    def _observation(self, otherwise: str) -> Observation:
        """What the player to move reads: what the game and the others have said since its last move, but not its own moves."""
        with self._own_random():
            player, messages = self.game.get_observation()
        text = "\n".join(self._line(sender, text) for sender, text, _ in messages if sender != player)
        return Observation.of(text or otherwise, to=self.roles[player] if self.roles else "")

    def _line(self, sender: int, text: str) -> str:
        return text if sender < 0 else f"[player {sender}] {text}"

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
