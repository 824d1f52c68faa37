"""Jobs on a machine that lacks something end with one sentence; what they wrote stays good, and `--resume` continues bit-equal."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from run_state import equal

from agentrl.store import Recording

PLAYED = (
    "--env search_r1 --rollout-batch-size 2 --n-samples-per-prompt 2 --seed 5 --eval-interval 0 --eval-limit 2 --max-turns 2 --tensorboard false "
    "--rollout-max-response-len 60 --concurrency 4 --threads 1"
).split()
TRAIN = ["train", *PLAYED, *"--num-rollout 2 --save-interval 1 --lr 1e-4".split()]
SIZE, FILES = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def run(folder, words, *limit):
    """A command, perhaps under a limit of the system: its status and its errors."""

    def lower():
        if limit:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    command = [sys.executable, "-m", "agentrl.cli", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=ENV, preexec_fn=lower, capture_output=True, text=True, timeout=500)
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
    command = [sys.executable, "-m", "agentrl.cli", *TRAIN, "--run", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, **pipes) as process:
        for line in process.stdout:
            if line.startswith("run folder"):
                shutil.rmtree(tmp_path / "run")
                break
        _, err = process.communicate(timeout=400)
    assert process.returncode in (1, 2)
    assert "was it deleted" in one_sentence(err, "train")
