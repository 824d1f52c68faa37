"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from agentrl.config.settings.base import STRICT, check_top_k


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalSettings:
    """Held-out evaluation."""

    eval_interval: Annotated[int, Field(ge=0)] = 20
    """rollouts between evaluations; 0: never

    The policy is also evaluated before the first rollout and after the last."""
    eval_prompt_data: Annotated[tuple[str, ...], "NAME PATH"] = ()
    """evaluation sets, as pairs of name and data file (default: the environment's split 'test')

    NAME:input_key=COLUMN,label_key=COLUMN gives a set its own columns, NAME:n_samples_per_eval_prompt=N its own number of episodes. With
    --prompt-data there is no default set; `agentrl eval` then evaluates on that data."""
    eval_engine: Annotated[tuple[str, ...], "separate|HOST:PORT"] = ()
    """separate engine for evaluations, which keeps its weights during training (default: the engine of the rollouts)

    `separate`: a second local engine. With --engine sglang, addresses of running servers. Evaluations then run beside rollouts, training and weight
    updates, at the version with which they began. Checkpoints wait for them."""
    n_samples_per_eval_prompt: Annotated[int, Field(ge=1)] = 1
    """episodes per evaluation task"""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """sampling temperature in evaluation; 0: greedy"""
    eval_top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """nucleus sampling in evaluation; 1: off (default: --rollout-top-p)"""
    eval_top_k: Annotated[int | None, AfterValidator(check_top_k)] = None
    """sample from the N likeliest tokens in evaluation; -1: off (default: --rollout-top-k)"""
    eval_max_response_len: Annotated[int | None, Field(ge=1)] = None
    """maximum tokens after the prompt in evaluation (default: --rollout-max-response-len)"""
    eval_players: Annotated[dict[str, str], "ROLE=PLAYER"] = field(default_factory=dict)
    """who plays a role in evaluation; repeatable (default: --player)"""
    eval_limit: Annotated[int | None, Field(ge=1)] = 200
    """maximum tasks of each evaluation set; none: all"""
