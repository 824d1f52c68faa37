"""Runner processes: the same episodes in one process or several, also when processes fail."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
import zlib
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web
from doubles import until
from ray_clusters import started
from sglang_double import Double

from agentrl.config import build_config
from agentrl.core import secret_socket
from agentrl.core.child_process import session_members
from agentrl.engine.sglang import router
from agentrl.errors import ConfigError, ContractError, DataError, TooManyFailuresError, WorkerError
from agentrl.rollout import process_pool as runners
from agentrl.rollout import ray_processes
from agentrl.run.components import Components
from agentrl.run.evaluation import evaluate_only
from agentrl.run.progress import Progress
from agentrl.run.rollouts import EpisodeRun, rollout_only
from agentrl.store import read_records

ENV = str(Path(__file__).parents[1] / "process_pool_env.py") + ":Walk"
pytestmark = pytest.mark.slow


class Server(Double):
    """Says what follows from the context alone: a search, or an answer after two or three of them."""

    async def server_info(self, _, __):
        return web.json_response({"version": self.version, "device": "cuda", "tp_size": 1, "context_length": 4096})

    running = most = 0

    async def generate(self, request, body):
        Server.running += 1
        Server.most = max(Server.most, Server.running)
        try:
            return await super().generate(request, body)
        finally:
            Server.running -= 1

    async def _answer(self, body):
        if len(body["input_ids"]) > 2:  # else a fleet looks whether it generates
            await self.going.wait()
            await asyncio.sleep(self.delay_s)
        ids, text = self.answer(body)
        ids = ids[: body["sampling_params"]["max_new_tokens"]]
        meta = {
            "input_token_logprobs": [[-0.5, i, None] for i in body["input_ids"]],
            "output_token_logprobs": [[-1 / (1 + i), i, None] for i in ids],
            "finish_reason": {"type": "stop", "matched": "</search>" if "</search>" in text else "</answer>"},
            "weight_version": self.weight_version,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})


def script(tokenizer):
    def answer(body):
        context = body["input_ids"]
        number = zlib.crc32(str(context).encode())
        turn = tokenizer.decode(context).count("</search>")
        text = f"<search>q{number % 1000}</search>" if turn < 2 + number % 2 else f"<answer>{number % 10}</answer>"
        return tokenizer.encode(text), text

    return answer


@pytest.fixture(scope="module")
def fork_context():
    """Processes forked from one that has imported what they need, which saves most of the time of these tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["agentrl.run.components", "agentrl.engine.sglang.fleet", "transformers", "quick_heartbeats"]
    )
    path = os.pathsep.join([str(Path(ENV).parent), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    yield context
    forkserver._forkserver._stop()


@pytest.fixture(autouse=True)
def forked(request, monkeypatch):
    """A test with the mark `usefixtures("spawned")` starts them as a run does."""
    if "spawned" not in request.fixturenames:
        monkeypatch.setattr(runners, "_SPAWN", request.getfixturevalue("fork_context"))


@pytest.fixture
def spawned(): ...


@pytest.fixture
async def servers(tokenizer, monkeypatch):
    # the settings ask each whether it is a router, and block the event loop on which it would answer
    monkeypatch.setattr(router, "TIMEOUT_S", 0.01)
    Server.running = Server.most = 0
    found = [await Server(answer=script(tokenizer)).start() for _ in range(2)]
    yield found
    for server in found:
        await server.stop()


@pytest.fixture
def settings(tmp_path, tokenizer_dir, servers):
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 1000}))

    def make(name: str, processes: int, *, max_retries: int = 1, **env_args):
        return build_config(
            {
                "run": str(tmp_path / name), "hf_checkpoint": str(tokenizer_dir), "tensorboard": False, "env": ENV,
                "env_args": env_args, "engine": "sglang", "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 3,
                "rollout_external_engine_addrs": [s.address for s in servers], "runner_processes": processes, "max_retries": max_retries,
                "max_failure_share": 1.0, "concurrency": 7, "eval_interval": 0,
            }
        )  # fmt: skip

    return make


def episodes(run: Path) -> list[dict]:
    """As they were recorded, without how long things took."""

    def still(value):
        if isinstance(value, dict):
            return {k: still(v) for k, v in value.items() if k not in ("timings", "duration_s", "time", "started")}
        return [still(v) for v in value] if isinstance(value, list) else value

    return [still(r) for r in read_records(run)]


async def run(config):
    """The recorded episodes and what was said."""
    said: list[str] = []
    folder = await asyncio.wait_for(rollout_only(config, echo=said.append), 120)
    return episodes(folder / "episodes"), "\n".join(said)


def table_of(said: str) -> str:
    """The table of causes of the whole run, among the last words."""
    return said[said.rindex("stop reason") : said.rindex("groups dropped")]


@pytest.mark.usefixtures("spawned")
async def test_the_number_of_processes_does_not_change_the_episodes(settings, servers):
    one, said_one = await run(settings("one", 1))
    two, said_two = await run(settings("two", 2))
    assert len(one) == 24
    assert one == two
    assert table_of(said_one) == table_of(said_two)
    assert not multiprocessing.active_children()
    assert all("/continue_generation" not in s.calls for s in servers), "commands are the controller's"


async def test_several_speakers_are_the_same_in_several_processes(settings):
    talk = [
        replace(c, env=replace(c.env, env=ENV.replace("Walk", "Talk"))) for c in map(settings, ("one", "two"), (1, 2))
    ]
    (one, _), (two, _) = [await run(config) for config in talk]
    assert len(one) == 24
    assert one == two
    for e in one:
        assert {s["agent_id"] for s in e["segments"]} == {"first", "second"}
        assert [turn["agent_id"] for turn in e["turns"]] == ["first", "guest", "second"] * 2 + ["first"]
        assert e["state"]["said"][1].startswith("guest ")


async def test_failures_and_retries_are_the_same_too(settings):
    one, said_one = await run(settings("one", 1, does="infra"))
    two, said_two = await run(settings("two", 2, does="infra"))
    assert [e["stop_reason"] for e in one].count("tool_failure") == 6
    assert one == two
    assert table_of(said_one) == table_of(said_two)


async def test_a_group_is_played_in_one_process_and_all_are_used(settings):
    done, _ = await run(settings("pids", 2, does="pid"))
    where = {}
    for e in done:
        where.setdefault((e["step"], e["group_index"]), set()).add(e["state"]["pid"])
    assert all(len(pids) == 1 for pids in where.values())
    assert len(set.union(*where.values())) == 2
    assert os.getpid() not in set.union(*where.values())
    assert {e["state"]["starts"] for e in done} == {multiprocessing.get_start_method()}, "as in one process"


async def test_sessions_stick_to_a_server(settings, servers):
    await run(settings("sticky", 2))
    for s in servers:
        assert len(s.bodies) > 10, "both are used"
        contexts = [b["input_ids"] for b in s.bodies if len(b["input_ids"]) > 2]
        longer = [c for c in contexts if len(c) > min(map(len, contexts))]
        assert all(any(c[: len(d)] == d for d in contexts if len(d) < len(c)) for c in longer)


async def test_concurrency_is_limited_over_all_processes(settings, servers, monkeypatch):
    for server in servers:
        server.delay_s = 0.05
    run = EpisodeRun(Components(settings("slow", 2), trains=False), echo=lambda text: None)
    behind = 0

    def episode_done(self):
        nonlocal behind
        asked = sum(len(p.pending) for p in run.collector.processes._processes)
        behind = max(behind, asked)
        time.sleep(0.01)  # the controller is slow, the processes are not

    monkeypatch.setattr(Progress, "episode_done", episode_done)
    try:
        await run.engine.start()
        groups, _ = await run.rollout(0)
    finally:
        await run.close()
    assert sum(len(g.trajectories) for g in groups) == 12
    assert 2 < behind <= 7
    assert 2 < Server.most <= 7


async def test_a_killed_process_is_replaced_and_its_episodes_are_started_again(settings, tmp_path, caplog):
    config = settings("killed", 2, does="kill_once", flag=str(tmp_path / "flag"))
    done, said = await run(config)
    (tmp_path / "flag").unlink()
    (tmp_path / "flag").touch()
    calm, _ = await run(settings("calm", 1, does="kill_once", flag=str(tmp_path / "flag")))
    assert done == calm
    assert "was killed by SIGKILL, with" in caplog.text
    assert "(runner process died)" in table_of(said)


async def test_a_process_that_always_dies_ends_the_run(settings):
    with pytest.raises(WorkerError, match=r"exited with status 3, .* replaced 3 times"):
        await run(settings("dies", 2, does="exit"))
    assert not multiprocessing.active_children()


async def test_a_blocked_process_is_killed_and_replaced(settings, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runners, "HEARTBEAT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(runners, "HEARTBEAT_S", 0.5)
    done, _ = await run(settings("blocked", 2, does="block_once", flag=str(tmp_path / "flag")))
    assert len(done) == 24
    assert "sent no heartbeat for 3 s" in caplog.text


async def test_a_broken_contract_ends_the_run_with_its_sentence(settings):
    with pytest.raises(ContractError, match="step must return a StepResult, found str"):
        await run(settings("contract", 2, does="contract"))
    assert not multiprocessing.active_children()


async def test_values_that_cannot_be_pickled_are_recorded_as_one_process_records_them(settings):
    def odd(played):
        return [(e["episode_id"], t["info"]["lock"][:30]) for e in played for t in e["turns"] if "lock" in t["info"]]

    one, _ = await run(settings("one", 1, does="odd"))
    two, _ = await run(settings("two", 2, does="odd"))
    assert odd(one)
    assert odd(one) == odd(two)


async def test_a_task_that_cannot_be_sent_is_named(settings):
    run = EpisodeRun(Components(settings("task", 2), trains=False), echo=lambda text: None)
    run.source.tasks = [replace(t, metadata={"n": lambda: 0}) for t in run.source.tasks]
    try:
        await run.engine.start()
        with pytest.raises(DataError, match=r"task \d cannot be sent to a runner process: "):
            await run.rollout(0)
    finally:
        await run.close()


async def test_a_limit_too_small_to_share_is_refused(settings):
    with pytest.raises(ContractError, match=r"tool search allows 4 concurrent calls .* at most --runner-processes 4"):
        await run(settings("many", 5))


async def test_too_many_failures_stop_it_as_in_one_process(settings):
    config = settings("failing", 2, does="infra", where="0 1 2 3 4 5 6 7")
    config = replace(config, rollout=replace(config.rollout, max_failure_share=0.1))
    with pytest.raises(TooManyFailuresError, match="tool search: InfraError"):
        await run(config)
    assert not multiprocessing.active_children()


async def test_a_server_that_fails_for_a_while_is_used_again(settings, servers):
    config = settings("faults", 2)
    servers[0].faults += [200, 200, 503, 503]  # the first two are how the processes see that it generates
    done, said = await run(config)
    assert len({e["index"] for e in done if e["status"] == "completed"}) == 24, said


async def test_every_rollout_uses_the_current_weights(settings, servers):
    run = EpisodeRun(Components(settings("versions", 2), trains=False), echo=lambda text: None)
    try:
        await run.engine.start()
        for version in (0, 1):
            run.policy_version = run.engine.policy_version = version
            for server in servers:
                server.weight_version = str(version or "default")
            for member in run.engine.members:
                member.engine.policy_version = version
            groups, _ = await run.rollout(version)
            spans = [s for g in groups for t in g.trajectories for part in t.segments for s in part.spans]
            assert {s.policy_version for s in spans if s.log_probs} == {version}
    finally:
        await asyncio.wait_for(run.close(), 30)
    assert not multiprocessing.active_children()


async def test_a_cancelled_rollout_leaves_no_process(settings, servers):
    for server in servers:
        server.going.clear()
    job = asyncio.create_task(run(settings("cancelled", 2)))
    await until(lambda: any(len(b["input_ids"]) > 2 for s in servers for b in s.bodies))
    job.cancel()
    await asyncio.wait([job], timeout=30)
    assert job.cancelled()
    assert not multiprocessing.active_children()


async def test_the_processes_of_a_killed_controller_end(settings, servers, tmp_path):
    for server in servers:
        server.going.clear()
    config = settings("orphans", 2)
    (tmp_path / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "agentrl.cli", "rollout", "--config", str(tmp_path / "config.toml")]
    controller = await asyncio.create_subprocess_exec(*command, start_new_session=True)
    await until(lambda: any(len(b["input_ids"]) > 2 for s in servers for b in s.bodies))
    assert len(session_members(controller.pid)) > 2
    controller.kill()
    await controller.wait()
    await until(lambda: not session_members(controller.pid))


async def test_an_evaluation_runs_in_several_processes(settings):
    config = settings("eval", 2)
    numbers = await asyncio.wait_for(evaluate_only(config), 120)
    assert numbers["episodes"] == 8


def test_an_engine_in_this_process_is_refused():
    with pytest.raises(ConfigError, match=r"--runner-processes needs --engine sglang .*local"):
        build_config({"engine": "local", "runner_processes": 2})


# -- servers that move -----------------------------------------------------------------------------------------------------


async def test_the_processes_follow_a_server_that_starts_at_another_address(settings, servers, tokenizer):
    """In the middle of a rollout, which needs it, and in the next."""
    only, config = servers[0], settings("moved", 2, max_retries=3)
    only.going.clear()
    config = replace(config, engine=replace(config.engine, rollout_external_engine_addrs=(only.address,)))
    play = EpisodeRun(Components(config, trains=False), echo=lambda text: None)
    moved = await Server(answer=script(tokenizer)).start()
    try:
        await play.engine.start()
        rollout = asyncio.create_task(play.rollout(0))
        await until(lambda: sum(len(b["input_ids"]) > 2 for b in only.bodies) == 7)
        await only.stop()
        (member,) = play.engine.members
        await member.engine.move(moved.address)  # what a restart on another node does
        await member.engine.start()
        play.engine.on_moved()
        first, _ = await asyncio.wait_for(rollout, 60)
        second, _ = await asyncio.wait_for(play.rollout(1), 60)
    finally:
        await asyncio.wait_for(play.close(), 60)
        await moved.stop()
    assert [sum(len(g.trajectories) for g in groups) for groups in (first, second)] == [12, 12]
    done = [e["index"] for e in episodes(play.folder.path / "episodes") if e["status"] == "completed"]
    assert sorted(done) == list(range(24)), "each once"


# -- on the nodes of a ray cluster -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of one CPU: for two processes, and a spare one."""
    ray = pytest.importorskip("ray")
    with started([1, 1, 1]) as cluster:
        yield cluster
        ray.shutdown()


def on_ray(config, cluster):
    return replace(config, engine=replace(config.engine, ray_address=cluster.address))


def without_config(played, others):
    """With the fingerprint of the settings of the others: they name the cluster."""
    return [e | {"config": others[0]["config"]} for e in played]


@pytest.mark.full
async def test_processes_on_the_nodes_of_a_ray_cluster_play_the_same_episodes(settings, cluster):
    import ray

    here, said_here = await run(settings("here", 2))
    there, said_there = await run(on_ray(settings("there", 2), cluster))
    assert len(here) == 24
    assert here == without_config(there, here)
    assert table_of(said_here) == table_of(said_there)
    await until(lambda: ray.available_resources().get("CPU") == 3)  # what was reserved is given back


@pytest.mark.full
@pytest.mark.parametrize("dies", ["actor", "node"])
async def test_an_actor_or_a_node_that_dies_is_replaced_and_no_episode_counts_twice(
    dies, settings, servers, cluster, tmp_path, caplog
):
    import ray

    calm, _ = await run(settings("calm", 1))
    for server in servers:
        server.going.clear()
        server.bodies.clear()
    job = asyncio.create_task(run(on_ray(settings("hurt", 2), cluster)))
    await until(lambda: sum(len(b["input_ids"]) > 2 for s in servers for b in s.bodies) >= 7, within_s=120)
    first, second = (a for a in ray._private.state.actors().values() if a["State"] == "ALIVE")
    assert first["Address"]["NodeID"] != second["Address"]["NodeID"]
    if dies == "actor":
        os.kill(first["Pid"], signal.SIGKILL)
    else:
        (node,) = [n for n in cluster.worker_nodes if n.node_id == first["Address"]["NodeID"]]
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
    for server in servers:
        server.going.set()
    done, said = await job
    assert without_config(done, calm) == calm
    assert "(runner process died)" in table_of(said)
    assert "runner process" in caplog.text
    assert "they are started again" in caplog.text


@pytest.mark.full
async def test_a_node_with_another_version_is_refused_with_both(settings, cluster, monkeypatch):
    monkeypatch.setattr(secret_socket, "versions", lambda: {"agentrl": "0.0.1"})
    with pytest.raises(WorkerError, match=r"node \d\S+ has agentrl \S+, this machine 0\.0\.1; install equal versions"):
        await run(on_ray(settings("versions", 2), cluster))


@pytest.mark.full
async def test_processes_that_find_no_room_end_the_run_with_the_reason(settings, cluster, monkeypatch):
    monkeypatch.setattr(ray_processes, "START_TIMEOUT_S", 0.01)  # no actor starts in that time
    with pytest.raises(WorkerError, match=r"did not connect within 0\.01 s: no node has room, .* replaced 3 times"):
        await run(on_ray(settings("room", 2), cluster))
