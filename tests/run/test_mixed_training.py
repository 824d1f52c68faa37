"""Training on two environments at 70/30: the shares of each rollout, their metrics, and a resumed run that is the one that was not interrupted.

The runs are those of test_async_training.py, on its virtual clock.
"""

import json
from collections import Counter

import pytest
from test_async_training import Trainer, play, trained

from agentrl import Env, StepResult, Task

__all__ = ["play"]
SETTINGS = {
    "env": f"{__file__}:Tall=0.7 {__file__}:Wide=0.3",
    "action_format": "search_r1",
    "schedule": "sync",
    "async_buffer_size": None,
    "consumption_window": None,
    "rollout_batch_size": 10,
    "num_rollout": 20,
    "save_interval": 8,
}


class Tall(Env):
    """Scores the number that the policy says. Nothing runs in a thread, which the virtual clock would not wait for."""

    @classmethod
    def tasks(cls, split):
        return [Task(f"{cls.__name__}{i}", f"Say {i}.") for i in range(9)]

    async def reset(self, task, *, seed):
        return str(task.prompt)

    async def step(self, action):
        return StepResult(reward=float("".join(c for c in action.text if c.isdigit()) or 0), terminated=True)

    async def state(self):
        return {}


class Wide(Tall):
    """Scores a hundred more."""

    async def step(self, action):
        result = await super().step(action)
        return StepResult(reward=100 + result.reward, terminated=True)


def episodes(folder):
    return {r["episode_id"]: (r["step"], r["env"], r["task"]["id"], r["turns"][0]["reward"]) for r in trained(folder)}


@pytest.mark.slow
def test_twenty_rollouts_at_seventy_thirty_and_the_same_when_they_are_interrupted_and_resumed(play):
    numbers = {"says": lambda request: str(request.sampling.seed % 100)}
    whole, trainer, *_ = play("whole", engine=numbers, **SETTINGS)
    played = episodes(whole)
    groups = Counter((step, env) for step, env, *_ in played.values())
    assert groups == {(step, env): 2 * n for step in range(20) for env, n in (("Tall", 7), ("Wide", 3))}
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert (row["Tall/groups"], row["Wide/groups"]) == (7, 3)
        assert row["Tall/reward"] < 100 <= row["Wide/reward"]
    with pytest.raises(KeyboardInterrupt):
        play(engine=numbers, trainer=Trainer(crash_after=13), **SETTINGS)
    folder, resumed, *_ = play(engine=numbers, resume=True, **SETTINGS)
    assert episodes(folder) == played
    assert resumed.weights == trainer.weights != 0
