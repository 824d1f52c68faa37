"""The tests of a task decide the score of a program: in the shapes of public data sets, under limits, and out of the program's reach."""

import json
from dataclasses import replace

import pytest
from doubles import trajectory

from agentrl import reward
from agentrl.errors import ContractError, InfraError, RewardFailure
from agentrl.reward import Scorer, resolve_rewards
from agentrl.rewards.code_tests import CodeTests, program_of, read_tests
from agentrl.sandbox import Sandbox, SandboxLimits
from agentrl.types import Action, Task, Turn

QUICK = SandboxLimits(time_s=10.0, cpu_s=1.0, memory_bytes=256 << 20)
STDIN = {"inputs": ["3\n", "-1"], "outputs": ["6\n", "-2\n"]}
FUNCTION = {"fn_name": "twice", "inputs": [[3], [-1]], "outputs": [6, [-2]]}
READS = "n = int(input())\nprint(2 * n)"
DEFINES = "def twice(n):\n    print('noise')\n    return 2 * n"
METHOD = "class Solution:\n    def twice(self, n: int) -> int:\n        return 2 * n"
LIVE = [{"input": "3\n", "output": "6", "testtype": "stdin"}]
LIVE_FUNCTION = [{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional", "fn_name": "join"}]
ASSERTS = ["assert twice(3) == 6", "assert set(map(twice, (1, 2))) == {2, 4}", "assert isinstance(twice(1), int)"]


def episode(code, tests, answer=None):
    text = f"I write\n```python\n{code}\n```\nThat is all."
    return replace(trajectory(turns=[Turn(0, 0, 2, Action(text, answer=answer))]), task=Task("0", "Write it.", tests))


async def score(code, tests, **settings):
    return await CodeTests(limits=QUICK, **settings)(episode(code, tests))


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (READS, STDIN),
        (DEFINES, FUNCTION),
        (DEFINES, ASSERTS),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (METHOD, FUNCTION),
                (READS, json.dumps(STDIN)),
                (READS, {"inputs": [["3", ""]], "outputs": [["6.0"]]}),
                (READS, LIVE),
                ("def join(a, b):\n    return (*a, b)", LIVE_FUNCTION),
                (DEFINES, "\n".join(ASSERTS)),
            )
        ),
    ],
    ids=["stdin", "function", "assertions", "method", "JSON text", "lines and numbers", "LiveCodeBench", "LiveCodeBench function", "text"],
)  # fmt: skip
async def test_a_right_program_passes_tests_of_every_public_shape_and_a_wrong_one_fails(code, tests):
    assert await score(code, tests) == 1.0
    wrong = code.replace("2 * n", "3 * n").replace("(*a, b)", "(b, *a)")
    assert await score(wrong, tests) == 0.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param("while True: pass", "the CPU limit", marks=pytest.mark.full),
        ("input(); raise SystemExit(1)", "an exit status"),
        ("def broken(:", "a syntax error"),
        ("print('x' * 10**9)", "the memory limit"),
        ("open('value', 'w').write('6'); open('out', 'w').write('6')\nimport os; os._exit(0)", "no output"),
        ("import os\nfor f in os.listdir('.'): os.remove(f)", "its files are gone"),
    ],
)
async def test_a_program_that_does_not_answer_fails_its_tests(code, why):
    assert await score(code, FUNCTION) == 0.0, why


async def test_the_score_may_be_the_share_of_tests_that_pass():
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "0", "8"]}
    assert await score(READS, tests, partial=True) == 0.75
    assert await score(READS, tests, partial=True, max_tests=2) == 1.0
    assert await score(READS, tests) == 0.0
    assert await score(READS, tests, partial=True, total_s=1e-6) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["55555"], "outputs": ["77777"]},
        {"fn_name": "twice", "inputs": [[55555]], "outputs": [77777]},
        [{"input": "55555", "output": "77777", "testtype": "functional", "fn_name": "twice"}],
        ["assert twice(55555) == 77777"],
    ],
)
async def test_what_a_test_expects_stays_outside_of_the_sandbox(tests, monkeypatch):
    entered = []
    write_file, shell = Sandbox.write_file, Sandbox.shell

    async def written(self, path, data):
        entered.append(data)
        await write_file(self, path, data)

    async def run(self, command):
        entered.append(command.encode())
        return await shell(self, command)

    monkeypatch.setattr(Sandbox, "write_file", written)
    monkeypatch.setattr(Sandbox, "shell", run)
    assert await score(READS if "fn_name" not in tests and isinstance(tests, dict) else DEFINES, tests) == 0.0
    assert b"55555" in b"".join(entered)
    assert b"77777" not in b"".join(entered)


def test_the_program_is_the_last_block_of_code_else_the_whole_text():
    assert program_of("```py\na\n```\nor\n```python\nb\nc\n```") == "b\nc"
    assert program_of("```\ncut off") == "cut off"
    assert program_of("print(1)") == "print(1)"


async def test_a_parsed_answer_takes_precedence():
    answered = episode("print(0)", LIVE, answer=f"```python\n{READS}\n```")
    assert await CodeTests(limits=QUICK)(answered) == 1.0


@pytest.mark.parametrize(
    ("tests", "text"),
    [
        (None, "expected tests as"),
        ({"inputs": ["1"], "outputs": []}, "of the same length"),
        ([], "expected tests as"),
        ([{"stdin": "1"}], "'input' and 'output'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "the function's name in 'fn_name'"),
        ([{"input": "a", "output": "2", "testtype": "functional", "fn_name": "f"}], "expected JSON"),
        ({"fn_name": "f", "inputs": [1], "outputs": [2]}, "a list of the arguments of f"),
        ("not Python at all", "expected an assertion in Python"),
    ],
)
def test_tests_of_another_shape_are_refused_with_the_shapes_that_are_taken(tests, text):
    with pytest.raises(ValueError, match=text):
        read_tests(tests)


async def test_bad_tests_and_a_sandbox_that_cannot_start_are_failures_and_never_a_score(monkeypatch):
    scorer = Scorer([reward(name="tested")(CodeTests(limits=QUICK))])
    with pytest.raises(RewardFailure, match="expected tests as"):
        await scorer.score(episode(READS, None))

    async def broken(self, code):
        raise InfraError("a sandbox cannot be started: no memory")

    monkeypatch.setattr("agentrl.sandbox.Sandbox.python", broken)
    with pytest.raises(RewardFailure, match="cannot be started"):
        await scorer.score(episode(READS, STDIN))


async def test_the_built_in_reward_is_called_code():
    (built_in,) = resolve_rewards(["code=0.5"])
    assert (built_in.name, built_in.weight) == ("code", 0.5)
    scored = await Scorer([built_in]).score(episode(READS, STDIN))
    assert scored.rewards == {"code": 1.0}


@pytest.mark.parametrize("settings", [{"total_s": 0}, {"max_tests": 0}, {"max_concurrency": 0}])
def test_limits_that_cannot_work_are_refused_where_they_are_written(settings):
    with pytest.raises(ContractError, match="CodeTests"):
        CodeTests(**settings)
