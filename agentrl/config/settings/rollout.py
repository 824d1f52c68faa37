"""Settings of rollouts: sampling and limits, the schedule of rollouts beside training, the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from agentrl.config.settings.base import STRICT, check_top_k


def _temperature(value: float) -> float:
    if value <= 0:
        raise ValueError("must be above 0", "greedy sampling has no distribution to learn from")
    return value


def _branch_at(values: tuple[str, ...]) -> tuple[str, ...]:
    turns = [value for value in values if value.isascii() and value.isdecimal() and int(value) > 0]
    if values != ("entropy",) and (len(turns) < len(values) or len(set(map(int, turns))) < len(turns)):
        raise ValueError(
            "must be different turns, counted from 0 and above 0, or the word entropy",
            "turn 0 is what --n-samples-per-prompt samples",
        )
    return values


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    branch_at: Annotated[tuple[str, ...], AfterValidator(_branch_at), "TURN|entropy"] = ()
    """turns, counted from 0, at which each episode of training is branched (default: none)

    A branch plays the turns before by verified replay and samples from that turn on; it is compared with its siblings by
    --advantage-estimator branch_rloo. entropy: the turn after the first whose sampled tokens have the largest mean -log p. An environment that
    does not repeat its answers is refused, and its branches are counted as failures. Branches are in addition to --n-samples-per-prompt."""
    branch_samples: Annotated[int, Field(ge=1)] = 1
    """branches at each turn of --branch-at"""
    global_batch_size: Annotated[int | None, Field(ge=1)] = None
    """episodes per optimizer step (default: tasks × episodes per task / optimizer steps per rollout)"""
    num_steps_per_rollout: Annotated[int, Field(ge=1)] = 1
    """optimizer steps per rollout"""
    rollout_temperature: Annotated[float, AfterValidator(_temperature)] = 1.0
    """sampling temperature in training, above 0"""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """nucleus sampling in training; 1: off"""
    rollout_top_k: Annotated[int, AfterValidator(check_top_k)] = -1
    """sample from the N likeliest tokens in training; -1: off"""
    allow_truncated_sampling: bool = False
    """allow top-p and top-k in training, although the trainer's distribution then differs from the engine's"""
    use_rollout_routing_replay: bool = False
    """record the experts of every token in the engine, and train with them; for mixtures of experts

    The trainer's routers would choose others for some tokens (router replay, R3). Their weights are the current router's. Old log-probabilities
    and optimizer steps use the recorded experts; the reference model, teachers and the critic choose by themselves. Episodes recorded with it
    can be trained on with `--train-only`. Needs --engine local, or SGLang 0.5.23."""
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
    """processes that run episodes, if one core is too slow; needs --engine sglang

    With --ray-address they run on the nodes of that cluster."""
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    """maximum tasks played in place of each group that the filter refuses; if it refuses all of them, the rollout has one group less"""
    over_sampling_batch_size: Annotated[int | None, Field(ge=1)] = None
    """start N groups for each rollout, train on the first to finish, and stop the rest (default: --rollout-batch-size)

    Only with --schedule sync. The tasks of stopped groups are given back and played again. Groups that take long are trained on less often: the run
    prints by how much at least the episodes are shorter. --schedule async waits for none and drops none."""
    buffer_filter_path: Annotated[str | None, "NAME"] = None
    """function of the list of groups that --over-sampling-batch-size stopped, which returns those to play again (default: all)

    `module:function` or `file.py:function`; a group is a list of EpisodeSpec."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineSettings:
    """Inference."""

    engine: Literal["local", "sglang"] = "local"
    """local: in this process; sglang: servers

    Flags of servers (--colocate, --rollout-num-gpus, --sglang-NAME) imply sglang. The servers are started here, or already run at
    --rollout-external-engine-addrs."""
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
    rollout_min_num_gpus: Annotated[int | None, Field(ge=1)] = None
    """GPUs of --rollout-num-gpus with which a run on a ray cluster starts (default: all)

    The other engines join while the run goes on, whenever the cluster has room for one, and leave when their node dies. Without GPUs, the
    number of server processes."""
    rollout_num_gpus_per_engine: Annotated[int, Field(ge=1)] = 1
    """GPUs of one SGLang engine, its tensor parallel size"""
    rollout_external_engine_addrs: Annotated[tuple[str, ...], "HOST:PORT"] = ()
    """running SGLang servers, or an sglang-router in front of them (default: start servers here)"""
    ray_address: Annotated[str | None, "auto|local|HOST:PORT"] = None
    """ray cluster on whose nodes SGLang servers, trainer ranks and runner processes start (default: this machine, without ray)

    auto: the cluster that runs on this machine; local: start one here. Each node has agentrl, SGLang and the model at the same paths, and shares
    the run folder."""
    engine_python: Annotated[str | None, "PATH"] = None
    """Python interpreter that has SGLang (default: .venv-sglang/bin/python if it exists, otherwise this one)"""
    engine_pythonpath: Annotated[str | None, "PATH"] = None
    """folder to put first in the PYTHONPATH of the servers (default: none)"""
    engine_max_running: Annotated[int, Field(ge=1)] = 128
    """generations that the local engine runs at the same time"""
    threads: Annotated[int | None, Field(ge=1)] = None
    """CPU threads of the local engine and of the trainer, which take turns (default: the machine's cores)"""
