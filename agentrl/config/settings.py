"""Every setting there is, with its default and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import tomli_w


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
    log_level: Literal["debug", "info", "warning", "error"] = field(default="info", metadata={"recorded": False})
    """least severe messages that are logged; not recorded in config.toml, because it changes nothing in the run"""


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
    """of episodes, lost after all their attempts; above it, once more than 8 are lost, the run stops with the table of causes, and below 1 also
    when no group is left or nothing works any more (twice as many failures in a row as `concurrency`)"""


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
    """HOST:PORT of SGLang servers that run already, or of an sglang-router for those behind it; empty: they are started here"""
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
    """see agentrl/train/advantage.py for formulas and sources"""
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


def _plain(obj: Any) -> Any:
    if is_dataclass(obj) and not isinstance(obj, type):
        values = {f.name: (getattr(obj, f.name), f.default) for f in fields(obj) if f.metadata.get("recorded", True)}
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
