"""Who plays the roles of an environment of several speakers, from `--player` and `--eval-player`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.core.message_images import PlacedImage
from agentrl.core.registry import Registry
from agentrl.engine.base import Engine, Generation, SamplingParams
from agentrl.engine.chat_model import ChatModel
from agentrl.env import Env
from agentrl.errors import ConfigError, suggest
from agentrl.rollout.seat import Player
from agentrl.run.model_folder import model_folder, token_ids

POLICY = "policy"
"""the player that is trained"""
INITIAL = "initial"
"""the model that the run starts from, with the weights it has then"""
_FUNCTIONS = Registry("player", {})


class FrozenModel:
    """A model whose weights stay as they are. It is loaded at the first generation.

    Args:
        make: makes its engine.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._starting = asyncio.Lock()

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Generator.generate`."""
        async with self._starting:
            if self._engine is None:
                engine = self._make()
                await engine.start()
                self._engine = engine
        return await self._engine.generate(ids, sampling, session=session, images=images)

    async def release(self, session: str) -> None:
        """See `Generator.release`."""
        if self._engine is not None:
            await self._engine.release(session)

    async def close(self) -> None:
        """Free the model."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


class Players:
    """The players of an environment's roles, in training and in evaluations.

    Args:
        config: all settings.
        env_class: the environment, whose `players` hold where the settings name none.
        policy: folder of the policy's model.
        make_engine: makes the local engine of a model folder.

    Raises:
        UsageError: a player cannot be what it is said to be.
    """

    def __init__(
        self, config: Config, env_class: type[Env], policy: Path, make_engine: Callable[[Path], Engine]
    ) -> None:
        self._config, self._policy, self._make_engine = config, policy, make_engine
        self._label = env_class.label()
        self._made: dict[str, Player] = {}
        self._open: dict[str, ChatModel | FrozenModel] = {}
        """by what `--player` names"""
        training = {**env_class.players, **config.env.players}
        self._names = {"--player": training, "--eval-player": {**training, **config.eval.eval_players}}
        self.training = self._of("--player")
        self.evaluation = self._of("--eval-player")

    async def check(self, roles: Sequence[str]) -> None:
        """Check the players of the environment's roles: the roles exist, the policy plays one, servers answer.

        Raises:
            ConfigError: one of these does not hold.
        """
        label = self._label
        for flag, names in self._names.items():
            for role in names:
                if not roles:
                    raise ConfigError(f"{flag} {role}=…: {label} has no roles; leave it out")
                if role not in roles:
                    raise ConfigError(
                        f"{flag} {role}=…: {label} has the roles {', '.join(roles)}{suggest(role, roles)}"
                    )
            if roles and all(names.get(role, POLICY) != POLICY for role in roles):
                raise ConfigError(
                    f"{flag}: the policy plays none of the roles of {label} ({', '.join(roles)}); leave one to it"
                )
        for name, player in self._open.items():
            if isinstance(player, ChatModel):
                await player.check(f"--player {name}")

    async def close(self) -> None:
        """Free the models and connections."""
        for player in self._open.values():
            await player.close()

    def _of(self, flag: str) -> dict[str, Player]:
        players = {role: self._player(flag, role, name) for role, name in self._names[flag].items()}
        return {role: player for role, player in players.items() if player is not None}

    def _player(self, flag: str, role: str, name: Any) -> Player | None:
        """The player of a role; None: the policy."""
        if callable(name):
            return name  # type: ignore[no-any-return]  # of the environment's `players`
        if not isinstance(name, str):
            raise ConfigError(f"{flag} {role}: expected a function, an address or a model, found {name!r:.80}")
        if name == POLICY:
            return None
        if name not in self._made:
            self._made[name] = self._make(f"{flag} {role}={name}", name)
        return self._made[name]

    def _make(self, flag: str, name: str) -> Player:
        if name.startswith(("http://", "https://")):
            rollout = self._config.rollout
            model = ChatModel(name, temperature=rollout.rollout_temperature, max_tokens=rollout.max_tokens_per_turn)
            self._open[name] = model
            return model.reply
        if name == INITIAL or Path(name).is_dir():
            frozen = self._open[name] = self._frozen(flag, name)
            return frozen
        if ":" not in name and not name.endswith(".py"):
            raise ConfigError(
                f"{flag}: no such folder; give {POLICY}, {INITIAL}, a model folder, an address http://HOST:PORT/v1, or file.py:function"
            )
        function: Any = _FUNCTIONS.resolve(name)
        if not callable(function):
            raise ConfigError(f"{flag}: expected a function of messages that returns a text, found {function!r:.80}")
        player: Player = function
        return player

    def _frozen(self, flag: str, name: str) -> FrozenModel:
        if self._config.engine.engine == "sglang":
            raise ConfigError(
                f"{flag}: a model folder is played by the local engine; with --engine sglang serve it, and give its address: "
                f"{flag.partition('=')[0]}=http://HOST:PORT/v1"
            )
        folder = self._policy if name == INITIAL else model_folder(name)
        if token_ids(folder) != token_ids(self._policy):
            raise ConfigError(
                f"{flag}: its tokenizer is not that of the policy ({self._policy}); serve it, and give its address http://HOST:PORT/v1"
            )
        return FrozenModel(lambda: self._make_engine(folder))
