"""Checks before a server starts: flags, versions, ports, GPUs, memory; and the plan that follows from settings."""

import asyncio
import os
import socket
import subprocess
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_double import Double

from agentrl.config import build_config
from agentrl.core.ports import free_port
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.installation import Installation, find_installation, gpus
from agentrl.engine.sglang.launch_spec import LaunchSpec, check_spec, command_line
from agentrl.engine.sglang.plan import is_local, make_fleet, plan_servers
from agentrl.engine.sglang.protocol import LEAST, warn_if_untested
from agentrl.engine.sglang.server_flags import check_flags, server_flags
from agentrl.errors import ConfigError
from agentrl.weight_sync.gpu_sharing import GpuSharing
from agentrl.weight_sync.make import make_weight_sync

MODEL = Path(__file__).parents[2] / "agentrl/assets/search_r1_3m"
SERVER_ARGS = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        print("a message of the package")
        parser.add_argument("--mem-fraction-static", type=float, default=0.9, help="its share")
        parser.add_argument("--port", type=int, default=1)
        parser.add_argument("--dtype", "--data-type", choices=["auto", "half"], default="auto")
        parser.add_argument("--offload", action=argparse.BooleanOptionalAction)
        parser.add_argument("--log-level", "--level")
        parser.add_argument("--quiet", action="store_true")
"""


@pytest.fixture
def installation(tmp_path):
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt/server_args.py").write_text(SERVER_ARGS)
    return Installation(python=Path(sys.executable), version="0.5.23", pythonpath=(str(tmp_path),))


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
def test_flags_that_contradict_agentrl(installation, flag, why):
    with pytest.raises(ConfigError, match=f"--sglang-{flag.replace('_', '-')} is not accepted: .*{why}"):
        check_flags({flag: "x"}, installation)


def test_flags_are_listed_by_the_interpreter_that_has_sglang(installation):
    flags = server_flags(installation)
    assert flags.keys() == {
        *("mem-fraction-static", "port", "dtype", "data-type", "offload", "no-offload", "log-level", "level", "quiet")
    }
    assert flags["mem-fraction-static"] == {"type": "float", "choices": None, "default": 0.9, "help": "its share"}
    assert flags["dtype"]["choices"] == ["auto", "half"]
    assert flags["quiet"]["type"] == "switch"


def test_flags_are_left_to_the_server_if_sglang_cannot_be_imported(installation, tmp_path):
    (tmp_path / "sglang/srt/server_args.py").write_text("import no_such_package")
    check_flags({"mem_fraction_statik": 0.5}, installation)
    with pytest.raises(ConfigError, match="--sglang-dtype is not accepted"):
        check_flags({"dtype": "x"}, installation)


@pytest.mark.sglang
def test_flags_of_the_installed_sglang():
    try:
        installation = find_installation(os.environ.get("AGENTRL_SGLANG_PYTHON"))
    except ConfigError as e:  # tests may have a server, but no SGLang of their own
        pytest.skip(str(e))
    flags = server_flags(installation)
    assert {"mem-fraction-static", "port", "log-level"} <= flags.keys()
    with pytest.raises(ConfigError, match="did you mean 'mem-fraction-static'"):
        check_flags({"mem_fraction_statik": 0.5}, installation)


async def test_a_router_stands_for_its_servers(double, plan):
    servers = ["http://127.0.0.1:30001", "http://127.0.0.1:30002"]
    settings = {"rollout_external_engine_addrs": [double.address, "127.0.0.1:1", "127.0.0.1:30002"]}

    async def planned():
        return (await asyncio.to_thread(plan, settings)).addresses

    assert await planned() == (double.address, "http://127.0.0.1:1", servers[1]), "no router, and nobody there"
    double.servers = (servers[0] + "/", servers[1] + "@0", servers[1] + "@1")
    assert await planned() == (*servers, "http://127.0.0.1:1")
    double.servers = ()
    with pytest.raises(ConfigError, match=f"router at {double.address} has no servers"):
        await planned()
    double.servers = (f"http://{AWAY}",)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.5:30000 is on another machine"):
        await planned()
    double.servers = ("grpc://127.0.0.1:5",)
    with pytest.raises(ConfigError, match="do not speak HTTP: grpc://127"):
        await planned()


def test_free_ports_are_outside_the_ephemeral_range(monkeypatch, tmp_path):
    given = tmp_path / "range"
    monkeypatch.setattr("agentrl.core.ports.EPHEMERAL_RANGE", given)
    assert 10_000 <= free_port() < 32768
    given.write_text("10002\t60999\n")
    assert free_port() in (10_000, 10_001)
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 10_000))
        two.bind(("127.0.0.1", 10_001))
        assert free_port() > 10_001, "any, where all of those are taken"
    given.write_text("1024\t65535\n")
    assert free_port() > 1024


async def test_a_port_in_use(installation, double):
    spec = LaunchSpec(model=MODEL, dtype="float32", context_length=128, args={"port": double.port})
    with pytest.raises(ConfigError, match="is in use"):
        check_spec(spec, installation)


@pytest.mark.parametrize("version", ["0.3.0", "0.5.9", "0.5.9.post1"])
def test_a_version_that_is_too_old(installation, version):
    with pytest.raises(ConfigError, match=f"has SGLang {version}, agentrl needs 0.5.10 or later"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128), replace(installation, version=version))


def test_the_oldest_version_is_that_of_the_dependency():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["sglang"] == [f"sglang>={'.'.join(map(str, LEAST))}"]


@pytest.mark.parametrize("version", ["0.5.10", "0.0.0.dev1+g1234567", "0.5.24rc1", "unknown"])
async def test_an_untested_version_warns_once_before_it_is_started(installation, version):
    double = await Double(version=version).start()
    engine = SGLangEngine(double.address)
    warn_if_untested.cache_clear()
    with pytest.warns(RuntimeWarning, match="was not tested"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128), replace(installation, version=version))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await engine.start()
    await engine.close()
    await double.stop()


@pytest.mark.parametrize("port", ["abc", 70000, 0, -1, True, 30000.5])
def test_an_invalid_port(installation, port):
    with pytest.raises(ConfigError, match=f"--sglang-port .*from 1 to 65535, found {port!r}"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128, args={"port": port}), installation)


def test_every_engine_needs_a_port(installation):
    with pytest.raises(ConfigError, match="from 1 to 65534, found 65535"):
        check_spec(
            LaunchSpec(model=MODEL, dtype="float32", context_length=128, engines=2, args={"port": 65535}), installation
        )


@pytest.mark.parametrize("share", ["abc", 1.5, 0, True])
def test_an_invalid_memory_fraction(installation, share):
    with pytest.raises(ConfigError, match=f"--sglang-mem-fraction-static is a share between 0 and 1, found {share!r}"):
        check_spec(
            LaunchSpec(model=MODEL, dtype="float32", context_length=128, args={"mem_fraction_static": share}),
            installation,
        )


def test_a_model_that_does_not_exist(installation, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_spec(LaunchSpec(model=tmp_path, dtype="float32", context_length=128), installation)


def test_too_little_memory(installation, monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.launch_spec.gpus", lambda: [(5, 80000)])
    with pytest.raises(ConfigError, match="GPU 0 has 5 of 80000 MiB free"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128), installation)
    with pytest.raises(ConfigError, match="need 2 GPUs; this machine has 1"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128, engines=2), installation)


@pytest.fixture
def plan(installation, monkeypatch):
    """`plan_servers` of these settings, with this installation and these GPUs."""
    monkeypatch.setattr("agentrl.engine.sglang.plan.find_installation", lambda *_: installation)

    def make(settings, *, trains=True, cards=()):
        for module in ("plan", "launch_spec"):
            monkeypatch.setattr(f"agentrl.engine.sglang.{module}.gpus", lambda: list(cards))
        return plan_servers(build_config({"engine": "sglang", **settings}), MODEL, 128, trains=trains)

    return make


def test_one_gpu_is_enough_without_a_trainer_or_shared_with_it(plan):
    one = [(80000, 80000)]
    assert plan({}, trains=False, cards=one).spec.first_gpu == 0
    assert plan({"colocate": True}, cards=one).spec.first_gpu == 0
    assert plan({}, cards=one * 2).spec.first_gpu == 1
    with pytest.raises(ConfigError, match="beside a trainer of 1, need 2 GPUs; this machine has 1; --colocate"):
        plan({}, cards=one)


AWAY = "192.0.2.5:30000"
"""an address that is reserved for documentation"""


def test_servers_on_other_machines_need_a_folder_that_both_see(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.router.TIMEOUT_S", 0.2)  # nobody will answer
    with pytest.raises(ConfigError, match=r"192\.0\.2\.5:30000 is on another machine: .* --update-weight-disk-dir"):
        plan({"rollout_external_engine_addrs": ["localhost:1", AWAY]})
    for kind in ("split", "colocated"):
        with pytest.raises(ConfigError, match=f"--weight-sync {kind} reaches .*{AWAY} is on another; use disk"):
            plan({"rollout_external_engine_addrs": [AWAY], "weight_sync": kind})
    with pytest.raises(ConfigError, match=r"--update-weight-disk-dir .*nowhere is not a folder"):
        plan({"rollout_external_engine_addrs": [AWAY], "update_weight_disk_dir": str(tmp_path / "nowhere")})
    plan({"rollout_external_engine_addrs": [AWAY]}, trains=False)
    plan({"rollout_external_engine_addrs": [AWAY], "update_weight_disk_dir": str(tmp_path)})


@pytest.mark.parametrize("kind", ["disk", "split", "colocated"])
def test_weights_by_disk_go_to_the_given_folder(plan, tmp_path, kind):
    settings = {"update_weight_disk_dir": str(tmp_path), "weight_sync": kind}
    config = build_config({"engine": "sglang", **settings})
    servers = plan(settings)
    sync = make_weight_sync(config.engine, servers, make_fleet(servers, None), Path())
    assert sync.folder.parent == tmp_path
    sync.close()


def test_servers_on_this_machine(plan):
    here = ["localhost:1", "127.0.0.2:30000", socket.gethostbyname(socket.gethostname()) + ":1"]
    here += ["[::1]:1"] if is_local("::1") else []
    for kind in ("split", "colocated", "disk"):
        assert len(plan({"rollout_external_engine_addrs": here, "weight_sync": kind}).addresses) == len(here)
    assert not is_local("no.such.name.invalid")
    for address in ("localhost", "localhost:x", "[::1", ":1", "localhost:1/v1"):
        with pytest.raises(ConfigError, match="takes HOST:PORT"):
            plan({"rollout_external_engine_addrs": [address]})


@pytest.mark.parametrize("settings", [{}, {"rollout_external_engine_addrs": ["localhost:1"]}])
@pytest.mark.parametrize(("timeout_s", "patience_s"), [(100.0, 50.0), (600.0, 300.0), (9000.0, 600.0)])
def test_a_generation_waits_for_less_time_than_its_episode_has(plan, tmp_path, settings, timeout_s, patience_s):
    fleet = make_fleet(plan({**settings, "episode_timeout_s": timeout_s}), tmp_path)
    assert fleet._patience_s == patience_s


def test_weights_by_disk_cannot_share_gpus(plan):
    settings = {"colocate": True, "weight_sync": "disk"}
    with pytest.raises(ConfigError, match="use --weight-sync colocated"):
        plan(settings, cards=[(80000, 80000)])
    plan(settings)


def test_only_visible_gpus_are_counted(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\nprintf "GPU-aaaa1, 10, 80000\\nGPU-bbbb2, 20, 80000\\nGPU-cccc3, 30, 80000\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [free for free, _ in gpus()] == [10, 20, 30]
    for chosen, free in {"2,0": [30, 10], "GPU-bbbb2": [20], "1,9,0": [20], "": [], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [f for f, _ in gpus()] == free, chosen


def test_gpus_with_unknown_memory_are_counted(installation, tmp_path, monkeypatch):
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
    monkeypatch.setattr("agentrl.engine.sglang.launch_spec.gpus", lambda: [None])
    check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128), installation)
    with pytest.raises(ConfigError, match="need 2 GPUs; this machine has 1"):
        check_spec(LaunchSpec(model=MODEL, dtype="float32", context_length=128, engines=2), installation)


def test_gpus_are_counted_although_the_driver_hangs(tmp_path, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("agentrl.engine.sglang.installation.shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("agentrl.engine.sglang.installation.subprocess.run", hang)
    monkeypatch.setattr("agentrl.engine.sglang.installation.DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus() == [None, None]


@pytest.mark.parametrize(("free", "known"), [(None, {}), (5, {"rollout": 5})])
async def test_the_free_memory_of_a_stage_is_that_of_this_cycle(free, known):
    sharing = GpuSharing(Fleet([]))
    sharing.free_mib["rollout"] = 7  # of the cycle before
    await sharing.note(SimpleNamespace(free_mib=lambda: free), "rollout")
    assert sharing.free_mib == known


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


def test_the_command_line(installation):
    words = command_line(
        LaunchSpec(model=MODEL, dtype="float32", context_length=128, args={"log_level": "info", "x": False}),
        installation,
        0,
        77,
    )
    assert words[words.index("--port") + 1] == "77"
    assert words[words.index("--log-level") + 1] == "info"
    assert "--x" not in words
