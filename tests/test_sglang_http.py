"""The SGLang client, the fleet and the launcher against a scripted HTTP server: what needs no SGLang."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import until, weights
from engine_contract import EngineContract
from sglang_double import Double, count_up

from agentrl.assemble import Parts
from agentrl.config import build_config
from agentrl.engine.base import SamplingParams, WeightsManifest
from agentrl.engine.choose import make_fleet, of_this_machine, plan_servers
from agentrl.engine.fleet import Fleet, Member
from agentrl.engine.launch import ServerProcess, session_members
from agentrl.engine.launch_spec import LaunchSpec, check_spec, command_line, free_port
from agentrl.engine.sglang import SGLangEngine
from agentrl.engine.sglang_flags import check_flags, known_flags
from agentrl.engine.sglang_install import Installation, find_installation, gpus
from agentrl.engine.sglang_protocol import LEAST, ServerFacts, warn_if_untested
from agentrl.errors import ConfigError, EngineAbort, EngineFailure
from agentrl.images import Placed, as_image
from agentrl.sync.colocated import ColocatedSync
from agentrl.types import FinishReason

Pil = pytest.importorskip("PIL.Image")
MODEL = Path(__file__).parents[1] / "agentrl/assets/search_r1_3m"
FIVE = SamplingParams(5)


@pytest.fixture
async def double():
    server = await Double().start()
    yield server
    await server.stop()


@pytest.fixture
async def engine(double):
    engine = SGLangEngine(double.address, timeout_s=5, generate_timeout_s=5)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def manifest(tmp_path):
    return weights(tmp_path / "w")


async def test_what_is_asked_and_what_is_read(engine, double):
    sampling = SamplingParams(5, temperature=0.7, top_p=0.9, stop=("</search>",), stop_token_ids=(3,), ignore_eos=True)
    g = await engine.generate([1, 2], sampling, session="a")
    assert (g.ids, g.log_probs, g.finish_reason) == ((3, 4, 5, 6, 7), (-0.5,) * 5, FinishReason.LENGTH)
    body = double.bodies[0]
    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"] is True
    asked = body["sampling_params"]
    assert asked["no_stop_trim"] is True
    assert asked["skip_special_tokens"] is False
    assert (asked["temperature"], asked["stop"], asked["stop_token_ids"]) == (0.7, ["</search>"], [3])
    assert "sampling_seed" not in asked


async def test_images_go_beside_the_ids_one_placeholder_each(double, engine):
    images = [as_image({"image": Pil.new("RGB", (9, n), "red")}) for n in (4, 5)]
    ids = [1, 77, 77, 77, 2, 77, 77, 3]
    placed = [Placed(images[0], 1, 3), Placed(images[1], 5, 2)]
    double.image_tokens = (3, 2)
    g = await engine.generate(ids, FIVE, session="a", images=placed)
    assert g.ids == (4, 5, 6, 7, 8)
    body = double.bodies[0]
    assert body["input_ids"] == [1, 77, 2, 77, 3]
    assert [as_image({"image_url": u}) for u in body["image_data"]] == images
    assert body["sampling_params"]["max_new_tokens"] == 5
    double.image_tokens = (3, 3)  # a server whose processor is set otherwise
    with pytest.raises(EngineFailure, match="read 9 tokens with images, the renderer gave 8") as e:
        await engine.generate(ids, FIVE, session="a", images=placed)
    assert e.value.cause == "engine: images expanded otherwise"
    await engine.generate(ids, FIVE, session="a")
    assert "image_data" not in double.bodies[-1]


async def test_room_is_what_the_context_leaves(engine, double):
    await engine.generate([1] * 250, SamplingParams(100), session="a")
    assert double.bodies[0]["sampling_params"]["max_new_tokens"] == 6


async def test_a_kept_connection_that_was_closed_is_asked_again_once(engine, double):
    await engine.generate([1], FIVE, session="a")
    double.faults = ["close"]
    assert (await engine.generate([1], FIVE, session="a")).ids
    double.faults = ["close", "close"]
    with pytest.raises(EngineFailure) as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: connection lost"


@pytest.mark.parametrize(("given", "model", "least"), [(None, 512, 256), (None, 128, 128), (64, 128, 64)])
async def test_the_context_length_is_the_least_that_is_known(double, tmp_path, given, model, least):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": model}))
    engine = SGLangEngine(double.address, model_dir=tmp_path, context_length=given)
    await engine.start()
    (tmp_path / "config.json").unlink()  # read once
    assert (engine.context_length, engine.vocab_size) == (least, 50)
    assert (await engine.health()).context_length == least
    await engine.close()


async def test_a_fresh_connection_is_not_asked_again(double):
    double.faults = ["close"]
    engine = SGLangEngine(double.address)
    engine._facts = ServerFacts("0.5.23", "cuda", 1, True, False, False, False, 256)
    with pytest.raises(EngineFailure):
        await engine.generate([1], FIVE, session="a")
    assert len(double.bodies) == 1
    await engine.close()


async def test_a_reset_in_the_answer_is_not_asked_again(engine, double):
    await engine.generate([1], FIVE, session="a")
    double.faults = ["reset"]
    with pytest.raises(EngineFailure) as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: connection lost"
    assert len(double.bodies) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_statuses_are_failures_and_never_asked_again(engine, double, status):
    double.faults = [status]
    with pytest.raises(EngineFailure, match="by the script") as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == f"engine: HTTP {status}"
    assert len(double.bodies) == 1


async def test_ids_and_log_probs_must_belong_together(engine, double, monkeypatch):
    async def wrong(_, body):
        from aiohttp import web

        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 7, None]],
            "weight_version": "default",
        }
        return web.json_response({"output_ids": [8], "meta_info": meta})

    monkeypatch.setattr(double, "generate", wrong)
    with pytest.raises(EngineFailure, match="differ"):
        await engine.generate([1], FIVE, session="a")


async def test_an_answer_of_other_weights_is_a_failure(engine, double):
    double.weight_version = "4"
    with pytest.raises(EngineFailure, match="restarted") as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: old weights"


async def test_paused_engines_are_asked_nothing(engine, double):
    await engine.pause()
    task = asyncio.create_task(engine.generate([1], FIVE, session="a"))
    await asyncio.sleep(0.05)
    assert not double.bodies
    await engine.resume()
    assert (await task).ids


async def test_requests_without_tokens_start_over_with_new_weights(engine, double, manifest):
    double.delay_s = 60
    task = asyncio.create_task(engine.generate([1], FIVE, session="a"))
    await until(lambda: double.bodies)
    await engine.update_weights(manifest, 3)
    double.delay_s = 0
    g = await task
    assert g.policy_version == 3
    assert len(double.bodies) == 2


async def test_abort_is_at_once(engine, double):
    double.delay_s = 60
    tasks = [asyncio.create_task(engine.generate([1], FIVE, session=s)) for s in "ab"]
    await until(lambda: len(double.bodies) == 2)
    await engine.abort("a")
    with pytest.raises(EngineAbort):
        await tasks[0]
    assert not tasks[1].done()
    tasks[1].cancel()


@pytest.mark.parametrize(("version", "brackets"), [("0.5.17", False), ("0.5.23", True)])
async def test_brackets_follow_the_version(version, brackets):
    double = await Double(version=version).start()
    engine = SGLangEngine(double.address)
    await engine.start()
    await engine.begin_weights(bracket=True)
    await engine.end_weights(2)
    assert ("/begin_weight_update" in double.calls) is brackets
    assert ("/end_weight_update" in double.calls) is brackets
    assert double.weight_version == "2"
    await engine.close()
    await double.stop()


async def test_an_untested_version_warns():
    double = await Double(version="0.4.1").start()
    engine = SGLangEngine(double.address)
    warn_if_untested.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"0\.4\.1 was not tested"):
        await engine.start()
    await engine.close()
    await double.stop()


async def test_weights_that_do_not_fit_never_reach_the_server(engine, double, manifest):
    with pytest.raises(EngineFailure, match="fingerprint"):
        await engine.update_weights(WeightsManifest(manifest.path, "0" * 32), 3)
    assert "/update_weights_from_disk" not in double.calls
    assert (await engine.generate([1], FIVE, session="a")).policy_version == 0


# -- the fleet -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def doubles():
    servers = [await Double(delay_s=0.01).start() for _ in range(2)]
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def fleet(doubles):
    fleet = Fleet([Member(SGLangEngine(d.address, timeout_s=5)) for d in doubles], patience_s=10, start_timeout_s=10)
    await fleet.start()
    yield fleet
    await fleet.close()


async def ask(fleet, session="a"):
    return await fleet.generate([1], FIVE, session=session)


async def test_sessions_stick_and_spread(fleet, doubles):
    for _ in range(3):
        await asyncio.gather(*(ask(fleet, s) for s in "abcd"))
    assert [len(d.bodies) for d in doubles] == [6, 6]
    for s in "abcd":
        await fleet.release(s)
    assert not any(m.sessions for m in fleet.members)


async def test_503_for_a_while_loses_one_answer_and_then_waits(doubles):
    fleet = Fleet([Member(SGLangEngine(doubles[0].address, timeout_s=5))], patience_s=10, start_timeout_s=10)
    await fleet.start()
    doubles[0].refuse = dict.fromkeys(["/generate", "/model_info", "/server_info"], 503)
    with pytest.raises(EngineFailure) as e:
        await ask(fleet)
    assert e.value.cause == "engine: HTTP 503"
    waiting = asyncio.create_task(ask(fleet))
    await asyncio.sleep(1)
    assert not waiting.done()
    doubles[0].refuse = {}
    assert (await waiting).ids
    assert fleet.causes == {"engine: HTTP 503": 1}
    await fleet.close()


async def test_a_4xx_takes_nobody_down(fleet, doubles):
    doubles[0].faults = [400]
    doubles[1].faults = [400]
    for s in "ab":
        with pytest.raises(EngineFailure):
            await ask(fleet, s)
    assert [m.state for m in fleet.members] == ["ready", "ready"]


async def test_a_server_that_came_back_with_old_weights_is_given_new_ones(fleet, doubles, manifest):
    await fleet.update_weights(manifest, 2)

    async def recovery(engine):
        await engine.update_weights(manifest, fleet.policy_version)
        return True

    fleet.recovery = recovery
    doubles[0].weight_version = "default"
    answers = await asyncio.gather(*(ask(fleet, s) for s in "abcd"), return_exceptions=True)
    failed = [a for a in answers if isinstance(a, EngineFailure)]
    assert {f.cause for f in failed} == {"engine: old weights"}
    assert fleet.causes == {"engine: old weights": 1}
    await until(lambda: all(m.state == "ready" for m in fleet.members))
    assert doubles[0].weight_version == "2"
    assert {(await ask(fleet, s)).policy_version for s in "abcd"} == {2}


async def test_a_server_that_fails_an_update_is_discarded_and_the_others_go_on(fleet, doubles, manifest):
    doubles[0].refuse = {"/update_weights_from_disk": 500}
    await fleet.update_weights(manifest, 1)
    assert fleet.members[0].state == "down"
    assert fleet.members[0].spoilt
    assert {(await ask(fleet, s)).policy_version for s in "abcd"} == {1}
    assert fleet.causes == {"engine: HTTP 500": 1}


async def test_an_update_that_nobody_takes_is_an_error_and_ends(fleet, doubles, manifest):
    for d in doubles:
        d.refuse = {"/update_weights_from_disk": 500}
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailure, match="no engine"):
            await fleet.update_weights(manifest, 1)


async def test_refused_weights_leave_all_members_as_they_were(fleet, manifest):
    with pytest.raises(EngineFailure) as e:
        await fleet.update_weights(WeightsManifest(manifest.path, "0" * 32), 1)
    assert e.value.cause == "weights fingerprint"
    assert [m.state for m in fleet.members] == ["ready", "ready"]
    assert (await ask(fleet)).policy_version == 0


async def test_pause_and_resume_are_idempotent(fleet):
    await fleet.pause()
    await fleet.pause()
    task = asyncio.create_task(ask(fleet))
    await asyncio.sleep(0.05)
    assert not task.done()
    await fleet.resume()
    await fleet.resume()
    assert (await task).ids


# -- processes -----------------------------------------------------------------------------------------------------------

SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from doubles import weights
from engine_contract import EngineContract
from sglang_double import Double, count_up
async def main():
    await Double(delay_s=0.2).start({port})
    await asyncio.Event().wait()
asyncio.run(main())
"""


def process(tmp_path, port, code=None):
    code = code or SERVER.format(tests=str(Path(__file__).parent), port=port)
    return ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log", f"http://127.0.0.1:{port}")


async def test_a_server_that_dies_while_starting_fails_at_once_with_its_log(tmp_path):
    server = process(tmp_path, 1, "import sys; print('no memory left'); sys.exit(3)")
    server.start()
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailure, match=r"died while it started \(status 3\)(.|\n)*no memory left"):
            await server.wait_ready()
    await server.stop()


async def test_stop_ends_the_whole_tree(tmp_path):
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    server = process(tmp_path, 1, child)
    server.start()
    pid = server.process.pid
    await until(lambda: len(session_members(pid)) == 2)
    await server.stop()
    assert not session_members(pid)
    await server.stop()


@pytest.fixture
async def stubborn(tmp_path):
    """A server that ignores SIGTERM."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    server = process(tmp_path, 1, code)
    server.start()
    await until(lambda: "deaf" in server.tail())
    yield server
    for pid in session_members(server.process.pid) if server.process else ():
        os.kill(pid, signal.SIGKILL)


async def test_a_stop_that_was_cancelled_can_be_asked_for_again(stubborn):
    pid = stubborn.process.pid
    stop = asyncio.create_task(stubborn.stop())
    await asyncio.sleep(0.1)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)
    assert session_members(pid)
    await asyncio.gather(stubborn.stop(), stubborn.stop())
    assert not session_members(pid)
    assert not stubborn.alive


async def test_a_server_that_the_kernel_keeps_is_a_failure_that_names_it(stubborn, monkeypatch):
    def never(timeout):
        raise subprocess.TimeoutExpired("server", timeout)

    monkeypatch.setattr(stubborn.process, "wait", never)
    with pytest.raises(EngineFailure, match=rf"\(pid {stubborn.process.pid}\) was killed and does not end"):
        await stubborn.stop()
    assert stubborn.process is not None


async def test_killed_during_a_turn_it_is_started_again_with_the_weights_that_count(tmp_path, manifest):
    port = free_port()
    server = process(tmp_path, port)
    fleet = Fleet([Member(SGLangEngine(server.address, timeout_s=5), server)], patience_s=30)
    await fleet.start()
    try:
        await fleet.update_weights(manifest, 7)

        async def recovery(engine):
            await engine.update_weights(manifest, fleet.policy_version)
            return True

        fleet.recovery = recovery
        tasks = [asyncio.create_task(ask(fleet, s)) for s in "abc"]
        await asyncio.sleep(0.1)
        os.kill(server.process.pid, signal.SIGKILL)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(a, EngineFailure) for a in answers)
        assert (await ask(fleet)).policy_version == 7
        assert fleet.members[0].restarts == 1
        assert sum(fleet.causes.values()) == 1
    finally:
        await fleet.close()


async def test_killed_while_paused_the_next_update_waits_for_it(tmp_path, manifest):
    port = free_port()
    server = process(tmp_path, port)
    fleet = Fleet([Member(SGLangEngine(server.address, timeout_s=5), server)], patience_s=30)
    await fleet.start()
    try:
        await fleet.pause()
        os.kill(server.process.pid, signal.SIGKILL)
        await fleet.update_weights(manifest, 3)
        await fleet.resume()
        assert (await ask(fleet)).policy_version == 3
    finally:
        await fleet.close()


# -- bad input -----------------------------------------------------------------------------------------------------------


SERVER_ARGS = """
class ServerArgs:
    mem_fraction_static: A[float, "its share"] = 0.9
    port: A[int, Arg(help="where")] = 1
    dtype: A[str, Arg(aliases=["--data-type"])] = "auto"
    gemm_runner: A[str, Arg(cli_name="--gemm")] = "auto"
    offload: A[bool, Arg(action=argparse.BooleanOptionalAction)] = False
    hidden: A[int, Arg(no_cli=True)] = 1
    name: str = ""

    def add_cli_args(parser):
        parser.add_argument("--log-level", "--level", help="Use --other instead.", new_flag="--another")
"""
PARSER = "import argparse as a; from sglang.srt.server_args import ServerArgs as S; p = a.ArgumentParser(add_help=False); S.add_cli_args(p)"


@pytest.fixture
def installation(tmp_path):
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt/server_args.py").write_text(SERVER_ARGS)
    return Installation(Path(sys.executable), package, "0.5.23")


def test_flags_are_checked_by_name(installation):
    check_flags({"mem_fraction_static": 0.5, "log-level": "info"}, installation)
    with pytest.raises(
        ConfigError, match=r"SGLang 0\.5\.23 has no flag --mem-fraction-statik; did you mean 'mem-fraction-static'"
    ):
        check_flags({"mem_fraction_statik": 0.5}, installation)


@pytest.mark.parametrize(
    ("flag", "why"),
    {
        "dtype": "give --dtype",
        "pipeline_parallel_size": "--rollout-num-gpus-per-engine",
        "nnodes": "--rollout-external-engine-addrs",
        "base-gpu-id": "CUDA_VISIBLE_DEVICES",
        "api-key": "without a key",
        "config": r"table \[sglang\]",
    }.items(),
)
def test_flags_that_contradict_what_agentrl_does(installation, flag, why):
    with pytest.raises(ConfigError, match=f"--sglang-{flag.replace('_', '-')} is not taken: .*{why}"):
        check_flags({flag: "x"}, installation)


def test_flags_are_those_of_the_source(installation):
    assert known_flags(installation) == {
        *("mem-fraction-static", "port", "dtype", "data-type", "gemm", "offload", "no-offload", "log-level", "level")
    }


@pytest.mark.sglang
def test_flags_are_those_of_the_parser():
    try:
        installation = find_installation(os.environ.get("AGENTRL_SGLANG_PYTHON"))
    except ConfigError as e:  # tests may have a server, but no SGLang of their own
        pytest.skip(str(e))
    code = f"{PARSER}; print(*(name for action in p._actions for name in action.option_strings))"
    command = [installation.python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=installation.environment, check=True)
    assert known_flags(installation) == {name.removeprefix("--") for name in done.stdout.splitlines()[-1].split()}


async def test_a_router_is_no_server(double):
    double.refuse["/server_info"] = 404
    with pytest.raises(EngineFailure, match="/server_info answered 404"):
        await SGLangEngine(double.address).start()
    double.servers = ("http://10.0.0.5:30000", "http://10.0.0.6:30000")
    with pytest.raises(
        EngineFailure, match=r"is a router; .* --rollout-external-engine-addrs 10\.0\.0\.5:30000 10\.0\.0\.6:30000"
    ):
        await SGLangEngine(double.address).start()


async def test_a_port_in_use(installation, double):
    spec = LaunchSpec(MODEL, "float32", 128, args={"port": double.port})
    with pytest.raises(ConfigError, match="is in use"):
        check_spec(spec, installation)


@pytest.mark.parametrize("version", ["0.3.0", "0.5.9", "0.5.9.post1"])
def test_a_version_that_is_too_old(installation, version):
    with pytest.raises(ConfigError, match=f"has SGLang {version}, agentrl needs 0.5.10 or later"):
        check_spec(LaunchSpec(MODEL, "float32", 128), replace(installation, version=version))


def test_the_oldest_version_is_the_one_that_is_asked_for():
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["sglang"] == [f"sglang>={'.'.join(map(str, LEAST))}"]


@pytest.mark.parametrize("version", ["0.5.10", "0.0.0.dev1+g1234567", "0.5.24rc1", "unknown"])
async def test_an_untested_version_warns_once_before_it_is_started(installation, version):
    double = await Double(version=version).start()
    engine = SGLangEngine(double.address)
    warn_if_untested.cache_clear()
    with pytest.warns(RuntimeWarning, match="was not tested"):
        check_spec(LaunchSpec(MODEL, "float32", 128), replace(installation, version=version))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await engine.start()
    await engine.close()
    await double.stop()


@pytest.mark.parametrize("port", ["abc", 70000, 0, -1, True, 30000.5])
def test_a_port_that_is_none(installation, port):
    with pytest.raises(ConfigError, match=f"--sglang-port .*from 1 to 65535, found {port!r}"):
        check_spec(LaunchSpec(MODEL, "float32", 128, args={"port": port}), installation)


def test_every_engine_needs_a_port(installation):
    with pytest.raises(ConfigError, match="from 1 to 65534, found 65535"):
        check_spec(LaunchSpec(MODEL, "float32", 128, engines=2, args={"port": 65535}), installation)


@pytest.mark.parametrize("share", ["abc", 1.5, 0, True])
def test_a_share_of_memory_that_is_none(installation, share):
    with pytest.raises(ConfigError, match=f"--sglang-mem-fraction-static is a share between 0 and 1, found {share!r}"):
        check_spec(LaunchSpec(MODEL, "float32", 128, args={"mem_fraction_static": share}), installation)


def test_a_model_that_does_not_exist(installation, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_spec(LaunchSpec(tmp_path, "float32", 128), installation)


def test_too_little_memory(installation, monkeypatch):
    monkeypatch.setattr("agentrl.engine.launch_spec.gpus", lambda: [(5, 80000)])
    with pytest.raises(ConfigError, match="GPU 0 has 5 of 80000 MiB free"):
        check_spec(LaunchSpec(MODEL, "float32", 128), installation)
    with pytest.raises(ConfigError, match="need 2 GPUs; this machine has 1"):
        check_spec(LaunchSpec(MODEL, "float32", 128, engines=2), installation)


@pytest.fixture
def plan(installation, monkeypatch):
    """`plan_servers` of these settings, with this installation and these cards."""
    monkeypatch.setattr("agentrl.engine.choose.find_installation", lambda *_: installation)

    def make(settings, *, trains=True, cards=()):
        for module in ("choose", "launch_spec"):
            monkeypatch.setattr(f"agentrl.engine.{module}.gpus", lambda: list(cards))
        return plan_servers(build_config({"engine": "sglang", **settings}), MODEL, 128, trains=trains)

    return make


def test_one_card_is_enough_without_a_trainer_or_shared_with_it(plan):
    one = [(80000, 80000)]
    assert plan({}, trains=False, cards=one).spec.first_gpu == 0
    assert plan({"colocate": True}, cards=one).spec.first_gpu == 0
    assert plan({}, cards=one * 2).spec.first_gpu == 1
    with pytest.raises(ConfigError, match="beside a trainer of 1, need 2 GPUs; this machine has 1; --colocate"):
        plan({}, cards=one)


AWAY = "192.0.2.5:30000"
"""an address for documentation: nobody's"""


def test_servers_elsewhere_need_a_folder_that_both_see(plan, tmp_path):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.5:30000 is on another machine: .* --update-weight-disk-dir"):
        plan({"rollout_external_engine_addrs": ["localhost:1", AWAY]})
    for kind in ("split", "colocated"):
        with pytest.raises(ConfigError, match=f"--weight-sync {kind} reaches .*{AWAY} is on another; use disk"):
            plan({"rollout_external_engine_addrs": [AWAY], "weight_sync": kind})
    with pytest.raises(ConfigError, match=r"--update-weight-disk-dir .*nowhere is no folder"):
        plan({"rollout_external_engine_addrs": [AWAY], "update_weight_disk_dir": str(tmp_path / "nowhere")})
    plan({"rollout_external_engine_addrs": [AWAY]}, trains=False)
    plan({"rollout_external_engine_addrs": [AWAY], "update_weight_disk_dir": str(tmp_path)})


@pytest.mark.parametrize("kind", ["disk", "split", "colocated"])
def test_weights_by_disk_go_where_they_are_told(plan, tmp_path, kind):
    settings = {"update_weight_disk_dir": str(tmp_path), "weight_sync": kind}
    config = build_config({"engine": "sglang", **settings})
    sync = Parts.weight_sync(SimpleNamespace(config=config, servers=plan(settings)))
    assert sync.folder.parent == tmp_path
    sync.close()


def test_servers_of_this_machine(plan):
    here = ["localhost:1", "127.0.0.2:30000", socket.gethostbyname(socket.gethostname()) + ":1"]
    here += ["[::1]:1"] if of_this_machine("::1") else []
    for kind in ("split", "colocated", "disk"):
        assert len(plan({"rollout_external_engine_addrs": here, "weight_sync": kind}).addresses) == len(here)
    assert not of_this_machine("no.such.name.invalid")
    for address in ("localhost", "localhost:x", "[::1", ":1", "localhost:1/v1"):
        with pytest.raises(ConfigError, match="takes HOST:PORT"):
            plan({"rollout_external_engine_addrs": [address]})


@pytest.mark.parametrize("settings", [{}, {"rollout_external_engine_addrs": ["localhost:1"]}])
@pytest.mark.parametrize(("timeout_s", "patience_s"), [(100.0, 50.0), (600.0, 300.0), (9000.0, 600.0)])
def test_generations_give_up_waiting_before_their_episode_does(plan, tmp_path, settings, timeout_s, patience_s):
    fleet = make_fleet(plan({**settings, "episode_timeout_s": timeout_s}), tmp_path)
    assert fleet._patience_s == patience_s


def test_weights_by_disk_lend_no_memory(plan):
    settings = {"colocate": True, "weight_sync": "disk"}
    with pytest.raises(ConfigError, match="use --weight-sync colocated"):
        plan(settings, cards=[(80000, 80000)])
    plan(settings)


def test_only_the_visible_cards_count(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\nprintf "GPU-aaaa1, 10, 80000\\nGPU-bbbb2, 20, 80000\\nGPU-cccc3, 30, 80000\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [free for free, _ in gpus()] == [10, 20, 30]
    for chosen, free in {"2,0": [30, 10], "GPU-bbbb2": [20], "1,9,0": [20], "": [], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [f for f, _ in gpus()] == free, chosen


def test_cards_count_although_their_memory_is_not_told(installation, tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = {"GPU-aaaa1, [N/A], [N/A]": [None], "GPU-aaaa1, 10, 80000\nGPU-bbbb2, [N/A], 80000": [(10, 80000), None]}
    for text, cards in said.items():
        script.write_text(f'#!/bin/sh\necho "{text}"\n')
        script.chmod(0o755)
        assert gpus() == cards
    script.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []
    monkeypatch.setattr("agentrl.engine.launch_spec.gpus", lambda: [None])
    check_spec(LaunchSpec(MODEL, "float32", 128), installation)
    with pytest.raises(ConfigError, match="need 2 GPUs; this machine has 1"):
        check_spec(LaunchSpec(MODEL, "float32", 128, engines=2), installation)


def test_cards_count_although_the_driver_hangs(tmp_path, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("agentrl.engine.sglang_install.shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("agentrl.engine.sglang_install.subprocess.run", hang)
    monkeypatch.setattr("agentrl.engine.sglang_install.DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus() == [None, None]


@pytest.mark.parametrize(("free", "known"), [(None, {}), (5, {"free_mib/rollout": 5})])
async def test_the_memory_of_a_stage_is_that_of_this_cycle(free, known):
    sync = ColocatedSync()
    sync.free_mib["rollout"] = 7  # of the cycle before
    await sync._note(SimpleNamespace(free_mib=lambda: free), "rollout")
    assert sync.memory() == known
    sync.close()


def test_no_sglang(tmp_path):
    with pytest.raises(ConfigError, match="make setup-sglang-cpu"):
        find_installation(_without_packages(tmp_path))
    with pytest.raises(ConfigError, match="no such program"):
        find_installation(str(tmp_path / "nothing"))


def _without_packages(tmp_path):
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_the_command(installation):
    words = command_line(LaunchSpec(MODEL, "float32", 128, args={"log_level": "info", "x": False}), installation, 0, 77)
    assert words[words.index("--port") + 1] == "77"
    assert words[words.index("--log-level") + 1] == "info"
    assert "--x" not in words


async def test_an_end_token_that_is_ignored_while_others_count(engine, double):
    """SGLang ignores all stop tokens together, so it is asked to continue after the model's own."""

    def stop_at_50_and_60(body):
        ids = []
        for i in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            ids.append(body["input_ids"][-1] + i)
            if ids[-1] in (50, 60):
                break
        return ids

    double.answer, double.eos = stop_at_50_and_60, (50, 60)
    g = await engine.generate([45], SamplingParams(40, ignore_eos=True, stop_token_ids=(60,)), session="a")
    assert g.ids == tuple(range(46, 61))
    assert (g.finish_reason, g.matched_stop) == (FinishReason.STOP, 60)
    assert [len(b["input_ids"]) for b in double.bodies] == [1, 6]
    g = await engine.generate([45], SamplingParams(5, ignore_eos=True, stop_token_ids=(60,)), session="a")
    assert (g.ids, g.finish_reason, g.matched_stop) == ((46, 47, 48, 49, 50), FinishReason.LENGTH, None)


async def test_memory_is_released_and_resumed_by_tags(double, monkeypatch):
    asked = []

    async def note(request, body):
        from aiohttp import web

        asked.append((request.path, body["tags"]))
        return web.json_response({})

    monkeypatch.setattr(double, "release_memory_occupation", note, raising=False)
    monkeypatch.setattr(double, "resume_memory_occupation", note, raising=False)
    engine = SGLangEngine(double.address)
    await engine.start()
    engine._facts = ServerFacts("0.5.23", "cuda", 1, True, False, True, False, 256)
    await engine.wake()
    assert asked == []
    await engine.sleep(("kv_cache", "weights"))
    with pytest.raises(EngineFailure, match="wake"):
        await engine.generate([1], FIVE, session="a")
    await engine.wake(("weights",), ready=False)
    with pytest.raises(EngineFailure, match="wake"):
        await engine.generate([1], FIVE, session="a")
    await engine.wake(("kv_cache",))
    await engine.wake(("kv_cache",))
    assert (await engine.generate([1], FIVE, session="a")).ids
    assert asked == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]
    await engine.close()


# -- the contract, over fleets of scripted servers ------------------------------------------------------------------------


def until_stopped(body):
    """As `count_up`, ended by the stop tokens that were asked for."""
    stops = body["sampling_params"].get("stop_token_ids", ())
    ids = count_up(body)
    at = next((n for n, i in enumerate(ids) if i in stops), None)
    return ids if at is None else ids[: at + 1]


class TestFleet(EngineContract):
    deterministic = False

    @pytest.fixture
    def context(self):
        return [4, 8, 15, 16, 23, 42]

    @pytest.fixture
    async def servers(self):
        servers = [await Double(answer=until_stopped, cached=0).start() for _ in range(2)]
        yield servers
        for server in servers:
            await server.stop()

    @pytest.fixture
    async def engine(self, servers):
        fleet = Fleet([Member(SGLangEngine(s.address, timeout_s=5)) for s in servers])
        await fleet.start()
        yield fleet
        await fleet.close()

    @pytest.fixture
    def slow(self, engine, servers):
        for server in servers:
            server.delay_s = 0.5
        return engine

    @pytest.fixture
    def manifest(self, whole_manifest):
        return whole_manifest

    async def test_the_next_turn_finds_its_prefix(self):
        pytest.skip("scripted servers have no cache")


@pytest.fixture
def whole_manifest(manifest):
    return manifest
