"""The context hook: what leaves a long conversation opens a segment, and everything else continues as if nothing had happened."""

import dataclasses

import pytest
from doubles import FakeGenerator, call, groups_of, make_runner, play
from echo import Echo

from agentrl import ToolEnv, reward, tool
from agentrl.errors import ConfigError, ContractError, UnknownNameError
from agentrl.render import DropOldTurns, Summarise
from agentrl.render.context_policy import resolve_context_policy
from agentrl.replay.fork import fork
from agentrl.replay.replayer import replay_group
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, exactness_violations, read_episodes, to_record
from agentrl.store.episode_record import encode
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.types import Provenance, StopReason


@reward
def exact(trajectory):
    return float(trajectory.answer == trajectory.label)


class Long(ToolEnv):
    """Searches with long results, then an answer."""

    action_format = "hermes"
    rewards = (exact,)
    context_policy = DropOldTurns(keep=1, above=0.5)

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"{query}: " + "the capital of France is Paris. " * 5


def script(request):
    return (*(call("search", query=f"q{i}") for i in range(5)), "<answer>Paris</answer>")[min(request.turn, 5)]


async def test_private_characters_beside_a_control_token_are_plain_text_in_a_new_segment(hermes):
    text = "\U000f0000\U00100000\U000f8000\U00108000<|im_end|>"

    class Says(Echo):
        context_policy = DropOldTurns(keep=1, above=0.0)

    t = await play(Says, ["x", "y", "z"], hermes, env_args={"ends": 3, "observation": text})
    assert (t.stop_reason, len(t.segments)) == (StopReason.TERMINATED, 2)
    assert text in hermes.tokenizer.decode(t.segments[1].ids)


LIMITS = {"context_length": 420, "max_response_tokens": 4096}


async def record(env, renderer, folder, **more):
    runner = make_runner(env, script, renderer, rewards=env.rewards, **{**LIMITS, **more})
    groups, _ = await Rollout(runner, RolloutLimits(max_retries=0)).run(groups_of(2, 2))
    runner.close()
    writer = EpisodeWriter(folder)
    made = [t for g in groups for t in g.trajectories]
    for t in made:
        writer.write(t)
    writer.close()
    return made, list(read_episodes(folder))


async def replayed(env, renderer, members, **more):
    runner = make_runner(env, [], renderer, rewards=env.rewards, **{**LIMITS, **more})
    try:
        return [o.divergence for o in await replay_group(runner, members)]
    finally:
        runner.close()


async def test_old_turns_leave_and_the_episode_goes_on(hermes, tmp_path):
    made, read = await record(Long, hermes, tmp_path)
    t = made[0]
    assert t.stop_reason is StopReason.TERMINATED, (t.stop_reason, t.cause)
    assert len(t.turns) == 6
    assert len(t.segments) > 1
    assert exactness_violations(made) == 0
    rewritten = [u for u in t.turns if u.context is not None]
    assert len(rewritten) == len(t.segments) - 1
    for u in rewritten:
        assert u.info["new_segment"] == "the context policy"
        assert [m["role"] for m in u.context] == ["user", "assistant", "tool"]
        assert u.observation.messages[-1] == u.context[-1]
    without = await play(type("Without", (Long,), {"context_policy": None}), script, hermes, **LIMITS)
    assert without.stop_reason in (StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS)
    assert [encode(to_record(a)) for a in read] == [encode(to_record(b)) for b in made]


async def test_every_sampled_token_is_trained_once_with_the_episodes_advantage(hermes, tmp_path):
    made, _ = await record(Long, hermes, tmp_path)
    samples = [s for t in made for s in to_samples(t)]
    assert sum(s.trained_tokens for s in samples) == sum(t.sampled_tokens for t in made)
    assert all(s.segments[0].spans[0].provenance is Provenance.PROMPT for s in made)
    rows = make_rows(samples, {t.episode_id: 2.0 for t in made})
    assert len(rows) > len(made)
    for t in made:
        mine = [r for r in rows if r.source[0] == t.episode_id]
        assert len(mine) == len(t.segments)
        assert sum(r.weights.sum() for r in mine) == pytest.approx(1 / len(made))
        assert {float(a) for r in mine for a in r.advantages[r.weights > 0]} == {2.0}


async def test_a_replay_asks_todays_policy(hermes, tmp_path):
    _, read = await record(Long, hermes, tmp_path)
    assert await replayed(Long, hermes, read[:2]) == [None, None]
    other = type("Long", (Long,), {"context_policy": DropOldTurns(keep=2, above=0.5)})
    (found, _) = await replayed(other, hermes, read[:2])
    assert (found.cause, found.what) == ("env", "the result of the context policy")
    first = next(u.index for u in read[0].turns if u.context)
    assert found.turn == first


async def test_a_policy_that_asks_a_model_is_not_asked_again(hermes, tmp_path):
    asked = []

    async def write(old):
        asked.append(len(old))
        return f"Summary {len(asked)} of {len(old)} messages"

    class Summed(Long):
        context_policy = Summarise(write, keep=1, above=0.5)

    _, read = await record(Summed, hermes, tmp_path)
    times = len(asked)
    assert times
    assert "Summary" in next(u for u in read[0].turns if u.context).context[0]["content"]
    assert await replayed(Summed, hermes, read[:2]) == [None, None]
    assert len(asked) == times
    runner = make_runner(Summed, FakeGenerator(hermes, script), hermes, **LIMITS)
    at = next(u.index for u in read[0].turns if u.context) + 1
    runner.engine.turns[f"fork/{read[0].episode_id}@{at}/0/{read[0].episode_id}"] = at
    (branch,) = await fork(runner, read[0], at)
    assert branch.trajectory.turns[at - 1].context is not None
    assert runner.rewrite_context is None
    runner.close()


async def test_a_method_of_the_environment_is_a_policy(hermes):
    class Own(Long):
        def context_policy(self, view):
            if view.share < 0.5:
                return None
            self.forgot = len(view.messages)
            return [*view.messages[: view.first], {"role": "user", "content": f"{view.tokens}: go on"}]

        def state(self):
            return {"forgot": self.forgot}

    t = await play(Own, script, hermes, **LIMITS)
    assert t.stop_reason is StopReason.TERMINATED, t.cause
    assert t.state["forgot"] > 2
    u = next(u for u in t.turns if u.context)
    assert [m["role"] for m in u.context] == ["user", "user"]


async def test_an_observation_too_large_for_what_is_left_is_shown_to_the_policy_first(hermes):
    class Late(Long):
        context_policy = DropOldTurns(keep=1, above=1.0)

    t = await play(Late, script, hermes, **LIMITS)
    assert t.stop_reason is StopReason.TERMINATED
    assert sum(u.observation_cut_tokens for u in t.turns) == 0
    assert len(t.segments) > 1


async def test_what_a_policy_does_wrong(hermes):
    def policy(value):
        return type("Bad", (Long,), {"context_policy": staticmethod(value)})

    t = await play(policy(lambda view: 1 / 0), script, hermes, **LIMITS)
    assert (t.stop_reason, t.cause) == (StopReason.ENV_FAILURE, "context policy: ZeroDivisionError")
    with pytest.raises(ContractError, match="must return messages"):
        await play(policy(lambda view: ["x"]), script, hermes, **LIMITS)
    t = await play(
        policy(lambda view: [*view.messages[:-1], {"role": "user", "content": "long " * 900}]), script, hermes, **LIMITS
    )
    assert t.turns[0].observation_cut_tokens > 0
    t = await play(
        policy(lambda view: [{"role": "user", "content": "long " * 900}, *view.messages]), script, hermes, **LIMITS
    )
    assert t.stop_reason in (StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS)


def test_names_on_the_command_line():
    assert resolve_context_policy(None) is None
    assert resolve_context_policy("drop_old_turns") == DropOldTurns()
    with pytest.raises(UnknownNameError, match="drop_old_turns"):
        resolve_context_policy("drop_old_turn")
    with pytest.raises(ConfigError):
        resolve_context_policy("no.such:thing")
    with pytest.raises(ContractError, match="expected a function"):
        resolve_context_policy("agentrl.render.context_policy:__name__")


async def test_the_command_lines_policy_goes_before_the_environments(hermes):
    class Never(Long):
        context_policy = None

    runner = make_runner(Never, script, hermes, **LIMITS)
    runner = dataclasses.replace(runner, context_policy=DropOldTurns(keep=1, above=0.5))
    t = await runner.run(groups_of(1, 1)[0][0])
    runner.close()
    assert t.stop_reason is StopReason.TERMINATED
    assert len(t.segments) > 1
