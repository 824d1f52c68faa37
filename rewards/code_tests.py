r"""Whether a policy's program passes the tests of its task, in a sandbox.

The tests are the label (or what `tests` returns), as public code data sets write them, as an object or as JSON text:

    {"inputs": ["3\n"], "outputs": ["6\n"]}                          programs: standard input and output (APPS, TACO, PRIME)
    {"fn_name": "twice", "inputs": [[3]], "outputs": [6]}            functions, also methods of `class Solution` (APPS, TACO)
    [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]         LiveCodeBench; "functional" has a line of JSON for each argument
    ["assert twice(3) == 6"]                                         assertions (MBPP)

What a test expects stays outside of the sandbox, where a program could read it; only assertions that are not `call == literal` go in whole.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.errors import shown
from agentrl.reward import reward
from agentrl.sandbox import Backend, Sandbox, SandboxLimits
from agentrl.tool import check_limit
from agentrl.types import Trajectory

_FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_MAX_OUTPUT = 4 << 20
"""bytes of a program's output that are read"""
_CALL = r"""
import json, sys
name, args = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(compile(open("main.py", encoding="utf-8").read(), "main.py", "exec"), space)
function = space[name] if name in space else getattr(space["Solution"](), name)
value = json.dumps(function(*args))
open("value", "w", encoding="utf-8").write(value)
"""
_EVALUATE = r"""
import json, sys
code, nonce = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(compile(open("main.py", encoding="utf-8").read(), "main.py", "exec"), space)
value = repr(eval(code, space)) if nonce is None else exec(code, space) or nonce
open("value", "w", encoding="utf-8").write(value)
"""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test of a program."""

    stdin: str
    """standard input of the program, or of what calls its function"""
    check: Callable[[str], bool]
    """whether an output, or the value that a function returned, is right"""
    driver: str = ""
    """program that calls the function; empty: the policy's program is run itself"""


def program_of(text: str) -> str:
    r"""The program in an answer: its last fenced block; without one, the whole text.

    Example:
        >>> program_of("So:\n```python\nprint(1)\n```\nDone.")
        'print(1)'
    """
    blocks = _FENCE.findall(text)
    return str(blocks[-1] if blocks else text)


def read_tests(tests: Any) -> list[CodeTest]:
    """The tests in one of the shapes above.

    Raises:
        ValueError: they have another shape, or there are none.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = [line for line in tests.split("\n") if line.strip()]
    if isinstance(tests, Mapping):
        read = _from_object(tests)
    elif isinstance(tests, Sequence) and tests:
        read = [_from_text(t) if isinstance(t, str) else _from_row(t) for t in tests]
    else:
        read = []
    if not read:
        raise ValueError(
            "expected tests as {'inputs': [...], 'outputs': [...]}, a list of {'input', 'output'}, or a list of assertions, "
            f"found {shown(tests, 120)}"
        )
    return read


def _from_object(tests: Mapping[str, Any]) -> list[CodeTest]:
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError(
            f"expected 'inputs' and 'outputs' of the same length in the tests, found {shown(dict(tests), 120)}"
        )
    if name is None:
        return [CodeTest(_lines(i), _same_output(_lines(o))) for i, o in zip(inputs, outputs, strict=True)]
    return [_function_test(name, i, o) for i, o in zip(inputs, outputs, strict=True)]


def _from_row(row: Any) -> CodeTest:
    if not isinstance(row, Mapping) or not {"input", "output"} <= row.keys():
        raise ValueError(f"expected a test with 'input' and 'output', found {shown(row, 120)}")
    if row.get("testtype") != "functional":
        return CodeTest(_lines(row["input"]), _same_output(_lines(row["output"])))
    name = row.get("fn_name") or row.get("func_name")
    if not name:
        raise ValueError(
            f"expected the function's name in 'fn_name' of a functional test, found {shown(dict(row), 120)}"
        )
    try:
        args = [json.loads(line) for line in str(row["input"]).split("\n") if line.strip()]
        return _function_test(str(name), args, json.loads(str(row["output"])))
    except json.JSONDecodeError as e:
        raise ValueError(f"expected JSON in a functional test, found {shown(dict(row), 120)}") from e


def _function_test(name: str, args: Any, expected: Any) -> CodeTest:
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ValueError(f"expected a list of the arguments of {name}, found {shown(args)}")

    def check(value: str) -> bool:
        found = json.loads(value)
        # APPS wraps some results in a list
        return bool(found == expected or (isinstance(expected, list) and len(expected) == 1 and found == expected[0]))

    return CodeTest(json.dumps([name, list(args)]), check, _CALL)


def _from_text(code: str) -> CodeTest:
    """A test that is Python: the value of `assert call == literal` is compared outside, anything else is run after the program."""
    try:
        tree = ast.parse(code)
    except SyntaxError as e:
        raise ValueError(f"expected an assertion in Python, found {shown(code, 120)}") from e
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[literal]))]:
            try:
                expected = ast.literal_eval(literal)
            except ValueError:
                pass
            else:
                return CodeTest(
                    json.dumps([ast.unparse(call), None]), lambda value: _literal(value) == expected, _EVALUATE
                )
    nonce = secrets.token_hex()
    return CodeTest(json.dumps([code, nonce]), nonce.__eq__, _EVALUATE)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _NOTHING


_NOTHING = object()


def _lines(value: Any) -> str:
    """Input or output as text; some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _same_output(expected: str) -> Callable[[str], bool]:
    def same(found: str) -> bool:
        lines, wanted = _words(found), _words(expected)
        return lines == wanted or (
            [len(line) for line in lines] == [len(line) for line in wanted]
            and all(_equal(a, b) for x, y in zip(lines, wanted, strict=True) for a, b in zip(x, y, strict=True))
        )

    return same


def _words(text: str) -> list[list[str]]:
    """The words of each line, without empty lines at the end."""
    return [line.split() for line in text.rstrip().splitlines()]


def _equal(a: str, b: str) -> bool:
    """Whether two words are the same, also as numbers: 2 and 2.0."""
    try:
        return a == b or Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """A reward that runs the policy's program against the tests of its task.

    Wrong output, an exception, a limit and a program that cannot be read fail a test. A sandbox that cannot be started is a failure of the
    reward, and never a score.

    Example:
        >>> from agentrl import reward
        >>> share = reward(name="tests_passed", timeout_s=3600)(CodeTests(partial=True, max_tests=20))
    """

    partial: bool = False
    """score by the share of tests that pass; else 1 if all pass and 0 otherwise, and the first that fails ends the episode's tests"""
    limits: SandboxLimits = field(default_factory=lambda: SandboxLimits(time_s=30.0, cpu_s=6.0))
    """of each test; a busy machine slows programs down, so the limit that should end them is `cpu_s`"""
    total_s: float = 120.0
    """time for all tests of an episode, in seconds; tests that are left fail"""
    max_tests: int | None = None
    """use only the first tests; None: all"""
    packages: bool = False
    """let programs import the packages of this Python, such as numpy; else the standard library only"""
    backend: str | Backend = "auto"
    """see `agentrl.sandbox.choose_backend`"""
    max_concurrency: int = field(default_factory=lambda: os.cpu_count() or 1)
    """episodes whose tests run at the same time, in this process"""
    tests: Callable[[Trajectory], Any] | None = None
    """returns the tests of an episode; None: its label"""
    _loops: MutableMapping[Any, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_limit("CodeTests", "total_s", self.total_s)
        check_limit("CodeTests", "max_concurrency", self.max_concurrency, least=1)
        if self.max_tests is not None:
            check_limit("CodeTests", "max_tests", self.max_tests, least=1)

    async def __call__(self, trajectory: Trajectory) -> float:
        """The score of an episode.

        Raises:
            InfraError: a sandbox cannot be started.
            ValueError: the tests have an unknown shape.
        """
        tests = read_tests(self.tests(trajectory) if self.tests else trajectory.label)[: self.max_tests]
        text = trajectory.answer
        if text is None:
            text = trajectory.turns[-1].action.text if trajectory.turns else ""
        slots = self._loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrency))
        async with slots:
            passed = await self._passed(program_of(text), tests)
        return passed / len(tests) if self.partial else float(passed == len(tests))

    async def _passed(self, program: str, tests: Sequence[CodeTest]) -> int:
        """The number of tests that pass; those after the first failure are not run unless the score is partial."""
        passed, ends = 0, time.monotonic() + self.total_s
        async with Sandbox(self.limits, self.backend, packages=self.packages) as sandbox:
            command = await _python(sandbox)
            for test in tests:
                if time.monotonic() > ends:
                    break
                right = await _passes(sandbox, command, program, test)
                passed += right
                if not (right or self.partial):
                    break
        return passed


async def _python(sandbox: Sandbox) -> str:
    """The command that starts Python in a sandbox, with the modules that its code may import."""
    started = await sandbox.python("import json, sys; print(json.dumps([sys.executable, sys.path]))")
    executable, path = json.loads(started.output)
    return f"PYTHONPATH={shlex.quote(':'.join(filter(None, path)))} {shlex.quote(executable)} -BS"


async def _passes(sandbox: Sandbox, command: str, program: str, test: CodeTest) -> bool:
    """Run one test. The files of the test before it may have been changed by the program, so all are written again."""
    output = "value" if test.driver else "out"
    try:
        await sandbox.write_file("main.py", program.encode("utf-8", "replace"))
        await sandbox.write_file("driver.py", test.driver.encode())
        await sandbox.write_file("in", test.stdin.encode("utf-8", "replace"))
        await sandbox.shell(f"rm -rf value out; cd {'.'}")
        script = "driver.py" if test.driver else "main.py"
        result = await sandbox.shell(f"rm -rf value out; {command} {script} < in > out 2> /dev/null")
        if result.status != "ok":
            return False
        found = (await sandbox.read_file(output, _MAX_OUTPUT)).decode("utf-8", "replace")
    except OSError:  # the program deleted or filled what the test needs
        return False
    try:
        return test.check(found)
    except ValueError:
        return False


code = reward(name="code", timeout_s=3600)(CodeTests())
"""1 if the program passes all tests of the label, else 0; `--reward code`"""
