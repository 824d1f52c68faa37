"""Several environments in one run: exact shares, each with its own settings, data, rewards, limits and metrics; resumed and replayed exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.config.mixture import env_shares
from agentrl.core.name_syntax import split_envs
from agentrl.data.data_source import DataSource
from agentrl.data.mixed_source import MixedSource
from agentrl.errors import ConfigError
from agentrl.store import read_episodes

ENVS = """
from agentrl import Env, StepResult, Task, ToolEnv, reward

@reward
def short(trajectory):
    return 1.0

@reward
def long(trajectory):
    return 0.25

class Short(ToolEnv):
    rewards = [short]
    eval_score = "short"

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}-short-{i}", f"short {i}?") for i in range(3)]

class Long(Env):
    rewards = [long]

    def __init__(self, word="more"):
        self.word = word

    @classmethod
    def tasks(cls, split, word):
        return [Task(f"{split}-{word}-{i}", f"{word} {i}?") for i in range(4)]

    def step(self, action):
        return StepResult(self.word)
"""


def sources(seed=0):
    tasks = {"a": [Task(f"a{i}", "") for i in range(5)], "b": [Task(f"b{i}", "") for i in range(3)]}
    made = {e: DataSource(t, n_samples_per_prompt=2, seed=seed) for e, t in tasks.items()}
    return MixedSource(made, {"a": 0.7, "b": 0.3})


def issued(groups):
    return [(s.env, s.task.id, s.group_index, s.index) for specs in groups for s in specs]


class TestTheOrderOfGroups:
    def test_seventy_thirty_over_twenty_rollouts_is_exact_in_each(self):
        source = sources()
        for _ in range(20):
            groups = source.get_samples(10)
            assert Counter(specs[0].env for specs in groups) == {"a": 7, "b": 3}
        assert source.issued == {"a": 140, "b": 60}

    def test_after_any_number_of_groups_each_share_is_exact_to_one_group(self):
        source = sources()
        for number in range(1, 200):
            source.get_samples(1)
            assert abs(source.issued["a"] - 0.7 * number) < 1

    def test_groups_and_episodes_are_numbered_over_all(self):
        specs = [s for group in sources().get_samples(30) for s in group]
        assert [s.index for s in specs] == list(range(60))
        assert [s.group_index for s in specs] == [i // 2 for i in range(60)]

    def test_it_is_resumed_exactly(self):
        whole, first, second = sources(), sources(), sources()
        expected = issued(whole.get_samples(37))
        played = issued(first.get_samples(13))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert played + issued(second.get_samples(24)) == expected


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "envs"),
        [
            ("a=0.7 b=0.3", [("a", 0.7), ("b", 0.3)]),
            ("a.py:X=1 gymnasium:F-v1=2", [("a.py:X", 1.0), ("gymnasium:F-v1", 2.0)]),
            ("mcp:uvx server --port=5", [("mcp:uvx server --port=5", 1.0)]),
            ("my env.py:X", [("my env.py:X", 1.0)]),
        ],
    )
    def test_names_and_shares(self, text, envs):
        assert split_envs(text) == envs

    def test_an_environment_has_its_own_settings_and_the_others_of_the_run(self):
        own = {"b.max_turns": 3, "b.env_args": {"x": 1}, "b.concurrency": 2, "a.prompt_data": "t.jsonl"}
        own["b.context_policy_args"] = {"keep": 1}
        a, b = env_shares(build_config({"env": "a=3 b=1", "env_settings": own, "max_turns": 5}))
        assert (a.share, b.share, a.concurrency, b.concurrency) == (0.75, 0.25, None, 2)
        assert (a.config.env.max_turns, b.config.env.max_turns) == (5, 3)
        assert (a.config.data.prompt_data, b.config.env.env_args) == ("t.jsonl", {"x": 1})
        assert (a.config.env.context_policy_args, b.config.env.context_policy_args) == ({}, {"keep": 1})
        assert a.config.env.env == "a"

    @pytest.mark.parametrize(
        ("settings", "what"),
        [
            ({"env": "a=1 a=2"}, "names a twice"),
            ({"env": "a=1 b=0"}, "every share must be above 0"),
            ({"env": "a", "env_settings": {"a.max_turns": 3}}, "needs several environments"),
            ({"env": "a=1 b=1", "env_settings": {"c.max_turns": 3}}, "there is no environment 'c'"),
            ({"env": "a=1 b=1", "env_settings": {"a.max_turn": 3}}, "did you mean 'max_turns'"),
            ({"env": "a=1 b=1", "env_settings": {"a.lr": 3}}, "cannot have its own 'lr'"),
            ({"env": "a=1 b=1", "env_settings": {"a.max_turns": 0}}, "--max-turns must be"),
            ({"env": "a=1 b=1", "env_args": {"x": 1}}, "does not say which of the environments"),
            ({"env": "a=1 b=1", "context_policy_args": {"keep": 1}}, "--context-policy-arg does not say which"),
            ({"env": "a=1 b=1", "prompt_data": "t"}, "does not say which of the environments"),
        ],
    )
    def test_what_cannot_work_is_one_sentence(self, settings, what):
        with pytest.raises(ConfigError, match=what):
            env_shares(build_config(settings))


def test_tasks_that_are_given_back_keep_the_shares_and_get_new_numbers():
    source = sources()
    first = source.get_samples(10)
    source.add_samples(first[7:])
    resumed = sources()
    resumed.load_state_dict(source.state_dict())
    second = source.get_samples(13)
    assert Counter(g[0].env for g in first[:7] + second) == {"a": 14, "b": 6}
    returned = [next(g for g in second if g[0].env == env)[0].task.id for env in ("a", "b")]
    assert returned == [next(g for g in first[7:] if g[0].env == env)[0].task.id for env in ("a", "b")]
    everything = first + second
    assert [g[0].group_index for g in everything] == list(range(23))
    assert len({spec.index for g in everything for spec in g}) == sum(map(len, everything))
    assert [g[0].task.id for g in resumed.get_samples(13)] == [g[0].task.id for g in second]


@pytest.fixture
def mixed(model, says, tmp_path):
    """The words of a command that plays two environments."""
    (tmp_path / "envs.py").write_text(ENVS)
    says(lambda request: "said")
    words = ["--env", "envs.py:Short=0.7", "envs.py:Long=0.3", "--model", model, "--run", "run", "--max-turns", "5"]
    own = ["--env-setting", "envs.py:Long.max_turns=2", "--env-setting", 'envs.py:Long.env_args={word = "again"}']
    return [*words, *own, "--n-samples-per-prompt", "2", "--rollout-batch-size", "10"]


def test_each_environment_plays_its_share_with_its_own_tasks_rewards_limits_and_metrics(mixed, capsys):
    assert main(["rollout", *mixed, "--num-rollout", "2"]) == 0, capsys.readouterr().err
    episodes = [t for t in read_episodes(Path("run/episodes")) if not t.episode_id.startswith("eval/")]
    assert Counter(t.env for t in episodes) == {"Short": 28, "Long": 12}
    by_env = {env: [t for t in episodes if t.env == env] for env in ("Short", "Long")}
    assert {len(t.turns) for t in by_env["Short"]} == {1}
    assert {len(t.turns) for t in by_env["Long"]} == {2}
    assert {t.score for t in by_env["Short"]} == {1.0}
    assert {t.score for t in by_env["Long"]} == {0.25}
    assert all("-again-" in t.task.id for t in by_env["Long"])
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    played = [row for row in rows if "Short/reward" in row]
    assert [(r["Short/groups"], r["Long/groups"]) for r in played] == [(7, 3), (7, 3)]
    assert [(r["Short/reward"], r["Long/reward"], r["Long/turns"]) for r in played] == [(1.0, 0.25, 2.0)] * 2
    assert main(["replay", "run"]) == 0, capsys.readouterr().out


def test_all_are_evaluated_each_under_its_own_name(mixed, capsys):
    assert main(["eval", *mixed, "--n-samples-per-eval-prompt", "2"]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    scores = {k: v for row in rows for k, v in row.items() if k.startswith("eval/")}
    assert (scores["eval/Short/reward"], scores["eval/Long/reward"]) == (1.0, 0.25)
    assert (scores["eval/Short/pass@2"], scores["eval/Long/pass@2"]) == (1.0, 0.0)
    assert (scores["eval/Short/questions"], scores["eval/Long/questions"]) == (3, 4)
    assert main(["rescore", "run", "--split", "all"]) == 2
    assert "give the rewards to score with by --reward" in capsys.readouterr().err
