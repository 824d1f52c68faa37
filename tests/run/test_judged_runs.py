"""Recorded runs whose rewards asked a server: replay and rescore give the recorded scores and make no request; another judge is asked."""

import json

import pytest
from replays import command
from reward_server import RewardServer, chat

from agentrl.store import read_episodes

ENV = """
from agentrl import Env, StepResult, Task, reward
from agentrl.rewards.remote import ChatJudge, RewardModel

class Toy(Env):
    def step(self, action): return StepResult(terminated=True)

    @classmethod
    def tasks(cls, split): return [Task(str(n), f"Say {n}.", n) for n in range(2)]

judge = ChatJudge(url="URL/v1", model="m", backoff_s=0.01, retries=0)
judged = reward(name="judged")(judge)
strict = reward(name="judged")(ChatJudge(url="URL/v1", model="m", prompt="Strictly: {response}", retries=0))
model = RewardModel(url="URL/score", retries=0)

@reward(name="best", group=True)
async def best(members):
    scores = [await model(t) for t in members]
    return [s - min(scores) for s in scores]
"""
SMALL = "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 1 --tensorboard false --run run".split()


def answers(n, request):
    """Another answer to each request, also to the same one: a score that is asked again is another."""
    return 200, (chat(str(n / 8)) if "messages" in request else {"score": n / 8}), {}


@pytest.fixture
async def judged_run(model, says, tmp_path, request):
    """A run of these rewards, and the server that they asked."""
    says(lambda asked: f"answer of {asked.session}")
    async with RewardServer(answers) as server:
        (tmp_path / "toy.py").write_text(ENV.replace("URL", server.url))
        rewards = [f"toy.py:{name}" for name in request.param.split()]
        assert await command("rollout", "--env", "toy.py", "--model", model, "--reward", *rewards, *SMALL) == 0
        yield tmp_path / "run", server


def scores(folder):
    return {t.episode_id: dict(t.rewards) for t in read_episodes(folder)}


@pytest.mark.parametrize("judged_run", ["judged", "best", "judged best"], indirect=True)
async def test_replay_and_rescore_give_the_recorded_scores_and_make_no_request(judged_run, tmp_path):
    run, server = judged_run
    before, asked = scores(run / "episodes"), len(server.requests)
    assert asked >= 4
    assert len({json.dumps(r) for r in before.values()}) > 1
    assert await command("replay", run, "--workers", 1) == 0
    assert await command("rescore", run, "--out", tmp_path / "again") == 0
    assert scores(tmp_path / "again") == before
    assert len(server.requests) == asked


@pytest.mark.parametrize("judged_run", ["judged"], indirect=True)
async def test_rescore_asks_another_judge_and_records_its_answers(judged_run, tmp_path):
    run, server = judged_run
    before, asked = scores(run / "episodes"), len(server.requests)
    assert await command("rescore", run, "--reward", "toy.py:strict", "--out", tmp_path / "strict") == 0
    assert len(server.requests) == asked + 4
    assert server.requests[-1]["messages"][0]["content"].startswith("Strictly: answer of")
    strict = scores(tmp_path / "strict")
    assert strict != before
    assert strict.keys() == before.keys()
    words = ("--config", run / "config.toml", "--reward", "toy.py:strict", "--out", tmp_path / "again")
    assert await command("rescore", tmp_path / "strict", *words) == 0
    assert scores(tmp_path / "again") == strict
    assert len(server.requests) == asked + 4
