"""From the settings that are given, on the command line or in Python, to a `Config`: for a new run, and for one that is recorded."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.config import FIELDS, Config, Layer, build_config, read_toml
from agentrl.config.describe import flag_names
from agentrl.config.mixture import OWN_SETTINGS
from agentrl.config.paths import anchor
from agentrl.core.name_syntax import split_envs
from agentrl.core.registry import was_object
from agentrl.data.row_files import SUFFIXES, data_suffix
from agentrl.engine.sglang.installation import gpus
from agentrl.env import make_env_class
from agentrl.errors import ConfigError
from agentrl.gateway.agent_env import AgentEnv
from agentrl.run.model_folder import embedded
from agentrl.store.checkpoints import require_run
from agentrl.store.run_folder import recorded_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The settings that a command or a call in Python is given."""

    command: str
    """such as 'train'"""
    flags: Layer
    config: Path | None = None
    """file of further settings, which the flags override"""
    file: Layer = field(init=False)
    """the settings in the file"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", read_toml(self.config) if self.config else {})


def resolve(given: Given) -> Config:
    """The settings of a new run. Later layers win: defaults, the environment's own TOML, --config, flags."""
    file, flags = given.file, given.flags
    env = flags.get("env", file.get("env"))
    config = build_config(file, flags, base={} if env in (None, "none") else env_defaults(str(env)))
    _require_read(given.command, flags)
    return _new_run(config)


def resolve_played(given: Given, *, scored: bool, evaluates: bool = False) -> Config:
    """The settings of a new run that plays episodes. `scored`: there must be a reward. `evaluates`: evaluation sets suffice as tasks.

    Raises:
        ConfigError: neither an environment nor data is given, or nothing scores the answers.
    """
    config = resolve(given)
    if config.env.env is not None:
        return config
    if not (config.data.prompt_data or (evaluates and config.eval.eval_prompt_data)):
        data = "--prompt-data or --eval-prompt-data" if evaluates else "--prompt-data"
        raise ConfigError(
            f"no environment is given; give --env NAME|FILE.py (search_r1 is the example), or tasks with {data} "
            "and their --reward NAME|FILE.py"
        )
    e = config.env
    if scored and not (e.reward or e.custom_rm_path or e.custom_generate_function_path or e.rollout_function_path):
        raise ConfigError(
            "nothing scores the answers to the tasks; give --reward NAME|FILE.py, or an environment with --env"
        )
    return config


def resolve_open_gateway(given: Given) -> Config:
    """The settings of a gateway for agents that the run does not start: any `AgentEnv`, which may score them.

    Raises:
        ConfigError: the environment is not an AgentEnv.
    """
    config = resolve(given)
    if config.env.env is None:
        config = replace(config, env=replace(config.env, env="agentrl.gateway:AgentEnv"))
    elif not issubclass(make_env_class(config.env.env), AgentEnv):
        raise ConfigError(
            f"--env {config.env.env}: not an AgentEnv, whose rewards would score the agents; leave --env out"
        )
    return config


def resolve_trained(given: Given, sources: Sequence[Path]) -> Config:
    """The settings of a new run that trains on recorded episodes: those of the run that recorded them, --config, flags.

    Sources that no run recorded, such as conversations, have no settings. The engine's settings are not taken, because none is used.

    Raises:
        ConfigError: two runs have different models or forms of episodes, and nothing says which to train with.
    """
    file, flags = given.file, given.flags
    recorded = {
        source: read_toml(path)
        for source in sources
        if data_suffix(source) not in SUFFIXES and (path := recorded_config(source))
    }
    if not recorded:
        return resolve(given)
    (first, base), *others = recorded.items()
    for source, layer in others:
        for name in _OF_EPISODES:
            if name not in file and name not in flags and (base.get(name) or None) != (layer.get(name) or None):
                raise ConfigError(
                    f"{first} and {source} were recorded with different settings of {flag_names(name)[0]}: "
                    f"{base.get(name)!r} and {layer.get(name)!r}; give the one to train with"
                )
    own = {k: v for k, v in base.items() if k not in _NOT_TAKEN and (k == "threads" or FIELDS.get(k) != "engine")}
    config = build_config(file, flags, base=own)
    _require_read(given.command, flags)
    return _new_run(config)


_OF_EPISODES = ("hf_checkpoint", "template_args", "env", "action_format")
"""Settings that the episodes of one run have in common."""
_NOT_TAKEN = {"run", "runner_processes", "sglang", "actor_num_nodes"}
"""Settings of a recorded run that a run on its episodes does not take, apart from those of the engine."""


_READ_BY_SFT = (
    "rollout_max_context_len threads lr lr_warmup_rollouts lr_decay_style calculate_per_token_loss max_tokens_per_gpu "
    "actor_num_gpus_per_node actor_num_nodes node_rank master_addr master_port tree_packing"
).split()
"""Settings of the sections below that `agentrl sft` reads."""
_SECTIONS_OF_EPISODES = ("data", "rollout", "engine", "gateway", "train", "eval")


def _require_read(command: str, flags: Layer) -> None:
    """Refuse flags that the command does not read. A file of settings may serve several commands and is not checked.

    Raises:
        ConfigError: A flag has no effect.
    """
    unread = []
    for name in flags:
        section = FIELDS.get(name)
        reason = ""
        if command == "sft" and section in _SECTIONS_OF_EPISODES and name not in _READ_BY_SFT:
            reason = "in `agentrl sft`, which plays no episodes and has no rewards"
        elif command != "sft" and section == "sft":
            reason = f"in `agentrl {command}`; it is for `agentrl sft`"
        elif command not in ("train", "sft") and section == "lora":
            reason = f"in `agentrl {command}`, which trains nothing; weights with merged adapters are a model: --hf-checkpoint RUN/hf"
        if reason:
            unread.append(f"{flag_names(name)[0]} has no effect {reason}; leave it out")
    if unread:
        raise ConfigError.of_all(unread)


def _new_run(config: Config) -> Config:
    """The settings with absolute paths and with today's date, unless they have one."""
    config = anchor(config, embedded=embedded())
    if config.run.date:
        return config
    return replace(config, run=replace(config.run, date=datetime.date.today().isoformat()))


def resolve_recorded(given: Given, recorded: Path) -> Config:
    """The settings with which the episodes at `recorded` were made, overridden by flags.

    Raises:
        ConfigError: There is no config.toml.
    """
    path = given.config or recorded_config(recorded)
    if path is None:
        raise ConfigError(
            f"{recorded}: no config.toml of a run in this folder or above it; "
            "give --config FILE.toml with the settings of its episodes"
        )
    return build_config(given.flags, base=read_toml(path))


_RESUMABLE = {
    "num_rollout", "save_interval", "eval_interval", "threads", "concurrency", "log_level", "use_fault_tolerance",
    "trainer_timeout_s", "distributed_timeout_minutes", "node_rank", "master_addr", "master_port",
}  # fmt: skip
"""Settings that may change when a run continues."""


def resolve_resumed(given: Given, run: Path, *, how: str = "--resume") -> Config:
    """The run's own settings, with the few that may change. Settings that repeat those of the run are accepted.

    What was given as a Python object may be given again, as an object or by name: the environment and the rewards.

    Raises:
        ConfigError: the run cannot be resumed, or another setting changes.
    """
    flags = given.file | given.flags
    flags.pop("run", None)
    recorded = read_toml(require_run(run) / "config.toml")
    config = anchor(build_config(flags, base=recorded), embedded=embedded())
    before = build_config(base=recorded)
    changed = sorted(
        name
        for name in flags
        if name not in _RESUMABLE and _value(config, name) != (old := _value(before, name)) and not _was_object(old)
    )
    if changed:
        flag = flag_names(changed[0])[0] if changed[0] in FIELDS else f"flags of [{changed[0]}]"
        raise ConfigError(f"{how} continues with the run's own settings; leave out {flag}, or start a new run")
    return config


def _value(config: Config, name: str) -> object:
    return getattr(getattr(config, FIELDS[name]), name) if name in FIELDS else getattr(config, name)


def _was_object(value: object) -> bool:
    """Whether a recorded setting names an object that no name imports."""
    names = value if isinstance(value, tuple) else (value,)
    return any(isinstance(name, str) and was_object(name) for name in names)


def env_defaults(env: str) -> Layer:
    """Recommended settings of an environment, from `NAME.toml` beside its `NAME.py`; of several, those that each can have for itself.

    The number of trainer ranks is limited to the GPUs of this machine, if it has any.
    """
    envs = split_envs(env)
    if len(envs) > 1:
        own = {f"{name}.{k}": v for name, _ in envs for k, v in env_defaults(name).items() if k in OWN_SETTINGS}
        return {"env_settings": own} if own else {}
    source = getattr(sys.modules.get(make_env_class(env).__module__), "__file__", None)
    beside = Path(source).with_suffix(".toml") if source else None
    if not beside or not beside.exists():
        return {}
    layer = read_toml(beside)
    ranks = layer.get("actor_num_gpus_per_node", 1)
    if isinstance(ranks, int) and ranks > 1 and (cards := len(gpus())):
        layer["actor_num_gpus_per_node"] = min(ranks, cards)
    return layer
