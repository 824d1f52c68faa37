"""Environments of verifiers before 0.4 (`load_environment`), with the genuine package and environments that others wrote (sophistry-bench-sprint)."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest
from adapter_checks import refused, require_replays, require_same_at_any_concurrency, require_sound
from doubles import call, make_runner

from agentrl.env import make_env_class, tasks_of
from agentrl.envs.adapters import base, verifiers_environment
from agentrl.errors import ConfigError
from agentrl.types import EpisodeSpec, StopReason, Task

OLDER = Path(sys.executable).parents[1] / "verifiers-0.3"
SPRINT = "verifiers:sophistry-bench-sprint"
OURS = "verifiers:older_environments"


@pytest.fixture(scope="module", autouse=True)
def older():
    """verifiers 0.3 instead of the locked one, in this process and for this module."""

    def forget():
        base._class_of.cache_clear()
        verifiers_environment._load.cache_clear()
        return [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "older_environments")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", list(sys.meta_path))  # verifiers 0.3 adds a finder
        patch.syspath_prepend(str(OLDER))
        for name in forget():
            patch.delitem(sys.modules, name)
        yield
        for name in forget():
            del sys.modules[name]


class TestSprint:
    """Arguments with citations of a passage, scored by rules: an environment that nobody here wrote."""

    @pytest.mark.slow
    async def test_it_keeps_the_contract_and_plays_the_same_at_any_concurrency(self, hermes):
        args = {"n_items": 8, "passage_chars": 200}
        await require_sound(SPRINT, args, episodes=8)
        says = ["<claim>a</claim>", "<claim>a</claim><claim>b</claim>", "no"]
        await require_same_at_any_concurrency(SPRINT, hermes, says, args, concurrencies=(1, 8))

    @pytest.mark.slow
    async def test_answers_get_the_scores_of_the_package_and_replay(self, hermes):
        args = {"n_items": 2, "passage_chars": 400, "test_size": 1}
        package = importlib.import_module("sophistry_bench_sprint")
        row = package.load_environment(n_items=2, passage_chars=400).get_dataset()[1]
        quote = " ".join(row["info"]["passage"].split()[3:9])
        scores = []
        for claims, quotes in ((["one", "two"], [quote, quote]), (["one", "two"], ["no such words in it"]), ([], [])):
            said = "".join(f"<claim>{c}</claim>" for c in claims) + "".join(f"<cite>{q}</cite>" for q in quotes)
            played = await require_replays(SPRINT, [said or "Believe me."], hermes, args)
            assert (played.task.prompt[0]["content"], len(played.turns)) == (row["prompt"][0]["content"], 1)
            assert played.score == package.aggregate_reward(claims, quotes, row["info"]["passage"])
            assert played.turns[0].info["metrics"]["n_claims_metric"] == len(claims)
            scores.append(played.score)
        assert scores[0] > scores[1] + 0.3

    @pytest.mark.slow
    def test_tasks_are_split_and_arguments_checked(self):
        env = make_env_class(SPRINT)
        args = {"n_items": 10, "passage_chars": 100}
        train, test = (list(tasks_of(env, split, {"test_size": 6, **args})) for split in ("train", "test"))
        assert (len(train), len(test)) == (14, 6)
        assert {t.metadata["row"] for t in train}.isdisjoint(t.metadata["row"] for t in test)
        assert len(list(tasks_of(env, "train", args))) == 10, "half, since there are fewer than 100 for a test"
        assert len(list(tasks_of(env, "train", {"size": 4, "test_size": 0, **args}))) == 4
        assert "cannot be loaded" in refused(SPRINT, {"quality_json": "/nonexistent"})
        with pytest.raises(ConfigError, match="leave --prompt-data out"):
            env.check_task(Task("0", "Argue."))


async def play(hermes, says, args=None, **more):
    env = make_env_class(OURS)
    task = next(iter(tasks_of(env, "train", args or {})))
    return await make_runner(env, says, hermes, env_args=args, **more).run(EpisodeSpec(task, 0, 0))


class TestLoop:
    """Several turns, tools, limits and failures, in environments written here for the genuine package."""

    @pytest.mark.slow
    async def test_turns_are_those_of_the_environment(self, hermes):
        played = await require_replays(OURS, ["7", "9", "8"], hermes, {"test_size": 4})
        assert (played.task.id, played.score, played.stop_reason) == ("train-4", 1.0, StopReason.TERMINATED)
        assert [t.observation.messages[0]["content"] for t in played.turns[:2]] == [
            "7 is wrong, guess 1.",
            "9 is wrong, guess 2.",
        ]
        assert played.task.prompt[0] == {"role": "system", "content": "Be brief."}
        lost = await play(hermes, ["1", "2", "3"], {"test_size": 4})
        assert (lost.score, len(lost.turns)) == (0.0, 3), "its own max_turns ended it"

    @pytest.mark.slow
    async def test_tools_are_called_by_the_environment(self, hermes):
        args = {"kind": "tools", "test_size": 4}
        await require_sound(OURS, args, episodes=4)
        says = [call("add", a=4, b=4) + call("add", a=99, b=1), "It is 8."]
        played = await require_replays(OURS, says, hermes, args)
        assert (played.score, [t.reward for t in played.turns]) == (1.0, [0.0, 1.0])
        results = played.turns[0].observation.messages
        assert [(m["role"], m["name"], m["content"]) for m in results] == [
            ("tool", "add", "8"),
            ("tool", "add", "too large"),
        ]

    @pytest.mark.slow
    async def test_a_failure_is_never_a_score(self, hermes):
        died = await play(hermes, ["stop"])
        assert (died.stop_reason, died.status.value) == (StopReason.ENV_FAILURE, "failed")
        assert "the sandbox died" in died.detail
        unscored = await play(hermes, ["0", "1", "2"], {"reward": "broken"})
        assert (unscored.status.value, "no such column" in unscored.detail) == ("failed", True)

    @pytest.mark.slow
    async def test_its_time_limit_truncates(self, hermes):
        late = await play(hermes, ["wait"], {"seconds": 0.2})
        assert (late.stop_reason, late.status.value) == (StopReason.ENV_TRUNCATED, "truncated")

    @pytest.mark.slow
    async def test_a_conversation_that_is_rewritten_is_refused(self, hermes):
        with pytest.raises(Exception, match="changed messages of earlier turns"):
            await play(hermes, ["1", "2"], {"kind": "rewrites"})

    @pytest.mark.slow
    def test_its_own_test_data_is_the_split_test(self):
        env = make_env_class(OURS)
        test, train = (list(tasks_of(env, split, {"test_rows": 3})) for split in ("test", "train"))
        assert (len(test), len(train)) == (3, 8)

    @pytest.mark.slow
    def test_the_handlers_of_signals_stay(self):
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        list(tasks_of(make_env_class(OURS), "train", {}))
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before

    @pytest.mark.slow
    def test_what_cannot_work_is_one_sentence(self):
        assert "compares the episodes of a group" in refused(OURS, {"reward": "of_a_group"})
        assert "its rubric has no rewards" in refused(OURS, {"reward": "none"})
        assert "did you mean 'reward'" in refused(OURS, {"rewards": "right"})
        assert "there is no module sophistry.maze" in refused("verifiers:sophistry.maze")
