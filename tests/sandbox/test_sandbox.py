"""What a sandbox runs, keeps and returns, and that nothing which is tried from inside leaves it."""

import asyncio
import itertools
import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import play, until

from agentrl.errors import ConfigError, ContractError, InfraError, UnknownNameError
from agentrl.render import make_renderer
from agentrl.sandbox import Container, Namespaces, ProcessLimits, Sandbox, SandboxLimits, backends, choose_backend
from agentrl.types import StopReason, Task

RETOOL = Path(__file__).parents[2] / "examples/retool/retool.py"
NAMESPACES = [Namespaces(), Namespaces(as_root=False)] if os.geteuid() == 0 else [Namespaces()]
needs_namespaces = pytest.mark.skipif(Namespaces().why_not() is not None, reason="needs Linux namespaces")
QUICK = SandboxLimits(time_s=2.0, cpu_s=20.0, memory_bytes=256 << 20, disk_bytes=8 << 20)


@pytest.fixture(params=NAMESPACES, ids=lambda b: "root" if b.as_root and len(NAMESPACES) > 1 else "user")
async def closed(request):
    async with Sandbox(QUICK, request.param) as sandbox:
        yield sandbox


@pytest.fixture(params=[ProcessLimits(), *NAMESPACES], ids=["limits", *(["root", "user"][-len(NAMESPACES) :])])
def backend(request):
    if isinstance(request.param, Namespaces) and request.param.why_not() is not None:
        pytest.skip("needs Linux namespaces")
    return request.param


@pytest.fixture
async def any_sandbox(backend):
    async with Sandbox(QUICK, backend) as sandbox:
        yield sandbox


async def test_variables_files_and_the_shells_folder_stay(any_sandbox):
    run, shell = any_sandbox.python, any_sandbox.shell
    assert (await run("x = 6")).output == ""
    assert (await run("print('to', end=' '); x * 7")).output == "to 42\n"
    await any_sandbox.write_file("data/in.txt", b"\x00six")
    assert (await run("open('data/in.txt', 'rb').read()")).output == "b'\\x00six'\n"
    assert (await shell("cd data; export WORD=seven; echo $WORD > out.txt")).status == "ok"
    failed = await shell("pwd; echo $WORD; exit 4")
    assert failed.output.split() == [*failed.output.split()[:1], "seven", "[exit", "status", "4]"]
    assert failed.output.split()[0].endswith("/data")
    assert failed.status == "error"
    assert await any_sandbox.read_file("data/out.txt") == b"seven\n"
    assert await any_sandbox.read_file("data/out.txt", max_bytes=3) == b"sev"


async def test_an_error_reads_as_in_an_interpreter(any_sandbox):
    result = await any_sandbox.python("def f():\n    return 1 / 0\nf()")
    assert result.status == "error"
    assert result.output == (
        'Traceback (most recent call last):\n  File "<code 1>", line 3, in <module>\n    f()\n'
        '  File "<code 1>", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )


async def test_what_ends_the_process_loses_variables_and_keeps_files(any_sandbox):
    await any_sandbox.python("x = 1; open('kept', 'w').write('here')")
    for code, how in (
        ("import os; os._exit(3)", "exited with status 3"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    ):
        died = await any_sandbox.python(code)
        assert (died.status, died.detail, died.state_lost) == ("died", how, True)
        assert died.text() == f"[the process {how}; its variables are lost]"
    assert "NameError" in (await any_sandbox.python("x")).output
    assert (await any_sandbox.python("open('kept').read()")).output == "'here'\n"
    assert (await any_sandbox.python("import sys; sys.exit(2)")).status == "error"


async def test_time_is_limited_and_an_interruption_keeps_variables(backend):
    async with Sandbox(replace(QUICK, time_s=0.5), backend) as sandbox:
        await sandbox.python("x = 1")
        for call in (sandbox.python("while True: pass"), sandbox.shell("sleep 1000")):
            late = await call
            assert (late.status, late.state_lost) == ("timeout", False)
            assert "the time limit interrupted the code" in late.text()
        stubborn = await sandbox.python("import time\nwhile True:\n try: time.sleep(60)\n except BaseException: pass")
        assert (stubborn.status, stubborn.state_lost) == ("timeout", True)


async def test_200_mb_of_output_are_cut_and_counted(any_sandbox):
    result = await any_sandbox.python("import sys\nfor _ in range(200): _ = sys.stdout.write('z' * 1_000_000)")
    assert result.output == "z" * QUICK.output_bytes
    if result.status == "ok":  # a busy machine may be too slow
        assert result.output_bytes == 200_000_000
    assert f"output cut: the first {QUICK.output_bytes} of {result.output_bytes} bytes" in result.text()
    assert (await any_sandbox.python("1 + 1")).status in ("ok", "error")


async def test_output_that_is_not_text_and_odd_code_are_taken(any_sandbox):
    assert (await any_sandbox.python("import os; _ = os.write(1, b'\\xff\\x00ok')")).output == "\ufffd\x00ok"
    for code in ("", "\ud800", "\x00", "(" * 5000, "x = '" + "y" * 300_000 + "'"):
        assert (await any_sandbox.python(code)).status in ("ok", "error", "died")
    assert (await any_sandbox.python("2 + 2")).status == "ok"


# -- attempts to leave -------------------------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.parametrize(
    "closed", NAMESPACES[:1], indirect=True
)  # the kernel does not limit the number of root's processes
async def test_a_fork_bomb_stays_inside_and_ends(closed):
    bombed = await closed.python("import os\nwhile True:\n try: os.fork()\n except OSError: pass")
    assert bombed.status in ("timeout", "memory", "died")  # died: it had no time to answer, so all of it was ended
    await closed.shell(":(){ :|:& };:")
    alive = (await closed.python("import os; sum(p.isdigit() for p in os.listdir('/proc'))")).output
    assert int(next(filter(str.isdigit, alive.split()))) <= QUICK.processes + 4
    outside = _processes()
    await closed.close()
    await until(lambda: len(_processes() - outside) < 5, within_s=10)


def _processes():
    return {int(p) for p in os.listdir("/proc") if p.isdigit()}


@needs_namespaces
async def test_memory_is_limited_over_all_processes(closed):
    alone = await closed.python("x = bytearray(1 << 30)")
    assert "MemoryError" in alone.output
    many = (
        "import os, time\nfor _ in range(8):\n if os.fork() == 0:\n  x = bytearray(100 << 20)\n"
        "  for i in range(0, len(x), 4096): x[i] = 1\n  time.sleep(60)\ntime.sleep(60)"
    )
    together = await closed.python(many)
    assert together.status in ("memory", "timeout")
    assert (await closed.python("1")).status == "ok"


@needs_namespaces
async def test_disk_is_limited(closed):
    full = await closed.shell(
        "(head -c 99999999 /dev/zero > a; head -c 99999999 /dev/zero > b) 2> /dev/null; du -sk . | cut -f1"
    )
    assert int(full.output.split()[-1]) <= QUICK.disk_bytes // 1024 + 64
    assert "OSError" in (await closed.python("for i in range(10**6): open(f'f{i}', 'w').close()")).output
    with pytest.raises(OSError, match="No space left"):
        await closed.write_file("c", bytes(9 << 20))


@needs_namespaces
async def test_there_is_no_network(closed):
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for address in ("127.0.0.1", "1.1.1.1"):
        result = await closed.python(f"import socket; socket.create_connection(({address!r}, {port}), 1)")
        assert "Network is unreachable" in result.output
    assert "Temporary failure" in (await closed.python("import socket; socket.gethostbyname('example.org')")).output
    server.close()


@needs_namespaces
async def test_files_outside_are_not_there(closed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the parent's secret")
    paths = [
        str(secret),
        "/etc/passwd",
        "/etc/shadow",
        f"/proc/{os.getpid()}/environ",
        str(Path.home() / ".bashrc"),
        __file__,
        "/sys/kernel",
    ]
    for path in paths:
        assert "FileNotFoundError" in (await closed.python(f"open({path!r}).read()")).output
    inside = (
        await closed.shell(
            f"ls -d / /* /root /root/* /home/* 2>/dev/null; cat /proc/1/environ /proc/self/environ; ls {tmp_path}"
        )
    ).output
    assert "secret" not in inside
    assert not {k for k in os.environ if k.startswith(("AGENTRL", "PYTEST"))} & set(inside.replace("=", " ").split())
    for path in ("/usr/x", "/x", "/bin/x", "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/dev/x"):
        assert "Error" in (await closed.python(f"open({path!r}, 'w').write('x')")).output
    await closed.shell("ln -s /etc/alternatives link; ln -s ../.. up; mkfifo pipe")
    for path in ("link/x", "../../etc/hosts", "up/usr/bin/env", "pipe", "/usr/bin/env", "nothing"):
        with pytest.raises(OSError, match="sandbox, "):
            await closed.read_file(path)


@needs_namespaces
async def test_processes_outside_are_neither_seen_nor_reached(closed):
    result = await closed.python(
        f"import os, signal\ntry: os.kill({os.getpid()}, signal.SIGKILL)\nexcept ProcessLookupError: print('no such process')\n"
        "print(max(int(p) for p in os.listdir('/proc') if p.isdigit()))\n"
        "os.kill(1, signal.SIGKILL)\ntry: os.kill(-1, signal.SIGTERM)\nexcept ProcessLookupError: pass"
    )
    assert result.output.split()[:3] == ["no", "such", "process"]
    assert int(result.output.split()[3]) < 20
    assert (await closed.python("1")).status in ("ok", "died")


@needs_namespaces
async def test_rights_cannot_be_regained(closed):
    for command in (
        "mount -t tmpfs x /usr", "unshare -n true", "unshare -m mount --bind /usr /work", "chroot /usr", "mknod d b 8 0",
        "nsenter -t 1 -m true", "dmesg", "hostname x", "su -c true",
    ):  # fmt: skip
        assert (await closed.shell(command)).status == "error", command
    caps = (await closed.shell("grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status")).output.split()
    assert caps == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


@needs_namespaces
async def test_a_guest_that_answers_nonsense_is_ended(closed):
    """Code reaches the agent's descriptors only through /proc, where the agent of the same user could be opened."""
    await closed.python("1")
    code = (
        "import os\nanswer = b'{\"status\": 7, \"output\": 3, \"bytes\": []}\\n'\nfor n in range(3, 64):\n for p in ('1', 'self'):\n"
        "  try: os.write(os.open(f'/proc/{p}/fd/{n}', os.O_WRONLY), answer * 9)\n  except OSError: pass"
    )
    forged = await closed.python(code)
    assert forged.status in ("ok", "error", "died", "timeout")
    later = await closed.python("1")
    assert isinstance(later.output, str)


async def test_nothing_is_left_after_close_or_cancellation(any_sandbox):
    before = _processes()
    await any_sandbox.shell("sleep 1234 & setsid sleep 1234 & disown -a; true")
    await any_sandbox.python("import os\nif os.fork() == 0:\n os.setsid()\n import time\n time.sleep(1234)")
    folder = any_sandbox._folder
    task = asyncio.create_task(any_sandbox.shell("sleep 1"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await any_sandbox.close()
    mine = str(folder).encode()
    await until(lambda: not any(_mentions(p, mine) for p in _processes() - before), within_s=10)
    assert not folder.exists()


def _mentions(pid, text):
    try:
        return text in Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# -- backends ----------------------------------------------------------------------------------------------------------


def test_a_backend_that_this_machine_cannot_give_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="'container' cannot run here: neither docker nor podman is installed"):
        choose_backend("container")
    with pytest.raises(UnknownNameError, match="did you mean 'namespaces'"):
        choose_backend("namespace")
    monkeypatch.setattr(Namespaces, "why_not", lambda self: "unshare: Operation not permitted")
    assert choose_backend("auto").name == "process limits"
    assert "network and readable files are NOT closed off" in choose_backend("auto").note


@pytest.mark.parametrize("wrong", [{"time_s": 0}, {"memory_bytes": 1.5}, {"processes": True}, {"cpu_s": float("nan")}])
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(ContractError, match=f"{next(iter(wrong))} must be a positive"):
        SandboxLimits(**wrong)


async def test_a_sandbox_that_does_not_start_is_a_failure_of_infrastructure():
    class Broken(ProcessLimits):
        def command(self, limits, folder, *, packages):
            return [sys.executable, "-c", "import sys; sys.exit('no room')"]

    with pytest.raises(InfraError, match="a sandbox cannot be started: no room"):
        await Sandbox(QUICK, Broken()).python("1")


async def test_a_container_gets_the_limits_and_runs_the_same_guest(tmp_path, monkeypatch):
    """The program of a container is played by one that notes its arguments and runs the guest here."""
    program, notes = tmp_path / "docker", tmp_path / "notes"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nargs = sys.argv[1:]\n"
        f"if args[0] == 'image': sys.exit(args[2] != 'here')\n"
        f"json.dump(args, open({str(notes)!r}, 'w'))\ncommand = args[args.index('here') + 1:]\n"
        f"os.environ.update(HOME={str(tmp_path)!r}, TMPDIR={str(tmp_path / 'tmp')!r})\nos.execv(sys.executable, command)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert Container("missing", str(program)).why_not() is not None
    container = Container("here", str(program))
    assert container.why_not() is None
    async with Sandbox(QUICK, container) as sandbox:
        assert (await sandbox.python("6 * 7")).output == "42\n"
    args = json.loads(notes.read_text())
    given = dict(itertools.pairwise(args))
    assert (given["--network"], given["--pids-limit"], given["--cap-drop"]) == ("none", "64", "ALL")
    assert given["--tmpfs"].startswith(f"/work:size={QUICK.disk_bytes},")
    assert "--read-only" in args


# -- the example -------------------------------------------------------------------------------------------------------


async def test_retool_plays_scores_and_records_its_sandbox(tokenizer):
    from agentrl.env import make_env_class

    env = make_env_class(str(RETOOL))
    task = next(iter(env.tasks("train")))
    assert task.label == str(eval(task.prompt.rsplit("What is ", 1)[1].removesuffix("?").replace("modulo", "%")))
    question = task.prompt.rsplit("What is ", 1)[1].removesuffix("?").replace("modulo", "%")
    renderer = make_renderer(tokenizer, env.action_format)
    script = [f"<code>x = {question}\nx</code>", "<code>x + 0</code>", f"<answer>{task.label}.0</answer>"]
    t = await play(env, script, renderer, task=task, rewards=env.rewards, context_length=8192)
    assert [r.content for turn in t.turns for r in turn.action.results] == [task.label, task.label]
    assert (t.stop_reason, t.score) == (StopReason.TERMINATED, 1.0)
    assert t.state["sandbox"].startswith("sandbox: ")
    wrong = await play(env, ["<answer>many</answer>"], renderer, task=Task("t", "?", "7"), rewards=env.rewards)
    assert wrong.score == -1.0


async def test_calls_share_a_process_and_sandboxes_do_not_wait_for_each_other():
    """What a thousand calls a minute rest on; `benchmarks/sandbox.py` measures them."""
    patient = replace(QUICK, time_s=600.0)
    async with Sandbox(patient) as busy, Sandbox(patient) as other:
        process = (await other.python("import os; os.getpid()")).output
        waiting = asyncio.create_task(busy.python("import time; time.sleep(3600)"))
        results = [await other.python("os.getpid()") for _ in range(4)]
        assert [result.output for result in results] == [process] * 4
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
