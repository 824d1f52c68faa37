"""The loop: rollout -> advantage -> train -> sync, one rollout after another; readable at a glance in `train`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl.config import Config
from agentrl.core.seeds import derive_seed
from agentrl.data.data_source import DataSource
from agentrl.engine.base import Engine
from agentrl.errors import ConfigError, DataError
from agentrl.run.collector import Collector, Policy
from agentrl.run.components import Components
from agentrl.run.metrics import eval_metrics, flatten, rollout_metrics
from agentrl.run.report import Report
from agentrl.store import Recording
from agentrl.store.run_folder import RunFolder, last_checkpoint
from agentrl.train.schedule import rollout_learning_rate
from agentrl.train.step_record import step_record
from agentrl.train.steps import loss_config, step_rows, with_log_probs
from agentrl.types import EpisodeSpec, Group

Print = Callable[[str], None]


async def train(config: Config, *, resume: Path | None = None, out: Print = print) -> Path:
    """Run the whole job; returns the run folder. `resume`: go on with a run folder, to the bit.

    Raises:
        UsageError: whatever cannot work, before anything starts.
    """
    require_groups(config)
    components = Components(config)
    await components.require_env()
    job = Job(components, resume, out)
    try:
        await job.start()
        for step in range(job.step, config.rollout.num_rollout):
            if job.eval_due(step):
                await job.evaluate(step)
            groups = await job.rollout(step)
            await job.optimize(groups)
            await job.sync()
            job.record(step)
            if job.save_due(step):
                await job.save(step + 1)
        await job.evaluate(config.rollout.num_rollout)
        await job.finish()
    except asyncio.CancelledError:
        out(f"interrupted; the run goes on with: agentrl train --resume {job.folder.path}")
        raise
    finally:
        await job.close()
    return job.folder.path


class Job:
    """The components of a run and where it stands."""

    def __init__(self, components: Components, resume: Path | None, out: Print, *, evaluates: bool = False) -> None:
        """Check everything, then make the run folder.

        Raises:
            UsageError: whatever cannot work, before anything starts.
        """
        self.config = config = components.config
        self.out = out
        self.components = components
        self.eval_sets = components.tasks.evaluation() if config.eval.eval_interval else {}
        if evaluates and not self.eval_sets:
            raise DataError(
                f"{self.components.env_class.label()} has no tasks of the split 'test' to evaluate on; give --eval-prompt-data NAME PATH"
            )
        self.source = DataSource(
            components.tasks.training(),
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            seed=config.run.seed,
            shuffle=config.data.rollout_shuffle,
        )
        if components.trains:
            self.components.require_trainable()
        else:
            self.components.require_weights()
        self.step = 0
        self.policy_version = 0
        self.optimizer_step = 0
        self.report = Report(components.env_class.eval_score)
        self.checkpoint: Path | None = None
        if resume is None:
            self.folder = RunFolder.create(config, __version__)
        else:
            self.checkpoint, state = last_checkpoint(resume, config)
            self._restore(state)
            dropped = 0 if self.checkpoint else len(Recording(resume).episodes)
            self.folder = RunFolder.reopen(resume, config, __version__, state)
            if self.checkpoint is None:
                out(
                    f"{resume} has no checkpoint yet and starts from the beginning; recorded episodes dropped: {dropped}"
                )
        self.report.open(self.folder.path, config, self.folder.metrics.rows())
        self.engine: Engine = self.components.engine(self.folder.path)
        self.collector = Collector(components, self.engine, self.folder, self.report)
        self.trainer: Any = None
        self.weights = self.components.weight_sync(self.engine)
        self.row: dict[str, float] = {}
        """metrics of the step under way"""
        self.seconds: dict[str, float] = {}
        """timings of the step under way"""

    # -- the stages, in order ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start trainer and engine side by side; the engine takes a checkpoint's weights, and the model's if it comes with others."""
        self.out(
            f"run folder {self.folder.path}: model {self.components.folder}, environment {self.components.env_class.label()}, "
            f"{len(self.source.tasks)} tasks, "
            f"evaluated on {', '.join(self.eval_sets) or 'nothing (see --eval-prompt-data)'}"
        )
        (self.folder.path / "checkpoints").mkdir(exist_ok=True)  # from here on it can be resumed
        reference = self.config.train.use_kl_loss
        self.trainer, _ = await asyncio.gather(
            asyncio.to_thread(self.components.trainer, self.folder.path, reference=reference), self.engine.start()
        )
        if self.checkpoint is not None:
            await asyncio.to_thread(self.trainer.load, self.checkpoint / "trainer")
        await self.weights.begin(self.trainer)
        if self.checkpoint is not None or (await self.engine.health()).policy_version != self.policy_version:
            await self.weights.yield_gpu(self.trainer)
            await self.weights.sync(self.trainer, self.policy_version)
        if self.checkpoint is not None:
            self.out(f"resumed after rollout {self.step} from {self.checkpoint}")

    async def start_engine(self) -> None:
        """Start the engine alone, with the weights it has."""
        await self.engine.start()
        self.policy_version = (await self.engine.health()).policy_version

    async def rollout(self, step: int) -> list[Group]:
        """Episodes for this step, recorded in the order of their ordinals."""
        started = time.perf_counter()
        specs = self.source.get_samples(self.config.rollout.rollout_batch_size)
        policy = Policy(self.policy_version, self.config.rollout.rollout_temperature, self.config.run.seed)
        found = await self.collector.play(specs, policy, step=step, split="train")
        self.seconds = {"rollout_s": time.perf_counter() - started}
        self.row = rollout_metrics(*found)
        self.report.count(*found)
        return found.groups

    async def optimize(self, groups: Sequence[Group]) -> None:
        """Advantages, rows, and `num_steps_per_rollout` optimizer steps."""
        started = time.perf_counter()
        await self.weights.yield_gpu(self.trainer)
        lr, loss = rollout_learning_rate(self.config, self.step), loss_config(self.config.train)
        steps = await with_log_probs(
            self.trainer, step_rows(groups, self.config), reference=self.config.train.use_kl_loss
        )
        done = []
        for rows in steps:
            metrics = await asyncio.to_thread(self.trainer.step, rows, loss, lr)
            self.optimizer_step += 1
            where = {"step": self.step, "optimizer_step": self.optimizer_step, "loss": asdict(loss), "lr": lr}
            record = step_record(rows, self.trainer, metrics.pop("log_probs"), **where)
            self.folder.episodes.write_step(**record, metrics=metrics)
            done.append(metrics)
        self.row |= {"train/steps": len(done), "train/rows": sum(map(len, steps))} | {
            f"train/{k}": v for k, v in flatten(done).items()
        }
        self.seconds["train_s"] = time.perf_counter() - started

    async def sync(self) -> None:
        """New weights to the engine, if there are any."""
        started = time.perf_counter()
        if self.row["train/steps"]:
            self.policy_version += 1
        if self.row["train/steps"] or self.weights.gpu_yielded:
            await self.weights.sync(self.trainer, self.policy_version)
            self.row |= self.weights.metrics()
        self.row["policy_version"] = self.policy_version
        self.seconds["sync_s"] = time.perf_counter() - started

    def record(self, step: int) -> None:
        """Write the step's numbers and say them."""
        self.folder.metrics.write({"step": step, **self.row})
        timings = {f"sync/{k}": v for k, v in self.weights.seconds.items()}
        self.folder.timings.write({"step": step, **self.seconds, **timings, **self.weights.memory()})
        self.report.step(step, self.row, self.seconds)
        self.out(self.report.line(step))
        self.step = step + 1

    async def evaluate(self, step: int) -> None:
        """All evaluation sets, with the weights as they are."""
        settings = self.config.eval
        for name, tasks in self.eval_sets.items():
            started = time.perf_counter()
            k = settings.n_samples_per_eval_prompt
            prefix = f"eval/{name}/{step}/"
            specs = [[EpisodeSpec(task, g, g * k + i, prefix=prefix) for i in range(k)] for g, task in enumerate(tasks)]
            policy = Policy(
                self.policy_version, settings.eval_temperature, derive_seed(self.config.run.seed, "eval", name)
            )
            found = await self.collector.play(specs, policy, step=step, split=f"eval/{name}")
            row = eval_metrics(name, found.groups, self.components.env_class.eval_groups)
            self.folder.metrics.write({"step": step, **row})
            seconds = time.perf_counter() - started
            self.folder.timings.write({"step": step, f"eval/{name}_s": seconds})
            self.report.count(*found)
            self.report.evaluation(step, name, row, seconds)
            self.out(self.report.eval_line(step, name, seconds))

    async def save(self, step: int, *, recorded: bool = False) -> None:
        """A checkpoint from which the run goes on at `step`; after training on recorded episodes there is nothing to go on with."""
        state = {
            "step": step,
            "recorded": recorded,
            "policy_version": self.policy_version,
            "optimizer_step": self.optimizer_step,
            "source": self.source.state_dict(),
            "report": self.report.state_dict(),
        }
        await self.weights.yield_gpu(self.trainer, keep_weights=True)
        await asyncio.to_thread(self.folder.save, step, state, self.trainer.save)
        await self.weights.reclaim_gpu(self.trainer)

    async def finish(self) -> None:
        """Export the weights, draw the curve, write the summary."""
        await self.weights.yield_gpu(self.trainer, keep_weights=True)
        await asyncio.to_thread(self.folder.export, self.trainer.export_weights)
        self.report.finish(self.folder.path, self.config)
        self.out(self.report.closing(self.folder.path))

    async def close(self) -> None:
        """Stop everything; called once, whatever happened."""
        await self.collector.close()
        await self.engine.close()
        if self.trainer is not None:
            await asyncio.to_thread(self.trainer.close)
        self.weights.close()
        self.components.close()
        self.report.close()
        self.folder.close()

    # -- when --------------------------------------------------------------------------------------------------------

    def eval_due(self, step: int) -> bool:
        """Before the first rollout and after every `eval_interval`."""
        interval = self.config.eval.eval_interval
        return step % interval == 0 if interval else False

    def save_due(self, step: int) -> bool:
        """After every `save_interval` rollouts and after the last."""
        done = step + 1
        return done % self.config.run.save_interval == 0 or done == self.config.rollout.num_rollout

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _restore(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.step, self.policy_version, self.optimizer_step = (
            state["step"],
            state["policy_version"],
            state["optimizer_step"],
        )
        self.source.load_state_dict(state["source"])
        self.report.load_state_dict(state["report"])


def require_groups(config: Config) -> None:
    """Refuse groups of one, which have no advantage, if nothing else is trained.

    Raises:
        ConfigError: what to set.
    """
    t = config.train
    if config.rollout.n_samples_per_prompt == 1 and not (t.kl_loss_coef or t.entropy_coef):
        raise ConfigError(
            "--n-samples-per-prompt 1 trains nothing: an episode's advantage is its distance from the others of its group; "
            "give at least 2 (or --kl-loss-coef or --entropy-coef, if only these are meant)"
        )
