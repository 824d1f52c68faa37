"""Many episodes: retries, groups, group rewards, the table of causes, and the seed rule at any concurrency."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from doubles import SAMPLED, FakeGenerator, call, groups_of, make_runner, trajectory

from agentrl import Env, StepResult, ToolEnv, tool
from agentrl.engine.scripted import ScriptedEngine
from agentrl.errors import ContractError, EngineAbort, EngineFailure, TooManyFailuresError
from agentrl.reward import Reward, Scorer
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.types import EpisodeSpec, FinishReason, StopReason


class Talk(Env):
    """Two turns; keeps what was made of it."""

    made = []
    timeout_s = 5.0

    def __init__(self):
        self.steps = self.closed = 0
        Talk.made.append(self)

    async def step(self, action):
        self.steps += 1
        return StepResult(f"heard {action.text}", reward=0.5, terminated=self.steps == 2)

    async def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def _fresh():
    Talk.made = []


def rollout(hermes, script, env=Talk, rewards=(), seed=0, temperature=1.0, **limits):
    runner = make_runner(env, script, hermes, rewards=rewards, seed=seed, temperature=temperature)
    return Rollout(runner, RolloutLimits(**limits))


def attempt_of(request):
    return int(request.session.rpartition("-")[2])


def index_of(request):
    return int(request.session.partition("-")[0])


async def test_groups_come_back_in_order_with_all_their_members(hermes):
    async def script(request):
        await asyncio.sleep(request.random.random() / 200)  # they finish in another order than they began
        return "x"

    specs = groups_of(5, 3)
    groups, table = await rollout(hermes, script).run(specs)
    assert [[t.index for t in g.trajectories] for g in groups] == [[s.index for s in g] for g in specs]
    assert [g.task.id for g in groups] == ["t0", "t1", "t2", "t3", "t4"]
    assert table.by_reason() == {"terminated": 15}
    assert (table.attempts, table.failures, table.retried) == (15, 0, 0)
    assert [e.closed for e in Talk.made] == [1] * 15


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_at_most_concurrency_episodes_run_at_a_time(hermes, concurrency):
    async def script(request):
        await asyncio.sleep(0.02)
        return "x"

    engine = FakeGenerator(hermes, script)
    await rollout(hermes, engine, concurrency=concurrency).run(groups_of(3, 3))
    assert min(concurrency, 2) <= engine.most_running <= concurrency


async def test_progress_is_called_with_every_attempt(hermes):
    heard = []
    script = lambda r: EngineFailure("503") if index_of(r) == 0 and attempt_of(r) == 0 else "x"  # noqa: E731
    await rollout(hermes, script).run(groups_of(1, 2), heard.append)
    assert sorted(t.episode_id for t in heard) == ["0-0", "0-1", "1-0"]


@pytest.mark.parametrize("failure", [EngineFailure("503"), EngineAbort("weight update")])
async def test_a_failed_episode_is_run_again_with_new_seeds(hermes, failure):
    engine = FakeGenerator(hermes, lambda r: failure if index_of(r) == 1 and attempt_of(r) < 2 else "x")
    (group,), table = await rollout(hermes, engine, max_retries=2).run(groups_of(1, 2))
    assert [t.attempt for t in group.trajectories] == [0, 2]
    assert [t.episode_id for t in group.trajectories] == ["0-0", "1-2"]
    assert table.retried == 2
    first = {attempt_of(r): r.sampling.seed for r in engine.requests if index_of(r) == 1 and r.turn == 0}
    assert len(set(first.values())) == 3


async def test_case_23_a_group_continues_with_enough_members_and_is_dropped_with_fewer(hermes):
    lost = {0, 4, 5}
    script = lambda r: EngineFailure("503") if index_of(r) in lost else "x"  # noqa: E731
    groups, table = await rollout(hermes, script, max_retries=1, min_group_size=2).run(groups_of(2, 3))
    assert [[t.index for t in g.trajectories] for g in groups] == [[1, 2]]
    assert table.dropped_groups == 1
    assert table.by_reason() == {"engine_failure": 6, "terminated": 3}


async def test_case_23_a_group_issued_with_one_member_is_kept(hermes):
    groups, table = await rollout(hermes, ["x"], min_group_size=2).run(groups_of(2, 1))
    assert [len(g.trajectories) for g in groups] == [1, 1]
    assert table.dropped_groups == 0


async def test_case_26_one_episode_raises_and_its_siblings_continue(hermes):
    class Fragile(Talk):
        async def reset(self, task, *, seed):
            if len(Talk.made) == 2:
                raise RuntimeError("boom")
            return task.messages

    groups, table = await rollout(hermes, ["x"], env=Fragile, concurrency=1).run(groups_of(2, 2))
    assert [[t.index for t in g.trajectories] for g in groups] == [[0, 1], [2, 3]]
    assert table.counts["env_failure", "env reset: RuntimeError"] == 1
    assert [e.closed for e in Talk.made] == [1] * 5


async def test_a_failure_never_becomes_a_reward_of_zero(hermes):
    script = lambda r: EngineFailure("503") if index_of(r) == 0 else "x"  # noqa: E731
    (group,), _ = await rollout(hermes, script, rewards=[Reward(lambda t: 1.0, "one")]).run(groups_of(1, 3))
    assert [t.score for t in group.trajectories] == [2.0, 2.0]


# -- too many failures -----------------------------------------------------------------------------------------------


async def test_above_the_share_of_failures_the_run_stops_with_the_table(hermes):
    def script(request):
        return EngineFailure("connection refused: 10.0.0.7", "connection refused") if index_of(request) % 4 else "x"

    with pytest.raises(TooManyFailuresError) as e:
        await rollout(hermes, script, max_retries=2, concurrency=64).run(groups_of(8, 8))
    message = str(e.value)
    assert "more than max_failure_share 0.5 allows" in message
    assert "connection refused" in message
    assert "engine_failure" in message
    assert "retried" in message
    assert all(env.closed == 1 for env in Talk.made)


async def test_case_30_when_every_episode_fails_the_run_stops_and_does_not_wait(hermes):
    with pytest.raises(TooManyFailuresError, match=r"\(21 of 21 attempts failed\), the last 21 of them consecutively"):
        await asyncio.wait_for(rollout(hermes, [EngineFailure("down")], concurrency=10).run(groups_of(50, 4)), 10)


async def test_a_success_resets_the_count_of_consecutive_failures(hermes):
    script = lambda r: EngineFailure("503") if index_of(r) % 16 and attempt_of(r) == 0 else "x"  # noqa: E731
    groups, table = await rollout(hermes, script, concurrency=8).run(groups_of(16, 4))
    assert len(groups) == 16
    assert table.failures == 60


@pytest.mark.parametrize("max_retries", [0, 2])
async def test_a_small_rollout_without_a_group_left_stops_the_run(hermes, max_retries):
    attempts = 2 + 2 * max_retries
    with pytest.raises(
        TooManyFailuresError,
        match=rf"2 of 2 episodes were lost \({attempts} of {attempts} attempts .*\n(.*\n)*.*down",
    ):
        await rollout(hermes, [EngineFailure("down")], max_retries=max_retries).run(groups_of(1, 2))
    groups, _ = await rollout(hermes, [EngineFailure("down")], max_failure_share=1.0).run(groups_of(1, 2))
    assert groups == [], "any share is borne"


async def test_a_server_that_fails_everything_it_has_once_does_not_end_the_run(hermes):
    script = lambda r: EngineFailure("killed") if attempt_of(r) == 0 else "x"  # noqa: E731
    groups, table = await rollout(hermes, script, concurrency=64).run(groups_of(16, 4))
    assert [len(g.trajectories) for g in groups] == [4] * 16
    assert (table.failures, table.retried) == (64, 64)


@pytest.mark.parametrize(("lost", "stops"), [(8, False), (9, True)])
async def test_a_few_episodes_lost_at_the_start_do_not_stop_it(hermes, lost, stops):
    script = lambda r: EngineFailure("503") if index_of(r) < lost else "x"  # noqa: E731
    playing = rollout(hermes, script, concurrency=1, max_retries=0).run(groups_of(10, 2))
    if stops:
        with pytest.raises(TooManyFailuresError, match="9 of 9 episodes were lost"):
            await playing
        return
    groups, table = await playing
    assert len(groups) == 6
    assert (table.failures, table.dropped_groups) == (8, 4)


async def test_of_simultaneous_failures_the_first_is_raised():
    waiting, gate = [], asyncio.Event()

    class Fails:
        async def run(self, spec):
            if spec.index >= 8:
                waiting.append(spec.index)
                if len(waiting) == 4:
                    asyncio.get_running_loop().call_soon(gate.set)
                if spec.index == 9:  # whose group ends after the last one
                    try:
                        await asyncio.sleep(60)
                    finally:
                        await asyncio.sleep(0.1)
                await gate.wait()
            return trajectory(index=spec.index, group=spec.group_index, reason=StopReason.ENGINE_FAILURE)

    with pytest.raises(TooManyFailuresError, match="9 of 12 episodes were lost"):
        await Rollout(Fails(), RolloutLimits(concurrency=12, max_retries=0)).run(groups_of(6, 2))


async def test_a_rollout_without_a_group_left_stops_the_run_at_any_share_of_losses(hermes):
    script = lambda r: EngineFailure("down") if index_of(r) % 2 else "x"  # noqa: E731
    with pytest.raises(TooManyFailuresError, match=r"6 of 12 episodes were lost .*, and no group is left; the causes:"):
        await rollout(hermes, script).run(groups_of(6, 2))
    groups, _ = await rollout(hermes, script, max_failure_share=1.0).run(groups_of(6, 2))
    assert groups == []


async def test_failures_that_come_back_before_any_success_do_not_stop_it(hermes):
    """An engine that refuses a few connections answers those first; the others take their time."""

    async def script(request):
        if index_of(request) < 12 and attempt_of(request) == 0:
            return EngineFailure("refused")
        await asyncio.sleep(0.05)
        return "x"

    groups, table = await rollout(hermes, script, max_retries=0).run(groups_of(8, 8))
    assert len(groups) == 7, "of the first nothing is left"
    assert (table.failures, table.dropped_groups) == (12, 1)


async def test_a_broken_contract_stops_the_run_after_every_other_episode_was_closed(hermes):
    class Broken(Talk):
        async def step(self, action):
            if action.text == "bad":
                return "no StepResult"
            await asyncio.sleep(30)
            return None

    with pytest.raises(ContractError, match="must return a StepResult"):
        await asyncio.wait_for(
            rollout(hermes, lambda r: "bad" if index_of(r) == 3 else "x", env=Broken).run(groups_of(3, 3)), 10
        )
    assert len(Talk.made) == 9
    assert [e.closed for e in Talk.made] == [1] * 9
    assert len(asyncio.all_tasks()) == 1, "nothing goes on behind the caller's back"


async def test_a_cancel_closes_everything(hermes):
    async def script(request):
        await asyncio.sleep(30)

    task = asyncio.create_task(rollout(hermes, script).run(groups_of(2, 4)))
    while len(Talk.made) < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [e.closed for e in Talk.made] == [1] * 8


# -- group rewards ---------------------------------------------------------------------------------------------------


def ranked(trajectories):
    """The episode's place within its group."""
    return [float(i) for i, _ in enumerate(trajectories)]


async def test_group_rewards_see_the_whole_group_and_enter_the_score(hermes):
    groups, _ = await rollout(hermes, ["x"], rewards=[Reward(ranked, "rank", 2.0, group=True)]).run(groups_of(2, 3))
    assert [[t.rewards["rank"] for t in g.trajectories] for g in groups] == [[0, 1, 2], [0, 1, 2]]
    assert [t.score for t in groups[0].trajectories] == [1.0, 3.0, 5.0]


async def test_a_group_reward_may_abstain_for_some(hermes):
    some = Reward(lambda ts: [None if t.index == 1 else 1.0 for t in ts], "some", group=True)
    (group,), _ = await rollout(hermes, ["x"], rewards=[some]).run(groups_of(1, 3))
    assert [t.score for t in group.trajectories] == [2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda ts: 1 / 0,
        lambda ts: [1.0],
        lambda ts: None,
        lambda ts: ["a"] * len(ts),
        lambda ts: [float("nan")] * len(ts),
    ],
    ids=["raises", "too few", "None", "strings", "NaN"],
)
async def test_case_22_a_bad_group_reward_drops_the_group_and_counts_each_attempt_once(hermes, fn):
    heard = {}
    bad = Reward(fn, "bad", group=True)
    groups, table = await rollout(hermes, ["x"], rewards=[bad], max_failure_share=1.0).run(
        groups_of(1, 4), lambda t: heard.update({t.episode_id: t})
    )
    assert groups == []
    assert {t.stop_reason for t in heard.values()} == {StopReason.REWARD_FAILURE}, "what is recorded is not trained on"
    assert table.by_reason() == {"reward_failure": 4}
    assert (table.attempts, table.failures, table.dropped_groups) == (4, 4, 1)


async def test_a_group_reward_that_always_fails_stops_the_run(hermes):
    with pytest.raises(TooManyFailuresError, match="reward bad: ZeroDivisionError"):
        await rollout(hermes, ["x"], rewards=[Reward(lambda ts: 1 / 0, "bad", group=True)]).run(groups_of(6, 4))


async def test_a_group_reward_is_tried_again(hermes):
    tries = []

    def flaky(ts):
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return [1.0] * len(ts)

    groups, table = await rollout(hermes, ["x"], rewards=[Reward(flaky, "flaky", group=True)], max_retries=2).run(
        groups_of(1, 2)
    )
    assert len(groups) == 1
    assert table.by_reason() == {"terminated": 2}


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_counts_reasons_causes_and_opened_segments():
    table = CauseTable()
    table.add(trajectory(reason=StopReason.MAX_TURNS))
    table.add(trajectory(reason=StopReason.TOOL_FAILURE, cause="tool search: InfraError"))
    table.add(trajectory(reason=StopReason.TOOL_FAILURE, cause="tool search: InfraError"))
    other = CauseTable(retried=2, dropped_groups=1)
    other.add(trajectory())
    table.merge(other)
    assert table.by_reason() == {"max_turns": 1, "terminated": 1, "tool_failure": 2}
    assert (table.attempts, table.failures, table.retried, table.dropped_groups) == (4, 2, 2, 1)
    lines = str(table).splitlines()
    assert lines[1].split() == ["tool_failure", "2", "tool", "search:", "InfraError"]
    assert lines[-1] == "2 retried, 1 groups dropped"


@pytest.mark.parametrize(
    ("table", "plain"),
    [
        (CauseTable(), True),
        (CauseTable(Counter({("terminated", ""): 3})), True),
        (CauseTable(Counter({("terminated", ""): 3, ("max_turns", ""): 1})), True),
        (CauseTable(Counter({("terminated", ""): 1, ("max_turns", ""): 1, ("max_tokens", ""): 1})), False),
        (CauseTable(Counter({("terminated", ""): 3, ("episode_timeout", "during generation"): 1})), False),
        (CauseTable(Counter({("terminated", ""): 3, ("invalid_action_limit", ""): 1})), False),
        (CauseTable(Counter({("terminated", ""): 3}), retried=1), False),
        (CauseTable(Counter({("terminated", ""): 3}), dropped_groups=1), False),
    ],
)
def test_a_table_needs_attention_if_something_failed_or_most_episodes_were_cut(table, plain):
    assert table.needs_attention is not plain


async def test_the_table_shows_what_was_raised_and_where(hermes):
    class Fragile(Env):
        async def step(self, action):
            raise ValueError("the index is empty")

    with pytest.raises(
        TooManyFailuresError, match=r"env step: ValueError\n.*such as: .*the index is empty \(.*test_rollout\.py:\d+\)"
    ):
        await rollout(hermes, ["x"], env=Fragile, max_retries=0).run(groups_of(1, 2))


def test_recounting_moves_an_attempt():
    table = CauseTable()
    t = trajectory()
    table.add(t)
    table.recount(t, replace(t, stop_reason=StopReason.REWARD_FAILURE, cause="late"))
    assert dict(table.counts) == {("reward_failure", "late"): 1}


# -- the seed law ----------------------------------------------------------------------------------------------------


async def chatter(request):
    """Says what the seed decides, after a time that the seed decides; fails now and then."""
    random = Random(request.sampling.seed)
    await asyncio.sleep(random.random() / 500)
    if random.random() < 0.05:
        raise EngineFailure("flaky")
    return " ".join(random.choices(("capital", "of", "France", "東京", "Paris"), k=random.randint(1, 6)))


def scripted(hermes):
    return ScriptedEngine(chatter, encode=hermes.tokenizer.encode, decode=hermes.tokenizer.decode, end_id=hermes.end_id)


def without_timings(groups):
    return [
        [replace(t, timings={}, turns=tuple(replace(x, timings={}) for x in t.turns)) for t in g.trajectories]
        for g in groups
    ]


@pytest.mark.parametrize(
    "engine", [scripted, lambda hermes: FakeGenerator(hermes, chatter)], ids=["scripted", "double"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_same_rollout_at_any_concurrency_gives_the_same_trajectories(hermes, temperature, engine):
    found = []
    for concurrency in (1, 1, 7, 64):
        groups, table = await rollout(
            hermes, engine(hermes), concurrency=concurrency, temperature=temperature, seed=11
        ).run(groups_of(8, 8))
        found.append(without_timings(groups))
        assert table.retried > 0, "retries are among what must not matter"
    assert found[0] == found[1] == found[2] == found[3]
    said = {s.ids for g in found[0] for t in g for s in t.segments[0].spans if s.provenance is SAMPLED}
    assert len(said) > 20, "members of a group differ"
    other, _ = await rollout(hermes, engine(hermes), concurrency=7, temperature=temperature, seed=12).run(
        groups_of(8, 8)
    )
    assert without_timings(other) != found[0]


async def test_an_evaluations_episodes_have_names_of_their_own(hermes):
    spec = EpisodeSpec(groups_of(1, 1)[0][0].task, 0, 0, prefix="eval/test/20/")
    (group,), _ = await rollout(hermes, ["x"]).run([[spec]])
    assert group.trajectories[0].episode_id == "eval/test/20/0-0"


async def test_finish_reasons_are_recorded(hermes):
    (group,), _ = await rollout(hermes, ["x"]).run(groups_of(1, 1))
    assert [turn.action.finish_reason for turn in group.trajectories[0].turns] == [FinishReason.STOP] * 2
    assert isinstance(rollout(hermes, ["x"]).runner.scorer, Scorer)


class SlowOnce(ToolEnv):
    """The first call of each episode takes longer than its limit."""

    def __init__(self):
        self.called = False

    @tool(timeout_s=0.1)
    def look(self) -> str:
        """Look."""
        if not self.called:
            self.called = True
            time.sleep(0.3)
        return "seen"


async def test_a_sync_tool_that_exceeds_its_limit_in_many_episodes_does_not_end_the_rollout(hermes):
    engine = FakeGenerator(hermes, [call("look"), call("look"), "<answer>x</answer>"])
    runner = make_runner(SlowOnce, engine, hermes)
    try:
        groups, table = await Rollout(runner, RolloutLimits(concurrency=16)).run(groups_of(4, 4))
    finally:
        runner.close()
    episodes = [t for g in groups for t in g.trajectories]
    assert (len(episodes), table.retried) == (16, 0)
    for t in episodes:
        assert [r.content for turn in t.turns for r in turn.action.results] == [
            "error: look did not answer within 0.1 s",
            "seen",
        ]
