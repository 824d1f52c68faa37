"""Rescore and fork, as functions and from the command line."""

import dataclasses
import json

import pytest
from doubles import FakeEngine, FakeGenerator, group_of, groups_of, make_runner
from lookup import Search
from replays import Guess, command, script

from agentrl import reward
from agentrl.cli.fork_command import observation_of
from agentrl.config import build_config
from agentrl.errors import ConfigError, StoreError
from agentrl.replay.fork import fork, table
from agentrl.replay.rescore import Change, rescore_group
from agentrl.reward import Scorer, resolve_rewards
from agentrl.store import Recording, read_episodes
from agentrl.types import StopReason


def scorer_of(*rewards):
    return Scorer(resolve_rewards(rewards))


async def change_of(group, *rewards):
    scorer, change = scorer_of(*rewards), Change()
    change.add([await rescore_group(scorer, group.trajectories)])
    scorer.close()
    return change


@reward
def upside_down(t):
    return 1.0 - t.index % 100 / 10


async def test_rescore_counts_swaps_and_flips():
    change = await change_of(group_of(0.0, 0.5, 1.0), upside_down)
    assert (change.groups, change.pairs, change.swapped, change.reversed) == (1, 3, 3, 3)
    assert [(e, a < 0 < b) for _, e, a, b in change.flipped] == [("0-0", True), ("2-0", False)]
    assert change.flipped_groups == 1
    text = str(change)
    assert "pairs within a group whose order changes: 3 of 3, 3 of them reversed" in text
    assert "score           0.5000     0.9000    +0.4000" in text


async def test_rescore_with_the_same_rewards_changes_nothing():
    @reward(name="r")
    def same(t):
        return {0: 0.0, 1: 0.5, 2: 1.0}[t.index]

    change = await change_of(group_of(0.0, 0.5, 1.0), same)
    assert (change.swapped, change.flipped, [t.rewards for t in change.today]) == (
        0,
        [],
        [{"r": 0.0}, {"r": 0.5}, {"r": 1.0}],
    )


async def test_rescore_skips_failures_and_reports_new_ones():
    @reward
    def picky(t):
        if t.index == 1:
            raise ValueError("no")
        return 1.0

    change = await change_of(
        group_of(0.0, 0.5, 1.0, reasons=[StopReason.TERMINATED, StopReason.TERMINATED, StopReason.ENV_FAILURE]), picky
    )
    assert len(change.today) == 1
    assert "rewards that failed: 1, the first in episode 1-0: reward picky: ValueError" in str(change)


async def test_rescore_calls_group_rewards_with_the_group():
    @reward(group=True)
    def best(ts):
        return [float(t.index == max(x.index for x in ts)) for t in ts]

    change = await change_of(group_of(1.0, 0.0), best)
    assert [t.score for t in change.today] == [0.0, 1.0]


# -- fork --------------------------------------------------------------------------------------------------------------


async def one(tags, **more):
    runner = make_runner(Search, script, tags, rewards=Search.rewards, **more)
    t = await runner.run(groups_of(1, 1)[0][0])
    runner.close()
    return t


async def forked(tags, t, turn, says=script, **options):
    runner = make_runner(
        Search,
        FakeGenerator(tags, lambda r: says(dataclasses.replace(r, turn=turn + r.turn))),
        tags,
        rewards=Search.rewards,
    )
    try:
        return await fork(runner, t, turn, **options)
    finally:
        runner.close()


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_a_fork_with_the_same_seed_and_observation_is_the_original(tags, turn):
    t = await one(tags)
    (branch,) = await forked(tags, t, turn)
    assert branch.differs_at is None
    again = branch.trajectory
    assert (again.segments, again.stop_reason, again.rewards, again.state) == (
        t.segments,
        t.stop_reason,
        t.rewards,
        t.state,
    )
    assert [dataclasses.replace(x, timings={}, action=None) for x in again.turns] == [
        dataclasses.replace(x, timings={}, action=None) for x in t.turns
    ]


async def test_branches_draw_by_other_seeds_and_are_reproducible(tags):
    t = await one(tags)
    options = {"turn": 0, "seeds": range(8)}
    branches = await forked(tags, t, **options)
    words = [b.trajectory.answer for b in branches]
    assert set(words) == {"Paris", "Rome"}
    assert words[0] == t.answer
    assert [b.trajectory.segments for b in await forked(tags, t, **options)] == [
        b.trajectory.segments for b in branches
    ]


async def test_an_edited_observation_is_what_the_policy_reads(tags, tokenizer):
    t = await one(tags)
    seen = []

    def says(request):
        seen.append(tokenizer.decode(request.ids))
        return script(request)

    (branch,) = await forked(tags, t, 1, says, observation="it is in Asia")
    assert seen[0].count("<information>it is in Asia</information>") == 1
    assert "is in Europe" not in seen[0]
    assert branch.differs_at is not None
    assert branch.differs_at[1] >= t.turns[0].context_length
    (branch,) = await forked(tags, t, 0, says, observation="Another question?")
    assert "Another question?" in seen[-1]
    assert t.task.prompt not in seen[-1]


async def test_tools_that_change_the_environment_have_changed_it_by_the_fork(tags):
    runner = make_runner(Guess, script, tags, rewards=Guess.rewards)
    t = await runner.run(groups_of(1, 1)[0][0])
    assert [x.reward for x in t.turns] == [1.0, 2.0]
    live = FakeGenerator(tags, lambda r: script(dataclasses.replace(r, turn=1 + r.turn)))
    runner = dataclasses.replace(runner, engine=live)
    (branch,) = await fork(runner, t, 1)
    runner.close()
    assert branch.differs_at is None
    assert [x.reward for x in branch.trajectory.turns] == [1.0, 2.0]


async def test_the_table_has_aligned_columns_and_shows_escapes_as_text(tags):
    t = await one(tags)
    branches = await forked(tags, t, 2, lambda r: "<answer>\x1b[31mred</answer>", seeds=range(2))
    text = table(t, branches)
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert text.splitlines()[1].startswith("original")
    assert len(text.splitlines()) == 4


async def test_a_missing_turn_and_a_turn_that_is_not_reached_are_errors(tags):
    t = await one(tags)
    with pytest.raises(ConfigError, match="has turns 0 to 2; it cannot be forked at turn 3"):
        await forked(tags, t, 3)

    class Other(Search):
        def reset(self, task, *, seed):
            return "something else"

    runner = make_runner(Other, script, tags)
    with pytest.raises(StoreError, match="does not reach turn 1 as recorded"):
        await fork(runner, t, 1)
    runner.close()


# -- the command line --------------------------------------------------------------------------------------------------


async def test_replay_reports_identical_episodes_and_writes_its_outcomes(lookup_run, capsys):
    path, _ = lookup_run
    assert await command("replay", path, "--workers", 2) == 0
    assert "6 episodes replayed: identical" in capsys.readouterr().out
    assert len((path / "replay.jsonl").read_text().splitlines()) == 6


async def test_replay_of_one_episode_under_another_limit_exits_with_1(lookup_run, capsys):
    path, _ = lookup_run
    assert await command("replay", path, "3-0", "--max-turns", 2) == 1
    out = capsys.readouterr().out
    assert "1 episodes replayed: 0 identical, 1 differ" in out
    assert "limit: how the episode continues at turn 1" in out


async def test_rescore_end_to_end(lookup_run, tmp_path, capsys):
    path, env = lookup_run
    out = tmp_path / "again"
    assert await command("rescore", path, "--reward", f"{env}:short", "--out", out) == 0
    text = capsys.readouterr().out
    assert "short" in text
    assert "groups in which an advantage (grpo) changes its sign" in text
    assert [t.rewards for t in read_episodes(out)] == [{"short": -float(len(t.answer))} for t in read_episodes(path)]
    assert [e.step for e in Recording(out).episodes] == [0] * 6
    left = json.loads((path / "rescore.json").read_bytes())
    assert left["text"] in text
    assert left["rewards"] == ["short"]
    assert left["episodes"] == 6
    names = [name for name, _, _ in left["means"]]
    assert names[-1] == "score"
    assert {"exact", "short"} <= set(names)
    assert left["means"][-1][2] == pytest.approx(sum(t.score for t in read_episodes(out)) / 6)
    assert {g for g, *_ in left["flipped"]} <= {0, 1, 2}
    assert await command("rescore", path, "--out", out) == 2


def test_an_observation_is_read_from_a_file_without_its_byte_order_mark(tmp_path):
    (tmp_path / "o.txt").write_text("\ufeffit is in Asia", encoding="utf-8")
    assert observation_of(f"@{tmp_path}/o.txt") == "it is in Asia"
    assert observation_of("it is") == "it is"


async def test_fork_end_to_end(lookup_run, tags, monkeypatch, capsys):
    path, _ = lookup_run
    monkeypatch.setattr(
        "agentrl.run.components.Components.engine",
        lambda self, *_: FakeEngine(tags, lambda r: script(dataclasses.replace(r, turn=1 + r.turn))),
    )
    assert await command("fork", path, "2-0", "--turn", 1, "--branches", 2) == 0
    text = capsys.readouterr().out
    assert "identical" in text.splitlines()[3]
    recording = Recording(path / "forks" / "2-0-t1-1")
    assert [e.split for e in recording.episodes] == ["fork", "fork"]
    assert recording.record(recording.episodes[1])["fork"] == {
        "episode_id": "2-0",
        "turn": 1,
        "seed": 1,
        "observation": None,
    }
    assert await command("fork", path, "2-0", "--turn", 9) == 2


def log_probs(t):
    return [x for g in t.segments for s in g.spans for x in s.log_probs or ()]


@pytest.mark.full
async def test_on_the_local_engine_every_fork_with_the_same_seed_is_the_original_again():
    """A live engine, real weights: the seed law makes a recorded episode reproducible from any of its turns."""
    from agentrl.cli.common import runner_of
    from agentrl.run.components import Components
    from agentrl.run.resolve import env_defaults
    from agentrl.types import EpisodeSpec

    components = Components(build_config(env_defaults("search_r1"), {"env": "search_r1", "threads": 1}))
    engine = components.engine()
    runner = runner_of(components, "train", engine)
    try:
        await engine.start()
        tasks = [t for t in components.tasks.training() if t.metadata["hops"] == 2][:3]
        episodes = [await runner.run(EpisodeSpec(task, n, n)) for n, task in enumerate(tasks)]
        others = 0
        for t in episodes:
            for turn in range(len(t.turns)):
                same, *rest = await fork(runner, t, turn, seeds=range(6))
                assert same.differs_at is None
                # a context computed at once and one computed turn by turn round differently; no draw changes
                assert log_probs(same.trajectory) == pytest.approx(log_probs(t), abs=1e-4)
                assert same.trajectory.rewards == t.rewards
                others += sum(b.differs_at is not None for b in rest)
        assert others, "other seeds draw otherwise"
    finally:
        runner.close()
        await engine.close()
        components.close()
