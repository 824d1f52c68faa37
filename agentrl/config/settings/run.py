"""Settings of a run as a whole: seed, folders, its model."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from agentrl.config.settings.base import STRICT


def _http_address(value: str | None) -> str | None:
    if value is not None and not (value.startswith(("http://", "https://")) and urlsplit(value).hostname):
        raise ValueError("must be an address that begins with http:// or https://")
    return value


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    use_fault_tolerance: bool = False
    """continue after a crash: start trainer ranks that die or hang again, and the run itself from its last checkpoint

    New ranks load the last checkpoint and repeat the optimizer steps since, so the weights are those of a run without the failure. Not after a usage
    error, a signal or a loss that is not finite, and at most 3 times without progress. Engines, runner processes and episodes are always replaced."""
    trainer_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """seconds after which a trainer rank that has not answered counts as hung"""
    distributed_timeout_minutes: Annotated[float | None, Field(gt=0)] = None
    """minutes after which a collective operation of the trainer's ranks fails (default: --trainer-timeout-s)"""
    tensorboard: bool = True
    """write TensorBoard events into the run folder"""
    profile: Annotated[int | None, Field(ge=1)] = None
    """number of an optimizer step to profile, from 1 (default: none)

    Each trainer rank writes a trace of the step into profile/ of the run folder, for ui.perfetto.dev, and a table of its operators."""
    trackers: Annotated[tuple[Literal["wandb", "mlflow", "trackio"], ...], "NAME"] = ()
    """services that receive the metrics too, each an extra: wandb, mlflow, trackio (default: none)"""
    tracking_project: Annotated[str, "NAME"] = "agentrl"
    """project (W&B, trackio) or experiment (MLflow) of --trackers"""
    otlp_endpoint: Annotated[str | None, "URL", AfterValidator(_http_address)] = None
    """address that receives spans and metrics by OpenTelemetry's OTLP over HTTP, such as http://localhost:4318 (default: off)

    Needs the extra otel. The standard environment variables (OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS …) are read too, and one of the endpoints alone
    turns it on. Spans are those of rollouts, episodes, turns, tool calls, optimizer steps and weight syncs."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(exclude=True)] = "info"
    """lowest severity of logged messages

    The level is not recorded in config.toml, because it does not change the run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelSettings:
    """The model that is trained or plays, called the policy."""

    hf_checkpoint: Annotated[str | None, "PATH|NAME"] = None
    """model folder, hub id or embedded model (default: the one that the environment recommends, if any)

    The folder is in Hugging Face layout, with safetensors files and tokenizer.json. `search_r1_3m` is an embedded model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the weights in the trainer and in SGLang

    With bfloat16 the trainer keeps float32 master weights. The local engine always computes in float32."""
    template_args: Annotated[dict[str, Any], "NAME=VALUE"] = field(default_factory=dict)
    """argument of the chat template, such as enable_thinking=false; repeatable (default: none)"""
