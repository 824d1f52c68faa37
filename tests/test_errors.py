"""The error tree: base classes, messages, pickling, and the failures that `boundary` raises."""

import asyncio
import inspect
import pickle

import pytest

from agentrl import errors
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    ContractError,
    EngineAbort,
    EnvFailure,
    Failure,
    InfraError,
    ToolFailure,
    UnknownNameError,
    UsageError,
    boundary,
    suggest,
)

ALL = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, AgentRLError)]


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_is_in_the_drawing_and_survives_pickling(cls):
    assert cls.__name__ in errors.__doc__ or cls is InfraError
    error = pickle.loads(pickle.dumps(cls("what happened")))
    assert type(error) is cls
    assert str(error) == "what happened"


@pytest.mark.parametrize("cls", [c for c in ALL if c is not AgentRLError], ids=lambda c: c.__name__)
def test_every_error_is_also_one_of_the_standard_librarys(cls):
    own = {Exception, BaseException, object}
    assert any(c.__module__ == "builtins" and c not in own for c in cls.__mro__)


def test_a_failure_keeps_its_cause_through_pickling():
    error = pickle.loads(pickle.dumps(ToolFailure("tool search: refused by 10 hosts", "tool search: ConnectionError")))
    assert (type(error), error.cause) == (ToolFailure, "tool search: ConnectionError")
    assert ToolFailure("no cause given").cause == "no cause given"


@pytest.mark.parametrize(
    "raised", [ValueError("x"), KeyError("x"), InfraError("x"), StopIteration(), ExceptionGroup("g", [OSError()])]
)
def test_boundary_attributes_what_user_code_raises(raised):
    with pytest.raises(EnvFailure) as caught, boundary(EnvFailure, "env Maze.step"):
        raise raised
    assert caught.value.cause == f"env Maze.step: {type(raised).__name__}"
    assert caught.value.__cause__ is raised


def test_boundary_names_a_timeout_as_such():
    with (
        pytest.raises(EnvFailure, match=r"env Maze.reset timed out") as caught,
        boundary(EnvFailure, "env Maze.reset"),
    ):
        raise TimeoutError
    assert caught.value.cause == "env Maze.reset: timeout"


def test_boundary_says_what_a_timeout_of_user_code_says():
    with (
        pytest.raises(EnvFailure, match="env run timed out: no connection to the shop"),
        boundary(EnvFailure, "env run"),
    ):
        raise TimeoutError("no connection to the shop")


@pytest.mark.parametrize("raised", [EngineAbort("given up"), ContractError("wrong type"), ConfigError("bad flag")])
def test_boundary_lets_failures_and_usage_errors_pass(raised):
    with pytest.raises(type(raised)) as caught, boundary(EnvFailure, "env"):
        raise raised
    assert caught.value is raised


@pytest.mark.parametrize("raised", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
def test_boundary_lets_a_cancellation_pass(raised):
    with pytest.raises(raised), boundary(EnvFailure, "env"):
        raise raised


def test_suggestions():
    assert suggest("serach", ["search", "lookup"]) == "; did you mean 'search'?"
    assert suggest("xyz", ["search", "lookup"]) == "; known: lookup, search"
    assert suggest("xyz", []) == ""
    assert suggest("xyz", [f"n{i:02}" for i in range(40)]).endswith("n11, …")


def test_unknown_names():
    error = UnknownNameError.of("env", "serach_r1", ["search_r1"])
    assert str(error) == "unknown env 'serach_r1'; did you mean 'search_r1'?"
    assert isinstance(error, UsageError)
    assert isinstance(error, LookupError)
    assert not isinstance(error, Failure)
