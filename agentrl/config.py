"""Settings: frozen dataclasses with a docstring per field. Layers, the later ones winning: defaults, the environment's own TOML
(`envs/NAME.toml` beside its file), `--config FILE.toml`, flags. Unknown keys are errors with a suggestion.

Field names are unique over all sections, so that each is also a flag: `rollout_batch_size` is `--rollout-batch-size`. Megatron's own
settings live in the table `[megatron]` under Megatron's names, SGLang's in `[sglang]`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError, suggest


@dataclass(frozen=True)
class RunSettings:
    """Where the run lives."""

    run: str | None = None
    """run folder, made anew; None: the next free `runs/NAME-NNN`"""
    seed: int = 0
    """every random draw of the run follows from it"""
    date: str | None = None
    """the day that chat templates print, YYYY-MM-DD; None: the day the run begins (recorded, so that replay prints the same)"""
    save_interval: int = 10
    """rollouts between checkpoints; the last rollout always saves"""
    keep_checkpoints: int = 2
    """older ones are removed; 0: keep all"""
    tensorboard: bool = True
    """write TensorBoard events"""


@dataclass(frozen=True)
class ModelSettings:
    """The policy."""

    hf_checkpoint: str = "search_r1_3m"
    """a model folder in Hugging Face layout, a hub id, or the name of an embedded model (`search_r1_3m`)"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the trainer's weights (bfloat16 keeps fp32 master weights) and of SGLang's; the local engine always computes in float32"""
    template_args: dict[str, Any] = field(default_factory=dict)
    """passed to the chat template, e.g. enable_thinking = false"""


@dataclass(frozen=True)
class EnvSettings:
    """The environment and its rewards."""

    env: str = "search_r1"
    """a registered name, `module:Class`, or `file.py[:Class]`"""
    env_args: dict[str, Any] = field(default_factory=dict)
    """constructor arguments; on the command line `--env-arg NAME=VALUE`, repeated"""
    reward: tuple[str, ...] = ()
    """NAME, NAME=WEIGHT, `module:fn` or `file.py:fn`; empty: the environment's own"""
    action_format: str | None = None
    """how actions are written (search_r1, hermes); None: the environment's choice, else the model family's"""
    max_turns: int = 8
    """generations in an episode"""
    max_invalid_actions: int = 3
    """turns that could not be parsed before the episode ends"""
    max_calls_per_turn: int = 8
    """tool calls in one turn; further ones are answered with an error"""
    keep_whole_outputs: bool = False
    """what a tool returned and the policy saw only the beginning of: keep it whole, in `episodes/outputs/` of the run folder"""
    surplus_calls: Literal["error", "ignore", "refuse"] = "error"
    """calls over the limit: answered with an error, left out, or all calls of the turn refused"""
    history_policy: Literal["append", "rerender"] = "append"
    """templates that rewrite history (thinking stripped): keep the tokens, or render anew in a segment of its own"""
    context_policy: str | None = None
    """what leaves a conversation that grows long: drop_old_turns, truncate_old_results, or `module:policy`; None: the environment's choice"""
    raw_content: bool = False
    """let control tokens inside prompts and tool output count as such; unsafe"""
    truncated_episodes: Literal["train", "mask", "drop"] = "train"
    """MAX_TURNS, MAX_TOKENS, CONTEXT_FULL: train on them, mask them (they still count in the baseline), or drop them"""


@dataclass(frozen=True)
class DataSettings:
    """Tasks."""

    prompt_data: str | None = None
    """JSONL or Parquet, `path@[a:b]` for a slice; None: the environment's own tasks"""
    input_key: str | None = None
    """column of the prompt (text or messages); None: the environment's (`prompt`)"""
    label_key: str | None = None
    """column of the label; None: the environment's (`label`)"""
    apply_chat_template: bool = True
    """prompts always go through the model's chat template; false is refused"""
    rollout_shuffle: bool = True
    """shuffle each epoch (by the seed)"""
    data_limit: int | None = None
    """use only the first so many tasks"""


@dataclass(frozen=True)
class RolloutSettings:
    """How episodes are made."""

    num_rollout: int = 100
    """rollouts in the run; each is followed by `num_steps_per_rollout` optimizer steps"""
    rollout_batch_size: int = 16
    """tasks per rollout"""
    n_samples_per_prompt: int = 8
    """episodes per task: the group; `train` learns from the differences in it, so from 2 on"""
    global_batch_size: int | None = None
    """episodes per optimizer step; None: from the equation"""
    num_steps_per_rollout: int = 1
    """optimizer steps per rollout"""
    rollout_temperature: float = 1.0
    """of sampling; recorded with each turn"""
    rollout_top_p: float = 1.0
    """of sampling; 1: off"""
    rollout_top_k: int = -1
    """of sampling; -1: off"""
    allow_truncated_sampling: bool = False
    """train with top-p or top-k although the trainer's distribution then differs from the engine's"""
    rollout_max_response_len: int = 1024
    """tokens after the prompt, over all turns, observations included"""
    rollout_max_context_len: int | None = None
    """prompt and response; None: the model's"""
    max_tokens_per_turn: int | None = None
    """of one generation"""
    concurrency: int = 128
    """episodes at once"""
    runner_processes: int = 1
    """processes that episodes are spread over when one core is not enough; needs engine = "sglang\""""
    episode_timeout_s: float = 600.0
    """seconds for one episode; one that takes longer is masked"""
    max_retries: int = 2
    """further attempts of an episode whose infrastructure failed"""
    min_group_size: int = 2
    """smaller groups are dropped"""
    max_failure_share: float = 0.5
    """of episodes, lost after all their attempts; above it the run stops with the table of causes"""


@dataclass(frozen=True)
class EngineSettings:
    """Inference."""

    engine: Literal["local", "sglang"] = "local"
    """local: in this process; sglang: servers, started here or attached to"""
    colocate: bool = False
    """sglang: engines and trainer share the same cards, in turns"""
    weight_sync: Literal["colocated", "split", "disk"] | None = None
    """how weights reach SGLang; None: colocated with --colocate, disk for external servers, else split"""
    update_weight_buffer_size: int = 1 << 30
    """bytes of a bucket of weights on the way"""
    update_weight_disk_dir: str | None = None
    """folder for weights by disk, also those of a server that comes back: trainer and servers see it under this name, as the same user; None:
    this machine's shared memory"""
    rollout_num_gpus: int | None = None
    """sglang: cards of all engines together (on a CPU: processes); None: one engine"""
    rollout_num_gpus_per_engine: int = 1
    """sglang: tensor parallel size of an engine"""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """HOST:PORT of SGLang servers that run already; empty: they are started here"""
    engine_python: str | None = None
    """interpreter that has SGLang; None: `.venv-sglang/bin/python` if it is there, else this one"""
    engine_pythonpath: str | None = None
    """folder that goes in front of the servers' PYTHONPATH"""
    engine_max_running: int = 128
    """generations at once (local)"""
    threads: int | None = None
    """CPU threads of the engine and of the trainer, which take turns; None: the machine's cores"""


@dataclass(frozen=True)
class TrainSettings:
    """Losses and optimizer. Everything of Megatron's own is in [megatron]."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """see agentrl/advantage.py for formulas and sources"""
    eps_clip: float = 0.2
    """of the probability ratio, both ways"""
    eps_clip_high: float | None = None
    """None: as eps_clip"""
    eps_clip_c: float | None = None
    """dual clip; None: off"""
    use_kl_loss: bool = False
    """keep a frozen reference and add the KL loss"""
    kl_loss_coef: float = 0.0
    """weight of the KL loss; needs use_kl_loss"""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL divergence (Schulman 2020)"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    calculate_per_token_loss: bool = False
    """mean over all tokens, instead of each episode's mean and then the mean over episodes"""
    use_tis: bool = False
    """truncated importance sampling, exp(old - rollout)"""
    tis_threshold: float = 2.0
    """upper bound of the importance weight"""
    lr: float = 1e-6
    """learning rate after warm-up"""
    lr_warmup_rollouts: int = 0
    """linear warm-up"""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """over num_rollout, down to lr / 10"""
    max_tokens_per_gpu: int = 8192
    """tokens of one padded micro-batch"""
    actor_num_gpus_per_node: int | None = None
    """trainer ranks on this machine (on CPU: processes); None: tensor × pipeline parallel size, that is one data-parallel copy"""


@dataclass(frozen=True)
class EvalSettings:
    """Held-out evaluation."""

    eval_interval: int = 20
    """rollouts between evaluations, also before the first and after the last; 0: never"""
    eval_prompt_data: tuple[str, ...] = ()
    """NAME PATH pairs; empty: the environment's split 'test', or with `--prompt-data` nothing (`agentrl eval`: that data)"""
    n_samples_per_eval_prompt: int = 1
    """episodes per question"""
    eval_temperature: float = 0.0
    """0: greedy"""
    eval_limit: int | None = 200
    """questions per set"""


@dataclass(frozen=True)
class SftSettings:
    """`agentrl sft` only."""

    sft_epochs: int = 1
    """passes over the episodes"""
    sft_batch_size: int = 64
    """episodes per optimizer step"""


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    env: EnvSettings = EnvSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    sft: SftSettings = SftSettings()
    megatron: dict[str, Any] = field(default_factory=dict)
    """fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig"""
    sglang: dict[str, Any] = field(default_factory=dict)
    """flags of SGLang's server by name; on the command line `--sglang-NAME VALUE`"""

    @property
    def global_batch_size(self) -> int:
        """Episodes per optimizer step."""
        r = self.rollout
        return r.global_batch_size or r.rollout_batch_size * r.n_samples_per_prompt // r.num_steps_per_rollout

    def to_toml(self) -> str:
        """The resolved settings, to be read again by `read_toml`; what is None by default and stayed so is left out."""
        return tomli_w.dumps(_plain(self))


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in fields(Config) if is_dataclass(f.default)}
"""Section name -> its dataclass."""

FIELDS: dict[str, str] = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
"""Field name -> its section."""

TABLES = ("megatron", "sglang")
"""sections whose keys are another program's"""

_AT_LEAST: dict[str, int] = {
    name: least
    for least, names in {
        0: "keep_checkpoints max_retries eps_clip eps_clip_high kl_loss_coef entropy_coef lr lr_warmup_rollouts eval_interval eval_temperature",
        1: "save_interval max_turns max_invalid_actions max_calls_per_turn data_limit num_rollout rollout_batch_size n_samples_per_prompt "
        "global_batch_size num_steps_per_rollout rollout_max_response_len rollout_max_context_len max_tokens_per_turn concurrency "
        "runner_processes min_group_size update_weight_buffer_size rollout_num_gpus rollout_num_gpus_per_engine engine_max_running threads "
        "max_tokens_per_gpu actor_num_gpus_per_node n_samples_per_eval_prompt eval_limit sft_epochs sft_batch_size",
    }.items()
    for name in names.split()
}

_ABOVE: dict[str, int] = {"episode_timeout_s": 0, "tis_threshold": 0, "eps_clip_c": 1}
"""the bound itself is refused; those that depend on more than one setting, or say why, are in `check`"""

Layer = dict[str, Any]
"""flat field names (and 'megatron': {...}) with raw values"""


def read_toml(path: Path) -> Layer:
    """A TOML file as a flat layer.

    Raises:
        ConfigError: no such file, not TOML, an unknown section or key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e
    flat: Layer = {}
    for section, body in data.items():
        if section in FIELDS and section not in SECTIONS:
            raise ConfigError(f"{path}: {section!r} stands in no section; it belongs in [{FIELDS[section]}]")
        if section not in (*SECTIONS, *TABLES):
            raise ConfigError(f"{path}: unknown section [{section}]{suggest(section, [*SECTIONS, *TABLES])}")
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {section!r} is a section; write [{section}] and its keys below it")
        if section in TABLES:
            flat[section] = body
            continue
        for key, value in body.items():
            if FIELDS.get(key) != section:
                where = (
                    f"; it belongs in [{FIELDS[key]}]"
                    if key in FIELDS
                    else suggest(key, [k for k, s in FIELDS.items() if s == section])
                )
                raise ConfigError(f"{path}: unknown key {key!r} in [{section}]{where}")
            flat[key] = value
    return flat


def build_config(*layers: Layer) -> Config:
    """Merge layers (later ones win; env_args, template_args and megatron merge by key), convert, check.

    'none' stands for None where a setting may be None (TOML and flags have no other word for it).

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or settings that contradict each other.
    """
    flat: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in FIELDS and key not in TABLES:
                raise ConfigError(f"unknown setting {key!r}{suggest(key, FIELDS)}")
            before: Any = flat.get(key)
            flat[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    sections = {
        name: _section(cls, {f.name: flat[f.name] for f in fields(cls) if f.name in flat})
        for name, cls in SECTIONS.items()
    }
    config = Config(**sections, megatron=dict(flat.get("megatron", {})), sglang=dict(flat.get("sglang", {})))
    check(config)
    return config


def _section(cls: type, values: Layer) -> Any:
    optional = {f.name for f in fields(cls) if "None" in str(f.type)}
    values = {k: None if v == "none" and k in optional else v for k, v in values.items()}
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as e:
        first = e.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else cls.__name__
        raise ConfigError(
            f"--{name.replace('_', '-')}: {first['msg'][0].lower()}{first['msg'][1:]}, found {first['input']!r}"
        ) from e


_adapter = lru_cache(TypeAdapter)


def check(config: Config) -> None:
    """Settings that contradict each other.

    Raises:
        ConfigError: one sentence.
    """
    r, t = config.rollout, config.train
    _check_bounds(config)
    left, right = r.rollout_batch_size * r.n_samples_per_prompt, config.global_batch_size * r.num_steps_per_rollout
    if left != right:
        raise ConfigError(
            f"rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout does not hold: "
            f"{r.rollout_batch_size} × {r.n_samples_per_prompt} = {left}, but {config.global_batch_size} × {r.num_steps_per_rollout} = {right}"
        )
    if not 0 < r.rollout_top_p <= 1 or (r.rollout_top_k != -1 and r.rollout_top_k < 1):
        raise ConfigError(
            f"--rollout-top-p must be above 0 and at most 1, --rollout-top-k at least 1 or -1 (off), found {r.rollout_top_p} and {r.rollout_top_k}"
        )
    if not 0 <= r.max_failure_share <= 1:
        raise ConfigError(f"--max-failure-share is a share from 0 to 1, found {r.max_failure_share}")
    if r.rollout_temperature <= 0:
        raise ConfigError(
            f"--rollout-temperature must be above 0 for training (greedy samples have no distribution), found {r.rollout_temperature}"
        )
    if (r.rollout_top_p < 1 or r.rollout_top_k > 0) and not r.allow_truncated_sampling:
        raise ConfigError(
            "training with top-p or top-k samples from another distribution than the trainer's; set --allow-truncated-sampling if that is meant"
        )
    if t.kl_loss_coef and not t.use_kl_loss:
        raise ConfigError("--kl-loss-coef has no effect without --use-kl-loss; add it")
    if not config.data.apply_chat_template:
        raise ConfigError(
            "--apply-chat-template false is not supported: prompts go through the model's chat template; give the model one that adds nothing"
        )
    _check_engine(config)
    if not 0 <= config.run.seed < 2**63:
        raise ConfigError(f"--seed must be at least 0 and below 2**63, found {config.run.seed}")
    names = config.eval.eval_prompt_data[::2]
    if len(config.eval.eval_prompt_data) % 2:
        raise ConfigError(f"--eval-prompt-data takes NAME PATH pairs, found {len(config.eval.eval_prompt_data)} words")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--eval-prompt-data gives the name {doubled[0]!r} to more than one set; name each differently"
        )


def _check_bounds(config: Config) -> None:
    for name, section in FIELDS.items():
        value = getattr(getattr(config, section), name)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag} must be a finite number, found {value}")
        if value is not None and name in _AT_LEAST and value < _AT_LEAST[name]:
            raise ConfigError(f"{flag} must be at least {_AT_LEAST[name]}, found {value}")
        if value is not None and name in _ABOVE and value <= _ABOVE[name]:
            raise ConfigError(f"{flag} must be above {_ABOVE[name]}, found {value}")


def _check_engine(config: Config) -> None:
    e = config.engine
    if e.engine == "sglang":
        if e.colocate and e.weight_sync == "split":
            raise ConfigError("--weight-sync split needs cards of the engines' own; with --colocate use colocated")
        if e.rollout_external_engine_addrs and e.colocate:
            raise ConfigError(
                "--colocate needs servers that are started here; leave out --rollout-external-engine-addrs"
            )
        return
    ours = (
        "colocate",
        "weight_sync",
        "update_weight_disk_dir",
        "rollout_num_gpus",
        "rollout_external_engine_addrs",
        "engine_python",
        "engine_pythonpath",
    )
    given = [f"--{name.replace('_', '-')}" for name in ours if getattr(e, name)] + [
        f"--sglang-{k.replace('_', '-')}" for k in config.sglang
    ]
    if config.rollout.runner_processes > 1:
        given.append("--runner-processes")
    if given:
        raise ConfigError(f"{given[0]} needs --engine sglang (the engine is {e.engine})")


def _plain(obj: Any) -> Any:
    if is_dataclass(obj) and not isinstance(obj, type):
        values = {f.name: (getattr(obj, f.name), f.default) for f in fields(obj)}
        return {
            k: "none" if v is None else _plain(v)
            for k, (v, default) in values.items()
            if v is not None or default is not None
        }
    if isinstance(obj, tuple):
        return [_plain(v) for v in obj]
    if isinstance(obj, Mapping):
        return {k: _plain(v) for k, v in obj.items() if v is not None}
    return obj
