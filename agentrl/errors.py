"""Every error that agentrl raises, in one tree. Each also inherits the built-in exception of its kind.

    AgentRLError
    ├── UsageError (ValueError)            invalid user input; the command line exits with status 2
    │   ├── ConfigError                    a flag, a TOML key, settings that contradict each other
    │   ├── DataError                      a data file, a row of it, a label
    │   ├── UnknownNameError               an environment, reward, tool or renderer that is not registered
    │   ├── TemplateError                  a model's chat template or tokenizer lacks what a setting needs
    │   └── ContractError                  a user's Env, Tool or reward violates its contract
    ├── InvariantError (ValueError)        an inconsistent Sample, Span or Batch: a bug, not bad data
    ├── StoreError (OSError)               a record that cannot be read or written
    ├── WorkerError (RuntimeError)         a trainer process died, hung or raised
    ├── NonFiniteError (ArithmeticError)   the loss or a gradient of an optimizer step is not finite
    ├── TooManyFailuresError (RuntimeError)  a rollout lost more episodes than max_failure_share allows
    └── Failure (RuntimeError)             infrastructure failed during an episode; it becomes the stop reason, never a reward of 0
        ├── EngineFailure                  the engine did not respond, or its response is invalid
        ├── EngineAbort                    the engine aborted the request, for example for a weight update
        ├── EnvFailure                     reset, step or close raised or timed out
        ├── ToolFailure                    a tool's infrastructure failed (a tool that raises is an observation, not a failure)
        └── RewardFailure                  a reward raised, timed out or did not return a number

A user's tool or environment raises `InfraError` for a failure of infrastructure, which the policy did not cause. Connection errors, timeouts and
other kinds (core/infra_errors.py) count as such without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb

from agentrl.core.redaction import redact


class AgentRLError(Exception):
    """Base class of the errors of agentrl."""


class UsageError(AgentRLError, ValueError):
    """Invalid user input. The message is one sentence: where, what was expected, what was found, what to do."""


class ConfigError(UsageError):
    """An invalid flag or TOML key, or settings that contradict each other."""

    @classmethod
    def of_all(cls, problems: Sequence[str]) -> ConfigError:
        """Return one error for several problems: a line for each, or just the sentence if there is only one."""
        if len(problems) == 1:
            return cls(problems[0])
        return cls("\n  ".join([f"{len(problems)} settings cannot be used:", *problems]))


class DataError(UsageError):
    """An invalid data file, row or label."""


class UnknownNameError(UsageError, LookupError):
    """A name that is not registered. The message suggests close matches."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Return the error 'unknown KIND NAME' with close matches or the known names."""
        return cls(f"unknown {kind} {name!r}{suggest(name, known)}")


class TemplateError(UsageError):
    """The model's chat template or tokenizer lacks what a setting needs."""


class ContractError(UsageError, TypeError):
    """A user's Env, Tool or reward returned or declared something that its contract does not allow."""


class InvariantError(AgentRLError, ValueError):
    """An inconsistent object: a bug in agentrl, or in code that builds Samples itself."""


class StoreError(AgentRLError, OSError):
    """A record of episodes cannot be read or written."""


class WorkerError(AgentRLError, RuntimeError):
    """A worker process died, hung or raised. The message holds the end of its log."""


class NonFiniteError(AgentRLError, ArithmeticError):
    """The loss or a gradient of an optimizer step is not finite. The step was not taken; weights and optimizer are unchanged."""


class TooManyFailuresError(AgentRLError, RuntimeError):
    """A rollout lost more episodes than `max_failure_share` allows. The message is the table of causes."""


class InfraError(AgentRLError, RuntimeError):
    """Raise it in a tool or an environment for a failure of infrastructure, which the policy did not cause.

    A tool call is then retried. An episode whose attempts all fail is lost, and is not scored.

    Example:
        >>> raise InfraError("the index server does not answer")
        Traceback (most recent call last):
        agentrl.errors.InfraError: the index server does not answer
    """


class Failure(AgentRLError, RuntimeError):
    """Infrastructure failed during an episode. `cause` is its short name in the table of causes. Both are recorded; credentials are masked."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(redact(message, environment=True))
        self.cause = redact(cause or message, environment=True)

    def __reduce__(self) -> tuple[type[Failure], tuple[str, str]]:
        return type(self), (str(self), self.cause)


class EngineFailure(Failure):
    """The engine did not respond, or its response is invalid."""


class EngineAbort(Failure):
    """The engine aborted a request; the episode runs again."""


class EnvFailure(Failure):
    """`reset`, `step` or `close` of an environment raised or timed out."""


class ToolFailure(Failure):
    """A tool's infrastructure failed."""


class RewardFailure(Failure):
    """A reward raised, timed out, or returned something that is not a number."""


class boundary:  # noqa: N801  used as a statement: `with boundary(EnvFailure, "env Maze.step"):`
    """Convert whatever user code raises inside the block to one kind of `Failure`. Only this class may catch any exception.

    Failures, usage errors and cancellations pass unchanged. It is not a generator-based context manager, because those let StopIteration
    through.
    """

    def __init__(self, failure: type[Failure], where: str) -> None:
        self.failure = failure
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, (Failure, UsageError)):
            return
        if isinstance(error, TimeoutError):
            said = f": {redact(str(error))}" if str(error) else ""
            raise self.failure(f"{self.where} timed out{said}", f"{self.where}: timeout") from error
        name = type(error).__name__
        file, line = place_of(error)
        raise self.failure(f"{self.where} raised {describe(error)} ({file}:{line})", f"{self.where}: {name}") from error


def describe(error: BaseException) -> str:
    """Return 'Type: message' with credentials masked, or the type alone if its __str__ raises."""
    try:
        return redact(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001  user code: its __str__
        return type(error).__name__


def shown(value: object, max_chars: int = 60) -> str:
    """Return the first characters of a value's repr; its type if its __repr__ raises."""
    try:
        return f"{value!r:.{max_chars}}"
    except Exception:  # noqa: BLE001  user code: its __repr__
        return f"a {type(value).__name__} whose repr raises"


def place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the user's code in which an error was raised; those that it carries if it comes from another process."""
    raised_at: tuple[str, int] | None = getattr(error, "raised_at", None)
    return raised_at or place(error, _is_users)


def place(error: BaseException, mine: Callable[[str], bool]) -> tuple[str, int]:
    """Return file and line of the innermost frame in a file for which `mine` is true; of the innermost frame if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    return ([line for line in lines if mine(line[0])] or lines)[-1]


def _is_users(file: str) -> bool:
    return not file.startswith((str(Path(__file__).parent), sys.base_prefix, sys.prefix))


def suggest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean 'a' or 'b'?' for close matches, else '; known: …' with up to 12 names."""
    names = sorted(set(known))
    close = get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not names:
        return ""
    more = ", …" if len(names) > 12 else ""
    return "; known: " + ", ".join(names[:12]) + more
