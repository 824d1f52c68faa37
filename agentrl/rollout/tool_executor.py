"""Execution of tool calls: limits shared over episodes, retries, conversion and truncation of results, classification of failures.

An exception raised by a tool always becomes an observation: otherwise a policy could erase its bad episodes. Only `InfraError` and the
kinds of error in core/infra_errors.py are failures of infrastructure; they are retried and then fail the episode. The crash of a tool's own
process counts as an exception, for the same reason; a process that cannot be started is a failure of infrastructure.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic import BaseModel

from agentrl.core.infra_errors import is_infra_error
from agentrl.core.message_images import is_image, load_parts, parts_of
from agentrl.core.rate_limit import RateLimit
from agentrl.core.timeout_pool import DeadlineError, PoolExhaustedError, TimeoutPool
from agentrl.errors import ContractError, ToolFailure, describe, suggest
from agentrl.tool import BadArgumentsError, ToolSpec
from agentrl.types import Action, ToolCall, ToolResult

_MAX_THREADS = 32
SaveOutput = Callable[[str, bytes], None]


class ToolLimiter:
    """What all episodes share of one tool: its threads, its limits of concurrent calls and of their rate, and its counts."""

    def __init__(self, spec: ToolSpec, processes: int = 1) -> None:
        limits = spec.limits
        concurrency = limits.max_concurrency // processes
        if concurrency < 1:
            raise ContractError(
                f"tool {spec.name} allows {limits.max_concurrency} concurrent calls over all episodes, fewer than the "
                f"{processes} processes that share them; give at most --runner-processes {limits.max_concurrency}, "
                "or the tool a higher max_concurrency"
            )
        self.slots = asyncio.Semaphore(concurrency)
        self.rate = RateLimit(limits.max_per_second / processes if limits.max_per_second else None)
        self.pool = TimeoutPool(
            f"tool-{spec.name}", threads=min(concurrency, _MAX_THREADS), max_abandoned=limits.max_hung
        )
        self.counts: Counter[str] = Counter()
        """calls, errors, timeouts, retries, cut"""


class ToolExecutor:
    """Executes the tool calls of all episodes. Tools of the same name in two environments have separate limits.

    Args:
        save_output: called with the SHA-256 and the full text of each result that is truncated; it may block.
        processes: number of runner processes that share each tool's concurrent calls.
    """

    def __init__(self, save_output: SaveOutput | None = None, processes: int = 1) -> None:
        self.save_output = save_output
        self._processes = processes
        self._limiters: dict[tuple[str, str], ToolLimiter] = {}

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Per tool name: calls, errors, timeouts, retries, cut (truncated results), hung (calls that never returned)."""
        total: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (name, _), limiter in self._limiters.items():
            total[name].update({**limiter.counts, "hung": limiter.pool.abandoned})
        return {name: dict(counts) for name, counts in total.items()}

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """Make the action's calls and return the action with their results in order.

        A call begins when the one before it has ended, unless both tools are `parallel`. If a call is of a tool without a function, no call of
        the turn is made: they are what the policy answers.

        Raises:
            ToolFailure: a tool's infrastructure failed in every attempt; the calls after it are not made.
        """
        if answers_by_calls(tools, action):
            return action
        if not action.calls:
            return action
        results: list[ToolResult] = []
        for batch in _batches(tools, action.calls):
            if len(batch) == 1:
                results.append(await self._call(tools, batch[0]))
            else:
                results += await self._batch(tools, batch)
        return Action(action.text, action.calls, action.errors, action.finish_reason, action.answer, tuple(results))

    async def _batch(self, tools: Mapping[str, ToolSpec], calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results of calls that are made at the same time. A failure is raised after the other calls have ended."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_failure_as_value(self._call(tools, call))) for call in calls]
        outcomes = [t.result() for t in tasks]
        failure = next((o for o in outcomes if isinstance(o, ToolFailure)), None)
        if failure is not None:
            raise failure
        return [o for o in outcomes if isinstance(o, ToolResult)]

    def close(self) -> None:
        """Let idle threads end; hanging calls are left behind."""
        for limiter in self._limiters.values():
            limiter.pool.close()

    async def _call(self, tools: Mapping[str, ToolSpec], call: ToolCall) -> ToolResult:
        spec = tools.get(call.name)
        if spec is None:
            return _error(
                replace(call, name=_clean(call.name)[:64]),
                f"unknown tool {call.name[:64]!r}{suggest(call.name[:64], tools)}",
            )
        limiter = self._limiter(spec)
        limiter.counts["calls"] += 1
        try:
            arguments = spec.arguments(call.arguments)
        except BadArgumentsError as e:
            limiter.counts["errors"] += 1
            return _error(call, str(e))
        started = time.perf_counter()
        async with limiter.slots:
            result = await self._attempts(spec, limiter, call, arguments)
        elapsed, r = (
            time.perf_counter() - started,
            result,
        )  # built directly, since `replace` takes several times as long
        return ToolResult(r.call_id, r.name, r.content, r.is_error, r.full_bytes, r.sha256, elapsed, r.parts)

    def _limiter(self, spec: ToolSpec) -> ToolLimiter:
        fn: Any = spec.fn if hasattr(spec.fn, "__qualname__") else type(spec.fn)
        key = (spec.name, spec.key or f"{fn.__module__}.{fn.__qualname__}")
        if key not in self._limiters:
            self._limiters[key] = ToolLimiter(spec, self._processes)
        return self._limiters[key]

    async def _attempts(
        self, spec: ToolSpec, limiter: ToolLimiter, call: ToolCall, arguments: dict[str, Any]
    ) -> ToolResult:
        assert spec.fn is not None, "calls of tools without a function are not made"
        for attempt in range(spec.limits.retries + 1):
            await limiter.rate.wait()
            try:
                value = await limiter.pool.call(partial(spec.fn, **arguments), timeout_s=spec.limits.timeout_s)
                parts = parts_of(value)
                if parts is None:
                    result = await self._truncate(call, to_text(value), spec.limits.max_result_bytes)
                else:
                    parts = await asyncio.to_thread(load_parts, parts)
                    text = "".join(str(p.get("text", "")) for p in parts if not is_image(p))
                    result = await self._truncate(call, text, spec.limits.max_result_bytes)
                    result = replace(result, parts=_result_parts(result, parts))
            except DeadlineError:
                limiter.counts["timeouts"] += 1
                return _error(call, f"{spec.name} did not answer within {spec.limits.timeout_s:g} s")
            except BadArgumentsError as e:  # a tool in another process, where its arguments are validated
                limiter.counts["errors"] += 1
                return _error(call, str(e))
            except Exception as e:  # user code; see the module's docstring
                if not is_infra_error(e):
                    limiter.counts["errors"] += 1
                    return await self._truncate(
                        call, f"error: {describe(e)}", spec.limits.max_result_bytes, is_error=True
                    )
                if attempt == spec.limits.retries or isinstance(e, PoolExhaustedError):  # which has already waited
                    raise ToolFailure(
                        f"tool {spec.name}: {describe(e)}", f"tool {spec.name}: {type(e).__name__}"
                    ) from e
                limiter.counts["retries"] += 1
            else:
                limiter.counts["cut"] += result.full_bytes is not None
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _truncate(self, call: ToolCall, text: str, limit: int, *, is_error: bool = False) -> ToolResult:
        """The result, truncated to `limit` bytes; the full text goes to `save_output`."""
        result = _truncated(call, text, limit, is_error=is_error)
        if self.save_output is not None and result.sha256 is not None:
            await asyncio.to_thread(self.save_output, result.sha256, text.encode("utf-8", errors="replace"))
        return result


def answers_by_calls(tools: Mapping[str, ToolSpec], action: Action) -> bool:
    """True if a call is of a tool without a function, so that the environment reads the calls and none is made."""
    return any((spec := tools.get(call.name)) is not None and spec.fn is None for call in action.calls)


def _batches(tools: Mapping[str, ToolSpec], calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
    """The calls in their order: neighbours whose tools are `parallel` together, every other call alone."""
    batches: list[list[ToolCall]] = []
    joinable = False
    for call in calls:
        spec = tools.get(call.name)
        parallel = spec is not None and spec.limits.parallel
        if parallel and joinable:
            batches[-1].append(call)
        else:
            batches.append([call])
        joinable = parallel
    return batches


async def _failure_as_value(call: Any) -> ToolResult | ToolFailure:
    """A failure is returned, not raised into the task group, so that sibling calls finish."""
    try:
        result: ToolResult = await call
    except ToolFailure as e:
        return e
    return result


def _error(call: ToolCall, message: str) -> ToolResult:
    """An error of the executor itself; truncated, since it may quote the policy at any length."""
    return _truncated(call, f"error: {message}", 2000, is_error=True)


def _result_parts(result: ToolResult, parts: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the texts and images of a result in order. If the text was truncated: the remaining text, then the images."""
    if result.full_bytes is None:
        return tuple(p if is_image(p) else {**p, "text": _clean(str(p.get("text", "")))} for p in parts)
    return ({"type": "text", "text": result.content}, *(p for p in parts if is_image(p)))


def to_text(value: Any) -> str:
    """A tool's value as text: str unchanged, bytes as UTF-8, None as '', the rest as JSON (sets and pydantic models too).

    Raises:
        TypeError: not representable; the policy reads the message as the tool's error.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", errors="replace")
    try:
        return orjson.dumps(value, _jsonable, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError:  # integers over 64 bits, lone surrogates
        return json.dumps(value, default=_jsonable, ensure_ascii=False, separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    raise TypeError(f"a tool must return text, bytes or JSON values, found {type(value).__name__}")


def _clean(text: str) -> str:
    """Replace lone surrogates, which no tokenizer accepts, by '?'."""
    return text.encode("utf-8", errors="replace").decode()


def _truncated(call: ToolCall, text: str, limit: int, *, is_error: bool = False) -> ToolResult:
    """The result, truncated to `limit` bytes of UTF-8 at a character boundary, with a note in the text; cleaned as by `_clean`."""
    if text.isascii() and len(text) <= limit:
        return ToolResult(call.id, call.name, text, is_error)
    raw = text.encode("utf-8", errors="replace")
    if len(raw) <= limit:
        return ToolResult(call.id, call.name, raw.decode(), is_error)
    head = raw[:limit].decode("utf-8", errors="ignore")
    note = f"\n[cut: the first {len(head.encode())} of {len(raw)} bytes]"
    return ToolResult(call.id, call.name, head + note, is_error, len(raw), hashlib.sha256(raw).hexdigest())
