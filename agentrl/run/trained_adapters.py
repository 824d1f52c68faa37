"""The adapters that a run trains (`--lora-rank`): what they are, whether a checkpoint holds them, and what each of several is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import Config
from agentrl.config.mixture import EnvShare
from agentrl.engine.sglang.launch_spec import AdapterForm
from agentrl.errors import ConfigError, DataError, StoreError, suggest
from agentrl.run.players import INITIAL, Players
from agentrl.types import Group

if TYPE_CHECKING:
    from agentrl.train.megatron.lora import Lora


def trained_adapters(config: Config, folder: Path) -> Lora | None:
    """The adapters of the model in `folder`; None: all weights are trained.

    Raises:
        UsageError: the model cannot have them, they are of another base, or a setting contradicts them.
    """
    from agentrl.train.megatron.lora import resolve
    from agentrl.train.megatron.model_config import read_model_config

    if not config.lora.used:
        return None
    players = (*config.env.players.values(), *config.eval.eval_players.values())
    if config.lora.lora_adapter_path and INITIAL in players:
        raise ConfigError(
            "--player initial is the base, without the adapters of --lora-adapter-path; give the folder of a model into which they are merged"
        )
    tree_packing = config.train.tree_packing and not config.train.true_on_policy_mode
    return resolve(config.lora, folder, read_model_config(folder), config.megatron, tree_packing=tree_packing)


def adapter_form(config: Config, folder: Path) -> AdapterForm:
    """What servers must know of several adapters of the model in `folder`.

    Raises:
        UsageError: see `trained_adapters`.
    """
    lora = trained_adapters(config, folder)
    assert lora is not None, "there are adapters"
    return AdapterForm(count=len(lora.adapters), rank=lora.rank, targets=lora.targets)


def adapters_of_envs(adapters: Mapping[str, str], shares: Sequence[EnvShare], labels: Iterable[str]) -> dict[str, str]:
    """The adapter of each of several environments, by its label.

    Args:
        adapters: `--lora-adapter`, by the names in `--env`.
        shares: the environments.
        labels: theirs, in the same order.

    Raises:
        ConfigError: an environment has none, or there is no such environment.
    """
    names = [share.name for share in shares]
    for name in adapters:
        if name not in names:
            raise ConfigError(
                f"--lora-adapter {name}=…: there is no environment {name!r}{suggest(name, names)}; --env has {', '.join(names)}"
            )
    if missing := [name for name in names if name not in adapters]:
        raise ConfigError(f"--lora-adapter names no adapter for {missing[0]}; give --lora-adapter {missing[0]}=NAME")
    return {label: adapters[name] for name, label in zip(names, labels, strict=True)}


def check_role_adapters(adapters: Mapping[str, str], roles: Sequence[str], players: Players, label: str) -> None:
    """Refuse adapters of roles that the policy does not play in training, and roles that it plays there or in evaluations without one.

    Args:
        adapters: by role; with the key '' those of all roles.
        roles: of the environment.
        players: who plays the roles that the policy does not play.
        label: the environment's.

    Raises:
        ConfigError: one does not fit.
    """
    if not adapters or "" in adapters:
        return
    own = [role for role in roles if role not in players.training]
    for role in adapters:
        if role not in own:
            played = f"the policy plays {', '.join(own)}" if own else "it has no roles, and is the only environment"
            raise ConfigError(f"--lora-adapter {role}=…: {label} has no role {role!r} of the policy, {played}")
    if missing := [role for role in own if role not in adapters]:
        raise ConfigError(
            f"--lora-adapter names no adapter for the role {missing[0]} of {label}; give {missing[0]}=NAME"
        )
    if missing := [role for role in roles if role not in adapters and role not in players.evaluation]:
        raise ConfigError(
            f"--eval-player {missing[0]}=policy: no adapter is trained for this role of {label}, which another player has in training; let it "
            "have one in evaluations too"
        )


def groups_by_adapter(groups: Sequence[Group], adapters: Mapping[str, str], *, by_role: bool) -> dict[str, list[Group]]:
    """What each adapter is trained on: the groups of its environments, or of every group the sides of its roles.

    Args:
        groups: of a rollout. An episode whose time was over before its environment was there has no roles, and nothing to train on.
        adapters: by environment, or by role.
        by_role: they are by role, which may be named as an environment is.

    Raises:
        DataError: an episode is of no adapter.
    """
    parts: dict[str, list[Group]] = {name: [] for name in adapters.values()}
    for group in groups:
        first = group.trajectories[0]
        if by_role:
            played = [t for t in group.trajectories if t.played]
            unknown = [name for t in played for name in t.roles or (t.env,) if not t.roles or name not in adapters]
        else:
            unknown = [] if first.env in adapters else [first.env]
        if unknown:
            raise DataError(
                f"episode {first.episode_id}: {unknown[0]} has no adapter; --lora-adapter names those of {', '.join(adapters)}"
            )
        if not by_role:
            parts[adapters[first.env]].append(group)
            continue
        for name, members in parts.items():
            sides = [replace(t, roles=tuple(r for r in t.roles if adapters[r] == name)) for t in group.trajectories]
            if kept := tuple(t for t in sides if t.roles):
                members.append(replace(group, trajectories=kept))
    return parts


def describe_adapters(config: Config, folder: Path) -> str | None:
    """What is trained, in one line; None: all weights."""
    from agentrl.train.megatron.lora import describe
    from agentrl.train.megatron.model_config import read_model_config

    lora = trained_adapters(config, folder)
    return None if lora is None else describe(folder, read_model_config(folder), lora)


def require_adapters(config: Config, folder: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint whose adapters are not those that the settings describe, or of another base.

    Raises:
        UsageError, StoreError: it is such a checkpoint, or cannot be read.
    """
    from agentrl.train.megatron.checkpoint_model import ADAPTERS, adapter_folder, require_model
    from agentrl.train.megatron.model_config import read_model_config

    if not config.lora.used:
        return
    lora = trained_adapters(config, folder)
    names = [] if lora is None else sorted(name for name, _ in lora.adapters)
    saved = sorted(path.name for path in (checkpoint / ADAPTERS).iterdir()) if (checkpoint / ADAPTERS).is_dir() else []
    if names != saved:
        raise StoreError(
            f"{checkpoint} holds {'the adapters ' + ' '.join(saved) if saved else 'one adapter'}, the settings name "
            f"{' '.join(names) or 'none'}; give the --lora-adapter of its run"
        )
    for place in [adapter_folder(checkpoint, name) for name in names] or [checkpoint]:
        require_model(place, read_model_config(folder), lora)
