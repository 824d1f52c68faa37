"""A subclass of the environment under check that reports what its methods raise and return, and how long they block."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from agentrl.check.findings import Findings
from agentrl.core.timeout_pool import is_async
from agentrl.env import Env
from agentrl.errors import InfraError, UsageError
from agentrl.types import Action, StepResult

SLOW_S = 1.0
"""A method that blocks for longer is reported."""
TIMEOUT_S = 20.0
"""Time limit of one call."""
ReturnCheck = Callable[[Any, Findings], None]
"""Reports what is wrong with a method's return value."""


def instrument(env: type[Env], findings: Findings) -> type[Env]:
    """Return a subclass that reports on its `reset`, `step`, `state` and `close`."""
    body: dict[str, Any] = {
        "name": env.label(),
        "timeout_s": min(env.timeout_s, TIMEOUT_S),
        "isolation": "thread",  # in this process, where the findings are
        "__module__": env.__module__,
        "__doc__": env.__doc__,
    }
    checks: dict[str, ReturnCheck | None] = {"reset": None, "step": _check_step, "state": _check_state, "close": None}
    for name, check in checks.items():
        method = getattr(env, name)
        if method is not getattr(Env, name) or name == "close":
            body[name] = _instrumented(method, name, check, findings)
    return type(env.__name__, (env,), body)


def _instrumented(
    method: Callable[..., Any], name: str, check: ReturnCheck | None, findings: Findings
) -> Callable[..., Any]:
    def before(env: Env) -> None:
        if name != "close":
            return
        env.__dict__["_times_closed"] = env.__dict__.get("_times_closed", 0) + 1
        if env.__dict__["_times_closed"] > 1:
            findings.warning(name, "was called more than once", "do not call it: the runner calls it once per episode")

    def checked(value: Any) -> Any:
        if check is not None:
            check(value, findings)
        return value

    @functools.wraps(method)
    async def call_async(self: Env, *args: Any, **kwargs: Any) -> Any:
        before(self)
        timed = BlockTimer(method(self, *args, **kwargs))
        try:
            return checked(await timed)
        except Exception as e:
            _report_raised(name, e, args, findings)
            raise
        finally:
            if timed.longest_s > SLOW_S:
                _report_blocked(name, self, True, findings)

    @functools.wraps(method)
    def call(self: Env, *args: Any, **kwargs: Any) -> Any:
        before(self)
        started = time.perf_counter()
        try:
            value = method(self, *args, **kwargs)
            return value if asyncio.iscoroutine(value) else checked(value)
        except Exception as e:
            _report_raised(name, e, args, findings)
            raise
        finally:
            if time.perf_counter() - started > SLOW_S:
                _report_blocked(name, self, threading.current_thread() is threading.main_thread(), findings)

    return call_async if is_async(method) else call


class BlockTimer:
    """Awaits something and measures the longest time for which it blocked the event loop."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self.longest_s = 0.0
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaitable.__await__()
        advance: Callable[[], Any] = functools.partial(next, steps)
        while True:
            started = time.perf_counter()
            try:
                waited_for = advance()
            except StopIteration as end:
                return end.value
            finally:
                self.longest_s = max(self.longest_s, time.perf_counter() - started)
            try:
                value = yield waited_for
            except BaseException as e:  # noqa: BLE001  a cancellation or the awaited future's exception: passed on
                advance = functools.partial(steps.throw, e)
            else:
                advance = functools.partial(steps.send, value)


def _report_blocked(name: str, env: Env, event_loop: bool, findings: Findings) -> None:
    if event_loop:
        what = f"blocked the event loop for over {SLOW_S:g} s, and with it every other episode"
        findings.error(name, what, "make it a plain def, which runs in a thread, or await the slow operation")
    else:
        what = f"blocked a thread for over {SLOW_S:g} s; only {env.threads} episodes can do that at the same time"
        findings.warning(name, what, "make it faster or async, or raise the class attribute `threads`")


def _report_raised(name: str, error: Exception, args: tuple[Any, ...], findings: Findings) -> None:
    if isinstance(error, UsageError):
        return  # it ends the episode, and is reported with it
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    if isinstance(error, InfraError):
        what = f"raised InfraError: {error} ({where})"
        findings.warning(name, what, "start the infrastructure that it needs, or check its address")
        return
    action = f" on {kind_of(args[0])}" if args and isinstance(args[0], Action) else ""
    what = f"raised {type(error).__name__}: {str(error)[:120]}{action} ({where})"
    findings.error(name, what, "return a StepResult for any action; raise InfraError for a failure of infrastructure")


def kind_of(action: Action) -> str:
    if action.errors:
        return "an action that cannot be parsed"
    if action.calls:
        return "a tool call"
    if action.answer is not None:
        return "an answer"
    return "plain text" if action.text.strip() else "an empty action"


def _check_step(value: Any, findings: Findings) -> None:
    if not isinstance(value, StepResult):
        return  # the runner reports it
    for name in ("terminated", "truncated"):
        kind = type(getattr(value, name)).__name__
        if kind not in ("bool", "bool_"):
            findings.error("step", f"StepResult.{name} must be a bool, found {kind}", "return True or False")
    if value.state_key is not None and not isinstance(value.state_key, str):
        kind = type(value.state_key).__name__
        findings.error("step", f"StepResult.state_key must be a str or None, found {kind}", "return str(key)")
    if error := json_error(value.info):
        findings.warning("step", f"StepResult.info is not JSON: {error}", _RETURN_JSON)


def _check_state(value: Any, findings: Findings) -> None:
    if not isinstance(value, dict):
        findings.error("state", f"must return a dict, found {type(value).__name__}", "return a dict of JSON values")
    elif error := json_error(value):
        findings.warning("state", f"is not JSON: {error}", _RETURN_JSON)


_RETURN_JSON = "return JSON values; the record holds the repr of anything else, and replay compares that"


def json_error(value: Any) -> str | None:
    """Return why a value cannot be written as JSON; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError:
        return "it is nested too deep"
    except (TypeError, ValueError) as e:
        return str(e)
    except Exception as e:  # noqa: BLE001  the value's own code raised, for example its iteration
        return f"reading it raised {type(e).__name__}"
    return None
