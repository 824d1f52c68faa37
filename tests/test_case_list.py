"""`cases.toml` names tests and commands that exist, and every test that is called a case."""

import ast
import re
from pathlib import Path

import pytest
from cases import ids_of, sections

ROOT = Path(__file__).parents[1]
CASES = {f"{section}.{name}": case for section, cases in sections().items() for name, case in cases.items()}


def found_in(file):
    """The ids of the tests in a file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                names = (node.name, inner.name) if isinstance(node, ast.ClassDef) else (inner.name,)
                yield "::".join((str(file.relative_to(ROOT)), *names))


def test_every_case_says_what_holds_and_names_what_shows_it():
    for name, case in CASES.items():
        assert case.keys() <= {"holds", "tests", "commands"}, name
        assert case["holds"], name
        assert case.get("tests") or case.get("commands"), name


def test_every_test_of_a_case_exists():
    files = {ROOT / test.partition("::")[0] for test in ids_of()}
    known = {test for file in files for test in found_in(file)}
    assert [test for test in ids_of() if test not in known] == []


def test_every_test_that_is_called_a_case_is_in_the_list():
    called = {t for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__) for t in found_in(file)}
    assert sorted(t for t in called if re.search(r"::test_cases?_\d", t) and t not in ids_of()) == []


def test_every_command_of_a_case_exists():
    for name, case in CASES.items():
        for command in case.get("commands", ()):
            assert (ROOT / command.split()[1]).is_file(), name


def test_sections_can_be_chosen():
    assert set(ids_of("tokens")) < set(ids_of())
    assert len(ids_of()) == len(set(ids_of()))
    with pytest.raises(SystemExit, match="has no section token; it has tokens, "):
        ids_of("token")
