"""The experts that an engine chose for each token are recorded with its generations, and stay with the episode."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from doubles import PROMPT, SAMPLED, groups_of, make_runner, span, trajectory
from gateway_agents import agent_class, message_of, user
from lookup import Search

from agentrl.core.routed_experts import RoutedExperts, RouterShape
from agentrl.engine.base import Generation, SamplingParams, check_routed_experts
from agentrl.engine.scripted import ScriptedEngine
from agentrl.errors import DataError, EngineFailure, InvariantError, StoreError
from agentrl.gateway.driver import GatewayDriver
from agentrl.replay.fork import fork
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.recorder import Recorder
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.group_buffer import read_buffer, write_buffer
from agentrl.run.group_player import PlayedGroup
from agentrl.store import EpisodeWriter, Recording, encode, from_record, read_episodes, to_record
from agentrl.train.rows import make_row, make_rows
from agentrl.train.sample import segment_sample, to_samples
from agentrl.train.step_record import rebuild_rows, step_record
from agentrl.types import EpisodeSpec, FinishReason, Group, Task

ROUTER = RouterShape(layers=3, experts=8, topk=2, mixtures=(0, 2))
TURNS = ["<search>capital</search>", "<search>France</search>", "<answer> Paris </answer>"]


def engine_of(renderer, **options):
    tokenizer = renderer.tokenizer
    return ScriptedEngine(TURNS, encode=tokenizer.encode, decode=tokenizer.decode, **{"router": ROUTER, **options})


def runner_of(engine, renderer, env=Search, **more):
    runner = make_runner(env, engine, renderer, rewards=env.rewards, **more)
    return dataclasses.replace(runner, sampling=dataclasses.replace(runner.sampling, routed_experts_from=0))


async def played(renderer, engine=None):
    """Two groups of two episodes, and the engine that sampled them."""
    engine = engine or engine_of(renderer)
    runner = runner_of(engine, renderer)
    groups, table = await Rollout(runner, RolloutLimits(max_retries=0, max_failure_share=1.0)).run(groups_of(2, 2))
    runner.close()
    return groups, engine, table


def experts_of(t):
    (segment,) = t.segments
    return segment.routed_experts


def of_ids(ids):
    """What the scripted engine invents for tokens that were inputs."""
    return engine_of_ids()._experts(ids, 0)


def engine_of_ids():
    return ScriptedEngine([], router=ROUTER)


async def test_each_generation_is_asked_for_the_experts_that_are_not_known(tags):
    groups, engine, _ = await played(tags)
    (t, *_) = groups[0].trajectories
    asked = [r.sampling.routed_experts_from for r in engine.requests if r.session == t.episode_id]
    ends = [turn.context_length + len(ids) for turn, ids in zip(t.turns, sampled(t), strict=True)]
    assert asked == [0, *(end - 1 for end in ends[:-1])]
    assert experts_of(t) == of_ids(t.segments[0].ids[: ends[-1] - 1])
    assert experts_of(t).tokens == ends[-1] - 1


def sampled(t):
    return [span.ids for span in t.segments[0].spans if span.provenance is SAMPLED]


async def test_a_run_without_replay_asks_for_none(tags):
    engine = engine_of(tags)
    runner = make_runner(Search, engine, tags, rewards=Search.rewards)
    groups, _ = await Rollout(runner, RolloutLimits()).run(groups_of(1, 1))
    runner.close()
    assert {r.sampling.routed_experts_from for r in engine.requests} == {None}
    assert experts_of(groups[0].trajectories[0]) is None


class OneTooMany(ScriptedEngine):
    """Returns the experts of the last token too, as if it had been an input."""

    async def generate(self, ids, sampling, **how):
        generation = await super().generate(ids, sampling, **how)
        return dataclasses.replace(
            generation, routed_experts=self._experts([*ids, *generation.ids], sampling.routed_experts_from)
        )


@pytest.mark.parametrize(("kind", "found"), [(OneTooMany, r"those of \d+ tokens"), (ScriptedEngine, "none")])
async def test_an_engine_that_returns_others_fails_the_episode(tags, kind, found):
    tokenizer = tags.tokenizer
    options = {} if kind is ScriptedEngine else {"router": ROUTER}
    engine = kind(TURNS, encode=tokenizer.encode, decode=tokenizer.decode, **options)
    groups, _, table = await played(tags, engine)
    assert groups == []
    assert table.by_reason() == {"engine_failure": 4}
    experts = engine_of_ids()._experts([1] * 6, 0) if options else None
    generation = Generation((7, 8), (-1.0, -1.0), FinishReason.STOP, routed_experts=experts)
    asked = rf"asked for the routed experts of 5 tokens \(4 of context and 2 sampled.* returned {found}"
    with pytest.raises(EngineFailure, match=asked):
        check_routed_experts(generation, SamplingParams(1, routed_experts_from=0), 4)


def test_the_recorder_keeps_what_is_known_and_refuses_a_gap():
    recorder = Recorder()
    recorder.open([(PROMPT, (1, 2, 3))])

    def add(ids, experts):
        generation = Generation(ids, (-1.0,) * len(ids), FinishReason.STOP, routed_experts=experts)
        recorder.sampled(generation, turn=0, temperature=1.0)

    add((4, 5), of_ids([1, 2, 3, 4]))
    recorder.extend([(PROMPT, (6,))], turn=0)
    assert recorder.experts_length() == 4
    with pytest.raises(InvariantError, match="tokens 5 to 6 cannot follow those of the first 4"):
        add((7,), of_ids([1, 2, 3, 4, 5, 6])[5:])
    other = of_ids([9, 9, 9, 9, 5, 6])
    add((7,), other)
    (segment,) = recorder.segments()
    assert np.array_equal(segment.routed_experts.array()[:4], of_ids([1, 2, 3, 4]).array())
    assert np.array_equal(segment.routed_experts.array()[4:], other.array()[4:])


async def test_records_name_them_by_hash_and_every_reader_gets_them(tags, tmp_path):
    groups, _, _ = await played(tags)
    trajectories = [t for g in groups for t in g.trajectories]
    writer = EpisodeWriter(tmp_path / "episodes")
    for t in trajectories:
        writer.write(t, step=0)
    writer.sync()
    writer.close()
    files = sorted((tmp_path / "episodes/routed_experts").iterdir())
    assert [f.stem for f in files] == sorted({experts_of(t).sha256 for t in trajectories})
    read = list(read_episodes(tmp_path))
    assert read == trajectories
    assert [experts_of(t).array().tolist() for t in read] == [experts_of(t).array().tolist() for t in trajectories]
    record = Recording(tmp_path).record(Recording(tmp_path).episodes[0])
    assert "base64" not in encode(record).decode()
    assert encode(to_record(from_record(record, Recording(tmp_path).blobs))) == encode(to_record(read[0]))


async def test_a_missing_or_damaged_file_is_one_sentence(tags, tmp_path):
    groups, _, _ = await played(tags)
    writer = EpisodeWriter(tmp_path)
    writer.write(groups[0].trajectories[0])
    writer.close()
    (file,) = (tmp_path / "routed_experts").iterdir()
    (t,) = read_episodes(tmp_path)
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(StoreError, match=r"the routed experts .* cannot be read"):
        experts_of(t).array()
    for wrong in (content[:-3], zstandard.ZstdCompressor().compress(b"\0" * (1 << 20)), b""):
        file.write_bytes(wrong)
        with pytest.raises(StoreError, match="routed experts"):
            experts_of(t).array()
    writer = EpisodeWriter(tmp_path)
    writer.write(groups[0].trajectories[0])  # as a resumed run does, after a power loss left the file so
    writer.close()
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "wrong", [{"sha256": "../../etc/passwd"}, {"dtype": "O"}, {"shape": [1, 2]}, {"base64": "AAAA"}, {"base64": "!"}]
)
def test_a_record_that_names_something_else_is_refused(wrong):
    t = trajectory([[span(PROMPT, (1, 2), -1), span(SAMPLED, (3, 4))]])
    segment = dataclasses.replace(t.segments[0], routed_experts=of_ids([1, 2, 3]))
    record = to_record(dataclasses.replace(t, segments=(segment,)))
    record["segments"][0]["routed_experts"] |= wrong
    with pytest.raises(StoreError, match="cannot be read"):
        from_record(record)


async def test_forks_keep_those_of_the_recorded_turns_and_record_the_new_ones(tags):
    groups, _, _ = await played(tags)
    (original, *_) = groups[0].trajectories
    engine = engine_of(tags)
    runner = runner_of(engine, tags)
    (branch,) = await fork(runner, original, 1)
    runner.close()
    t = branch.trajectory
    end = t.turns[-1].context_length + len(sampled(t)[-1])
    assert experts_of(t) == of_ids(t.segments[0].ids[: end - 1])
    known = original.turns[0].context_length + len(sampled(original)[0]) - 1
    assert engine.requests[0].sampling.routed_experts_from == known


async def test_requests_at_the_gateway_ask_for_the_whole_context(tags):
    """Which segment a request continues is known when its answer is recorded."""

    async def agent(client):
        messages = [user("one?")]
        for number in range(3):
            messages += [message_of(await client.chat(messages)), user(f"more {number}")]

    engine = engine_of(tags)
    env = agent_class(agent)
    driver = GatewayDriver(env)
    runner = runner_of(engine, tags, env, driver=driver)
    try:
        t = await runner.run(EpisodeSpec(Task("t", "x"), 0, 0))
    finally:
        await driver.close()
        runner.close()
    assert len(t.turns) == 3
    assert {r.sampling.routed_experts_from for r in engine.requests} == {0}
    for segment in t.segments:
        assert segment.routed_experts == of_ids(segment.ids[: segment.routed_experts.tokens])
        assert segment.routed_experts.tokens == len(segment.ids) - 1


async def test_groups_that_wait_in_a_checkpoint_hold_them(tags):
    groups, _, _ = await played(tags)
    group = groups[0]
    specs = groups_of(2, 2)[0]
    played_group = PlayedGroup(group=group, attempts=group.trajectories, causes=CauseTable())
    content = write_buffer({0: specs}, {0: played_group})
    _, outcomes = read_buffer(content, {"": [group.task]}, "here")
    assert [experts_of(t).array().tolist() for t in outcomes[0].group.trajectories] == [
        experts_of(t).array().tolist() for t in group.trajectories
    ]


async def test_rows_and_the_record_of_a_step_have_them_only_where_they_are_replayed(tags):
    groups, _, _ = await played(tags)
    (t, *_) = groups[0].trajectories
    (sample,) = to_samples(t)
    (row,) = make_rows([sample], {t.episode_id: 1.0}, replay_experts=True)
    assert np.array_equal(row.routed_experts, experts_of(t).array())
    (free,) = make_rows([sample], {t.episode_id: 1.0})
    assert free.routed_experts is None
    for made in (row, free):
        (again,) = rebuild_rows(step_record([made], Trainer()), lambda *_: sample)
        assert (again.routed_experts is None) == (made.routed_experts is None)
    bare = dataclasses.replace(sample, rollout_routed_experts=None)
    with pytest.raises(DataError, match=r"episode 0-0, segment 0 has no routed experts .*--use-rollout-routing-replay"):
        make_row(bare, advantage=1.0, weight=1.0, replay_experts=True)
    four = segment_sample(trajectory(), 0, None, False)
    with pytest.raises(InvariantError, match=r"rollout_routed_experts has \d+ entries for 4 tokens"):
        dataclasses.replace(four, rollout_routed_experts=experts_of(t))


class Trainer:
    copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, True


def test_large_numbers_of_experts_take_two_bytes():
    small, large = (RoutedExperts.of(np.array([[[0, n]]])) for n in (255, 256))
    assert (len(small.content), len(large.content)) == (2, 4)
    assert large.array().tolist() == [[[0, 256]]]
    assert small != large
    assert small == RoutedExperts.of(np.array([[[0, 255]]], np.int64))
    assert hash(small) == hash(RoutedExperts.of(np.array([[[0, 255]]])))


def test_groups_are_equal_only_with_equal_experts():
    t = trajectory()
    a, b = (
        dataclasses.replace(t, segments=(dataclasses.replace(t.segments[0], routed_experts=of_ids(ids)),))
        for ids in ([1, 2], [1, 3])
    )
    for one, other in pairwise((a, b)):
        assert Group(0, t.task, (one,)) != Group(0, t.task, (other,))
