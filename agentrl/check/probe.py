"""A subclass of the environment under test whose methods are watched: what they raise and return, and how long they block."""

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
"""a method that blocks for longer is said"""
TIMEOUT_S = 20.0
"""at most, for one call"""


def probe(env: type[Env], found: Findings) -> type[Env]:
    """The environment with `reset`, `step`, `state` and `close` watched."""
    body: dict[str, Any] = {
        "name": env.label(),
        "timeout_s": min(env.timeout_s, TIMEOUT_S),
        "__module__": env.__module__,
        "__doc__": env.__doc__,
    }
    for name, look in (("reset", None), ("step", _look_at_step), ("state", _look_at_state), ("close", None)):
        own = getattr(env, name)
        if own is not getattr(Env, name) or name == "close":
            body[name] = _watched(own, name, look, found)
    return type(env.__name__, (env,), body)


Look = Callable[[Any, Findings], None]


def _watched(own: Callable[..., Any], name: str, look: Look | None, found: Findings) -> Callable[..., Any]:
    def before(env: Env) -> None:
        if name == "close":
            closed = env.__dict__["_times_closed"] = env.__dict__.get("_times_closed", 0) + 1
            if closed > 1:
                found.warning(
                    name, "was called more than once", "do not call it yourself: the runner does, always, once"
                )

    def after(value: Any) -> Any:
        if look is not None:
            look(value, found)
        return value

    @functools.wraps(own)
    async def watch_async(self: Env, *args: Any, **kwargs: Any) -> Any:
        before(self)
        stretch = Stretches(own(self, *args, **kwargs))
        try:
            return after(await stretch)
        except Exception as e:
            _raised(name, e, args, found)
            raise
        finally:
            if stretch.longest > SLOW_S:
                _blocked(name, self, True, found)

    @functools.wraps(own)
    def watch(self: Env, *args: Any, **kwargs: Any) -> Any:
        before(self)
        started = time.perf_counter()
        try:
            value = own(self, *args, **kwargs)
            return value if asyncio.iscoroutine(value) else after(value)
        except Exception as e:
            _raised(name, e, args, found)
            raise
        finally:
            if time.perf_counter() - started > SLOW_S:
                _blocked(name, self, threading.current_thread() is threading.main_thread(), found)

    return watch_async if is_async(own) else watch


class Stretches:
    """Awaits something and measures the longest stretch for which it held the event loop."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self.longest = 0.0
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
                self.longest = max(self.longest, time.perf_counter() - started)
            try:
                value = yield waited_for
            except BaseException as e:  # noqa: BLE001  a cancel, or what the awaited future raised: handed on
                advance = functools.partial(steps.throw, e)
            else:
                advance = functools.partial(steps.send, value)


def _blocked(name: str, env: Env, loop: bool, found: Findings) -> None:
    if loop:
        what = f"blocked the event loop for over {SLOW_S:g} s: every other episode stood still"
        found.error(name, what, "make it a plain def (it then runs in a thread), or await what takes so long")
        return
    what = f"blocked a thread for over {SLOW_S:g} s; {env.threads} episodes at once can do that, the others wait"
    found.warning(name, what, "make it faster or async, or raise the class attribute `threads`")


def _raised(name: str, error: Exception, args: tuple[Any, ...], found: Findings) -> None:
    if isinstance(error, UsageError):
        return  # stops the episode, and is reported with it
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    if isinstance(error, InfraError):
        found.warning(
            name,
            f"raised InfraError: {error} ({where})",
            "its infrastructure does not answer here; start it, or check where it runs",
        )
        return
    on = f" on {kind_of(args[0])}" if args and isinstance(args[0], Action) else ""
    what = f"raised {type(error).__name__}: {str(error)[:120]}{on} ({where})"
    found.error(name, what, "answer any action with a StepResult; raise InfraError for what is not the policy's doing")


def kind_of(action: Action) -> str:
    """An action in a few words."""
    if action.errors:
        return "an action that cannot be parsed"
    if action.calls:
        return "a tool call"
    if action.answer is not None:
        return "an answer"
    return "plain text" if action.text.strip() else "an empty action"


def _look_at_step(value: Any, found: Findings) -> None:
    if not isinstance(value, StepResult):
        return  # the runner says it
    for name in ("terminated", "truncated"):
        flag = getattr(value, name)
        if type(flag).__name__ not in ("bool", "bool_"):
            found.error(
                "step", f"StepResult.{name} must be a bool, found {type(flag).__name__}", "return True or False"
            )
    if value.state_key is not None and not isinstance(value.state_key, str):
        found.error(
            "step",
            f"StepResult.state_key must be a str or None, found {type(value.state_key).__name__}",
            "return str(key)",
        )
    why = not_json(value.info)
    if why:
        found.warning(
            "step",
            f"StepResult.info is not JSON: {why}",
            "put plain values into it: the record keeps their repr otherwise",
        )


def _look_at_state(value: Any, found: Findings) -> None:
    if not isinstance(value, dict):
        found.error("state", f"must return a dict, found {type(value).__name__}", "return a dict of JSON values")
    elif why := not_json(value):
        found.error("state", f"is not JSON: {why}", "return plain values: rewards and the record see them")


def not_json(value: Any) -> str | None:
    """Why a value is not JSON; None if it is."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        return str(e)
    return None
