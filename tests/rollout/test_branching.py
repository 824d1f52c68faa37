"""Branching rollouts: siblings from chosen turns by verified replay, and what is refused."""

import asyncio
import itertools
from dataclasses import replace
from random import Random

import pytest
from doubles import SAMPLED, FakeGenerator, groups_of, make_runner, span, trajectory

from agentrl import Env, StepResult, Tool, ToolEnv, reward
from agentrl.config import build_config
from agentrl.errors import ConfigError, EngineAbort, TooManyFailuresError
from agentrl.replay.branch import play_branch
from agentrl.replay.replayer import replay_group
from agentrl.rollout.branching import LEFT_RECORD, BranchRule
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.components import Components
from agentrl.store import EpisodeWriter, Recording, from_record
from agentrl.train.sample import to_samples
from agentrl.types import StopReason, Turn
from agentrl.view.episode_detail import episode_detail


class Count(Env):
    """Three turns; repeats what it heard so far, with a draw of its own seed."""

    def reset(self, task, *, seed):
        self.random, self.heard = Random(seed), []
        return f"start {self.random.randrange(1000)}"

    def step(self, action):
        self.heard.append(action.text)
        done = len(self.heard) == 3
        text = f"{len(self.heard)} {self.random.randrange(1000)} {' '.join(self.heard)}"
        return StepResult(text, reward=float(len(action.text)), terminated=done, state_key=text)


def words(request):
    """A word by the seed of the generation."""
    return "a" * request.random.randint(1, 9)


def branching(hermes, env=Count, script=words, turns=(1,), samples=2, **limits):
    runner = replace(make_runner(env, script, hermes, rewards=env.rewards), play_branch=play_branch)
    return Rollout(runner, RolloutLimits(**limits), branching=BranchRule(turns, samples)), runner


async def play(hermes, groups=1, members=2, seen=None, **options):
    rollout, runner = branching(hermes, **options)
    made, table = await rollout.run(groups_of(groups, members), seen)
    runner.close()
    return made, table


async def test_branches_repeat_their_parents_turns_and_then_sample_for_themselves(hermes):
    (group,), table = await play(hermes, turns=(1, 2))
    assert [(t.episode_id, t.parent, t.branch_turn) for t in group.trajectories] == [
        (name, parent, turn)
        for i in range(2)
        for name, parent, turn in [
            (f"{i}-0", None, 0),
            *((f"branch/{turn}.{n}/{i}-0", f"{i}-0", turn) for turn in (1, 2) for n in range(2)),
        ]
    ]
    assert table.by_reason() == {"terminated": 10}
    by_id = {t.episode_id: t for t in group.trajectories}
    for t in group.trajectories:
        assert (len(t.turns), t.score) == (3, sum(len(x.action.text) for x in t.turns))
        if t.parent is None:
            continue
        parent = by_id[t.parent]
        at = parent.turns[t.branch_turn].context_length
        assert t.segments[0].ids[:at] == parent.segments[0].ids[:at]
        assert [x.reward for x in t.turns[: t.branch_turn]] == [x.reward for x in parent.turns[: t.branch_turn]]
    texts = {tuple(x.action.text for x in t.turns) for t in group.trajectories}
    assert len(texts) > 7, "branches sample with seeds of their own"


async def test_only_the_branching_turn_and_later_ones_ask_the_engine(hermes):
    engine = FakeGenerator(hermes, words)
    await play(hermes, members=1, script=engine, turns=(2,), samples=3)
    asked = [(r.session, len(r.ids)) for r in engine.requests]
    assert sum(s == "0-0" for s, _ in asked) == 3
    lengths = {n for s, n in asked if s != "0-0"}
    assert len(asked) == 6
    assert lengths == {max(n for s, n in asked if s == "0-0")}


async def test_branches_are_equal_in_equal_runs_at_any_concurrency(hermes):
    async def slow(request):
        await asyncio.sleep(request.random.random() / 500)
        return words(request)

    runs = [await play(hermes, groups=3, script=s, concurrency=n) for s, n in ((words, 64), (slow, 1), (slow, 3))]
    first, *others = ([[(t.episode_id, t.segments) for t in g.trajectories] for g in groups] for groups, _ in runs)
    assert all(first == other for other in others)


class Drifts(Count):
    """Another answer every time it is played."""

    draws = itertools.count()

    def step(self, action):
        result = super().step(action)
        return replace(result, observation=f"{result.observation} {next(self.draws)}")


class DriftsInReward(Count):
    """Another reward every time it is played, behind the same observations."""

    draws = itertools.count()

    def step(self, action):
        return replace(super().step(action), reward=float(next(self.draws)))


class EndsEarlier(Count):
    """Ends at once when it is played a second time."""

    played = 0

    def reset(self, task, *, seed):
        type(self).played += 1
        self.again = type(self).played > 1
        return super().reset(task, seed=seed)

    def step(self, action):
        return replace(super().step(action), terminated=self.again or len(self.heard) == 3)


@pytest.mark.parametrize(
    ("env", "names"),
    [(Drifts, "the observation"), (DriftsInReward, "step reward"), (EndsEarlier, "how the episode continues")],
)
async def test_an_environment_that_is_not_deterministic_is_refused_with_the_first_difference(hermes, env, names):
    seen = []
    (group,), table = await play(hermes, members=1, env=env, samples=1, seen=seen.append)
    assert [t.parent for t in group.trajectories] == [None]
    assert table.counts["env_failure", LEFT_RECORD] == 1, "it is not retried"
    assert (table.retried, len(seen)) == (0, 2)
    assert names in table.details["env_failure", LEFT_RECORD]
    assert "turn 0" in seen[1].detail
    assert seen[1].rewards == {}


async def test_a_rollout_whose_branches_are_all_refused_stops_with_the_table(hermes):
    with pytest.raises(TooManyFailuresError, match=LEFT_RECORD):
        await play(hermes, groups=5, env=Drifts, samples=3)


async def test_a_branch_is_retried_with_another_seed_after_a_failure_of_its_own(hermes):
    def script(request):
        first = request.session == "branch/1.0/0-0"
        return EngineAbort("weight update") if first else words(request)

    seen = []
    (group,), table = await play(hermes, members=1, samples=1, script=script, seen=seen.append)
    assert [t.episode_id for t in group.trajectories] == ["0-0", "branch/1.0-1/0-0"]
    assert [t.status.value for t in seen] == ["completed", "aborted", "completed"]
    assert table.retried == 1


async def test_turns_that_were_not_reached_and_failed_episodes_are_not_branched(hermes):
    (group,), _ = await play(hermes, members=1, turns=(1, 3, 7), samples=1)
    assert [t.branch_turn for t in group.trajectories] == [0, 1]
    rule, spec = BranchRule((0, 1)), groups_of(1, 1)[0][0]
    ended = trajectory([[span(SAMPLED, [3])]], turns=(Turn(0, 0, 1, None),))
    assert len(rule.branches(spec, ended)) == 1
    for reason in (StopReason.EPISODE_TIMEOUT, StopReason.ENV_FAILURE, StopReason.ENGINE_ABORT):
        assert rule.branches(spec, replace(ended, stop_reason=reason)) == []


def test_several_roles_are_refused_before_the_start_and_where_an_episode_has_them(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "from agentrl import Env, StepResult, Task\n\n\n"
        "class Two(Env):\n    roles = ('buyer', 'seller')\n\n    @classmethod\n    def tasks(cls, split):\n"
        "        return [Task('0', 'x')]\n\n    def step(self, action):\n        return StepResult(terminated=True)\n"
    )
    settings = {"env": str(file), "hf_checkpoint": "search_r1_3m", "branch_at": ["1"], "run": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="Two has several roles"):
        asyncio.run(Components(build_config(settings), trains=False).require_env())
    t = trajectory([[span(SAMPLED, [3])]], turns=(Turn(0, 0, 1, None, agent_id="buyer"), Turn(1, 0, 1, None)))
    with pytest.raises(ConfigError, match="several roles"):
        BranchRule((1,)).branches(groups_of(1, 1)[0][0], t)


def test_the_entropy_rule_takes_the_turn_after_the_first_with_the_least_likely_tokens():
    def sampled(turn, *log_probs):
        return replace(span(SAMPLED, [3] * len(log_probs), turn), log_probs=log_probs)

    spans = [sampled(0, -9.0), sampled(1, -1.0, -1.0), sampled(2, -2.5, -0.5), sampled(3, -1.5)]
    t = trajectory([spans], turns=tuple(Turn(i, 0, 1, None) for i in range(4)))
    rule, spec = BranchRule.of(("entropy",), 2), groups_of(1, 1)[0][0]
    assert [(b.turn, b.number) for b in rule.branches(spec, t)] == [(2, 0), (2, 1)]
    assert BranchRule.of((), 1) is None
    assert BranchRule.of(("2", "1"), 1) == BranchRule((1, 2), 1)


class Counter(Tool):
    """A number that grows with every call."""

    def __init__(self):
        self.value = 0

    def call(self, by: int) -> int:
        """Add to the number."""
        self.value += by
        return self.value


@reward
def last_result(t):
    return float([r.content for x in t.turns for r in x.action.results][-1])


class Counting(ToolEnv):
    """Adds until the third turn."""

    tools = [Counter]
    rewards = [last_result]


async def test_objects_of_tools_are_in_the_state_of_the_branching_turn(hermes):
    def script(request):
        turn = request.turn + (2 if request.session.startswith("branch") else 0)
        if turn == 3:
            return "done"
        by = request.random.randint(1, 50)
        return f'<tool_call>\n{{"name": "counter", "arguments": {{"by": {by}}}}}\n</tool_call>'

    (group,), _ = await play(hermes, env=Counting, script=script, members=1, turns=(2,), samples=2)
    assert len(group.trajectories) == 3
    for t in group.trajectories:
        assert t.score == sum(c.arguments["by"] for x in t.turns for c in x.action.calls)
    assert len({t.score for t in group.trajectories}) == 3


async def test_a_branch_is_recorded_replayed_and_shown_with_its_origin(hermes, tmp_path):
    (group,), _ = await play(hermes, members=1, samples=1)
    root, branch = group.trajectories
    writer = EpisodeWriter(tmp_path)
    for t in group.trajectories:
        writer.write(t, step=0, split="train")
    writer.close()
    recording = Recording(tmp_path)
    records = {r["episode_id"]: r for r in recording.records(recording.episodes)}
    read = from_record(records[branch.episode_id])
    assert read == branch
    runner = make_runner(Count, words, hermes)
    assert [o.divergence for o in await replay_group(runner, [read])] == [None]
    runner.close()

    detail = episode_detail(records[branch.episode_id], None, None, None)
    assert (detail["parent"], detail["branch_turn"]) == (root.episode_id, 1)
    (segment,) = detail["segments"]
    sampled = [
        (turn, mask)
        for turn, mask, p in zip(segment["turn"], segment["mask"], segment["provenance"], strict=True)
        if p == SAMPLED
    ]
    assert set(sampled) == {(0, 0), (1, 1), (2, 1)}, "the parent's tokens are trained in the parent"
    (sample,) = to_samples(read)
    assert sample.loss_mask == segment["mask"][-sample.response_length :]
