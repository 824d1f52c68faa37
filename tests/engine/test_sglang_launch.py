"""Scripted servers as processes: started, watched, stopped with their child processes, and restarted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import until, weights
from processes import read_line

from agentrl.core.child_process import session_members
from agentrl.core.ports import free_port
from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang import shared_memory
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import EngineFailure

FIVE = SamplingParams(5)


@pytest.fixture
def manifest(tmp_path):
    return weights(tmp_path / "w")


def ask(fleet, session="a"):
    return fleet.generate([1], FIVE, session=session)


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
    code = code or SERVER.format(tests=str(Path(__file__).parents[1]), port=port)
    return ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log", f"http://127.0.0.1:{port}")


async def test_a_server_that_dies_while_starting_fails_at_once_with_its_log(tmp_path):
    server = process(tmp_path, 1, "import sys; print('no memory left'); sys.exit(3)")
    server.start()
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailure, match=r"died while it started \(status 3\)(.|\n)*no memory left"):
            await server.wait_ready()
    await server.stop()


async def test_stop_ends_the_whole_process_tree(tmp_path):
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    server = process(tmp_path, 1, child)
    server.start()
    pid = server.process.pid
    await until(lambda: len(session_members(pid)) == 2)
    await server.stop()
    assert not session_members(pid)
    await server.stop()


MAPS = """
import mmap, os, time
mapped = []
for path in {paths!r}:
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 100)
    mapped.append(mmap.mmap(file, 100))
print("mapped", flush=True)
time.sleep(60)
"""


async def test_stop_removes_what_the_server_had_in_shared_memory_and_start_what_killed_ones_had(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    mine, others = tmp_path / "sem.mine", tmp_path / "sem.others"
    weights = tmp_path / "agentrl-weights-a" / "model.safetensors"
    weights.parent.mkdir()
    server = process(tmp_path, 1, MAPS.format(paths=[str(weights), str(mine)]))
    of_killed = tmp_path / "sglang_loads_b.shm"
    of_killed.touch()
    monkeypatch.setattr(shared_memory, "UNMAPPED_S", -1)
    server.start()
    assert not of_killed.exists()
    pid = server.process.pid
    others.touch()
    await until(lambda: shared_memory.mapped_files(session_members(pid)) == {mine})
    await server.stop()
    assert not mine.exists()
    assert others.exists()
    assert weights.exists(), "other servers may read them"


def test_only_what_no_process_maps_is_left_by_killed_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    monkeypatch.setattr(shared_memory, "UNMAPPED_S", -1)
    of_living, of_killed, others = (tmp_path / name for name in ("sglang_loads_a.shm", "sglang_loads_b.shm", "others"))
    of_killed.touch()
    others.touch()
    command = [sys.executable, "-c", MAPS.format(paths=[str(of_living)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living:
        assert read_line(living) == "mapped\n"
        shared_memory.remove_left_by_killed_servers()
        assert set(tmp_path.iterdir()) == {of_living, others}
        monkeypatch.setattr(shared_memory, "UNMAPPED_S", 30)
        of_killed.touch()
        shared_memory.remove_left_by_killed_servers()
        assert of_killed.exists(), "it may be about to be mapped"
        living.kill()


NOTES = """
import pathlib, sys, time
from agentrl.engine.sglang import shared_memory
shared_memory.MEMORY = pathlib.Path(sys.argv[1])
journal = shared_memory.Journal()
journal.write(pathlib.Path(path) for path in sys.argv[2:])
print("noted", flush=True)
time.sleep(60)
"""


def test_the_files_of_a_controller_that_was_killed_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    unmapped, mapped, again, others = (
        tmp_path / f"sem.mp-{name}" for name in ("unmapped", "mapped", "again", "others")
    )
    for file in (unmapped, again, others):
        file.touch()
    maps = [sys.executable, "-c", MAPS.format(paths=[str(mapped)])]
    with subprocess.Popen(maps, stdout=subprocess.PIPE, text=True) as server:
        assert read_line(server) == "mapped\n"
        words = [sys.executable, "-c", NOTES, *map(str, (tmp_path, unmapped, mapped, again))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as controller:
            assert read_line(controller) == "noted\n"
            (journal,) = tmp_path.glob("agentrl-*")
            shared_memory.remove_left_by_killed_servers()
            assert {unmapped, mapped, again, journal} <= set(tmp_path.iterdir()), "the controller lives"
            controller.kill()
        (tmp_path / "new").touch()
        (tmp_path / "new").rename(again)  # another program has made a file of that name
        shared_memory.remove_left_by_killed_servers()
        assert set(tmp_path.iterdir()) == {mapped, again, others, journal}
        server.kill()
    (tmp_path / "agentrl-mapped-1").touch()  # of a controller that was killed while it made it
    shared_memory.remove_left_by_killed_servers()
    assert set(tmp_path.iterdir()) == {again, others}


SERVES = """
import http.server, sys
print("serves", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{{}}")
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


async def test_a_server_that_is_ready_has_its_files_noted_until_it_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    port, mine = free_port(), tmp_path / "sgl_shm_mq_1_a"
    program = MAPS.format(paths=[str(mine)]).replace("time.sleep(60)", "") + SERVES.format(port=port)
    server = process(tmp_path, port, program)
    server.start()
    try:
        await server.wait_ready(60)
        (journal,) = tmp_path.glob("agentrl-*")
        assert json.loads(journal.read_bytes()) == {mine.name: mine.stat().st_ino}
    finally:
        await server.stop()
    assert not journal.exists()
    assert not mine.exists()


@pytest.fixture
async def stubborn(tmp_path):
    """A server that ignores SIGTERM."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    server = process(tmp_path, 1, code)
    server.start()
    await until(lambda: "deaf" in server.log_end())
    yield server
    for pid in session_members(server.process.pid) if server.process else ():
        os.kill(pid, signal.SIGKILL)


async def test_a_cancelled_stop_can_be_repeated(stubborn):
    pid = stubborn.process.pid
    stop = asyncio.create_task(stubborn.stop())
    await asyncio.sleep(0.1)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)
    assert session_members(pid)
    await asyncio.gather(stubborn.stop(), stubborn.stop())
    assert not session_members(pid)
    assert not stubborn.alive


async def test_a_server_that_does_not_end_is_a_failure_that_names_it(stubborn, monkeypatch):
    def never(timeout):
        raise subprocess.TimeoutExpired("server", timeout)

    monkeypatch.setattr(stubborn.process, "wait", never)
    with pytest.raises(EngineFailure, match=rf"\(pid {stubborn.process.pid}\) was killed and does not end"):
        await stubborn.stop()
    assert stubborn.process is not None
    monkeypatch.undo()
    stubborn.process.wait(30)


@pytest.fixture
async def alone(tmp_path):
    """A fleet of one server of ours, and that server."""
    server = process(tmp_path, free_port())
    fleet = Fleet([Member(SGLangEngine(server.address, timeout_s=5), server)], patience_s=30)
    await fleet.start()
    yield fleet, server
    await fleet.close()


async def test_a_server_killed_during_a_turn_is_restarted_with_the_current_weights(alone, manifest):
    fleet, server = alone
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


async def test_an_update_waits_for_a_server_killed_while_paused(alone, manifest):
    fleet, server = alone
    await fleet.pause()
    os.kill(server.process.pid, signal.SIGKILL)
    await fleet.update_weights(manifest, 3)
    await fleet.resume()
    assert (await ask(fleet)).policy_version == 3
