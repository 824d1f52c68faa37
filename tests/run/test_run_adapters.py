"""Several adapters in a run: which episodes train which, and what is refused before anything starts."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import EMBEDDED, play
from joint_roles import Pair

from agentrl import Task
from agentrl.config import build_config
from agentrl.config.mixture import EnvShare
from agentrl.engine.base import SamplingParams
from agentrl.engine.local.adapter_engines import AdapterEngines
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import ConfigError, DataError, EngineFailure, StoreError, UsageError
from agentrl.render import Tokenizer, make_renderer
from agentrl.run.components import Components
from agentrl.run.estimator_checks import require_estimator
from agentrl.run.sft import sft
from agentrl.run.trained_adapters import adapters_of_envs, check_role_adapters, groups_by_adapter, require_adapters
from agentrl.types import Group, StopReason, Trajectory

PAIR = str(Path(__file__).with_name("joint_roles.py"))
TEAMS = {"first": "red", "second": "blue"}


def group(index, env="Pair", roles=("first", "second")):
    task = Task(f"t{index}", "?")
    members = tuple(
        Trajectory(
            episode_id=f"{index}-{n}", group_index=index, index=n, attempt=0, env=env, task=task, segments=(), turns=(),
            stop_reason=StopReason.TERMINATED, roles=roles,
        )
        for n in range(2)
    )  # fmt: skip
    return Group(index, task, members)


def test_an_adapter_is_trained_on_its_environments_or_on_the_sides_of_its_roles():
    groups = [group(0, "a", ()), group(1, "b", ()), group(2, "c", ("first", "second"))]
    parts = groups_by_adapter(groups, {"a": "red", "b": "blue", "c": "red"}, by_role=False)
    assert {name: [g.index for g in part] for name, part in parts.items()} == {"red": [0, 2], "blue": [1]}
    sides = groups_by_adapter([group(0), group(1, roles=("second",))], TEAMS, by_role=True)
    roles = {name: [[t.roles for t in g.trajectories] for g in part] for name, part in sides.items()}
    assert roles == {"red": [[("first",)] * 2], "blue": [[("second",)] * 2, [("second",)] * 2]}
    with pytest.raises(DataError, match="episode 0-0: third has no adapter"):
        groups_by_adapter([group(0, roles=("first", "third"))], TEAMS, by_role=True)
    with pytest.raises(DataError, match="episode 0-0: other has no adapter"):
        groups_by_adapter([group(0, "other", ())], {"a": "red"}, by_role=False)
    sides = groups_by_adapter([group(0, "first")], TEAMS, by_role=True)
    assert [len(part) for part in sides.values()] == [1, 1], "an environment may be named as a role is"
    with pytest.raises(DataError, match="episode 0-0: first has no adapter"):
        groups_by_adapter([group(0, "first", ())], TEAMS, by_role=True)


async def test_an_episode_whose_time_was_over_before_its_environment_was_there_trains_no_adapter():
    class Late(Pair):
        def __init__(self):
            time.sleep(0.2)

    renderer = make_renderer(Tokenizer.load(EMBEDDED), "hermes")
    late = await play(Late, [], renderer, episode_timeout_s=0.05)
    assert (late.stop_reason, late.roles) == (StopReason.EPISODE_TIMEOUT, ())
    played = group(0)
    mixed = replace(played, trajectories=(late, *played.trajectories))
    parts = groups_by_adapter([mixed], TEAMS, by_role=True)
    assert {name: [len(g.trajectories) for g in part] for name, part in parts.items()} == {"red": [2], "blue": [2]}
    assert groups_by_adapter([replace(played, trajectories=(late,))], TEAMS, by_role=True) == {"red": [], "blue": []}


def test_every_environment_names_its_adapter():
    config = build_config({})
    shares = [EnvShare(name=f"{n}.py", share=0.5, config=config, concurrency=None) for n in "ab"]
    assert adapters_of_envs({"b.py": "red", "a.py": "blue"}, shares, ["A", "B"]) == {"A": "blue", "B": "red"}
    with pytest.raises(ConfigError, match=r"there is no environment 'c.py'.*--env has a.py, b.py"):
        adapters_of_envs({"c.py": "red"}, shares, ["A", "B"])
    with pytest.raises(ConfigError, match=r"names no adapter for b.py; give --lora-adapter b.py=NAME"):
        adapters_of_envs({"a.py": "red"}, shares, ["A", "B"])


@pytest.mark.parametrize(
    ("adapters", "roles", "players", "message"),
    [
        ({"first": "red"}, Pair.roles, {}, "names no adapter for the role second of Pair"),
        (TEAMS, Pair.roles, {"second": object()}, "no role 'second' of the policy, the policy plays first"),
        ({"thrid": "red"}, Pair.roles, {}, "has no role 'thrid' of the policy, the policy plays first, second"),
        ({"first": "red"}, (), {}, "it has no roles, and is the only environment"),
    ],
)
def test_every_role_of_the_policy_names_its_adapter(adapters, roles, players, message):
    same = SimpleNamespace(training=players, evaluation=players)
    with pytest.raises(ConfigError, match=message):
        check_role_adapters(adapters, roles, same, "Pair")
    check_role_adapters({"": "red"}, roles, same, "Pair")
    check_role_adapters({}, roles, same, "Pair")


async def test_roles_are_checked_before_a_run():
    settings = {"env": PAIR, "hf_checkpoint": str(EMBEDDED), "lora_rank": 4, "lora_adapters": {"first": "red"}}
    components = Components(build_config(settings))
    with pytest.raises(ConfigError, match="names no adapter for the role second of Pair"):
        await components.require_env()
    components.close()
    settings |= {"players": {"second": f"{PAIR}:echo"}, "eval_players": {"second": "policy"}}
    components = Components(build_config(settings))
    with pytest.raises(ConfigError, match=r"--eval-player second=policy: no adapter is trained for this role of Pair"):
        await components.require_env()
    components.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 0}, "--lora-adapter has no effect without --lora-rank"),
        ({"lora_adapters": {"a": "x/y"}}, "--lora-adapter a=x/y: the name of an adapter consists of letters, digits and _"),
        ({"engine": "sglang", "runner_processes": 2}, "--runner-processes tells"),
        ({"engine": "sglang", "colocate": True}, "--colocate takes the base from the engine's memory"),
        ({"engine": "sglang", "weight_sync": "split"}, "--weight-sync split brings whole weights"),
        ({"schedule": "async"}, "--schedule async counts the age of samples in versions of one policy"),
        ({"over_sampling_batch_size": 64}, "--over-sampling-batch-size counts"),
        ({"dynamic_sampling_filter_path": "x.py:f"}, "--dynamic-sampling-filter-path counts"),
        ({"eval_engine": ["separate"]}, "--eval-engine receives"),
        ({"custom_generate_function_path": "x.f"}, "--custom-generate-function-path names no adapter"),
        ({"rollout_function_path": "x.f"}, "--rollout-function-path names no adapter"),
    ],
)  # fmt: skip
def test_what_cannot_be_with_several_adapters_is_named(settings, message):
    with pytest.raises(UsageError, match=message):
        build_config({"lora_rank": 4, "lora_adapters": TEAMS} | settings)


async def test_jobs_and_estimators_that_cannot_have_several_are_named(tmp_path):
    config = build_config({"lora_rank": 4, "lora_adapters": TEAMS, "advantage_estimator": "ppo"})
    with pytest.raises(ConfigError, match="ppo has one critic, and --lora-adapter trains several"):
        require_estimator(config)
    with pytest.raises(ConfigError, match="of which `agentrl sft` has none"):
        await sft(config, [tmp_path])


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.run.trained_adapters.trained_adapters", lambda *_: None)
    (tmp_path / "adapters/red").mkdir(parents=True)
    with pytest.raises(StoreError, match="holds the adapters red, the settings name none"):
        require_adapters(build_config({"lora_rank": 4}), EMBEDDED, tmp_path)


async def test_a_request_goes_to_the_engine_of_its_adapter():
    engines = AdapterEngines({name: LocalEngine(EMBEDDED, threads=1, adapter=name) for name in ("red", "blue")})
    await engines.start()
    try:
        got = [
            await engines.generate([5, 6, 7], SamplingParams(2, adapter=name), session="a") for name in ("red", "blue")
        ]
        assert got[0].ids == got[1].ids, "both have the weights of the folder"
        for wrong in ("green", None):
            with pytest.raises(EngineFailure, match=f"names the adapter {wrong!r}; the engine has red, blue"):
                await engines.generate([5, 6, 7], SamplingParams(2, adapter=wrong), session="a")
        with pytest.raises(EngineFailure, match="names the adapter 'blue', and this local engine has red"):
            await engines.engines["red"].generate([5], SamplingParams(1, adapter="blue"), session="a")
    finally:
        await engines.close()
