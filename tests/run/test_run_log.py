"""run.log, and what is shown on stdout and stderr."""

import logging
import re

import pytest

from agentrl.cli.main import main
from agentrl.run.run_log import RunLog

FLAKY = """
from agentrl import Env, StepResult, Task
from agentrl.errors import InfraError

class Flaky(Env):
    failed = 0

    @classmethod
    def tasks(cls, split): return [Task('0', 'hello', 1)]

    def step(self, action):
        if Flaky.failed < 2:
            Flaky.failed += 1
            raise InfraError('the database is away')
        return StepResult('good', reward=1.0, terminated=True)
"""
BROKEN = FLAKY.replace("raise InfraError('the database is away')", "return 'text'")
LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) agentrl\.[\w.]+: ")


@pytest.fixture
def rollout(model, says, tmp_path, capsys):
    """`agentrl rollout` with an environment; the exit status, run.log by level, stdout and stderr."""

    def run(source, *words):
        says(["x"])
        (tmp_path / "flaky.py").write_text(source)
        words = ["rollout", "--model", model, "--env", "flaky.py", "--run", "run", "--concurrency", "1", *words]
        words += ["--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2"]
        status = main(words)
        log = (tmp_path / "run/run.log").read_text() if (tmp_path / "run/run.log").exists() else ""
        levels = {}
        for line in log.splitlines():
            if match := LINE.match(line):
                levels.setdefault(match[1], []).append(line[match.end() :])
        shown = capsys.readouterr()
        return status, levels, log, shown.out, shown.err

    return run


def test_the_log_holds_the_warnings_and_what_is_shown(rollout):
    status, levels, log, out, err = rollout(FLAKY)
    assert status == 0
    first = "episode 0-0, attempt 0: env_failure: env step raised InfraError: the database is away"
    assert [line.startswith(first) and line.endswith("; retried") for line in levels["WARNING"]] == [True]
    assert any("attempt 0" in line and line.endswith("retried") for line in levels["INFO"]), "the second of its cause"
    assert err == f"WARNING: {levels['WARNING'][0]}\n"
    shown = out.splitlines()
    assert shown[1].startswith("rollout    1  reward 1.000")
    assert shown[0] in levels["INFO"]
    assert all(line in log for line in shown)
    assert not any(LINE.match(line) for line in shown)


@pytest.mark.parametrize(("level", "logged"), [("warning", {"WARNING"}), ("error", set())])
def test_the_log_level_is_obeyed(rollout, level, logged):
    _, levels, _, out, err = rollout(FLAKY, "--log-level", level)
    assert set(levels) == logged
    assert "\nrollout    1  reward 1.000" in out, "what a run shows does not depend on it"
    assert bool(err) == bool(logged)


def test_an_unknown_level_is_refused(rollout, tmp_path):
    status, _, _, _, err = rollout(FLAKY, "--log-level", "loud")
    assert status == 2
    assert "warning" in err
    assert not (tmp_path / "run").exists()


def test_a_failure_that_ends_the_run_is_logged_with_its_traceback(rollout):
    status, levels, log, _, err = rollout(BROKEN)
    assert status == 2
    assert levels["ERROR"] == ["the run failed"]
    assert "Traceback" in log
    assert "step must return a StepResult" in log
    assert len(err.splitlines()) == 1


def test_a_closed_log_leaves_logging_as_it_was(tmp_path):
    package = logging.getLogger("agentrl")
    before = (package.level, list(package.handlers))
    for message in ("one", "two"):
        with RunLog(tmp_path, "info", lambda text: None) as log:
            log.echo(message)
    logging.getLogger("agentrl.run").error("later")
    assert (package.level, list(package.handlers)) == before
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [LINE.sub("", line) for line in lines] == ["one", "two"], "a resumed run appends"
