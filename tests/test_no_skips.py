"""`.ci/run` lets no test be skipped without a known reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BODY = """
import pytest

@pytest.mark.skip(reason="needs a CUDA GPU")
def test_allowed(): ...

@pytest.mark.skip(reason="needs the moon")
def test_marked(): ...

def test_called(): pytest.skip("needs the sun")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail(): assert False
"""


def run(folder, **env):
    (folder / "test_some.py").write_text(BODY)
    (folder / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-q", "--continue-on-collection-errors", str(folder)]
    env = {**{k: v for k, v in os.environ.items() if k != "AGENTRL_NO_SKIPS"}, **env}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_skip_without_a_known_reason_fails_where_skips_are_forbidden(tmp_path):
    done = run(tmp_path, AGENTRL_NO_SKIPS="1")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 skipped, 1 xfailed, 2 errors" in done.stdout
    for reason in ("needs the moon", "needs the sun", "could not import 'no_such_module'"):
        assert f"AGENTRL_NO_SKIPS forbids: {reason}" in done.stdout
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "4 skipped, 1 xfailed" in done.stdout


def test_ci_forbids_skips_and_reports_where_it_cannot():
    script = (HERE.parent / ".ci/run").read_text()
    before, asked, after = script.partition("export AGENTRL_NO_SKIPS=1")
    assert asked
    assert "make " not in before
    assert after.count("unset AGENTRL_NO_SKIPS") == after.count("ci: WARNING:") == 1, (
        "only where a browser cannot be had"
    )
    assert after.index("ci: WARNING:") < after.index("unset AGENTRL_NO_SKIPS") < after.index("make setup")
