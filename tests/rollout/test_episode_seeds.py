"""What the episodes of a group share, and what they do not: seeds and tasks."""

from dataclasses import replace

import pytest
from doubles import FakeGenerator, groups_of, make_runner, play

from agentrl import Env, StepResult, Task
from agentrl.core.seeds import derive_seed
from agentrl.errors import ContractError
from agentrl.reward import Reward, Scorer
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.types import EpisodeSpec


class Once(Env):
    async def step(self, action):
        return StepResult(terminated=True)


class OnlySeed(Once):
    def reset(self, task, *, seed):
        return f"seed {seed}"


class Both(Once):
    def reset(self, task, *, seed, group_seed=None):
        return f"seed {seed} group {group_seed}"


class AsyncBoth(Once):
    async def reset(self, task, group_seed, *, seed):
        return f"seed {seed} group {group_seed}"


class AnyKeyword(Once):
    def reset(self, task, **seeds):
        return f"seed {seeds.pop('seed')} {sorted(seeds)}"


class Failing(Once):
    async def reset(self, task, *, seed, group_seed):
        return f"seed {seed} group {group_seed}"

    async def step(self, action):
        raise RuntimeError("always")


async def first_texts(env, renderer, groups, **more):
    """What reset returned, by (group, index, attempt)."""
    runner = make_runner(env, FakeGenerator(renderer, ["x"]), renderer)
    texts = {}

    def note(t):
        text = renderer.tokenizer.decode(t.segments[0].spans[0].ids)
        texts[t.group_index, t.index, t.attempt] = text[text.index("seed ") :].split("<|im_end|>")[0]

    try:
        await Rollout(runner, RolloutLimits(max_failure_share=1.0, **more)).run(groups, note)
    finally:
        runner.close()
    return runner, texts


@pytest.mark.parametrize("env", [Both, AsyncBoth])
async def test_a_group_has_one_seed_and_each_episode_another(hermes, env):
    runner, texts = await first_texts(env, hermes, groups_of(3, 4))
    groups = {}
    for (group, index, _), text in texts.items():
        seed, group_seed = text.split()[1], text.split()[3]
        assert int(seed) == derive_seed(derive_seed(runner.seed, index, 0), "env")
        groups.setdefault(group, set()).add(int(group_seed))
    assert groups == {g: {derive_seed(runner.seed, "group", g, "env")} for g in range(3)}
    assert len(set(texts.values())) == 12


async def test_retries_keep_the_seed_of_the_group(hermes):
    _, texts = await first_texts(Failing, hermes, groups_of(1, 2), max_retries=2)
    assert len(texts) == 6
    assert len({t.split()[3] for t in texts.values()}) == 1
    assert len({t.split()[1] for t in texts.values()}) == 6


@pytest.mark.parametrize("env", [OnlySeed, AnyKeyword])
async def test_an_environment_that_names_no_group_seed_gets_what_it_always_got(hermes, env):
    runner, texts = await first_texts(env, hermes, groups_of(1, 2))
    for (_, index, _), text in texts.items():
        assert text.removesuffix(" []") == f"seed {derive_seed(derive_seed(runner.seed, index, 0), 'env')}"


# -- tasks -----------------------------------------------------------------------------------------------------------

TASK = Task("t", ({"role": "user", "content": [{"type": "text", "text": "q"}]},), ["Paris"], {"moves": [1]})
FRESH = Task("t", ({"role": "user", "content": [{"type": "text", "text": "q"}]},), ["Paris"], {"moves": [1]})


def spoil(task):
    task.prompt[0]["content"][0]["text"] = "spoilt"
    task.label.append("spoilt")
    task.metadata["moves"].append(2)
    task.metadata["seen"] = True


class Spoils(Once):
    def reset(self, task, *, seed):
        assert task == FRESH
        spoil(task)
        return "x"


async def test_what_an_environment_changes_in_its_task_reaches_nobody(hermes):
    runner = make_runner(Spoils, ["x"], hermes)
    for index in range(3):
        t = await runner.run(EpisodeSpec(TASK, 0, index))
        assert (t.stop_reason.value, t.task) == ("terminated", FRESH)
    runner.close()
    assert TASK == FRESH


async def test_what_rewards_change_in_a_task_reaches_nobody(hermes):
    def single(t):
        assert t.task == FRESH
        spoil(t.task)
        return 1.0

    def group(ts):
        assert [t.task for t in ts] == [FRESH] * len(ts)
        spoil(ts[0].task)
        return [float(t.task == FRESH) for t in ts]

    t = await play(Once, ["x"], hermes, task=TASK, rewards=[Reward(single, "single")])
    assert (t.rewards, t.task) == ({"single": 1.0}, FRESH)
    scored = await Scorer([Reward(group, "group", group=True)]).score_group([t, replace(t, index=1)])
    assert [s.rewards["group"] for s in scored] == [0.0, 1.0]
    assert all(s.task is TASK for s in scored)
    assert TASK == FRESH


async def test_a_task_that_cannot_be_copied_is_refused(hermes):
    task = Task("handle", "q", label=(n for n in range(3)))
    with pytest.raises(ContractError, match=r"task 'handle' cannot be copied for each episode: TypeError: .*generator"):
        await play(Once, ["x"], hermes, task=task)


def test_a_task_of_unchangeable_values_is_not_copied():
    task = Task("a", "q", "label")
    assert task.copy() is task
    assert TASK.copy() == TASK
    assert TASK.copy().label is not TASK.label
