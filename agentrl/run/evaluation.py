"""Evaluation on held-out tasks, during training and as `agentrl eval`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from agentrl.config import Config
from agentrl.core.name_syntax import split_slice
from agentrl.engine.base import Engine
from agentrl.run.components import Components
from agentrl.run.metrics import eval_metrics
from agentrl.run.rollouts import EpisodeRun
from agentrl.run.run_log import Echo
from agentrl.run.timeline import Timeline
from agentrl.types import EpisodeSpec


async def evaluate_only(config: Config, *, echo: Echo = print) -> dict[str, float]:
    """Evaluate the model as it is; returns the metrics of the first evaluation set.

    The tasks are those of `--eval-prompt-data`, else of `--prompt-data`, else of the environment's split 'test'.

    Raises:
        DataError: there are no tasks.
    """
    eval_data, data = config.eval.eval_prompt_data, config.data.prompt_data
    if data and not eval_data:
        eval_data = (Path(split_slice(data)[0]).stem, data)
    config = replace(config, eval=replace(config.eval, eval_interval=1, eval_prompt_data=eval_data))
    components = Components(config, trains=False)
    await components.require_env()
    async with EpisodeRun(components, echo=echo, plays="evaluation") as run:
        await run.start_engine()
        await evaluate(run, 0)
        run.finish_report()
    return next((rows[-1][1] for rows in run.report.evals.values()), {})


class Evaluations:
    """Evaluations during training, one at a time. A context manager: leaving it stops the one that runs.

    Args:
        run: a started run.
        beside: let the run go on while an evaluation is played.
        timeline: receives a span of each.
    """

    def __init__(self, run: EpisodeRun, *, beside: bool, timeline: Timeline) -> None:
        self._run, self._beside, self._timeline = run, beside, timeline
        self._task: asyncio.Task[None] | None = None

    async def start(self, step: int) -> None:
        """Evaluate the weights as they are now, after `step` rollouts. The one before is finished first."""
        await self.finish()
        weights = await self._run.evaluation_weights()
        self._task = asyncio.create_task(self._play(step, weights))
        if not self._beside:
            await self.finish()

    async def _play(self, step: int, weights: tuple[Engine, int]) -> None:
        with self._timeline.span("evaluation", f"after {step} rollouts"):
            await play_evaluation(self._run, step, weights)

    async def finish(self) -> None:
        """Wait for the evaluation that is being played, if any."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def evaluate(run: EpisodeRun, step: int) -> None:
    """Play all evaluation sets with the weights after `step` rollouts; record, report and show the metrics."""
    await play_evaluation(run, step, await run.evaluation_weights())


async def play_evaluation(run: EpisodeRun, step: int, weights: tuple[Engine, int]) -> None:
    """As `evaluate`, on an engine that has the weights, and their version."""
    engine, version = weights
    for name, evaluated in run.eval_sets.items():
        k = evaluated.samples or run.config.eval.n_samples_per_eval_prompt
        started = time.perf_counter()
        prefix = f"eval/{name}/{step}/"
        groups = [
            [EpisodeSpec(task, g, g * k + i, prefix=prefix, env=evaluated.env) for i in range(k)]
            for g, task in enumerate(evaluated.tasks)
        ]
        episodes = await run.collector.collect(
            groups, policy_version=version, step=step, split=f"eval/{name}", engine=engine
        )
        metrics = eval_metrics(name, episodes.groups, evaluated.groups)
        run.folder.metrics.write({"step": step, **metrics})
        seconds = time.perf_counter() - started
        run.folder.timings.write({"step": step, f"eval/{name}_s": seconds})
        run.report.add_episodes(*episodes)
        run.report.add_evaluation(step, name, metrics, seconds)
        run.log.echo(run.report.eval_line(step, name, seconds))
