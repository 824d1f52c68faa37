"""Environments of several speakers: whose tokens are trained, by which rewards, and what of it is recorded."""

import asyncio
import sys
from dataclasses import replace

import duel
import pytest
from doubles import FakeGenerator, groups_of, make_runner, play
from duel import Duel, Shop, Silent, customer, length, rank

from agentrl import Env, StepResult
from agentrl.errors import ContractError, InfraError
from agentrl.replay.fork import fork
from agentrl.replay.replayer import replay_group
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.metrics import eval_metrics, rollout_metrics
from agentrl.schedule.pace import nonzero_std
from agentrl.store import EpisodeWriter, read_episodes
from agentrl.store.episode_record import exactness_violations
from agentrl.train.advantage import compare, group_advantages
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows, step_record
from agentrl.types import EpisodeSpec, Observation, Provenance, StopReason, by_role, split_role_id

SAMPLED, OBSERVATION, OTHER = Provenance.SAMPLED, Provenance.OBSERVATION, Provenance.OTHER_AGENT


def numbers(request):
    """White says more than black in even episodes."""
    episode, role = split_role_id(request.session)
    index = int(episode.partition("-")[0])
    return f"{7 if (role == 'white') is (index % 2 == 0) else 3}{request.turn}"


def by_seed(request):
    """The same for the same request, whatever was asked before."""
    return str(request.sampling.seed % 1000)


async def group(renderer, env=Duel, *, script=numbers, rewards=(), players=None, size=2):
    runner = make_runner(env, FakeGenerator(renderer, script), renderer, rewards=rewards, players=players)
    try:
        (made,), _ = await Rollout(runner, RolloutLimits()).run(groups_of(1, size))
        return made
    finally:
        runner.close()


def texts(renderer, segment, *provenances):
    return [renderer.tokenizer.decode(s.ids) for s in segment.spans if s.provenance in provenances]


async def test_each_role_has_its_own_context_and_reads_only_what_is_addressed_to_it(tags):
    t = await play(Duel, numbers, tags)
    assert [s.agent_id for s in t.segments] == ["white", "black"]
    assert [turn.agent_id for turn in t.turns] == ["white", "black", "white", "black"]
    assert [turn.observation.to for turn in t.turns] == ["black", "white", "black", ""]
    white, black = t.segments
    assert [x.split("<|im_end|>")[0] for x in texts(tags, white, SAMPLED)] == ["70", "71"]
    assert [x.split("<|im_end|>")[0] for x in texts(tags, black, SAMPLED)] == ["30", "31"]
    assert "The other said 30" in "".join(texts(tags, white, OBSERVATION))
    assert "You are black. The other said 70" in texts(tags, black, Provenance.PROMPT)[0]
    assert "You are white" not in tags.tokenizer.decode(black.ids)
    assert t.roles == ("white", "black")
    assert exactness_violations([t]) == 0


async def test_tokens_of_a_role_are_trained_by_its_own_rewards_only(tags):
    made = await group(tags)
    for t in made.trajectories:
        win = 1 if t.index % 2 == 0 else -1
        # 0.25 for each own move but the last of the episode, 0.125 for each move of the other that addressed it
        scores = {"white": win + 0.5 + 0.125, "black": -win + 0.25 + 0.25}
        assert {role: t.of_role(role).score for role in t.roles} == scores
        assert t.score == sum(scores.values()) / 2
        samples = to_samples(t)
        assert [(s.episode_id, s.segment_index, s.reward) for s in samples] == [
            (f"{t.episode_id}#white", 0, scores["white"]),
            (f"{t.episode_id}#black", 1, scores["black"]),
        ]
        for sample, segment in zip(samples, t.segments, strict=True):
            own = [i for span in segment.spans if span.provenance is SAMPLED for i in span.ids]
            masked = [i for i, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
            assert masked == own


async def test_a_role_is_compared_with_the_same_role_of_its_group(tags):
    made = await group(tags)
    advantages = group_advantages([made], "dr_grpo")
    assert advantages == {"0-0#white": 1.0, "1-0#white": -1.0, "0-0#black": -1.0, "1-0#black": 1.0}
    assert nonzero_std(made), "the mean score of an episode is that of all, but those of the roles differ"
    metrics = rollout_metrics([made], _no_causes(), 0)
    assert (metrics["flat_groups"], metrics["role/white/reward"], metrics["role/black/reward"]) == (0.0, 0.625, 0.5)
    assert eval_metrics("test", [made])["eval/test/role/white/reward"] == 0.625


def _no_causes():
    from agentrl.rollout.failures import CauseTable

    return CauseTable()


async def test_rewards_of_turns_lie_on_the_roles_own_tokens(tags):
    made = await group(tags)
    data = compare([made]).data
    for episode, tokens in enumerate(data.starts()):
        assert data.rewards[tokens].sum() == pytest.approx(data.scores[episode])
        assert len(set(data.turn[tokens])) == 2


async def test_rewards_are_called_for_each_role(tags):
    made = await group(tags, rewards=[length, rank])
    for t in made.trajectories:
        assert set(t.rewards) == {"length.white", "length.black", "rank.white", "rank.black"}
        assert t.of_role("white").rewards == {"length": t.rewards["length.white"], "rank": t.rewards["rank.white"]}
        ahead = "white" if t.index % 2 == 0 else "black"
        assert {role: t.rewards[f"rank.{role}"] for role in t.roles} == {r: float(r == ahead) for r in t.roles}


async def test_rows_name_the_role_and_are_rebuilt_from_the_record(tags):
    made = await group(tags)
    compared = compare([made])
    samples = [s for part in compared.samples for s in part]
    rows = make_rows(samples, group_advantages([made]))

    class Trainer:
        copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, True

    record = step_record(rows, Trainer())
    assert [(r["episode_id"], r["role"], r["segment_index"]) for r in record["rows"]] == [
        ("0-0", "white", 0),
        ("1-0", "white", 0),
        ("0-0", "black", 1),
        ("1-0", "black", 1),
    ]
    by_place = {split_role_id(s.episode_id)[0] + str(s.segment_index): s for s in samples}
    again = rebuild_rows(record, lambda episode, segment: by_place[f"{episode}{segment}"])
    for a, b in zip(rows, again, strict=True):
        assert a.source == b.source
        assert (a.advantages == b.advantages).all()


async def test_a_frozen_players_tokens_are_recorded_and_never_trained(tags):
    other = FakeGenerator(tags, ["55"])
    made = await group(tags, players={"black": other})
    t = made.trajectories[0]
    assert t.roles == ("white",)
    assert "0-0#black" in [r.session for r in other.requests]
    assert "0-0#black" in other.released
    kinds = {s.agent_id: {x.provenance for x in s.spans} for s in t.segments}
    assert OTHER in kinds["black"]
    assert SAMPLED not in kinds["black"]
    assert OTHER not in kinds["white"]
    assert [s.episode_id for s in to_samples(t)] == ["0-0#white"]
    assert set(group_advantages([made])) == {"0-0#white", "1-0#white"}
    bare = replace(t, roles=())
    assert {s.segment_index for s in to_samples(bare)} == {0}, "without roles too, no token of the other is trained"


async def test_a_role_that_never_acted_has_no_tokens_and_its_score(tags):
    made = await group(tags, env=Silent)
    assert {s.episode_id for t in made.trajectories for s in to_samples(t)} == {"0-0#white", "1-0#white"}
    assert [part[0].score for part in by_role(made.trajectories)] == [1.0, 0.0]


async def test_a_scripted_user_speaks_by_text(tags):
    t = await play(Shop, ["Here is your tea.</answer>"], tags, players=Shop.players)
    assert t.state == {"said": ["Tea, please.", "Here is your tea.</answer>", "Thanks for: Here is your tea.</answer>"]}
    assert [(turn.agent_id, turn.segment) for turn in t.turns] == [("customer", -1), ("clerk", 0), ("customer", -1)]
    assert (t.roles, t.score, len(t.segments)) == (("clerk",), 1.0, 1)
    assert exactness_violations([t]) == 0
    (sample,) = to_samples(t)
    assert sample.reward == 1.0


async def test_a_user_simulator_may_be_async_and_its_failure_is_never_a_score(tags):
    async def asks(messages, *, seed):
        await asyncio.sleep(0)
        return customer(messages, seed=seed)

    t = await play(Shop, ["tea</answer>"], tags, players={"customer": asks})
    assert t.stop_reason is StopReason.TERMINATED

    def down(messages, *, seed):
        raise InfraError("the server is down")

    t = await play(Shop, ["tea</answer>"], tags, players={"customer": down})
    assert (t.stop_reason, t.rewards) == (StopReason.ENV_FAILURE, {})
    assert "the server is down" in t.detail
    with pytest.raises(ContractError, match="player of customer must return a text, found int: 7"):
        await play(Shop, ["tea</answer>"], tags, players={"customer": lambda messages, *, seed: 7})


@pytest.mark.parametrize("players", [{}, {"black": "frozen"}])
async def test_record_replay_and_fork(tags, tmp_path, players):
    def named():
        return {role: FakeGenerator(tags, by_seed) for role in players}

    made = await group(tags, script=by_seed, rewards=[length, rank], players=named())
    writer = EpisodeWriter(tmp_path)
    for t in made.trajectories:
        writer.write(t, step=0, split="train")
    writer.close()
    episodes = list(read_episodes(tmp_path))
    assert episodes == list(made.trajectories)
    runner = make_runner(Duel, FakeGenerator(tags, by_seed), tags, rewards=[length, rank], players=named())
    assert [o.divergence for o in await replay_group(runner, episodes)] == [None, None]
    for turn in range(4):
        same, other = await fork(runner, episodes[0], turn, seeds=(0, 1))
        assert same.differs_at is None
        assert other.differs_at is not None
        assert other.trajectory.turns[turn].action.text != episodes[0].turns[turn].action.text
        assert same.trajectory.roles == episodes[0].roles
    runner.close()


async def test_replay_and_fork_of_a_scripted_user(tags, tmp_path):
    asked = []

    def counted(messages, *, seed):
        asked.append(seed)
        return customer(messages, seed=seed)

    runner = make_runner(Shop, FakeGenerator(tags, ["tea</answer>"]), tags, players={"customer": counted})
    t = await runner.run(EpisodeSpec(groups_of(1, 1)[0][0].task, 0, 0))
    writer = EpisodeWriter(tmp_path)
    writer.write(t, step=0, split="train")
    writer.close()
    (read,) = read_episodes(tmp_path)
    assert read == t
    assert len(asked) == 2
    (outcome,) = await replay_group(runner, [read])
    assert (outcome.divergence, len(asked)) == (None, 2), "a replay takes the user's texts from the record"
    (branch,) = await fork(runner, read, 1)
    assert branch.differs_at is None
    assert asked[2:] == asked[1:2], "after the fork the user is asked again, with the same seed"
    runner.close()


async def test_a_different_speaker_is_reported_by_replay(tags):
    made = await group(tags)

    class Swapped(Duel):
        def step(self, action):
            result = super().step(action)
            if result.terminated:
                return result
            return replace(result, observation=replace(result.observation, to="white"))

    runner = make_runner(Swapped, FakeGenerator(tags, []), tags)
    outcomes = await replay_group(runner, made.trajectories)
    runner.close()
    assert {o.divergence.what for o in outcomes} == {"the role that acts next"}


async def test_limits_count_for_each_role(tags):
    t = await play(Duel, numbers, tags, env_args={"rounds": 9}, max_turns=2)
    assert t.stop_reason is StopReason.MAX_TURNS
    assert [turn.agent_id for turn in t.turns] == ["white", "black", "white"]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"roles": "ab"}, "must be distinct names"),
        ({"roles": ("a", "a")}, "must be distinct names"),
        ({"roles": ("a b", "c")}, "must be distinct names"),
        ({"roles": ("policy", "c")}, "must be distinct names"),
        ({"to": "blak"}, "names the role 'blak', and the environment has white, black; did you mean 'black'"),
        ({"rewards": {"grey": 1.0}}, "StepResult.rewards names the role 'grey'"),
        ({"rewards": {"white": "much"}}, "must be a finite number"),
        ({"rewards": 5}, "must be a mapping of roles"),
        ({"roles": (), "to": "white"}, "the environment has no roles"),
    ],
)
async def test_what_does_not_fit_is_refused(tags, attributes, message):
    class Wrong(Env):
        roles = attributes.get("roles", ("white", "black"))

        def reset(self, task, *, seed):
            return "go"

        def step(self, action):
            return StepResult(Observation.of("go", to=attributes.get("to", "")), rewards=attributes.get("rewards", {}))

    with pytest.raises(ContractError, match=message):
        await play(Wrong, numbers, tags)


@pytest.mark.slow
async def test_roles_in_a_process_of_their_own(tags, monkeypatch):
    monkeypatch.setitem(sys.modules, "duel", duel)  # other tests load the file again, under its name
    runner = make_runner(Duel, FakeGenerator(tags, numbers), tags)
    runner.pools.isolation = "process"
    try:
        t = await runner.run(EpisodeSpec(groups_of(1, 1)[0][0].task, 0, 0))
    finally:
        runner.close()
        runner.pools.end_processes()
    assert (t.roles, len(t.turns), t.stop_reason) == (("white", "black"), 4, StopReason.TERMINATED)
