"""Rewards: their return values, their names, and failures."""

import asyncio
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from doubles import PROMPT, SAMPLED, play, span, trajectory
from echo import Echo

from agentrl import Env, StepResult
from agentrl.core.timeout_pool import pure
from agentrl.errors import ConfigError, ContractError, InfraError, RewardFailure, UnknownNameError
from agentrl.reward import REWARDS, Reward, Scorer, resolve_rewards, reward
from agentrl.rollout.failures import CauseTable
from agentrl.run.metrics import rollout_metrics
from agentrl.types import Group, StopReason


async def score(*fns, t=None, **more):
    scorer = Scorer([f if isinstance(f, Reward) else Reward(f, f"r{i}", **more) for i, f in enumerate(fns)])
    try:
        return await scorer.score(t or trajectory())
    finally:
        scorer.close()


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.float64(1)], ids=lambda v: type(v).__name__
)
async def test_numbers_are_numbers(value):
    t = await score(lambda _: value)
    assert t.rewards == {"r0": 1.0}
    assert type(t.rewards["r0"]) is float


async def test_a_dict_names_components_and_shares_the_weight():
    t = await score(Reward(lambda _: {"exact": 1.0, "format": 0.5, "judge": None}, "qa", 2.0))
    assert t.rewards == {"qa.exact": 1.0, "qa.format": 0.5, "qa.judge": None}
    assert t.score == 3.0


async def test_a_weight_of_zero_is_reported_and_not_scored():
    t = await score(Reward(lambda _: 5.0, "length", 0.0), Reward(lambda _: 1.0, "one"))
    assert (t.rewards["length"], t.score) == (5.0, 1.0)


async def test_async_rewards_and_sync_ones_that_return_a_coroutine():
    async def one(t):
        await asyncio.sleep(0)
        return 1.0

    t = await score(one, lambda t: one(t))
    assert t.rewards == {"r0": 1.0, "r1": 1.0}


async def test_a_reward_cannot_see_half_scored_components_of_another_run():
    before = trajectory()
    after = await score(lambda t: len(t.rewards), t=before)
    assert before.rewards == {}
    assert after.rewards == {"r0": 0.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "finite number or None"),
        (b"1", "finite"),
        ([1], "finite"),
        ({"a": "x"}, "r0.a must be"),
        (float("nan"), "nan"),
        (10**400, "finite"),
        (1j, "finite"),
    ],
    ids=lambda v: str(v)[:8],
)
async def test_case_22_a_value_that_is_not_a_number_is_a_failure_with_the_rewards_name(value, message):
    with pytest.raises(RewardFailure, match=message) as e:
        await score(lambda _: value)
    assert e.value.cause.startswith("reward r0")


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), InfraError("judge down"), TimeoutError(), StopIteration(), SystemExit(1)],
    ids=lambda e: type(e).__name__,
)
async def test_case_22_any_exception_is_a_failure(error):
    def fails(_):
        raise error

    with pytest.raises(RewardFailure, match="reward r0"):
        await score(fails)


async def test_case_22_hanging_rewards_time_out_and_then_fail_at_once():
    async def hangs(_):
        await asyncio.sleep(60)

    with pytest.raises(RewardFailure, match="timed out"):
        await score(hangs, timeout_s=0.05)

    gate, calls = threading.Event(), []

    def blocks(_):
        calls.append(1)
        gate.wait(60)

    scorer = Scorer([Reward(blocks, "r0", timeout_s=0.05)])
    scorer.pool.patience_s = 0.05
    try:
        for _ in range(scorer.pool.max_abandoned):
            with pytest.raises(RewardFailure, match="timed out"):
                await scorer.score(trajectory())
        for _ in range(2):
            with pytest.raises(RewardFailure, match="hang past their time limit"):
                await scorer.score(trajectory())
        assert len(calls) == scorer.pool.max_abandoned
    finally:
        gate.set()
        scorer.close()


async def test_pure_rewards_run_where_they_are():
    t = await score(
        pure(lambda _: float(threading.current_thread() is threading.main_thread())),
        lambda _: float(threading.current_thread() is threading.main_thread()),
    )
    assert t.rewards == {"r0": 1.0, "r1": 0.0}


async def test_group_rewards_give_one_value_per_trajectory():
    group = [trajectory(index=i) for i in range(3)]
    scorer = Scorer(
        [Reward(lambda ts: [{"rank": i} for i, _ in enumerate(ts)], "g", 0.5, group=True), Reward(lambda t: 1, "s")]
    )
    done = await scorer.score_group(group)
    assert [t.rewards for t in done] == [{"g.rank": 0.0}, {"g.rank": 1.0}, {"g.rank": 2.0}]
    assert [t.score for t in done] == [0.0, 0.5, 1.0]
    assert [t.rewards for t in group] == [{}] * 3


@pytest.mark.parametrize("fn", [lambda ts: [1.0], lambda ts: 1.0, lambda ts: None, lambda ts: ["a", "b"]])
async def test_a_group_reward_of_the_wrong_shape_is_a_failure(fn):
    with pytest.raises(RewardFailure, match="reward g"):
        await Scorer([Reward(fn, "g", group=True)]).score_group([trajectory(), trajectory(index=1)])


async def test_a_group_reward_cannot_lengthen_the_group():
    group = [trajectory(), trajectory(index=1)]
    await Scorer([Reward(lambda ts: ts.append(1) or [0.0, 0.0], "g", group=True)]).score_group(group)
    assert len(group) == 2


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_decorator_registers_and_leaves_a_callable():
    @reward(weight=0.5, name="half_for_tests")
    def half(trajectory):
        return 1.0

    assert half(None) == 1.0
    assert resolve_rewards(["half_for_tests"]) == (half,)
    assert resolve_rewards(["half_for_tests=2"])[0].weight == 2.0
    assert "half_for_tests" in REWARDS.names()

    @reward
    def bare_for_tests(trajectory):
        return 2.0

    assert (bare_for_tests.name, bare_for_tests.weight) == ("bare_for_tests", 1.0)


def test_functions_files_and_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def judge(t):\n    return 0.25\n")
    found = resolve_rewards([lambda t: 1.0, f"{tmp_path}/mine.py:judge=3"])
    assert [r.name for r in found] == ["<lambda>", "judge"]
    assert found[1].weight == 3.0
    assert found[1](None) == 0.25


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        (["judge_for_test"], UnknownNameError, "did you mean 'judge_for_tests'"),
        (["tests_none:fn"], ConfigError, "cannot import"),
        ([5], ContractError, "must be a function"),
        (Reward(print, "a"), ContractError, r"must be a list .*found Reward.*; write rewards = \[...\]"),
        ("em", ContractError, "must be a list .*found 'em'"),
        ([Reward(print, "a"), Reward(print, "a")], ConfigError, "two rewards are called 'a'"),
    ],
)
def test_a_reward_that_cannot_be_resolved_is_one_sentence(items, error, message):
    REWARDS.register("judge_for_tests")(print)
    with pytest.raises(error, match=message):
        resolve_rewards(items)


def test_a_weight_that_is_not_a_number_is_one_sentence():
    @reward(name="w_for_tests")
    def w(t):
        return 1.0

    with pytest.raises(ConfigError, match="weight after '=' must be a number, found 'x'"):
        resolve_rewards(["w_for_tests=x"])
    with pytest.raises(ConfigError, match="weight"):
        resolve_rewards(["w_for_tests=nan"])


# -- values of any type ----------------------------------------------------------------------------------------------


class Floats:
    """Has `float()`, or raises whatever is done with it."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def __repr__(self):
        raise ValueError("no repr")


NUMBERS = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "numpy bool": (np.bool_(True), 1.0),
    "numpy float32": (np.float32(0.5), 0.5),
    "numpy int64": (np.int64(2), 2.0),
    "0-d array": (np.array(0.5), 0.5),
    "array of one": (np.array([0.5]), 0.5),
    "torch scalar": (torch.tensor(0.5), 0.5),
    "torch bool": (torch.tensor(True), 1.0),
    "torch with gradient": (torch.tensor(0.5, requires_grad=True) * 1, 0.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "Decimal": (Decimal("0.5"), 0.5),
    "Fraction": (Fraction(1, 2), 0.5),
    "__float__": (Floats(0.5), 0.5),
}
NOT_NUMBERS = {
    "text": "1",
    "bytes": b"1",
    "numpy text": np.str_("1"),
    "0-d text": np.array("1"),
    "array": np.array([1.0, 2.0]),
    "tensor": torch.tensor([1.0, 2.0]),
    "list": [1.0],
    "set": {1.0},
    "complex": 1j,
    "nan": np.float32("nan"),
    "inf": Decimal("inf"),
    "signalling nan": Decimal("sNaN"),
    "1e155": 1e155,
    "-1e155": -1e155,
    "1e308": 1e308,
    "long integer": 10**5000,
    "Decimal beyond float": Decimal("1e400"),
    "raises": Floats(RuntimeError("no float")),
    "object": object(),
}


@pytest.mark.parametrize("kind", NUMBERS)
async def test_every_real_number_is_a_reward(kind, hermes):
    value, number = NUMBERS[kind]

    async def step(self, action):
        return StepResult(reward=value, terminated=True)

    t = await score(lambda _: value, lambda _: {"part": value})
    assert t.rewards == {"r0": number, "r1.part": number}
    assert all(type(v) is float for v in t.rewards.values())
    (scored,) = await Scorer([Reward(lambda ts: [value], "g", group=True)]).score_group([trajectory()])
    assert scored.rewards == {"g": number}
    played = await play(type("Pays", (Env,), {"step": step}), ["x"], hermes)
    assert (played.score, type(played.turns[0].reward)) == (number, float)


@pytest.mark.parametrize("kind", NOT_NUMBERS)
async def test_what_is_no_real_number_is_refused_with_a_sentence(kind, hermes):
    value = NOT_NUMBERS[kind]

    async def step(self, action):
        return StepResult(reward=value, terminated=True)

    for fn in (lambda _: value, lambda _: {"part": value}):
        with pytest.raises(RewardFailure, match=r"reward r0\S* must be a finite number or None, at most 1e\+30"):
            await score(fn)
    with pytest.raises(RewardFailure, match="reward g must be a finite number"):
        await Scorer([Reward(lambda ts: [value], "g", group=True)]).score_group([trajectory()])
    with pytest.raises(ContractError, match=r"Pays\.step returned the reward .* must be a finite number"):
        await play(type("Pays", (Env,), {"step": step}), ["x"], hermes)


async def test_a_reward_that_its_weight_makes_too_large_is_refused():
    with pytest.raises(RewardFailure, match="at most 1e\\+30 with its weight") as e:
        await Scorer([Reward(lambda _: 1e20, "big", 1e20)]).score(trajectory())
    assert e.value.cause == "reward big: too large"


@pytest.mark.parametrize(
    "returned",
    [{0: 1.0, 1: 0.0}, {1.0, 0.0}, frozenset({1.0}), {0: 1}.keys(), "10", b"10", 1.0, None, np.float32(1)],
    ids=repr,
)
async def test_a_group_reward_must_return_values_in_the_order_of_the_members(returned):
    with pytest.raises(
        RewardFailure, match=f"group reward g must return a list .* 2 trajectories, found {type(returned).__name__}"
    ):
        await Scorer([Reward(lambda ts: returned, "g", group=True)]).score_group([trajectory(), trajectory(index=1)])


@pytest.mark.parametrize(
    "returned", [[1, 0], (1, 0), np.array([1.0, 0.0]), torch.tensor([1.0, 0.0])], ids=lambda v: type(v).__name__
)
async def test_a_group_reward_may_return_any_sequence(returned):
    scored = await Scorer([Reward(lambda ts: returned, "g", group=True)]).score_group(
        [trajectory(), trajectory(index=1)]
    )
    assert [t.rewards for t in scored] == [{"g": 1.0}, {"g": 0.0}]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"weight": float("nan")}, "weight must be a finite number"),
        ({"weight": float("inf")}, "weight must be a finite number"),
        ({"weight": "1"}, "weight must be a finite number"),
        ({"weight": None}, "weight must be a finite number"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"timeout_s": -1.0}, "timeout_s must be a positive number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a positive number"),
        ({"timeout_s": "5"}, "timeout_s must be a positive number"),
    ],
    ids=repr,
)
def test_a_bad_weight_or_limit_is_refused_where_it_is_declared(declared, message):
    with pytest.raises(ContractError, match=f"reward mine: {message}"):

        @reward(**declared)
        def mine(trajectory): ...

    assert "mine" not in REWARDS.names()


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("mute")


async def test_an_exception_whose_str_raises_is_an_ordinary_failure(hermes):
    def fails(*_, **__):
        raise MuteError

    with pytest.raises(RewardFailure, match="reward r0 raised MuteError"):
        await score(fails)
    for method in ("reset", "step", "state", "close"):
        t = await play(type("Broken", (Echo,), {method: fails}), ["x"], hermes, env_args={"ends": 1})
        assert f"env {method} raised MuteError" in t.detail


async def test_an_episode_whose_time_was_over_before_the_first_token_is_not_offered_to_rewards():
    early = trajectory([[span(PROMPT, [1, 2])]], index=0, reason=StopReason.EPISODE_TIMEOUT)
    late = trajectory([[span(SAMPLED, [1, 2])]], index=1, reason=StopReason.EPISODE_TIMEOUT)
    done = trajectory([[span(SAMPLED, [1, 2, 3])]], index=2)
    assert [t.played for t in (early, late, done)] == [False, True, True]

    def shortest(ts):
        lengths = [t.sampled_tokens for t in ts]
        return [float(n == min(lengths)) for n in lengths]

    scorer = Scorer([Reward(shortest, "shortest", group=True), Reward(lambda t: 1.0, "one")])
    scored = [await scorer.score(t) for t in await scorer.score_group([early, late, done])]
    assert [t.rewards for t in scored] == [{}, {"shortest": 1.0, "one": 1.0}, {"shortest": 0.0, "one": 1.0}]
    assert [t.rewards for t in await scorer.score_group([early])] == [{}]
    scorer.close()
    assert rollout_metrics([Group(0, done.task, tuple(scored))], CauseTable(), 0)["reward"] == 1.5
