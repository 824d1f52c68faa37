"""A run that plays episodes, and `agentrl rollout`: episodes recorded without training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from agentrl import __version__
from agentrl.config import Config
from agentrl.core.program_name import command
from agentrl.data.data_source import DataSource
from agentrl.data.mixed_source import MixedSource
from agentrl.engine.base import Engine
from agentrl.errors import ConfigError, DataError
from agentrl.run.collector import Collector
from agentrl.run.components import Components
from agentrl.run.image_models import check_image_engine
from agentrl.run.metrics import StageReport, metrics_by_env, rollout_metrics
from agentrl.run.report import Report
from agentrl.run.run_log import Echo, RunLog
from agentrl.run.run_tasks import evaluation_sets, task_counts, training_source
from agentrl.run.telemetry import require_telemetry
from agentrl.run.trackers import require_trackers
from agentrl.store.checkpoints import last_checkpoint
from agentrl.store.episode_files import count_readable
from agentrl.store.run_folder import RunFolder
from agentrl.types import Group

NOT_TRAINED = StageReport({"train/rows": 0})
"""Metrics of the training stage in a step that only plays episodes."""

Plays = Literal["training", "evaluation", "recorded"]
"""Which tasks a run plays: those of training (and evaluations), only those of evaluations, or none, because it has recorded episodes."""


async def rollout_only(config: Config, *, echo: Echo = print) -> Path:
    """Record `num_rollout` rollouts without a trainer; returns the run folder."""
    components = Components(config, trains=False)
    await components.require_env()
    async with EpisodeRun(components, echo=echo) as run:
        await run.start_engine()
        for step in range(config.rollout.num_rollout):
            _, rollout = await run.rollout(step)
            run.record(step, rollout, NOT_TRAINED)
        run.finish_report()
    return run.folder.path


class EpisodeRun:
    """An open run folder with what it takes to play episodes into it. A context manager: leaving it stops everything.

    Args:
        components: built from the settings.
        resume: the run folder to continue; None: a new one.
        echo: shows a message to the user.
        plays: which tasks there must be: those of training, those of evaluations, or none, where recorded episodes are trained on.

    Raises:
        UsageError: something cannot work; raised before the run folder is created or changed.
    """

    def __init__(
        self, components: Components, *, resume: Path | None = None, echo: Echo = print, plays: Plays = "training"
    ) -> None:
        self.components = components
        self.config = config = components.config
        if plays != "recorded":
            config.require_credentials()
        if config.lora.lora_adapter_path and not components.trains:
            raise ConfigError(
                "adapters are merged into weights by a trainer, and this command has none: leave out --lora-adapter-path, and give --hf-checkpoint "
                "with a model into which they are merged (hf/ of the run that trained them)"
            )
        evaluates = config.eval.eval_interval > 0 and plays != "recorded"
        self.eval_sets = evaluation_sets(components) if evaluates else {}
        if plays == "evaluation" and not self.eval_sets:
            raise DataError(
                f"{components.label} has no tasks of the split 'test' to evaluate on; give --eval-prompt-data NAME PATH"
            )
        self._source: DataSource | MixedSource | None = None
        if plays == "training":
            self._source = training_source(components)
        if components.trains:
            components.require_trainable()
            if plays != "recorded":
                check_image_engine(config, components.folder)
        else:
            components.require_weights()
        require_trackers(config)
        require_telemetry(config)
        self.report = Report(components.eval_score)
        self.policy_version = 0
        self.checkpoint: Path | None = None
        self.state: dict[str, Any] = {}
        """state of the checkpoint; empty without one"""
        self.dropped_episodes: int | None = None
        """number of recorded episodes that a resumed run without a checkpoint drops; None: not such a run"""
        self.damaged: tuple[str, ...] = ()
        """what is wrong with each checkpoint after the one that the run resumes from"""
        if resume is None:
            self.folder = RunFolder.create(config, __version__, resumable=components.trains and plays == "training")
        else:
            self._restore(resume)
            self.folder = RunFolder.reopen(resume, config, __version__, self.state, self.checkpoint)
        self.report.open(self.folder.path, config, self.folder.metrics.rows())
        self.log = RunLog(self.folder.path, config.run.log_level, echo)
        self.engine = components.engine(self.folder.path)
        self.collector = Collector(components, self.engine, self.folder, self.report, self.log.echo)

    @property
    def source(self) -> DataSource | MixedSource:
        """The order of the training tasks, in a run that plays them."""
        assert self._source is not None, "the run plays no training tasks"
        return self._source

    def _restore(self, path: Path) -> None:
        """Take over the state of the last checkpoint; without one the run starts from the beginning."""
        self.checkpoint, self.state, self.damaged = last_checkpoint(path, self.config)
        if self.checkpoint is None:
            self.dropped_episodes = count_readable(path / "episodes") if (path / "episodes").is_dir() else 0
            return
        self.check_state(self.state)
        self.policy_version = self.state["policy_version"]
        self.source.load_state_dict(self.state["source"])
        self.report.load_state_dict(self.state["report"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that the settings cannot continue, before the run folder is changed.

        Raises:
            ConfigError: they cannot.
        """

    async def __aenter__(self) -> Self:
        self.log.__enter__()
        for line in task_counts(self.components):
            self.log.echo(line)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self.close()
        finally:
            self.log.__exit__(kind, error, traceback)

    async def start_engine(self) -> None:
        """Start the engine with the weights it has."""
        await self.engine.start()
        self.policy_version = (await self.engine.health()).policy_version

    async def evaluation_weights(self) -> tuple[Engine, int]:
        """An engine for an evaluation with the weights as they are now, and their version."""
        return self.engine, self.policy_version

    async def rollout(self, step: int) -> tuple[list[Group], StageReport]:
        """Play and record the next `rollout_batch_size` groups of episodes."""
        started = time.perf_counter()
        version, function = self.policy_version, self.components.rollout_function
        if function is not None:
            get_specs = self.source.get_samples
            episodes = await self.collector.collect_by_function(function, get_specs, policy_version=version, step=step)
        else:
            groups = self.source.get_samples(self.config.rollout.rollout_batch_size)
            episodes = await self.collector.collect(groups, policy_version=version, step=step, split="train")
        self.source.add_results(episodes.groups)
        self.report.add_episodes(*episodes)
        seconds = time.perf_counter() - started
        metrics = rollout_metrics(*episodes)
        if self.components.envs:
            metrics |= metrics_by_env(episodes.groups)
        return episodes.groups, StageReport(metrics, {"rollout_s": seconds})

    def record(self, step: int, *stages: StageReport) -> None:
        """Write what the stages of a step report, and show its line."""
        metrics = {name: value for stage in stages for name, value in stage.metrics.items()}
        seconds = {name: value for stage in stages for name, value in stage.seconds.items()}
        self.folder.metrics.write({"step": step, **metrics})
        further = self.further_timings()
        self.folder.timings.write({"step": step, **seconds, **further})
        self.report.add_step(step, metrics, seconds, further)
        self.log.echo(self.report.step_line(step))

    def further_timings(self) -> dict[str, float]:
        """Timings of a step that are not among the report's totals."""
        return {}

    def finish_report(self) -> None:
        """Write the summary, draw the curve, and show the closing summary and what to do with the run."""
        self.report.finish(self.folder.path, self.config)
        self.log.echo(self.report.closing_summary(self.folder.path))
        self.log.echo("\n".join(self.next_steps()))

    def next_steps(self) -> list[str]:
        """What the user can do with the finished run, each with its command."""
        return [f"look at it in the browser: {command('view', self.folder.path)}"]

    async def close(self) -> None:
        """Stop the processes and the engine, and close all files."""
        await self.collector.close()
        await self.engine.close()
        self.components.close()
        self.report.close()
        self.folder.close()
