"""Shorter jobs than training, on the same parts: rollouts alone, one evaluation."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import Config
from agentrl.loop import Job, Print


async def rollout_only(config: Config, *, out: Print = print) -> Path:
    """`num_rollout` rollouts, recorded, no trainer; says the mean reward of each and the table of causes."""
    job = Job(config, None, out)
    try:
        await job.engine.start()
        for step in range(config.rollout.num_rollout):
            await job.rollout(step)
            job.row |= {"train/rows": 0}
            job.record(step)
        job.report.finish(job.folder.path, config)
        out(job.report.closing(job.folder.path))
    finally:
        await job.close()
    return job.folder.path


async def evaluate_only(config: Config, *, out: Print = print) -> dict[str, float]:
    """One evaluation of the model as it is; returns the numbers of the last set."""
    job = Job(config, None, out)
    try:
        await job.engine.start()
        await job.evaluate(0)
        job.report.finish(job.folder.path, config)
        out(job.report.closing(job.folder.path))
    finally:
        await job.close()
    return next((rows[-1][1] for rows in job.report.evals.values()), {})
