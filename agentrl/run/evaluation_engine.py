"""The separate engine of evaluations (`--eval-engine`): it keeps its weights while training and rollouts continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.plan import make_fleet, plan_servers
from agentrl.errors import ConfigError
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.make import make_weight_sync

SEPARATE = "separate"
"""`--eval-engine separate`: a second local engine"""


class EvaluationEngine:
    """An engine that receives weights only for an evaluation.

    Args:
        engine: not started.
        weights: brings weights to it.
    """

    def __init__(self, engine: Engine, weights: WeightSync) -> None:
        self.engine, self._weights = engine, weights

    async def start(self, trainer: Trainer) -> None:
        """Start the engine."""
        await self.engine.start()
        await self._weights.begin(trainer)
        if isinstance(self.engine, Fleet):  # the trainer's weights are newer than those of the evaluation
            self.engine.recovery = None

    async def load(self, trainer: Trainer, policy_version: int) -> None:
        """Bring the trainer's weights to the engine. The trainer may train on once this returns."""
        await self._weights.sync(trainer, policy_version)

    async def close(self) -> None:
        """Stop the engine and remove its weights."""
        await self.engine.close()
        self._weights.close()


def evaluation_servers(config: Config, addresses: Sequence[str], model: Path, context_length: int) -> EvaluationEngine:
    """An engine of running SGLang servers, which receive weights through a folder.

    Raises:
        ConfigError: weights could not reach them.
    """
    if SEPARATE in addresses:
        raise ConfigError(
            "--eval-engine separate is a second local engine; with --engine sglang give the addresses of servers for evaluation"
        )
    settings = replace(
        config.engine,
        rollout_external_engine_addrs=tuple(addresses),
        colocate=False,
        weight_sync="disk",
        ray_address=None,
    )
    plan = plan_servers(replace(config, engine=settings, sglang={}), model, context_length, trains=True)
    fleet = make_fleet(plan, None)
    return EvaluationEngine(fleet, make_weight_sync(settings, plan, fleet, model))
