"""User code in processes of its own: whatever it does ends its process only, and is counted by the rules for its kind."""

import asyncio
import json
import os
import time

import pytest
from doubles import call, end, make_runner, play, until
from isolated_env import Hostile, Method, Polite, Reluctant, Swallows, Tools

from agentrl.core.child_process import process_exists
from agentrl.errors import ContractError
from agentrl.rollout import env_instance
from agentrl.rollout.isolation import isolated_env
from agentrl.types import EpisodeSpec, StopReason, Task

TASK = Task("t", "Go on.", None)


async def alone(env, script, renderer, **more):
    return await play(env, script, renderer, task=TASK, **more)


def is_running(pid):
    """Not a zombie either, which its new parent may not have reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_an_isolated_environment_plays_like_one_in_a_thread(hermes, tmp_path):
    def facts(t):
        return t.stop_reason, t.segments, t.rewards, t.score, {k: v for k, v in t.state.items() if k != "pid"}

    class Here(Hostile):
        isolation = "thread"

    notes = tmp_path / "notes"
    isolated = await alone(Hostile, ["end"], hermes, env_args={"notes": str(notes)})
    pid = isolated.state["pid"]
    assert pid != os.getpid()
    assert notes.read_text() == f"closed in {pid}"
    await until(lambda: not process_exists(pid))
    assert facts(isolated) == facts(await alone(Here, ["end"], hermes, env_args={"notes": str(notes)}))


CAUSES = {
    "exit": "env step: the process of user code exited with status 7",
    "segfault": "env step: the process of user code was killed by SIGSEGV",
    "raise": "env step: IndexIsLoading",
    "sys_exit": "env step: RuntimeError",
    "infra": "env step: InfraError",
}


async def test_what_ends_an_isolated_environment_fails_its_episode_and_no_other(hermes, tmp_path):
    acts = [*CAUSES, "end"]
    specs = [EpisodeSpec(TASK, i, i) for i in range(len(acts))]
    ids = [spec.episode_id for spec in specs]
    runner = make_runner(
        Hostile,
        lambda r: acts[ids.index(r.session)],
        hermes,
        env_args={"notes": str(tmp_path / "n")},
    )
    try:
        episodes = await asyncio.gather(*map(runner.run, specs))
    finally:
        end(runner)
    assert {a: t.cause for a, t in zip(acts, episodes, strict=True)} == {**CAUSES, "end": None}
    assert all(t.stop_reason is StopReason.ENV_FAILURE for t in episodes[:-1])
    assert (episodes[-1].stop_reason, episodes[-1].score) == (StopReason.TERMINATED, 1.0)
    raised = episodes[acts.index("raise")].detail
    assert "IndexIsLoading: not yet" in raised
    assert "isolated_env.py:" in raised


@pytest.mark.parametrize("env", [Swallows, Reluctant])
async def test_a_hang_is_ended_with_its_process(hermes, tmp_path, monkeypatch, env):
    monkeypatch.setattr(isolated_env, "INTERRUPTED_GRACE_S", 0.5)
    started = time.monotonic()
    t = await alone(env, ["block" if env is Reluctant else "hang"], hermes, env_args={"notes": str(tmp_path / "n")})
    assert (t.stop_reason, t.cause) == (StopReason.ENV_FAILURE, "env step: timeout")
    assert time.monotonic() - started < 20


async def test_what_an_environment_started_ends_with_it(hermes, tmp_path):
    t = await alone(Hostile, ["leave"], hermes, env_args={"notes": str(tmp_path / "n")})
    pids = t.turns[-1].info["pids"]
    assert len(pids) == 2
    await until(lambda: not any(map(is_running, pids)), within_s=10)


async def test_values_and_errors_cross_as_they_would_be_recorded_here(hermes, tmp_path):
    script = [call("search", query="hang"), call("search", word="x"), "odd"]
    runner = make_runner(Polite, script, hermes, env_args={"notes": str(tmp_path / "n")})
    t = await runner.run(EpisodeSpec(TASK, 0, 0))
    end(runner)
    first, second = (turn.action.results[0].content for turn in t.turns[:2])
    assert first == "error: search did not answer within 0.3 s"
    assert second.startswith("error: bad arguments for search: query: Field required")
    info = t.turns[-1].info
    assert info["fine"] == (1, 2)
    assert info["lock"].startswith("<unlocked _thread.lock")
    json.dumps(info)


async def results(script, renderer):
    t = await alone(Tools, [*script, "done"], renderer, max_turns=12)
    assert t.stop_reason is StopReason.TERMINATED
    return [r.content for turn in t.turns for r in turn.action.results], t


async def test_the_crash_of_a_tool_is_an_observation_and_the_next_call_works(hermes):
    functions = [call("function", does=d) for d in ("work", "exit", "hang", "raise", "work")]
    notebook = [call("notebook", does=d) for d in ("a", "b", "exit", "c")]
    texts, t = await results([*functions, *notebook], hermes)
    died = "error: UserProcessError: the process of user code exited with status 3"
    assert texts[1] == texts[7] == died
    assert texts[2] == "error: function did not answer within 1 s"
    assert texts[3] == "error: IndexIsLoading: not yet"
    first, last = (int(texts[i].split()[-1]) for i in (0, 4))
    assert len({first, last, t.state["pid"]}) == 3
    assert [text.split(" in ")[0] for text in (texts[5], texts[6], texts[8])] == ["call 1", "call 2", "call 1"]


async def test_infrastructure_that_fails_in_an_isolated_tool_fails_the_episode(hermes):
    t = await alone(Tools, [call("function", does="infra"), "done"], hermes)
    assert (t.stop_reason, t.cause) == (StopReason.TOOL_FAILURE, "tool function: InfraError")


async def test_a_method_of_an_environment_cannot_leave_it(hermes):
    with pytest.raises(ContractError, match='set isolation = "process" on Method'):
        await alone(Method, ["x"], hermes)


async def test_an_environment_that_no_process_can_import_is_refused(hermes):
    class Local(Hostile):
        pass

    with pytest.raises(
        ContractError, match=r"environment Local cannot run in a process of its own: .*top level of a module"
    ):
        await alone(Local, ["x"], hermes)


async def test_processes_end_with_the_fork_server(hermes, tmp_path):
    pools = env_instance.ThreadPools(Hostile)
    instance = env_instance.EnvInstance(lambda: None, Hostile, pools)
    instance._make_env = Hostile
    await instance.create(0)
    assert (await instance.call("reset", TASK, seed=1)) == "Go on."
    pid = (await instance.call("state"))["pid"]
    pools.end_processes()
    await until(lambda: not process_exists(pid), within_s=10)
