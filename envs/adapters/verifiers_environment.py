"""Environments of verifiers before 0.4, which packages export as `load_environment`: `--env verifiers:my_environment`.

The environment's own loop plays the episode (`Environment.rollout`): its stop conditions, tools and setup are verifiers' code. It asks a client for
each turn, and this client passes the question on as an observation and the policy's next action back as the answer. At the end the rubric scores
the rollout. Arguments (`--env-arg`): those of `load_environment`, `size`, the most tasks of the split 'train', and `test_size`, those of the split
'test'.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.envs.adapters.base import Adapted, arguments_key, part_of
from agentrl.errors import ConfigError, ContractError, describe
from agentrl.tool import ToolSpec
from agentrl.types import Action, FinishReason, Message, StepResult, Task

_OWN = inspect.signature(lambda test_size=100, size=10_000: None)


@dataclass(slots=True)
class _Notes:
    """What verifiers itself does not report of a rubric's functions: it scores one that fails 0."""

    failed: list[Exception] = field(default_factory=list)
    """what rewards raised"""
    metrics: dict[str, float] = field(default_factory=dict)
    """of functions without a weight that return several"""
    without_value: set[str] = field(default_factory=set)
    """functions without a weight that failed, or returned several metrics"""


_NOTES: ContextVar[_Notes] = ContextVar("notes of a rubric")


class Environment(Adapted):
    """An environment of verifiers. The reward is the rubric's, at the end; a reward that raises fails the episode."""

    prefix, extra, example = "verifiers", "verifiers", "my_environment"

    def __init__(self, test_size: int = 100, size: int = 10_000, **args: Any) -> None:
        self._args = arguments_key(args)
        self._rollout: asyncio.Task[Any] | None = None

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """The arguments of the adapter and of `load_environment`."""
        _env_utils(target)
        load = importlib.import_module(module_name(target)).load_environment
        theirs = [
            p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
            for p in inspect.signature(load).parameters.values()
            if p.name not in _OWN.parameters and p.kind is not p.VAR_POSITIONAL
        ]
        return {"__signature__": inspect.Signature([*_OWN.parameters.values(), *theirs])}

    @classmethod
    def tasks(cls, split: str, test_size: int = 100, size: int = 10_000, **args: Any) -> Iterator[Task]:
        """The rows of the environment's data set. Without a data set for evaluation, its first rows are the split 'test'."""
        env = _load(cls.target, arguments_key(args))
        part = part_of(split, len(env.get_dataset()), test_size, size)
        if env.build_eval_dataset() is not None:
            part = range(size if split == "train" else test_size)
        of_test = split == "test" and env.eval_dataset is not None
        rows = env.get_eval_dataset() if of_test else env.get_dataset()
        for number in part[: max(0, len(rows) - part.start)]:
            yield Task(f"{split}-{number}", _prompt(rows[number]["prompt"]), metadata={"row": number, "eval": of_test})

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Accept only tasks of the environment: its rubric scores no others."""
        if "row" not in task.metadata:
            raise ConfigError(f"{cls.label()} scores only its own tasks; leave --prompt-data out")

    def check_ready(self) -> None:
        """Refuse an environment whose episodes this adapter cannot play or score.

        Raises:
            ConfigError: its rubric compares the episodes of a group or has no rewards, or it completes texts instead of conversations.
        """
        env = _load(self.target, self._args)
        rubric = env.rubric
        why = ""
        if rubric.has_group_rewards:
            why = "its rubric compares the episodes of a group, which this adapter does not do"
        elif not any(rubric._get_reward_weights()):
            why = "its rubric has no rewards, so that every answer would score 0"
        elif env.message_type != "chat":
            why = "it completes texts, and the policy is asked with messages"
        if why:
            raise ConfigError(f"--env {self.label()}: {why}; run verifiers against the gateway instead")

    def tool_specs(self, task: Task | None = None) -> list[ToolSpec]:
        """The environment's tools, or those of the task's row. The environment itself runs their calls."""
        env = _load(self.target, self._args)
        info = (_row(env, task).get("info") if task else None) or {}
        if isinstance(info, str):
            info = orjson.loads(info)
        tools = env._normalize_tool_defs(info.get("tool_defs")) or env.tool_defs or []
        return [
            *super().tool_specs(task), *(ToolSpec(t.name, t.description, dict(t.parameters)) for t in tools)
        ]  # fmt: skip

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        """Start the environment's loop and return what it asks first."""
        env = _load(self.target, self._args)
        self._client = _client([spec.name for spec in self.tool_specs(task)])
        self._rollout = asyncio.create_task(env.rollout(dict(_row(env, task)), self._client, "policy", {}))
        messages = await self._asked()
        if messages is None:
            raise _error_of(self._rollout.result()) or RuntimeError("the environment ended before the first turn")
        return messages

    async def step(self, action: Action) -> StepResult:
        """Answer the environment's question with the action; at the end score the rollout with its rubric."""
        assert self._rollout is not None
        if not self._rollout.done():  # else its time was over while the policy wrote
            self._client.answers.put_nowait(_response(action))
        messages = await self._asked()
        return StepResult(messages) if messages is not None else await self._scored(self._rollout.result())

    async def close(self) -> None:
        """End the environment's loop, with its cleanup."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})
            self._rollout.cancelled() or self._rollout.exception()  # retrieved, so that asyncio does not log it

    async def _asked(self) -> list[Message] | None:
        """The messages that the policy answers next; None: the rollout has ended."""
        assert self._rollout is not None
        question = asyncio.ensure_future(self._client.questions.get())
        try:
            await asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            return question.result() if question.done() else None
        finally:
            question.cancel()

    async def _scored(self, state: Any) -> StepResult:
        """The end of the episode, with the rubric's reward and metrics.

        Raises:
            Exception: the rollout, or a reward that counts, failed.
        """
        if error := _error_of(state):
            raise error
        rubric = _load(self.target, self._args).rubric
        _NOTES.set(notes := _Notes())
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        if notes.failed:
            raise notes.failed[0]
        metrics = {k: float(v) for k, v in (state["metrics"] or {}).items() if k not in notes.without_value}
        metrics |= notes.metrics
        late = bool(state.get("timed_out"))
        info = {"metrics": metrics, "stop": str(state.get("stop_condition"))}
        return StepResult(reward=float(state["reward"]), terminated=not late, truncated=late, info=info)


class _Questions:
    """The client of one episode: what the environment asks is put into `questions`, and what `answers` receives is returned."""

    def __init__(self, tools: Sequence[str]) -> None:
        self.questions: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self._tools = sorted(tools)
        self._known: list[Message] = []

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        """Ask the policy what follows the conversation.

        Raises:
            ContractError: the environment changed the conversation so far, or the tools.
        """
        names: dict[str, str] = {}
        messages = [_message(m, names) for m in prompt]
        count = len(self._known)
        if messages[:count] != self._known or len(messages) == count:
            raise ContractError(
                "the environment changed messages of earlier turns, but an episode is one conversation that only grows; "
                "run verifiers against the gateway instead"
            )
        if sorted(tool.name for tool in tools or ()) != self._tools:
            raise ContractError(
                "the environment changed its tools during the episode; run verifiers against the gateway instead"
            )
        self.questions.put_nowait(messages[count:])
        response = await self.answers.get()
        types = Environment.package("verifiers.types")
        said = types.AssistantMessage(content=response.message.content, tool_calls=response.message.tool_calls)
        self._known = [*messages, _message(said, names)]
        return response


def module_name(target: str) -> str:
    """The module that exports an environment: `owner/my-environment` is `my_environment`."""
    return target.partition("@")[0].rpartition("/")[2].replace("-", "_")


def exports_environment(target: str) -> bool:
    """True if a target is a module with `load_environment`.

    Raises:
        ConfigError: the module cannot be imported, because it was written for an older verifiers.
    """
    name = module_name(target)
    try:
        return callable(getattr(importlib.import_module(name), "load_environment", None))
    except ModuleNotFoundError as e:
        if e.name is not None and f"{name}.".startswith(f"{e.name}."):
            if "." not in name:  # a taskset of verifiers itself, perhaps
                return False
            raise ConfigError(
                f"--env verifiers:{target}: there is no module {name}; install its package, or correct the name"
            ) from e
        raise ConfigError(
            f"--env verifiers:{target}: it cannot be imported: {describe(e)}; install what it needs"
        ) from e
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"--env verifiers:{target}: it cannot be imported: {describe(e)}{_hint()}") from e


def _hint() -> str:
    """What to install, for the end of a message."""
    version = Environment.package("verifiers").__version__
    if tuple(map(int, version.split(".")[:2])) < (0, 4):
        return "; install what it needs"
    return f"; verifiers {version} has no such environments: pip install 'verifiers<0.4'"


def _env_utils(target: str) -> Any:
    """verifiers' own loader of environments.

    Raises:
        ConfigError: the installed verifiers has none.
    """
    Environment.package("verifiers")
    try:
        return importlib.import_module("verifiers.utils.env_utils")
    except ImportError as e:
        raise ConfigError(f"--env verifiers:{target} exports load_environment, and {describe(e)}{_hint()}") from e


@functools.lru_cache(maxsize=16)
def _load(target: str, args: str) -> Any:
    """The environment, which all episodes of this process share, as in verifiers.

    Raises:
        ConfigError: it cannot be loaded with these arguments.
    """
    utils = _env_utils(target)
    importlib.import_module("verifiers.envs.environment").signal = _NoHandlers()  # type: ignore[attr-defined]
    try:
        env = utils.load_environment(module_name(target), **orjson.loads(args))
    except (TypeError, ValueError, RuntimeError, ImportError, LookupError, OSError) as e:
        raise ConfigError(f"--env verifiers:{target}: it cannot be loaded with {args}: {describe(e)}") from e
    for rubric in _rubrics(env.rubric):
        pairs = zip(rubric.funcs, rubric.weights, strict=True)
        rubric.funcs = [_noted_reward(f) if weight else _noted_metric(f) for f, weight in pairs]
    return env


class _NoHandlers:
    """The module `signal` for verifiers' environments, whose handlers of SIGINT and SIGTERM would replace those of the run."""

    signal = staticmethod(lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)


def _noted_reward(reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose exceptions are added to the notes."""

    @functools.wraps(reward)
    async def noted(*args: Any, **kwargs: Any) -> float:
        try:
            value = reward(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as e:
            _NOTES.get().failed.append(e)
            raise

    return noted


def _noted_metric(metric: Callable[..., Any]) -> Callable[..., Any]:
    """A function without a weight, which may also return several metrics by name. What it raises is left out: it scores nothing."""

    @functools.wraps(metric)
    async def noted(*args: Any, **kwargs: Any) -> float:
        try:
            value = metric(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            if not isinstance(value, Mapping):
                return float(value)
            _NOTES.get().metrics.update({str(k): float(v) for k, v in value.items()})
        except Exception:  # noqa: BLE001  it scores nothing
            pass
        _NOTES.get().without_value.add(metric.__name__)
        return 0.0

    return noted


def _error_of(state: Mapping[str, Any]) -> Exception | None:
    error: Exception | None = state.get("error")
    return error


def _row(env: Any, task: Task) -> dict[str, Any]:
    rows = env.get_eval_dataset() if task.metadata["eval"] else env.get_dataset()
    row: dict[str, Any] = rows[int(task.metadata["row"])]
    return row


def _prompt(prompt: Any) -> str | tuple[Message, ...]:
    return prompt if isinstance(prompt, str) else tuple(_message(m, {}) for m in prompt)


def _message(message: Any, names: dict[str, str]) -> Message:
    """A message of verifiers in OpenAI's form. `names`: the tools of the calls so far by the ids of the calls; results get their names from it."""
    plain = message if isinstance(message, dict) else message.model_dump(mode="json")
    plain = {key: value for key, value in plain.items() if value is not None}
    if calls := plain.pop("tool_calls", None):
        written = [c if isinstance(c, dict) else c.model_dump() for c in calls]
        functions = [c.get("function") or {"name": c["name"], "arguments": c["arguments"]} for c in written]
        names.update({c["id"]: f["name"] for c, f in zip(written, functions, strict=True)})
        plain["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": f} for c, f in zip(written, functions, strict=True)
        ]
    if plain["role"] == "tool":
        plain.setdefault("name", names.get(plain.get("tool_call_id", ""), ""))
    return plain


def _client(tools: Sequence[str]) -> Any:
    """`_Questions` as a client of verifiers. Its other methods belong to providers of models, and are never called."""
    made: Any = type("Policy", (_Questions, Environment.package("verifiers.clients").Client), {})
    made.__abstractmethods__ = frozenset()
    return made(tools)


def _response(action: Action) -> Any:
    """The policy's turn as a model's response."""
    types = Environment.package("verifiers.types")
    calls = [types.ToolCall(id=c.id, name=c.name, arguments=orjson.dumps(c.arguments).decode()) for c in action.calls]
    cut = action.finish_reason is FinishReason.LENGTH
    message = types.ResponseMessage(
        content=action.text,
        tool_calls=calls or None,
        finish_reason="length" if cut else "tool_calls" if calls else "stop",
        is_truncated=cut,
    )
    return types.Response(id="policy", created=0, model="policy", message=message)
