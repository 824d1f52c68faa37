"""One episode: what ends it, and contract violations of user code."""

import numpy as np
import pytest
from doubles import SAMPLED, call, play, trajectory
from echo import Echo, Slow

from agentrl import Env, InfraError, StepResult, ToolEnv, reward, tool
from agentrl.engine.base import Generation
from agentrl.errors import ContractError, EngineAbort, EngineFailure
from agentrl.train.advantage import in_baseline, is_trained
from agentrl.train.sample import to_samples
from agentrl.types import FinishReason, Observation, Status, StopReason


@pytest.fixture(autouse=True)
def _fresh():
    Echo.made = []


# -- what ends an episode --------------------------------------------------------------------------------


class Raises(Echo):
    """Raises `error` in `where`."""

    def __init__(self, where, error=None):
        super().__init__()
        self.where, self.error = where, error or RuntimeError("boom")

    async def reset(self, task, *, seed):
        if self.where == "reset":
            raise self.error
        return task.messages

    async def step(self, action):
        if self.where == "step":
            raise self.error
        return await super().step(action)


class Lost(Echo, ToolEnv):
    step = ToolEnv.step

    @tool(retries=1)
    def gone(self) -> str:
        """Fail."""
        raise InfraError("the index is down")


class Truncating(Echo):
    async def step(self, action):
        return StepResult("over", truncated=True)


@reward
def broken(trajectory):
    raise ZeroDivisionError


# (env, env_args, script, more arguments) -> (stop reason, trained, in the baseline)
TABLE = {
    "env says so": (Echo, {"ends": 1}, ["x"], {}, StopReason.TERMINATED, True, True),
    "answer": (ToolEnv, {}, ["<answer>x</answer>"], {}, StopReason.TERMINATED, True, True),
    "env truncates": (Truncating, {}, ["x"], {}, StopReason.ENV_TRUNCATED, True, True),
    "turns": (Echo, {}, ["x"], {"max_turns": 3}, StopReason.MAX_TURNS, True, True),
    "response budget": (Echo, {}, ["x" * 500], {"max_response_tokens": 60}, StopReason.MAX_TOKENS, True, True),
    "one long turn": (Echo, {}, ["x" * 500], {"max_tokens_per_turn": 20}, StopReason.MAX_TOKENS, True, True),
    "context": (Echo, {}, ["x" * 500], {"context_length": 100}, StopReason.CONTEXT_FULL, True, True),
    "time": (Slow, {}, ["x"], {"episode_timeout_s": 0.1}, StopReason.EPISODE_TIMEOUT, False, False),
    "invalid": (Echo, {}, ["<tool_call>"], {"max_invalid_actions": 2}, StopReason.INVALID_ACTION_LIMIT, True, True),
    "abort": (Echo, {}, [EngineAbort("weights")], {}, StopReason.ENGINE_ABORT, False, False),
    "abort said": (Echo, {}, [Generation((), (), FinishReason.ABORT)], {}, StopReason.ENGINE_ABORT, False, False),
    "reset raises": (Raises, {"where": "reset"}, ["x"], {}, StopReason.ENV_FAILURE, False, False),
    "step raises": (Raises, {"where": "step"}, ["x"], {}, StopReason.ENV_FAILURE, False, False),
    "tool infrastructure": (Lost, {}, [call("gone")], {}, StopReason.TOOL_FAILURE, False, False),
    "reward raises": (Echo, {"ends": 1}, ["x"], {"rewards": [broken]}, StopReason.REWARD_FAILURE, False, False),
    "engine down": (Echo, {}, [EngineFailure("503")], {}, StopReason.ENGINE_FAILURE, False, False),
    "engine raises": (Echo, {}, [ConnectionError("x")], {}, StopReason.ENGINE_FAILURE, False, False),
}


@pytest.mark.parametrize("row", TABLE, ids=str)
async def test_every_row_of_the_table_of_stop_reasons(hermes, row):
    env, args, script, more, reason, trained, baseline = TABLE[row]
    t = await play(env, script, hermes, env_args=args, **more)
    assert (t.stop_reason, is_trained(t, "train"), in_baseline(t, "train")) == (reason, trained, baseline)
    assert all(made.closed == 1 for made in Echo.made)
    if t.status in (Status.FAILED, Status.ABORTED):
        assert to_samples(t) == []
        assert t.cause
        assert t.rewards == {}, "a failure is never turned into a reward"
    elif t.turns:
        assert to_samples(t)[0].status is t.status


@pytest.mark.parametrize("policy", ["train", "mask", "drop"])
@pytest.mark.parametrize(
    "reason", [StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.ENV_TRUNCATED]
)
def test_truncated_episodes_are_trained_masked_or_dropped(policy, reason):
    t = trajectory(reason=reason)
    assert (is_trained(t, policy), in_baseline(t, policy)) == (policy == "train", policy != "drop")


BAD_ANSWERS = {
    "too many tokens": Generation((1,) * 9999, (-1.0,) * 9999, FinishReason.STOP),
    "a log-prob missing": Generation((1, 2), (-1.0,), FinishReason.STOP),
    "a log-prob that is NaN": Generation((1, 2), (-1.0, float("nan")), FinishReason.STOP),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_an_invalid_generation_is_an_engine_failure(hermes, answer):
    t = await play(Echo, [answer], hermes)
    assert t.stop_reason is StopReason.ENGINE_FAILURE
    assert Echo.made[0].closed == 1


async def test_a_generation_cut_by_length_is_not_a_parse_error_and_ends_the_episode(hermes):
    t = await play(Echo, ["<tool_call>{" + "x" * 500], hermes, max_response_tokens=40, max_invalid_actions=1)
    assert t.stop_reason is StopReason.MAX_TOKENS
    assert t.turns[0].action.errors == ()
    assert Echo.made[0].steps == 0


async def test_order_the_environment_ends_before_the_limit_of_invalid_actions(hermes):
    t = await play(Echo, ["<tool_call>"], hermes, env_args={"ends": 1}, max_invalid_actions=1)
    assert t.stop_reason is StopReason.TERMINATED


async def test_order_invalid_actions_before_turns(hermes):
    t = await play(Echo, ["<tool_call>"], hermes, max_invalid_actions=1, max_turns=1)
    assert t.stop_reason is StopReason.INVALID_ACTION_LIMIT


async def test_order_turns_before_tokens(hermes):
    t = await play(
        Echo,
        ["x"],
        hermes,
        env_args={"observation": "y" * 9999},
        max_turns=1,
        context_length=200,
        max_response_tokens=100,
    )
    assert t.stop_reason is StopReason.MAX_TURNS


@pytest.mark.parametrize("script", [["x"], ["x" * 900]], ids=["before a generation", "in one"])
async def test_order_tokens_before_context_when_both_are_as_tight(hermes, script):
    prompt = len((await play(Echo, ["x"], hermes, env_args={"ends": 1})).segments[0].spans[0].ids)
    t = await play(Echo, script, hermes, max_turns=99, context_length=prompt + 50, max_response_tokens=50)
    assert t.stop_reason is StopReason.MAX_TOKENS


async def test_the_last_observation_is_not_appended_when_turns_run_out(hermes):
    t = await play(Echo, ["x"], hermes, max_turns=1)
    assert t.segments[0].spans[-1].provenance is SAMPLED
    assert t.turns[0].observation.messages[0]["content"] == "go on"


# -- contracts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: "text", "must return a StepResult"),
        (lambda: None, "must return a StepResult"),
        (lambda: StepResult(()), "returned no observation and did not end the episode"),
        (lambda: StepResult(5), "an observation must be"),
        (lambda: StepResult("x", reward=float("nan")), "finite number"),
        (lambda: StepResult("x", reward="1"), "finite number"),
        (lambda: StepResult("x", reward=b"1"), "finite number"),
        (lambda: StepResult("x", reward=None), "finite number"),
        (lambda: StepResult("x", reward=10**400), "finite number"),
        (lambda: StepResult("x", reward=1e155), "at most 1e"),
        (
            lambda: StepResult("x", terminated=np.array([True, False])),
            r"StepResult.terminated must be .*found ndarray: array\(\[ True",
        ),
        (
            lambda: StepResult("x", terminated=np.array([True])),
            "StepResult.terminated must be True or False, found ndarray",
        ),
        (lambda: StepResult("x", truncated=np.array([])), "StepResult.truncated must be True or False, found ndarray"),
        (lambda: StepResult("x", terminated="no"), "StepResult.terminated must be True or False, found str"),
        (lambda: StepResult("x", terminated=None), "StepResult.terminated must be True or False, found NoneType"),
        (lambda: StepResult("x", truncated=2), "StepResult.truncated must be True or False, found int"),
        (lambda: StepResult([{"role": "user", "content": [1, 2]}]), "an observation must be .* each a mapping"),
        (lambda: StepResult(Observation(({"role": "user", "content": ["a"]},))), "an observation must be"),
        (lambda: StepResult(Observation(("text",))), "an observation must be"),
        (lambda: StepResult("x", info=5), "info must be a mapping"),
        (lambda: StepResult("x", info=None), "info must be a mapping"),
    ],
)
async def test_a_contract_violation_stops_the_run_with_a_sentence_and_closes(hermes, step, message):
    class Broken(Echo):
        async def step(self, action):
            return step()

    with pytest.raises(ContractError, match=message):
        await play(Broken, ["x"], hermes)
    assert Echo.made[0].closed == 1


@pytest.mark.parametrize(
    ("flag", "ends"),
    [
        (True, True),
        (False, False),
        (np.bool_(True), True),
        (np.bool_(False), False),
        (np.array(True), True),
        (1, True),
        (0, False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["terminated", "truncated"])
async def test_flags_may_be_bools_of_numpy(hermes, name, flag, ends):
    class Ends(Echo):
        async def step(self, action):
            return StepResult("x", **{name: flag})

    t = await play(Ends, ["x"], hermes, max_turns=1)
    reason = StopReason.TERMINATED if name == "terminated" else StopReason.ENV_TRUNCATED
    assert t.stop_reason is (reason if ends else StopReason.MAX_TURNS)


@pytest.mark.parametrize("first", [(), [], None, 5, [{"role": "user"}]])
async def test_an_invalid_first_observation_stops_the_run(hermes, first):
    class Broken(Echo):
        async def reset(self, task, *, seed):
            return first

    with pytest.raises(ContractError, match="observation"):
        await play(Broken, ["x"], hermes)
    assert Echo.made[0].closed == 1


async def test_a_missing_step_is_a_failure_of_the_environment(hermes):
    class Nothing(Env):
        pass

    t = await play(Nothing, ["x"], hermes)
    assert t.cause == "env step: NotImplementedError"
