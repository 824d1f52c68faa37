"""Every setting: its type, bound, default and help text, each in one place.

The text under a field is its help: the first paragraph is what `--help` prints, the rest what `agentrl help FLAG` adds. A default that is
None or empty is explained in the text as "(default: …)". A string in `Annotated` is the name of the value in the help, such as PATH.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from agentrl.core.name_syntax import split_slice

ESTIMATOR_NAMES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gspo",
    "cispo",
    "ppo",
    "gigpo",
    "distillation",
)
"""Advantage estimators that are built in (agentrl/train/estimators)."""
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _temperature(value: float) -> float:
    if value <= 0:
        raise ValueError("must be above 0", "greedy sampling has no distribution to learn from")
    return value


def _top_k(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1 (off)")
    return value


def _estimator(value: str) -> str:
    if value not in ESTIMATOR_NAMES and ":" not in value and not value.endswith(".py"):
        raise ValueError(f"must be one of {', '.join(ESTIMATOR_NAMES)}, or file.py:function")
    return value


def _chat_template(value: bool) -> bool:
    if not value:
        raise ValueError("must be true", "to add nothing to prompts, give the model a template that adds nothing")
    return value


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunSettings:
    """Run folder, seed, checkpoints and logs."""

    run: Annotated[str | None, "PATH"] = None
    """run folder to create (default: the next free runs/NAME-NNN)"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of every random draw in the run"""
    date: Annotated[str | None, "YYYY-MM-DD"] = None
    """date that chat templates print (default: the day the run starts)

    The date is recorded, so that a replay renders the same prompts."""
    save_interval: Annotated[int, Field(ge=1)] = 10
    """rollouts between checkpoints; the last rollout is always saved"""
    save_debug_rollout_data: Annotated[str | None, "PATH"] = None
    """link to create, to the folder of the recorded episodes (default: none)

    Every episode is recorded in episodes/ of the run folder in any case. `agentrl train --load-debug-rollout-data PATH` trains on them."""
    async_save: bool = False
    """write checkpoints while the next rollout is played

    The trainer's state is copied to host memory first. The checkpoint is complete before the next optimizer step; until then a run that is killed
    resumes from the one before."""
    keep_checkpoints: Annotated[int, Field(ge=0)] = 2
    """checkpoints to keep, newest first; 0: keep all"""
    tensorboard: bool = True
    """write TensorBoard events into the run folder"""
    profile: Annotated[int | None, Field(ge=1)] = None
    """number of an optimizer step to profile, from 1 (default: none)

    Each trainer rank writes a trace of the step into profile/ of the run folder, for ui.perfetto.dev, and a table of its operators."""
    trackers: Annotated[tuple[Literal["wandb", "mlflow", "trackio"], ...], "NAME"] = ()
    """services that receive the metrics too, each an extra: wandb, mlflow, trackio (default: none)"""
    tracking_project: Annotated[str, "NAME"] = "agentrl"
    """project (W&B, trackio) or experiment (MLflow) of --trackers"""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(exclude=True)] = "info"
    """lowest severity of logged messages

    The level is not recorded in config.toml, because it does not change the run."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelSettings:
    """The policy."""

    hf_checkpoint: Annotated[str | None, "PATH|NAME"] = None
    """model folder, hub id or embedded model (default: the one that the environment recommends, if any)

    The folder is in Hugging Face layout, with safetensors files and tokenizer.json. `search_r1_3m` is an embedded model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the weights in the trainer and in SGLang

    With bfloat16 the trainer keeps float32 master weights. The local engine always computes in float32."""
    template_args: Annotated[dict[str, Any], "NAME=VALUE"] = field(default_factory=dict)
    """argument of the chat template, such as enable_thinking=false; repeatable (default: none)"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EnvSettings:
    """Environment, rewards and the form of episodes."""

    env: Annotated[str | None, "NAME|FILE.py"] = None
    """environment: a name, module:Class or file.py; several as NAME=SHARE (default: the tasks of --prompt-data, each answered in one turn)

    `file.py:Class` chooses between several environments of a file. `search_r1` is the example. Without an environment, tasks come from
    --prompt-data, `ToolEnv` plays them, and --reward scores the answers. `--env a=0.7 b=0.3` mixes environments in these shares of the
    groups; --env-setting gives each its own settings."""
    env_args: Annotated[dict[str, Any], "NAME=VALUE"] = field(default_factory=dict)
    """constructor argument of --env; repeatable (default: none)"""
    env_settings: Annotated[dict[str, Any], "ENV.SETTING=VALUE"] = field(default_factory=dict)
    """setting of one of several environments; repeatable (default: none)

    Such as `--env-setting search_r1.max_turns=4` or `--env-setting 'search_r1.env_args={topk = 2}'`. Its arguments, data, rewards and limits can
    be set, and its `concurrency`."""
    env_isolation: Literal["thread", "process"] | None = None
    """run each environment, with its tools, in a thread of the run or in a separate process (default: the environment's choice)

    In a separate process a hang, a crash or a leak of the environment ends that process only, and its episode is started again. The
    environment must be defined at the top level of a module or file, and its arguments must be picklable."""
    reward: Annotated[tuple[str, ...], "NAME"] = ()
    """rewards, each NAME or NAME=WEIGHT (default: the environment's)

    A name is registered, or `module:function`, or `file.py:function`. A file with one reward needs no function name."""
    custom_rm_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """reward function written for slime: `async f(args, sample)`, or `file.py:f` (default: --reward)"""
    group_rm: bool = False
    """--custom-rm-path scores the samples of a group at once: `f(args, samples)` returns a list"""
    custom_generate_function_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """generate function written for slime, which plays each episode: `async f(args, sample, sampling_params)` (default: --env)

    Every token that it marks as trained must be one that the engine sampled."""
    rollout_function_path: Annotated[str | None, "MODULE.FUNCTION"] = None
    """rollout function written for slime: `f(args, rollout_id, data_source, evaluation)` returns groups of samples (default: none)"""
    reward_key: Annotated[str | None, "NAME"] = None
    """component that counts, of a reward that returns a dict (default: all of them, each with the reward's weight)

    The other components are reported with weight 0, or left out if they are not numbers."""
    action_format: Annotated[str | None, "NAME"] = None
    """syntax of tool calls and answers, such as hermes or search_r1 (default: the environment's choice, or the model family's)"""
    tools_in_prompt: bool = False
    """write the tools and how to call them into the system message, where the chat template leaves tools out"""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """maximum turns of an episode

    A turn is one generation of the policy and the observation that follows."""
    max_invalid_actions: Annotated[int, Field(ge=1)] = 3
    """the episode ends after N turns that cannot be parsed"""
    max_calls_per_turn: Annotated[int, Field(ge=1)] = 8
    """maximum tool calls in one turn; see --surplus-calls"""
    keep_whole_outputs: bool = False
    """record the full text of tool outputs that the policy sees truncated

    They are kept in episodes/outputs/ of the run folder."""
    surplus_calls: Literal["error", "ignore", "refuse"] = "error"
    """tool calls above the limit of a turn: answer them with an error, ignore them, or refuse all calls of the turn"""
    history_policy: Literal["append", "rerender"] = "append"
    """if the template rewrites history (strips thinking): append to the sampled tokens, or render again in a new segment"""
    context_policy: Annotated[str | None, "NAME"] = None
    """how to shorten long conversations: drop_old_turns, truncate_old_results or module:policy (default: the environment's choice)"""
    raw_content: bool = False
    """parse control tokens inside prompts and tool outputs as control tokens; unsafe"""
    truncated_episodes: Literal["train", "mask", "drop"] = "train"
    """episodes cut by a limit of turns, tokens or context: train on them, mask them, or drop them

    Masked episodes still count in the baseline of their group."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataSettings:
    """Tasks."""

    prompt_data: Annotated[str | None, "PATH"] = None
    """tasks: a JSONL, JSON, CSV or Parquet file (also .gz), a folder or pattern of them, or a hub id (default: the environment's tasks)

    `PATH@[a:b]` takes the rows from a to b, as a slice in Python."""
    input_key: Annotated[str | None, "NAME"] = None
    """column of the prompt, which is text or messages; a.b is key b inside column a (default: the environment's, usually prompt)"""
    label_key: Annotated[str | None, "NAME"] = None
    """column of the label; a.b is key b inside column a (default: the environment's, usually label)"""
    metadata_key: Annotated[str | None, "NAME"] = None
    """column of the task's metadata, an object (default: all columns but prompt, label and id)"""
    tool_key: Annotated[str, "NAME"] = "tools"
    """column of the task's tools; a.b is key b inside column a"""
    apply_chat_template: Annotated[bool, AfterValidator(_chat_template)] = True
    """prompts always use the model's chat template; false is refused"""
    data_source_path: Annotated[str | None, "NAME"] = None
    """class that chooses which tasks are played next, `module:Class` or `file.py:Class` (default: all tasks in each epoch)

    A subclass of agentrl.data.data_source.DataSource with get_samples and add_samples. Checkpoints hold its state."""
    rollout_shuffle: bool = True
    """shuffle the tasks in each epoch, by the seed"""
    data_limit: Annotated[int | None, Field(ge=1)] = None
    """use only the first N tasks (default: all)"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RolloutSettings:
    """Sampling of episodes."""

    num_rollout: Annotated[int, Field(ge=1)] = 100
    """rollouts in the run

    Each rollout is followed by --num-steps-per-rollout optimizer steps."""
    rollout_batch_size: Annotated[int, Field(ge=1)] = 16
    """tasks per rollout"""
    n_samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """episodes per task, at least 2 to train

    The episodes of a task are a group; training learns from the differences between their rewards."""
    global_batch_size: Annotated[int | None, Field(ge=1)] = None
    """episodes per optimizer step (default: tasks × episodes per task / optimizer steps per rollout)"""
    num_steps_per_rollout: Annotated[int, Field(ge=1)] = 1
    """optimizer steps per rollout"""
    rollout_temperature: Annotated[float, AfterValidator(_temperature)] = 1.0
    """sampling temperature in training, above 0"""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """nucleus sampling in training; 1: off"""
    rollout_top_k: Annotated[int, AfterValidator(_top_k)] = -1
    """sample from the N likeliest tokens in training; -1: off"""
    allow_truncated_sampling: bool = False
    """allow top-p and top-k in training, although the trainer's distribution then differs from the engine's"""
    rollout_max_response_len: Annotated[int, Field(ge=1)] = 1024
    """maximum tokens after the prompt, over all turns

    The tokens of observations count too."""
    rollout_max_context_len: Annotated[int | None, Field(ge=1)] = None
    """maximum tokens of prompt and response (default: the model's limit)"""
    max_tokens_per_turn: Annotated[int | None, Field(ge=1)] = None
    """maximum tokens sampled in one turn (default: what the response budget leaves)"""
    concurrency: Annotated[int, Field(ge=1)] = 128
    """episodes that run at the same time"""
    runner_processes: Annotated[int, Field(ge=1)] = 1
    """processes that run episodes, if one core is too slow; needs --engine sglang"""
    episode_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """seconds until an episode is stopped and masked"""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """retries of an episode whose infrastructure failed"""
    min_group_size: Annotated[int, Field(ge=1)] = 2
    """drop groups with fewer episodes than this"""
    max_failure_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """share of episodes that may be lost after all retries before the run stops

    The share is checked once more than 8 episodes are lost; the run then stops with a table of causes. Below 1, the run also stops when
    no group is left, or after twice as many failures in a row as --concurrency."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ScheduleSettings:
    """When groups of episodes start, and when they are trained on."""

    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generate, then train; one_step_off: generate the next rollout during training; async: generate all the time

    With async nothing waits for the slowest episode, and no episode is dropped because it is slow. Give --use-tis with it, which
    corrects for the weights that sampled."""
    async_buffer_size: Annotated[int | None, Field(ge=1)] = None
    """groups that have started and are not yet trained on (default: twice --rollout-batch-size × --update-weights-interval)

    It bounds staleness, with --consumption-window; the run prints the bound. A larger buffer keeps engines busier."""
    consumption_window: Annotated[int | None, Field(ge=1)] = None
    """groups among which training may choose the first to finish; 1: the order of submission (default: 3 tenths of the buffer)"""
    update_weights_interval: Annotated[int, Field(ge=1)] = 1
    """rollouts between weight updates; needs --schedule one_step_off or async"""
    max_staleness: Annotated[int | None, Field(ge=0)] = None
    """refuse a schedule in which a sample could be older than N rollouts (default: what the schedule implies)

    Staleness is counted in rollouts from the weights of a sample's oldest token, queues included."""
    partial_rollout: bool = True
    """generations that a weight update interrupts continue with the new weights; false: finish them before the update

    Each token keeps its log-probability and the version that sampled it. An episode inside a tool is never waited for."""
    dynamic_sampling_filter_path: Annotated[str | None, "NAME"] = None
    """train only on groups for which this function returns true, and play other tasks in place of the rest (default: all)

    `nonzero_std` keeps groups whose scores differ; `module:function` and `file.py:function` take a Group."""
    max_resamples: Annotated[int, Field(ge=1)] = 4
    """tasks that are played in place of a group that the filter refused; then the rollout has a group less"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EngineSettings:
    """Inference."""

    engine: Literal["local", "sglang"] = "local"
    """local: in this process; sglang: servers

    The servers are started here, or already run at --rollout-external-engine-addrs."""
    colocate: bool = False
    """SGLang and the trainer share the same GPUs and take turns"""
    weight_sync: Literal["colocated", "split", "disk"] | None = None
    """how weights reach SGLang (default: colocated with --colocate, disk for external servers, otherwise split)"""
    update_weight_buffer_size: Annotated[int, Field(ge=1)] = 1 << 30
    """bytes of weights sent at once"""
    update_weight_disk_dir: Annotated[str | None, "PATH"] = None
    """folder for weight sync by disk (default: shared memory of this machine)

    Trainer and servers must see the folder under the same path, as the same user. Restarted servers load their weights from it too."""
    rollout_num_gpus: Annotated[int | None, Field(ge=1)] = None
    """GPUs of all SGLang engines together (default: one engine)

    Without GPUs, the number of server processes."""
    rollout_num_gpus_per_engine: Annotated[int, Field(ge=1)] = 1
    """GPUs of one SGLang engine, its tensor parallel size"""
    rollout_external_engine_addrs: Annotated[tuple[str, ...], "HOST:PORT"] = ()
    """running SGLang servers, or an sglang-router in front of them (default: start servers here)"""
    ray_address: Annotated[str | None, "auto|local|HOST:PORT"] = None
    """ray cluster on whose nodes the SGLang servers start (default: this machine, without ray)

    auto: the cluster that runs on this machine; local: start one here. Each node has SGLang and the model at the same paths."""
    engine_python: Annotated[str | None, "PATH"] = None
    """Python interpreter that has SGLang (default: .venv-sglang/bin/python if it exists, otherwise this one)"""
    engine_pythonpath: Annotated[str | None, "PATH"] = None
    """folder to put first in the PYTHONPATH of the servers (default: none)"""
    engine_max_running: Annotated[int, Field(ge=1)] = 128
    """generations that the local engine runs at the same time"""
    threads: Annotated[int | None, Field(ge=1)] = None
    """CPU threads of the local engine and of the trainer, which take turns (default: the machine's cores)"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class GatewaySettings:
    """The HTTP gateway of agents that are separate programs (`AgentEnv`)."""

    gateway_host: Annotated[str, "HOST"] = "127.0.0.1"
    """address on which the gateway listens

    Anyone who reaches the address and knows the key of an episode can use the policy until the episode ends."""
    gateway_port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """port on which the gateway listens; 0: any free port"""
    gateway_idle_s: Annotated[float, Field(gt=0)] = 60.0
    """`agentrl gateway`: an episode ends when its key has made no request for this many seconds"""
    gateway_url: Annotated[str | None, "URL"] = None
    """base address that agents are told, such as that of a tunnel into their container (default: that of host and port)"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainSettings:
    """Loss and optimizer (Megatron's own settings are in [megatron])."""

    advantage_estimator: Annotated[str, AfterValidator(_estimator), "NAME"] = "grpo"
    """how advantages are computed: grpo, dr_grpo, rloo, gspo, cispo, ppo, gigpo … or file.py:function

    docs/estimators.md has the formula and the source of each: grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo,
    ppo, gigpo, distillation. A function of a file has the decorator `@agentrl.train.estimators.estimator`."""
    normalize_advantages: bool = False
    """subtract the mean of the advantages of a rollout's trained tokens and divide by their standard deviation

    Groups of equal scores then have an advantage too: minus the mean."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """discount of ppo and reinforce_plus_plus per sampled token, and of gigpo per turn"""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of generalised advantage estimation in ppo"""
    gigpo_step_weight: Annotated[float, Field(ge=0)] = 1.0
    """weight of gigpo's turn-level advantage beside that of the episode"""
    eps_clip: Annotated[float, Field(ge=0)] = 0.2
    """clip range of the probability ratio, in both directions"""
    eps_clip_high: Annotated[float | None, Field(ge=0)] = None
    """upper clip range of the probability ratio (default: --eps-clip)"""
    eps_clip_c: Annotated[float | None, Field(gt=1)] = None
    """bound of the probability ratio for negative advantages, dual-clip PPO (default: off)"""
    use_kl_loss: bool = False
    """keep a frozen reference model and add the KL loss"""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL loss; needs --use-kl-loss"""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL divergence that is subtracted from the reward of every token, before advantages are computed"""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """estimator of the KL divergence, from Schulman 2020; low_var_kl is k3 with bounds"""
    use_unbiased_kl: bool = False
    """weight the KL loss by the ratio of the probabilities now and before the step, which makes its gradient unbiased"""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the entropy bonus"""
    calculate_per_token_loss: bool = False
    """average the loss over all tokens, instead of over the tokens of each episode and then over episodes"""
    use_tis: bool = False
    """importance sampling: weight tokens by exp(old - rollout log-probability), within bounds"""
    tis_level: Literal["token", "turn", "episode"] = "token"
    """what an importance weight of --use-tis is the ratio of: a token, all sampled tokens of a turn, or of an episode"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """importance weights outside their bounds become the bound (TIS), or 0 (MIS; IcePop with --tis-clip-low)"""
    tis_threshold: Annotated[float, Field(gt=0)] = 2.0
    """upper bound of the importance weight of --use-tis"""
    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """lower bound of the importance weight of --use-tis"""
    rejection_level: Literal["none", "token", "turn", "episode"] = "none"
    """do not learn from tokens, turns or episodes whose mean ratio of trainer to engine is outside --rejection-low and --rejection-high

    The mean is the geometric one. Rejected tokens have advantage 0 and are counted; denominators, KL loss and entropy stay as they are."""
    rejection_low: Annotated[float, Field(ge=0)] = 0.5
    """lower bound of the mean ratio; see --rejection-level"""
    rejection_high: Annotated[float, Field(gt=0)] = 2.0
    """upper bound of the mean ratio; see --rejection-level"""
    proximal_log_probs: Literal["forward", "interpolate", "rollout"] = "forward"
    """old log-probabilities of the ratio: by the trainer before the first step, interpolated by the age of the weights, or the engine's

    With one optimizer step per rollout, forward costs nothing, because they are those of the step itself. interpolate saves the forward pass with
    several steps: log π_old lies between the engine's and the current one, by the number of weight updates since the token was sampled."""
    overlong_buffer_len: Annotated[int, Field(ge=0)] = 0
    """penalise responses in the last N tokens before --rollout-max-response-len (DAPO); 0: off"""
    overlong_penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """penalty of a response at the limit; see --overlong-buffer-len"""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """learning rate after warm-up"""
    lr_warmup_rollouts: Annotated[int, Field(ge=0)] = 0
    """rollouts of linear learning-rate warm-up; in `agentrl sft`, optimizer steps"""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """learning-rate schedule over --num-rollout, down to a tenth of --lr

    `agentrl sft` decays linearly to a twentieth of --lr, both with linear and with cosine."""
    non_finite_step: Literal["stop", "skip"] = "stop"
    """an optimizer step whose loss or gradient is not finite: stop the run, or leave the step out and go on

    The message names episode, turn and token. The weights are those before the step in either case."""
    opd_teacher: Annotated[tuple[str, ...], "NAME=PATH|URL"] = ()
    """teachers that score the sampled tokens, each a model folder or the address of an SGLang server (default: none)

    Each must have the policy's tokenizer. A task whose metadata has a key `teacher` is scored by the teacher of that name, other tasks by all
    teachers, whose log-probabilities are averaged. NAME= may be left out where tasks name no teachers."""
    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """weight of the difference to the teacher's log-probability, which is subtracted from the advantage of each token"""
    critic_lr: Annotated[float | None, Field(ge=0)] = None
    """learning rate of the critic of ppo (default: --lr)"""
    critic_load: Annotated[str | None, "PATH"] = None
    """model folder that the critic of ppo starts from (default: the policy's)

    Without a tensor `score.weight` its values start at 0."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """clip range of a value's change since the rollout, in the loss of the critic of ppo"""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """rollouts in which only the critic of ppo learns, at the start of the run"""
    max_tokens_per_gpu: Annotated[int, Field(ge=1)] = 8192
    """maximum tokens of a micro-batch on a trainer rank, padding included

    A longer row is a micro-batch by itself. A prefix that rows of a micro-batch share counts once, see --tree-packing."""
    tree_packing: bool = True
    """compute a prefix that rows of a micro-batch share once: a group's prompt, the history of an episode's segments

    Loss and gradients are those of independent rows."""
    micro_batch_size: Annotated[int | None, Field(ge=1)] = None
    """maximum rows of a micro-batch (default: only --max-tokens-per-gpu bounds it)"""
    actor_num_gpus_per_node: Annotated[int | None, Field(ge=1)] = None
    """trainer ranks, one per GPU (default: one data-parallel copy)

    Without GPUs, the number of processes. One data-parallel copy is tensor × pipeline × context parallel size ranks."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EvalSettings:
    """Held-out evaluation."""

    eval_interval: Annotated[int, Field(ge=0)] = 20
    """rollouts between evaluations; 0: never

    The policy is also evaluated before the first rollout and after the last."""
    eval_prompt_data: Annotated[tuple[str, ...], "NAME PATH"] = ()
    """evaluation sets, as pairs of name and data file (default: the environment's split 'test')

    NAME:input_key=COLUMN,label_key=COLUMN gives a set its own columns. With --prompt-data there is no default set; `agentrl eval` then
    evaluates on that data."""
    n_samples_per_eval_prompt: Annotated[int, Field(ge=1)] = 1
    """episodes per evaluation task"""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """sampling temperature in evaluation; 0: greedy"""
    eval_top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """nucleus sampling in evaluation; 1: off (default: --rollout-top-p)"""
    eval_top_k: Annotated[int | None, AfterValidator(_top_k)] = None
    """sample from the N likeliest tokens in evaluation; -1: off (default: --rollout-top-k)"""
    eval_max_response_len: Annotated[int | None, Field(ge=1)] = None
    """maximum tokens after the prompt in evaluation (default: --rollout-max-response-len)"""
    eval_limit: Annotated[int | None, Field(ge=1)] = 200
    """maximum tasks of each evaluation set; none: all"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SftSettings:
    """Supervised training (`agentrl sft`)."""

    sft_epochs: Annotated[int, Field(ge=1)] = 1
    """passes over the episodes"""
    sft_batch_size: Annotated[int, Field(ge=1)] = 64
    """episodes per optimizer step"""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """All settings of a run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    env: EnvSettings = EnvSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
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

    @property
    def label(self) -> str:
        """What the run is called in names and titles: its environment, else the name of its data file, else 'run'."""
        return self.env.env or Path(split_slice(self.data.prompt_data or "run")[0]).name.partition(".")[0]

    def to_toml(self, defaults: Container[str] | None = None) -> str:
        """The settings as TOML that `read_toml` reads back. Values of None are left out where None is the default.

        `defaults` names the settings that are written although they are at their defaults; None: all of them. Sections in which nothing is
        written are left out then.
        """
        values = _plain(self, defaults)
        return tomli_w.dumps(values if defaults is None else {k: v for k, v in values.items() if v or k in TABLES})


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in fields(Config) if is_dataclass(f.default)}
"""Section name -> its dataclass."""

FIELDS: dict[str, str] = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
"""Field name -> its section."""

TABLES = ("megatron", "sglang")
"""Sections whose keys are another program's settings."""


def field_infos(cls: type) -> dict[str, FieldInfo]:
    """Type, bounds, default and help text of each field of a section."""
    infos: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return infos


def _plain(value: Any, defaults: Container[str] | None = None) -> Any:
    if is_dataclass(value):
        values = {
            name: (getattr(value, name), info.get_default(call_default_factory=True))
            for name, info in field_infos(type(value)).items()
            if not info.exclude
        }
        return {
            name: "none" if v is None else _plain(v, defaults)
            for name, (v, default) in values.items()
            if (v is not None or default is not None)
            and (defaults is None or isinstance(value, Config) or name in defaults or v != default)
        }
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return value
