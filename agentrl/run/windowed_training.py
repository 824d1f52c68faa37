"""Training while episodes go on: the loop of `--schedule one_step_off` and `async`, and of `sync` with a group filter.

The order of what happens is in the record: an episode's slot (admission), its step (consumption), and spans of several versions in a turn
(interruption). `agentrl train --train-only` on such a run gives the same weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.config import Config
from agentrl.data.mixed_source import MixedSource
from agentrl.errors import ConfigError, InvariantError
from agentrl.rollout.rollout import Rollout
from agentrl.run.collector import CollectedEpisodes
from agentrl.run.evaluation import Evaluations
from agentrl.run.generation_gate import GenerationGate
from agentrl.run.group_buffer import FILE, read_buffer, write_buffer
from agentrl.run.group_player import GroupPlayer, PlayedGroup, StoppedGroups, oldest_version
from agentrl.run.metrics import StageReport, rollout_metrics
from agentrl.run.over_sampling import OverSampling
from agentrl.schedule.pace import pace_of, resolve_buffer_filter, resolve_filter
from agentrl.schedule.pipeline import Pipeline, Taken
from agentrl.schedule.window import WindowedFifo
from agentrl.types import Group

if TYPE_CHECKING:
    from agentrl.run.training import TrainingRun

logger = logging.getLogger(__name__)


def uses_window(config: Config) -> bool:
    """Whether groups are played one by one, and not rollout by rollout."""
    schedule = config.schedule
    return schedule.schedule != "sync" or bool(
        schedule.dynamic_sampling_filter_path or schedule.over_sampling_batch_size
    )


def check_schedule(config: Config) -> None:
    """Refuse a schedule that cannot be kept, before anything starts.

    Raises:
        UsageError: a bound, a buffer or a filter cannot work.
    """
    pace = pace_of(config)
    resolve_filter(config.schedule.dynamic_sampling_filter_path)
    resolve_buffer_filter(config.schedule.buffer_filter_path)
    if pace.max_staleness and not config.train.use_tis:
        logger.warning(
            "samples may be %d rollouts old, and the loss takes no account of it: give --use-tis, which weights tokens by the ratio of "
            "the trainer's probability to that of the weights that sampled them",
            pace.max_staleness,
        )


def check_saved_schedule(config: Config, state: Mapping[str, Any]) -> None:
    """Refuse to continue a checkpoint's groups in flight with another schedule.

    Raises:
        ConfigError: the schedule differs.
    """
    saved = state.get("schedule")
    now = str(pace_of(config)) if uses_window(config) else "--schedule sync"
    if saved is not None and saved["pace"] != now:
        raise ConfigError(
            f"the checkpoint has groups in flight of {saved['pace']}, the settings give {now}; resume with the same schedule"
        )


class WindowedTraining:
    """The loop over a started run.

    Args:
        run: the run, whose checkpoint it continues.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        config = run.config
        self.pace = pace_of(config)
        self.timeline = run.timeline
        self.gate = GenerationGate(run.engine, self.timeline)
        self.evaluations = Evaluations(run, beside=True, timeline=self.timeline)
        self.staleness: Counter[int] = Counter()
        """groups by staleness, in rollouts"""
        self.over_sampling = OverSampling()
        slots = config.rollout.num_rollout * self.pace.batch
        if self.pace.stops_rest:  # the last rollout has as many to choose from as the others
            slots += self.pace.buffer - self.pace.batch
        self.fifo = WindowedFifo(self.pace, slots, self._saved_window())
        self._trained_steps = 0
        """optimizer steps since the last weight update"""

    def _saved_window(self) -> dict[str, Any] | None:
        """The window's state in the checkpoint; None in a new run."""
        saved, step = self.run.state.get("schedule"), self.run.first_step
        if saved is None:
            done = step * self.pace.batch
            window = {"admitted": done, "rollouts": step, "published": step, "taken": [], "oldest": done}
            return {**window, "finished": [], "started_at": []} if step else None
        self.staleness.update({int(n): count for n, count in saved["staleness"]})
        vars(self.over_sampling).update(saved.get("over_sampling", {}))
        window = saved["window"]
        return dict(window)

    async def train(self) -> None:
        """Train on all rollouts of the run that are left."""
        run, settings = self.run, self.run.config.schedule
        run.log.echo(self.description())
        specs, outcomes = self._saved_groups()
        async with AsyncExitStack() as stack:
            runner_settings = run.collector.settings("train", run.policy_version)
            runner = await stack.enter_async_context(run.collector.runner(runner_settings, self.gate))
            limits = run.components.rollout_limits()
            player = GroupPlayer(
                run.source,
                Rollout(runner, limits, run.components.env_limits(), run.components.branching("train")),
                limits,
                keep=resolve_filter(settings.dynamic_sampling_filter_path),
                max_resamples=settings.max_resamples,
                specs=specs,
            )
            player.restart = self.fifo.restart
            await stack.enter_async_context(self.evaluations)
            pipeline = await stack.enter_async_context(Pipeline(self.fifo, player.play, outcomes))
            if run.eval_due(self.fifo.published):
                await self.evaluations.start(self.fifo.published)
            for step in range(run.first_step, run.config.rollout.num_rollout):
                await self._step(step, pipeline, player)
            await self.evaluations.finish()
        self.timeline.write(run.folder.path / "timeline.json")
        run.log.echo(self.over_sampling.line() if self.pace.stops_rest else self.histogram())
        run.log.echo(self.timeline.summary())

    async def _step(self, step: int, pipeline: Pipeline[PlayedGroup], player: GroupPlayer) -> None:
        """One rollout: take its groups, train, update the weights if that is due, record, save."""
        run, last = self.run, step + 1 == self.run.config.rollout.num_rollout
        started = time.perf_counter()
        with self.timeline.span("trainer waits for groups", f"rollout {step + 1}"):
            taken = await pipeline.take()
        stopped = await self._stop_rest(pipeline, player) if self.pace.stops_rest else None
        episodes = await player.collect(run.collector, step, taken)
        over_sampled = {} if stopped is None else await self._count(stopped, step, taken, episodes)
        if run.config.engine.colocate and run.evaluation_engine is None:  # the engine sleeps during training
            await self.evaluations.finish()
        run.report.add_episodes(*episodes)
        metrics = rollout_metrics(*episodes) | self._staleness(taken, episodes.groups) | over_sampled
        rollout = StageReport(metrics, {"rollout_s": time.perf_counter() - started})
        with self.timeline.span("trainer", f"rollout {step + 1}"):
            training = await run.optimize(step, episodes.groups)
        self._trained_steps += int(training.metrics["train/steps"])
        sync = await self._publish(pipeline) if self.fifo.publish_due or last else self._unpublished()
        run.record(step, rollout, training, sync)
        if self.fifo.published == step + 1 and not last and run.eval_due(step + 1):
            await self.evaluations.start(step + 1)
        if run.save_due(step):
            await self.evaluations.finish()
            await run.save(
                step + 1, schedule=self._state(), files={FILE: write_buffer(player.specs, pipeline.outcomes)}
            )

    async def _stop_rest(self, pipeline: Pipeline[PlayedGroup], player: GroupPlayer) -> StoppedGroups:
        """Stop the groups that this rollout does not train on."""
        outcomes = await pipeline.stop_rest()
        finished = {slot: outcome for slot, outcome in outcomes.items() if outcome is not None}
        return player.give_back(
            list(outcomes), finished, resolve_buffer_filter(self.run.config.schedule.buffer_filter_path)
        )

    async def _count(
        self, stopped: StoppedGroups, step: int, taken: list[Taken[PlayedGroup]], episodes: CollectedEpisodes
    ) -> dict[str, float]:
        """Record the attempts of groups that were stopped, and count them among the causes; returns their metrics."""
        if stopped.unfinished:
            episodes.causes.counts["(episode stopped)", "over-sampling"] += stopped.unfinished
        sampled, self.gate.sampled_tokens = self.gate.sampled_tokens, 0
        violations = await asyncio.to_thread(self.run.collector.record, stopped.attempts, step, "surplus")
        metrics = self.over_sampling.add([t.outcome for t in taken], stopped, sampled)
        return {**metrics, "schedule/stopped_exactness_violations": violations}

    async def _publish(self, pipeline: Pipeline[PlayedGroup]) -> StageReport:
        """Bring the weights to the engine; an evaluation on it is finished first."""
        if self.run.evaluation_engine is None:
            await self.evaluations.finish()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(pipeline.publishing())
            if not self.run.config.schedule.partial_rollout:
                await stack.enter_async_context(self.gate.closed())
            stack.enter_context(self.timeline.span("weight sync", f"version {self.run.policy_version + 1}"))
            sync = await self.run.sync(StageReport({"train/steps": self._trained_steps}))
        self._trained_steps = 0
        return sync

    def _unpublished(self) -> StageReport:
        return StageReport({"policy_version": self.run.policy_version}, {"sync_s": 0.0})

    # -- staleness -----------------------------------------------------------------------------------------------------

    def _staleness(self, taken: list[Taken[PlayedGroup]], groups: list[Group]) -> dict[str, float]:
        """Metrics of a rollout's staleness: in rollouts by group, and in policy versions from the oldest token.

        Raises:
            InvariantError: a token is older than the bound.
        """
        ages = [t.staleness for t in taken]
        self.staleness.update(ages)
        oldest = oldest_version(groups)
        lag = 0 if oldest is None else self.run.policy_version - oldest
        if lag > self.pace.max_version_lag:
            raise InvariantError(
                f"a token is {lag} policy versions old, above the bound of {self.pace.max_version_lag}"
            )
        return {
            "schedule/staleness_mean": fmean(ages),
            "schedule/staleness_max": max(ages),
            "schedule/version_lag_max": lag,
            "schedule/refused_groups": len({t.group_index for s in taken for t in s.outcome.refused}),
        }

    def description(self) -> str:
        """The schedule and its bound, in one line."""
        pace = self.pace
        if pace.stops_rest:
            return (
                f"over-sampling: {pace.buffer} groups start for each rollout, and the first {pace.batch} that finish are trained on; the others are "
                "stopped, which biases training towards short episodes"
            )
        return (
            f"schedule {self.run.config.schedule.schedule}: {pace.buffer} groups started and not yet trained on, window of {pace.window}, weights "
            f"updated every {pace.interval} rollouts; no sample is older than {pace.max_staleness} rollouts ({pace.max_version_lag} versions)"
        )

    def histogram(self) -> str:
        """How old the samples were."""
        total = sum(self.staleness.values()) or 1
        parts = [f"{n}: {count} ({count / total:.0%})" for n, count in sorted(self.staleness.items())]
        return f"groups by staleness in rollouts (bound {self.pace.max_staleness})  {'  '.join(parts)}"

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "pace": str(self.pace),
            "window": self.fifo.state_dict(),
            "staleness": sorted(self.staleness.items()),
            **({"over_sampling": vars(self.over_sampling)} if self.pace.stops_rest else {}),
        }

    def _saved_groups(self) -> tuple[dict[int, Any], dict[int, PlayedGroup]]:
        checkpoint = self.run.checkpoint
        if checkpoint is None or not (checkpoint / FILE).exists():
            return {}, {}
        source = self.run.source
        sources = source.sources if isinstance(source, MixedSource) else {"": source}
        tasks = {env: each.tasks for env, each in sources.items()}
        return read_buffer((checkpoint / FILE).read_bytes(), tasks, checkpoint / FILE)
