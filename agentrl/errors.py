"""Every error agentrl raises, in one tree; each also inherits the standard library's type for its kind.

    AgentRLError
    ├── UsageError (ValueError)            something a person wrote is wrong; the command line exits with status 2
    │   ├── ConfigError                    a flag, a TOML key, an equation that does not hold
    │   ├── DataError                      a data file, a row of it, a label
    │   ├── UnknownNameError               an environment, reward, tool or renderer nobody registered
    │   ├── TemplateError                  a model's chat template or tokenizer cannot do what is asked
    │   └── ContractError                  a user's Env, Tool or reward broke its contract
    ├── InvariantError (ValueError)        a Sample, Span or Batch that contradicts itself: a bug, never data
    ├── StoreError (OSError)               a record that cannot be read or written
    ├── WorkerError (RuntimeError)         a trainer process died, hung or raised
    ├── TooManyFailuresError (RuntimeError)  a rollout lost more episodes than it may
    └── Failure (RuntimeError)             infrastructure failed under an episode: it is data (design §6), never a reward of 0
        ├── EngineFailure                  the engine did not answer, or answered nonsense
        ├── EngineAbort                    the engine gave the request up on purpose (weight update, over-sampling)
        ├── EnvFailure                     reset, step or close raised or ran out of time
        ├── ToolFailure                    a tool's infrastructure failed (not: the tool raised, which the policy sees)
        └── RewardFailure                  a reward raised, ran out of time or returned no number

`InfraError` is what a user's tool or environment raises to say 'this is not the policy's doing'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb


class AgentRLError(Exception):
    """Base of all errors raised on purpose by agentrl."""


class UsageError(AgentRLError, ValueError):
    """Something a person wrote is wrong. One sentence: where, what was expected, what was found, what to do."""


class ConfigError(UsageError):
    """A flag, a TOML key, or settings that contradict each other."""


class DataError(UsageError):
    """A data file, a row of it, or a label is not what it should be."""


class UnknownNameError(UsageError, LookupError):
    """A name that is not registered; carries close matches."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Build 'unknown KIND NAME; did you mean …? known: …'."""
        return cls(f"unknown {kind} {name!r}{suggest(name, known)}")


class TemplateError(UsageError):
    """The model's chat template or tokenizer cannot do what is asked of it."""


class ContractError(UsageError, TypeError):
    """A user's Env, Tool or reward returned or declared something its contract does not allow."""


class InvariantError(AgentRLError, ValueError):
    """An object that contradicts itself: a fault in agentrl or in code that builds Samples by hand."""


class StoreError(AgentRLError, OSError):
    """A record of episodes cannot be read or written."""


class WorkerError(AgentRLError, RuntimeError):
    """A worker process died, hung or raised; the message holds the end of its log."""


class TooManyFailuresError(AgentRLError, RuntimeError):
    """A rollout lost more episodes than `max_failure_share` allows; the message is the table of causes."""


class InfraError(AgentRLError, RuntimeError):
    """Raised by user code (tool, environment) for a failure of infrastructure, not of the policy."""


class Failure(AgentRLError, RuntimeError):
    """Infrastructure failed under an episode. `cause` names it in the table of causes, in a few words."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause or message

    def __reduce__(self) -> tuple[type[Failure], tuple[str, str]]:
        return type(self), (str(self), self.cause)


class EngineFailure(Failure):
    """The engine did not answer, or answered something impossible."""


class EngineAbort(Failure):
    """The engine gave a request up on purpose; the episode is re-queued or resumed."""


class EnvFailure(Failure):
    """`reset`, `step` or `close` of an environment raised or ran out of time."""


class ToolFailure(Failure):
    """A tool's infrastructure failed."""


class RewardFailure(Failure):
    """A reward raised, ran out of time, or returned something that is not a number."""


class boundary:  # noqa: N801  used as a statement: `with boundary(EnvFailure, "env Maze.step"):`
    """Attribute whatever user code raises inside to one kind of `Failure`: the one place where anything may be caught.

    Failures and usage errors pass unchanged; a cancellation passes (it belongs to whoever cancelled). No generator-based context
    manager, since those let StopIteration through.
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
            raise self.failure(f"{self.where} ran out of time", f"{self.where}: timeout") from error
        name = type(error).__name__
        file, line = place(error, _is_users)
        raise self.failure(f"{self.where} raised {name}: {error} ({file}:{line})", f"{self.where}: {name}") from error


def place(error: BaseException, mine: Callable[[str], bool]) -> tuple[str, int]:
    """File and line: the innermost one in a file that is `mine`, else the innermost at all."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    return ([line for line in lines if mine(line[0])] or lines)[-1]


def _is_users(file: str) -> bool:
    return not file.startswith((str(Path(__file__).parent), sys.base_prefix, sys.prefix))


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'a' or 'b'?' for close matches, else the known names (up to 12)."""
    names = sorted(set(known))
    close = get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not names:
        return ""
    more = ", …" if len(names) > 12 else ""
    return "; known: " + ", ".join(names[:12]) + more
