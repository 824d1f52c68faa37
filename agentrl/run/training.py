"""The training loop: rollout, advantages, optimizer steps, weight sync. `train` shows it at a glance."""

from __future__ import annotations

import asyncio
import functools
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.core.program_name import command
from agentrl.engine.base import Engine
from agentrl.errors import NonFiniteError
from agentrl.run.components import Components
from agentrl.run.estimator_checks import loss_warnings, require_estimator, require_groups, require_state_keys
from agentrl.run.evaluation import Evaluations, evaluate
from agentrl.run.machines import require_weights_folder
from agentrl.run.metrics import StageReport, mean_over_steps
from agentrl.run.rollouts import EpisodeRun, Plays
from agentrl.run.run_log import Echo
from agentrl.run.timeline import Timeline, ceiling
from agentrl.run.trained_adapters import describe_adapters, groups_by_adapter, require_adapters
from agentrl.run.windowed_training import WindowedTraining, check_saved_schedule, check_schedule, uses_window
from agentrl.store.run_folder import RunFolder
from agentrl.train.base import AdapterTrainer, Critic, LossConfig, Row, Trainer
from agentrl.train.estimators import find_estimator
from agentrl.train.restarting import RestartingTrainer
from agentrl.train.schedule import learning_rate
from agentrl.train.step_record import step_record
from agentrl.train.steps import (
    Models,
    critic_loss,
    engine_difference,
    loss_config,
    needs_reference,
    prepare,
    with_sequence_ratios,
)
from agentrl.types import Group

logger = logging.getLogger(__name__)
ADAPTER = "adapter"
"""folder of the trained adapters inside the run folder"""
CRITIC = "critic"
"""folder of the critic's checkpoint inside the trainer's"""


async def train(
    config: Config, *, resume: Path | None = None, echo: Echo = print, on_folder: Callable[[Path], None] | None = None
) -> Path:
    """Train a policy; returns the run folder.

    Args:
        config: all settings of the run.
        resume: a run folder to continue from its last checkpoint; the result is bit-exact.
        echo: shows a message to the user.
        on_folder: called with the run folder once the run can be resumed.

    Raises:
        UsageError: something cannot work; raised before anything starts.
    """
    require_groups(config)
    require_estimator(config)
    check_schedule(config)
    require_weights_folder(config)
    components = Components(config)
    components.require_critic()
    await components.require_env()
    require_state_keys(components)
    async with TrainingRun(components, resume=resume, echo=echo) as run:
        if on_folder is not None:
            on_folder(run.folder.path)
        try:
            await run.start()
            if uses_window(config):
                await WindowedTraining(run).train()
            else:
                await train_synchronously(run)
            await evaluate(run, config.rollout.num_rollout)
            await run.finish()
        except asyncio.CancelledError:
            run.log.echo(f"interrupted; to continue: {command('train', '--resume', run.folder.path)}")
            raise
    return run.folder.path


async def train_synchronously(run: TrainingRun) -> None:
    """Rollout, optimize, sync, record, save: one after the other. Evaluations run beside them if they have a separate engine."""
    timeline = run.timeline
    async with Evaluations(run, beside=run.evaluation_engine is not None, timeline=timeline) as evaluations:
        for step in range(run.first_step, run.config.rollout.num_rollout):
            if run.eval_due(step):
                await evaluations.start(step)
            with timeline.span("rollout", f"rollout {step + 1}"):
                groups, rollout = await run.rollout(step)
            with timeline.span("trainer", f"rollout {step + 1}"):
                training = await run.optimize(step, groups)
            with timeline.span("weight sync", f"version {run.policy_version + 1}"):
                sync = await run.sync(training)
            run.record(step, rollout, training, sync)
            if run.save_due(step):
                await evaluations.finish()
                await run.save(step + 1)
        await evaluations.finish()
    timeline.write(run.folder.path / "timeline.json")
    run.log.echo(ceiling(run.report.totals))


@dataclass
class _Part:
    """What the optimizer steps of the policy, or of one of several adapters, gave."""

    metrics: dict[str, float] = field(default_factory=dict)
    """of their preparation, and the critic's"""
    steps: list[dict[str, float]] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    rows: int = 0
    skipped: int = 0


class TrainingRun(EpisodeRun):
    """A run with a trainer, whose weights are brought to the engine after each step."""

    def __init__(
        self, components: Components, *, resume: Path | None = None, echo: Echo = print, plays: Plays = "training"
    ) -> None:
        self.teachers = components.teachers()
        """what scores the tokens in distillation; None: nothing"""
        super().__init__(components, resume=resume, echo=echo, plays=plays)
        self.first_step: int = self.state.get("step", 0)
        self.optimizer_step: int = self.state.get("optimizer_step", 0)
        new = dict.fromkeys(components.adapters.values(), 0)
        self.adapter_versions: dict[str, int] = new | self.state.get("adapter_versions", {})
        """version of the weights of each of several adapters; {}: there is one policy"""
        self.weights = components.weight_sync(self.engine, self.adapter_versions)
        self.evaluation_engine = components.evaluation_engine() if self.eval_sets else None
        """the engine of --eval-engine"""
        self.estimator = find_estimator(self.config.train.advantage_estimator)
        self.critic: Critic | None = None
        """the value model, once it has started; None: the estimator needs none"""
        if self.teachers is not None and plays == "training":
            for task in self.source.tasks:
                self.teachers.check(task)
        self.timeline = Timeline(None if self.report.telemetry is None else self.report.telemetry.span)
        self.rates: dict[str, float] = {}
        """tokens per second, MFU and memory of the last optimizer steps"""
        self._trainer: Trainer | None = None
        self._saving: asyncio.Task[None] | None = None
        """the checkpoint that is being written (--async-save)"""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """See `EpisodeRun.check_state`; the schedule must be the checkpoint's, and adapters of this base."""
        check_saved_schedule(self.config, state)
        assert self.checkpoint is not None, "the state is that of a checkpoint"
        require_adapters(self.config, self.components.folder, self.checkpoint / "trainer")

    @property
    def trainer(self) -> Trainer:
        """The trainer, once it has started."""
        assert self._trainer is not None, "the trainer has not been started"
        return self._trainer

    async def start(self) -> None:
        """Start trainer and engine together. The engine then receives the weights of the checkpoint or of given adapters, or the model's if it
        serves others.
        """
        components = self.components
        if self.dropped_episodes is not None:
            self.log.echo(
                f"{self.folder.path} has no checkpoint yet and starts from the beginning; recorded episodes dropped: {self.dropped_episodes}"
            )
        self.log.echo(
            f"run folder {self.folder.path}: model {components.folder}, environment {components.label}, "
            f"{len(self.source.tasks)} tasks, "
            f"evaluated on {', '.join(self.eval_sets) or 'nothing (see --eval-prompt-data)'}"
        )
        for damage in self.damaged:
            logger.warning("a damaged checkpoint is not used and kept as checkpoints/*.damaged: %s", damage)
        await asyncio.gather(self.start_trainer(), self.engine.start())
        if self.checkpoint is not None:
            await asyncio.to_thread(self.load_trainer, self.checkpoint / "trainer")
        await self.weights.begin(self.trainer)
        if (trained := describe_adapters(self.config, components.folder)) is not None:
            self.log.echo(trained)
        changed = self.checkpoint is not None or self.config.lora.lora_adapter_path is not None
        if changed or self.adapter_versions or (await self.engine.health()).policy_version != self.policy_version:
            await self.weights.yield_gpu(self.trainer)
            await self.weights.sync(self.trainer, self.policy_version)
        if self.evaluation_engine is not None:
            await self.evaluation_engine.start(self.trainer)
        if self.checkpoint is not None:
            self.log.echo(f"resumed after rollout {self.first_step} from {self.checkpoint}")

    async def evaluation_weights(self) -> tuple[Engine, int]:
        """See `EpisodeRun.evaluation_weights`; the engine of `--eval-engine` receives them."""
        if self.evaluation_engine is None:
            return await super().evaluation_weights()
        await self.evaluation_engine.load(self.trainer, self.policy_version)
        return self.evaluation_engine.engine, self.policy_version

    async def start_trainer(self) -> None:
        """Start the trainer's ranks, and those of the critic if the estimator needs one, without the engine."""
        components, path = self.components, self.folder.path
        settings = self.config.train
        for warning in loss_warnings(settings):
            logger.warning(warning)
        self._trainer = await asyncio.to_thread(components.trainer, path, reference=needs_reference(settings))
        if "critic" in self.estimator.needs:
            self.critic = await asyncio.to_thread(components.critic, path)
            await asyncio.to_thread(self.critic.offload)

    async def optimize(self, step: int, groups: Sequence[Group]) -> StageReport:
        """Compute advantages and rows, and take `num_steps_per_rollout` optimizer steps."""
        started = time.perf_counter()
        await self.complete_save()
        await self.weights.yield_gpu(self.trainer)
        if self.critic is not None:
            await asyncio.to_thread(self.critic.onload)
        parts = await self._parts(step, groups)
        steps = [metrics for part in parts.values() for metrics in part.steps]
        rates = mean_over_steps([rates for part in parts.values() for rates in part.rates])
        self.rates = {f"train/{name}": mean for name, mean in rates.items()}
        metrics: dict[str, float] = {}
        for adapter, part in parts.items():
            own = part.metrics
            if adapter:
                own |= {"steps": len(part.steps), "rows": part.rows, **mean_over_steps(part.steps)}
            metrics |= {f"train/{adapter}/{name}" if adapter else f"train/{name}": v for name, v in own.items()}
        skipped = sum(part.skipped for part in parts.values())
        metrics |= {"train/steps": len(steps), "train/rows": sum(part.rows for part in parts.values())}
        metrics |= {"train/non_finite_steps": skipped} if skipped else {}
        metrics |= {f"train/{name}": mean for name, mean in mean_over_steps(steps).items()}
        return StageReport(metrics, {"train_s": time.perf_counter() - started})

    async def _parts(self, step: int, groups: Sequence[Group]) -> dict[str, _Part]:
        """The optimizer steps of the policy, or of each adapter on what is its own; by its name, '' for the policy."""
        if not self.adapter_versions:
            return {"": await self._optimize(step, groups, self.trainer)}
        parts, by_role = {}, not self.components.envs
        for name, members in groups_by_adapter(groups, self.components.adapters, by_role=by_role).items():
            trainer: Any = AdapterTrainer(self.trainer, name)
            parts[name] = await self._optimize(step, members, trainer, name) if members else _Part()
        return parts

    async def _optimize(self, step: int, groups: Sequence[Group], trainer: Trainer, adapter: str = "") -> _Part:
        """The optimizer steps on these groups; `adapter`: what `trainer` trains, of several."""
        settings, part = self.config.train, _Part()
        models = Models(trainer=trainer, critic=self.critic, teachers=self.teachers)
        version = self.adapter_versions.get(adapter, self.policy_version)
        batches = await prepare(groups, self.config, models, policy_version=version)
        part.metrics = dict(batches.metrics)
        part.metrics |= await self.optimize_critic(step, batches.critic)
        policy = batches.policy if step >= settings.num_critic_only_steps else []
        part.rows = sum(map(len, policy))
        lr, loss = learning_rate(settings, step, self.config.rollout.num_rollout), loss_config(settings)
        for number, rows in enumerate(policy):
            if number and loss.policy_loss == "sequence":
                rows = await with_sequence_ratios(trainer, rows)
            self.optimizer_step += 1
            values: dict[str, Any] = {
                "step": step,
                "optimizer_step": self.optimizer_step,
                **({"adapter": adapter} if adapter else {}),
            }
            try:
                trained = await recorded_step(trainer, self.folder, rows, loss, lr, **values)
            except NonFiniteError as e:
                skip_or_stop(self.config, self.optimizer_step, e)
                part.skipped += 1
                continue
            if number:  # the weights are not those that sampled
                trained[0].pop(TRUE_ON_POLICY, None)
            part.steps.append(trained[0])
            part.rates.append(trained[1])
        return part

    async def optimize_critic(self, step: int, batches: Sequence[Sequence[Row]]) -> dict[str, float]:
        """Take the critic's optimizer steps and free its memory; returns their metrics."""
        if self.critic is None:
            return {}
        settings = self.config.train
        lr = learning_rate(settings, step, self.config.rollout.num_rollout, settings.critic_lr)
        loss = critic_loss(settings)
        steps = []
        for rows in batches:
            try:
                steps.append(await asyncio.to_thread(self.critic.step, rows, loss, lr))
            except NonFiniteError as e:
                skip_or_stop(self.config, self.optimizer_step, e)
            else:
                steps[-1].pop("rates", None)
        await asyncio.to_thread(self.critic.offload)
        return {f"critic_{name}": mean for name, mean in mean_over_steps(steps).items()}

    async def sync(self, training: StageReport) -> StageReport:
        """Bring the weights to the engine: new ones if there was an optimizer step, else those it gave up with its memory."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        trained = training.metrics["train/steps"] > 0
        if trained:
            self.policy_version += 1
        for name in self.adapter_versions:
            self.adapter_versions[name] += training.metrics[f"train/{name}/steps"] > 0
        if trained or self.weights.gpu_yielded:
            await self.weights.sync(self.trainer, self.policy_version)
            metrics |= self.weights.metrics()
        metrics["policy_version"] = self.policy_version
        metrics |= {f"policy_version/{name}": version for name, version in self.adapter_versions.items()}
        return StageReport(metrics, {"sync_s": time.perf_counter() - started})

    def further_timings(self) -> dict[str, float]:
        """Rates of the optimizer steps, the parts of the last weight sync, and the free GPU memory where engine and trainer share GPUs."""
        sync = {f"sync/{name}": value for name, value in self.weights.seconds.items()}
        both = {"trainer_restarts": self._trainer, "critic_restarts": self.critic}
        restarts = {n: float(t.restarts) for n, t in both.items() if isinstance(t, RestartingTrainer) and t.restarts}
        return self.rates | sync | self.weights.memory() | restarts

    async def save(
        self,
        step: int,
        *,
        recorded: bool = False,
        schedule: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a checkpoint.

        Args:
            step: rollouts that were trained on.
            recorded: they were recorded by another run, so this one cannot be resumed.
            schedule: the state of the window, in a run that has one.
            files: further files of the checkpoint, by name.
        """
        state = {
            "step": step,
            "recorded": recorded,
            "policy_version": self.policy_version,
            "optimizer_step": self.optimizer_step,
            "source": {} if recorded else self.source.state_dict(),
            "report": self.report.state_dict(),
            **({"schedule": schedule} if schedule is not None else {}),
            **({"adapter_versions": dict(self.adapter_versions)} if self.adapter_versions else {}),
        }
        await self.complete_save()
        await self.weights.yield_gpu(self.trainer, keep_weights=True)
        if not self.config.run.async_save:
            checkpoint = await asyncio.to_thread(self.folder.save, step, state, self.save_trainer, files)
            self._note_checkpoint(checkpoint)
            await self.weights.reclaim_gpu(self.trainer)
            return
        complete = await asyncio.to_thread(self.folder.begin_save, step, state, self.begin_save_trainer, files)
        await self.weights.reclaim_gpu(self.trainer)
        self._saving = asyncio.create_task(asyncio.to_thread(lambda: self._note_checkpoint(complete())))

    async def complete_save(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    def _note_checkpoint(self, checkpoint: Path) -> None:
        """Ranks that are started again load this checkpoint."""
        path = checkpoint / "trainer"
        for trainer, folder in ((self._trainer, path), (self.critic, path / CRITIC)):
            if isinstance(trainer, RestartingTrainer):
                trainer.restart_from(folder)

    def save_trainer(self, path: Path) -> None:
        """Write the trainer's checkpoint, and the critic's into its folder `critic`."""
        self.trainer.save(path)
        if self.critic is not None:
            self.critic.save(path / CRITIC)

    def begin_save_trainer(self, path: Path) -> Callable[[], None]:
        """Start what `save_trainer` writes; the function that is returned completes it. The critic's part is written then."""
        complete_trainer = self.trainer.begin_save(path)

        def complete() -> None:
            complete_trainer()
            if self.critic is not None:
                self.critic.save(path / CRITIC)

        return complete

    def load_trainer(self, path: Path) -> None:
        """Read what `save_trainer` wrote."""
        self.trainer.load(path)
        if self.critic is not None:
            self.critic.onload()
            self.critic.load(path / CRITIC)
            self.critic.offload()

    async def finish(self) -> None:
        """Complete the checkpoint and export the weights, then finish the report."""
        await self.complete_save()
        await self.weights.yield_gpu(self.trainer, keep_weights=True)
        await asyncio.to_thread(export_trained, self.trainer, self.folder)
        self.finish_report()

    def next_steps(self) -> list[str]:
        """See `EpisodeRun.next_steps`; the trained weights can be used as any other model, adapters as those of peft."""
        weights, adapter = (shlex.quote(str(self.folder.path / name)) for name in ("hf", ADAPTER))
        steps = super().next_steps()
        if not self.adapter_versions:
            steps = [*steps, f"use its weights as a model: --model {weights}"]
        further = f"train its adapters further: --lora-adapter-path {adapter}"
        return [*steps, further] if self.config.lora.used else steps

    async def close(self) -> None:
        """See `EpisodeRun.close`; then stop the trainer."""
        await super().close()
        if self.evaluation_engine is not None:
            await self.evaluation_engine.close()
        if self._trainer is not None:
            await asyncio.to_thread(self._trainer.close)
        if self.critic is not None:
            await asyncio.to_thread(self.critic.close)
        if self.teachers is not None:
            await self.teachers.close()
        if self._saving is not None:  # its ranks are gone, so it ends, and what it wrote is removed
            await asyncio.gather(self._saving, return_exceptions=True)
        self.weights.close()

    def eval_due(self, step: int) -> bool:
        """Whether an evaluation precedes rollout `step`: one does before the first and after each `eval_interval`."""
        interval = self.config.eval.eval_interval
        return bool(interval) and step % interval == 0

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint follows rollout `step`: one does after each `save_interval` and after the last."""
        rollouts = step + 1
        return rollouts % self.config.run.save_interval == 0 or rollouts == self.config.rollout.num_rollout


def export_trained(trainer: Trainer, folder: RunFolder) -> None:
    """Write the weights into `hf/` of the run folder, with adapters merged into them, and the adapters themselves into `adapter/`.

    Of several adapters only they themselves are written, into `adapter/NAME`.
    """
    if several := dict.fromkeys(folder.config.lora.lora_adapters.values()):

        def write(path: Path) -> None:
            path.mkdir()
            for name in several:
                trainer.export_adapter(path / name, adapter=name)

        folder.export(write, ADAPTER)
        return
    folder.export(trainer.export_weights)
    if folder.config.lora.used:
        folder.export(trainer.export_adapter, ADAPTER)


TRUE_ON_POLICY = "true_on_policy_diff_max"
"""largest difference between the log-probs of engine and trainer in a rollout's first step, with --true-on-policy-mode"""


async def recorded_step(
    trainer: Trainer,
    folder: RunFolder,
    rows: Sequence[Row],
    loss: LossConfig,
    lr: float,
    *,
    step: int,
    optimizer_step: int,
    **further: Any,
) -> tuple[dict[str, float], dict[str, float]]:
    """Take one optimizer step and record what the trainer was given; returns the step's metrics, and its rates, which depend on time.

    `further`: fields of the record.
    """
    take = trainer.step
    if optimizer_step == folder.config.run.profile:
        take = functools.partial(trainer.step, profile=folder.path / "profile")
    metrics = await asyncio.to_thread(take, rows, loss, lr)
    log_probs, rates = metrics.pop("log_probs"), metrics.pop("rates", {})
    if folder.config.train.true_on_policy_mode:
        metrics[TRUE_ON_POLICY] = engine_difference(rows, log_probs)
    values = {"step": step, "optimizer_step": optimizer_step, **further, "loss": asdict(loss), "lr": lr}
    folder.episodes.write_step(**step_record(rows, trainer, log_probs, **values), metrics=metrics)
    return metrics, rates


def skip_or_stop(config: Config, optimizer_step: int, error: NonFiniteError) -> None:
    """Log a step that is left out.

    Raises:
        NonFiniteError: the run is to stop.
    """
    if config.train.non_finite_step == "stop":
        raise NonFiniteError(
            f"optimizer step {optimizer_step}: {error}; to leave such steps out: --non-finite-step skip"
        ) from error
    logger.warning("optimizer step %d is left out: %s", optimizer_step, error)
