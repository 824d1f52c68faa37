"""What a runner takes from the settings of a rollout or an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.config import Config
from agentrl.core.seeds import derive_seed
from agentrl.engine.base import SamplingParams
from agentrl.rollout.tool_executor import SaveOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The settings that a runner takes from a rollout or an evaluation. They are sent to runner processes."""

    policy_version: int
    temperature: float
    seed: int
    top_p: float = 1.0
    top_k: int = -1
    max_response_tokens: int | None = None
    """None: as in training"""
    records_experts: bool = False
    """the engine returns the experts of the tokens"""
    evaluation: bool = False
    keep: SaveOutput | None = None
    """called with the full tool outputs that were truncated for the policy"""

    @property
    def sampling(self) -> SamplingParams:
        """How the tokens of a turn are sampled."""
        return SamplingParams(
            max_new_tokens=1,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            routed_experts_from=0 if self.records_experts else None,
        )


def runner_settings(
    config: Config, split: str, *, policy_version: int = 0, keep: SaveOutput | None = None
) -> RunnerSettings:
    """The settings of a split: 'train' or 'eval/NAME'."""
    kind, _, name = split.partition("/")
    seed, r, e = config.run.seed, config.rollout, config.eval
    top_p, top_k = r.rollout_top_p, r.rollout_top_k
    settings = RunnerSettings(
        policy_version=policy_version,
        keep=keep,
        temperature=r.rollout_temperature,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        records_experts=r.use_rollout_routing_replay and kind != "eval",
    )
    if kind != "eval":
        return settings
    return replace(
        settings,
        temperature=e.eval_temperature,
        seed=derive_seed(seed, "eval", name),
        top_p=top_p if e.eval_top_p is None else e.eval_top_p,
        top_k=top_k if e.eval_top_k is None else e.eval_top_k,
        max_response_tokens=e.eval_max_response_len,
        evaluation=True,
    )
