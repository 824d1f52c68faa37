"""What every adapter of environments must show: the contract, an identical replay, equal episodes at any concurrency, and what it refuses."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest
from doubles import make_runner

from agentrl.check import check_env
from agentrl.check.findings import Severity
from agentrl.env import check_env_args, make_env_class, tasks_of
from agentrl.errors import ConfigError
from agentrl.replay.replayer import replay_group
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.types import EpisodeSpec


async def require_sound(name, args=None, episodes=6, **more):
    """No errors in the check: its episodes are played twice, together and alone, and are equal."""
    report = await check_env(make_env_class(name), args, episodes=episodes, **more)
    assert not [f for f in report.findings if f.severity is Severity.ERROR], str(report)
    assert report.episodes == 2 * episodes
    return report


async def require_replays(name, script, hermes, args=None, task=None):
    """An episode and its replay are identical."""
    env = make_env_class(name)
    task = task or next(iter(tasks_of(env, "train", args or {})))
    runner = make_runner(env, script, hermes, env_args=args)
    played = await runner.run(EpisodeSpec(task, 0, 0))
    assert played.status.value in ("completed", "truncated"), played.detail
    (outcome,) = await replay_group(runner, [played])
    assert outcome.divergence is None, str(outcome.divergence)
    return played


def refused(name, args=None):
    """The sentence with which an environment is refused."""
    try:
        env = make_env_class(name)
        check_env_args(env, args or {})
        ready = env(**(args or {})).check_ready()
        if asyncio.iscoroutine(ready):
            asyncio.run(ready)
    except ConfigError as e:
        return str(e)
    pytest.fail("it was not refused")


async def require_same_at_any_concurrency(name, hermes, says, args=None, tasks=None, concurrencies=(1, 3, 16)):
    """The same seed plays the same episodes, one by one or several at a time."""
    env = make_env_class(name)
    tasks = tasks or list(islice(tasks_of(env, "train", args or {}), 4))
    groups = [[EpisodeSpec(task, g, 2 * g + i) for i in range(2)] for g, task in enumerate(tasks)]
    played = []
    for concurrency in concurrencies:
        runner = make_runner(
            env, lambda request: says[request.sampling.seed % len(says)], hermes, env_args=args, max_turns=4
        )
        made, _ = await Rollout(runner, RolloutLimits(concurrency=concurrency, min_group_size=1)).run(groups)
        runner.close()
        episodes = sorted((t for group in made for t in group.trajectories), key=lambda t: t.index)
        assert len(episodes) == 2 * len(tasks)
        played.append(
            [
                (t.task.id, t.score, t.state, [(u.action.text, u.observation, u.reward) for u in t.turns])
                for t in episodes
            ]
        )
    assert all(episodes == played[0] for episodes in played[1:])
