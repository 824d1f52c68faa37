"""The seed law on the local engine, through the runner: episodes do not depend on what runs at the same time."""

from dataclasses import replace

import orjson
import pytest

from agentrl.config import build_config
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.components import Components
from agentrl.run.runner_settings import RunnerSettings
from agentrl.store import to_record
from agentrl.types import EpisodeSpec

EPISODES, TASKS = 8, 4
SETTINGS = {"env": "search_r1", "hf_checkpoint": "search_r1_3m", "rollout_max_context_len": 512, "max_turns": 4}
SETTINGS |= {"rollout_max_response_len": 384, "max_tokens_per_turn": 40, "engine_max_running": 8, "threads": 1}


def without_clock(trajectory):
    """The record of an episode, less what depends on the clock."""
    record = orjson.loads(orjson.dumps(to_record(trajectory)))
    record.pop("timings")
    for turn in record["turns"]:
        turn.pop("timings")
        for result in turn["action"]["results"]:
            result.pop("duration_s")
    return record


@pytest.mark.slow
async def test_concurrency_changes_no_episode_of_the_local_engine():
    components = Components(build_config(SETTINGS))
    tasks = components.env_class.tasks("train")
    chosen = [task for _, task in zip(range(TASKS), tasks, strict=False)]
    members = EPISODES // TASKS
    specs = [[EpisodeSpec(t, g, g * members + i) for i in range(members)] for g, t in enumerate(chosen)]
    engine = components.engine()
    await engine.start()
    made = {}
    try:
        for concurrency in (1, 7, 64):
            fresh = [[replace(s, prefix=f"{concurrency}/") for s in group] for group in specs]
            runner = components.runner(engine, RunnerSettings(policy_version=0, temperature=1.0, seed=11))
            groups, table = await Rollout(runner, RolloutLimits(concurrency=concurrency)).run(fresh)
            runner.close()
            assert table.failures == 0
            made[concurrency] = [without_clock(t) for g in groups for t in g.trajectories]
    finally:
        await engine.close()
        components.close()
    for records in made.values():
        for record in records:
            record["episode_id"] = record["episode_id"].partition("/")[2]
    assert len({orjson.dumps(r["segments"]) for r in made[1]}) > TASKS, "members of a group draw differently"
    assert sum(len(r["turns"]) for r in made[1]) > EPISODES
    assert made[1] == made[7] == made[64]
