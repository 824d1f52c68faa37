"""`Env` and `ToolEnv`: what users subclass.

    class Guess(Env):
        rewards = [closeness]

        def reset(self, task, *, seed):
            self.secret = task.label
            return f"{task.prompt} Use at most five guesses."

        def step(self, action):
            ...
            return StepResult("higher", terminated=False)

One instance per episode, and one that is closed again before a run starts; constructor arguments are its config. Methods may be sync (they
run in a bounded pool of threads) or async. An Env never sees a tokenizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from agentrl.core.registry import Registry
from agentrl.errors import ConfigError, ContractError, suggest
from agentrl.tool import Tool, ToolSpec, spec_of, tools_of
from agentrl.types import Action, Message, Observation, StepResult, Task


def overridable(method: Callable[..., Any]) -> Callable[..., Any]:
    """For type checkers: a subclass may override this async method by a sync one as well."""
    return method


First = Observation | str | Sequence[Message]
"""what `reset` may return"""


class Env:
    """An environment: one episode of one task. Subclass and override `step`, and `reset` where the first observation is not the task's prompt."""

    name: ClassVar[str] = ""
    """shown in records and tables; default: the class name"""
    rewards: ClassVar[Sequence[Any]] = ()
    """`@reward` functions of the finished trajectory, unless `--reward` says otherwise"""
    tools: ClassVar[Sequence[Any]] = ()
    """`@tool` functions, `Tool` classes; `@tool` methods are found by themselves"""
    action_format: ClassVar[str | None] = None
    """how actions are written: a name of agentrl.render.FORMATS ('search_r1', 'hermes', …); None: the model family's own"""
    system_prompt: ClassVar[str | None] = None
    """put before the first observation"""
    shows_tools: ClassVar[bool] = False
    """its prompts say themselves what its tools are and how to call them, so that a chat template that leaves them out will do"""
    context_policy: ClassVar[Any] = None
    """what leaves a conversation that grows long: `DropOldTurns()`, `TruncateOldResults()`, `Summarise(write)` of agentrl.render, or any
    function (or method) of a `ContextView` that returns the messages to go on with, or None to leave them; None: nothing leaves it"""
    eval_score: ClassVar[str] = "reward"
    """the evaluation score shown in the closing summary and the curve: 'reward', or the name of a reward component"""
    eval_groups: ClassVar[Sequence[str]] = ()
    """keys of `Task.metadata` by whose values the mean reward of an evaluation is also reported (`eval/test/reward_hops2`)"""
    threads: ClassVar[int] = 32
    """sync methods at once, over all episodes of this class"""
    input_key: ClassVar[str] = "prompt"
    """column of data files that holds the prompt, unless `--input-key` says otherwise"""
    label_key: ClassVar[str] = "label"
    """column of data files that holds the label, unless `--label-key` says otherwise"""
    timeout_s: ClassVar[float] = 120.0
    """for one call of reset, step or close"""

    @overridable
    async def reset(self, task: Task, *, seed: int) -> First:
        """Begin the task; what it returns is the first observation. Default: the task's prompt."""
        return task.messages

    @overridable
    async def step(self, action: Action) -> StepResult:
        """Take the policy's action (its tool calls executed, `action.results` filled) and answer."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action) -> StepResult")

    @overridable
    async def close(self) -> None:
        """Free what reset took. Always called, exactly once, also after an exception, a timeout or a cancel."""

    def state(self) -> Mapping[str, Any]:
        """What rewards and the record may see of the final state; JSON values. Called once, before `close`."""
        return {}

    @classmethod
    def tasks(cls, split: str) -> Iterable[Task]:
        """The environment's own tasks of a split ('train', 'test'); `--prompt-data` overrides them."""
        raise ConfigError(f"environment {cls.label()} has no tasks of its own; give --prompt-data FILE")

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that this environment cannot run, before anything starts.

        Raises:
            DataError: what is wrong with it.
        """

    @classmethod
    def label(cls) -> str:
        """The name in records and tables."""
        return cls.name or cls.__name__

    def tool_specs(self) -> list[ToolSpec]:
        """The tools of this instance: `tools`, then `@tool` methods. Tool classes get an instance of their own (kept in `tool_instances`)."""
        specs = []
        for item in self.tools:
            obj = item() if inspect.isclass(item) and issubclass(item, Tool) else item
            if isinstance(obj, Tool):
                self.tool_instances.append(obj)
            specs.append(spec_of(obj))
        specs += tools_of(self)
        names = [s.name for s in specs]
        if len(set(names)) != len(names):
            raise ContractError(
                f"environment {self.label()} has two tools of the same name: {sorted({n for n in names if names.count(n) > 1})}"
            )
        return specs

    @property
    def tool_instances(self) -> list[Tool]:
        """`Tool` objects of this episode; the runner sets them up and closes them."""
        found: list[Tool] = self.__dict__.setdefault("_tool_instances", [])
        return found


class ToolEnv(Env):
    """An environment that needs only tools and a reward: tool results are its observations, an answer or a turn without a call ends it."""

    @overridable
    async def step(self, action: Action) -> StepResult:
        """Results become tool messages; what could not be parsed is told to the policy; otherwise the episode is over."""
        if action.answer is not None:
            return StepResult(terminated=True)
        messages = tool_messages(action)
        return StepResult(messages, terminated=not messages)


def tool_messages(action: Action) -> list[Message]:
    """One tool message per result, and one user message saying what could not be parsed."""
    messages: list[Message] = [
        {
            "role": "tool",
            "name": r.name,
            "tool_call_id": r.call_id,
            "content": r.content if r.parts is None else list(r.parts),
        }
        for r in action.results
    ]
    if action.errors:
        text = "\n".join(f"error: {e.message}" for e in action.errors)
        role = {"role": "tool", "name": "error", "tool_call_id": "error"} if messages else {"role": "user"}
        messages.append({**role, "content": text})
    return messages


def constructor_is_trivial(make: Callable[[], Env], env_class: type[Env]) -> bool:
    """True if creating the environment runs no user code, which could block."""
    cls = make.func if isinstance(make, partial) and not make.args and not make.keywords else make
    constructs = any(vars(c).keys() & {"__init__", "__new__"} for c in env_class.__mro__[:-1])
    return cls is env_class and not constructs


def check_reward(value: Any, env_class: type[Env]) -> float:
    """A step reward as a float.

    Raises:
        ContractError: not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, (str, bytes)):
        raise ContractError(f"{env_class.label()}.step returned the reward {value!r:.60}; it must be a finite number")
    return number


def _only_env(module: Any) -> Any:
    """The one Env subclass that a file defines."""
    found = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Env) and c.__module__ == module.__name__
    ]
    return found[0] if len(found) == 1 else None


ENVS = Registry("env", {"search_r1": "agentrl.envs.search_r1:SearchR1"}, default=_only_env)
"""Environments by name."""


def register_env(name: str) -> Callable[[type[Env]], type[Env]]:
    """Decorator: make an Env class known as `--env NAME`."""
    return ENVS.register(name)


def make_env_class(name: str) -> type[Env]:
    """The Env class behind `--env NAME`.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, or no Env.
    """
    found = ENVS.resolve(name)
    if not (inspect.isclass(found) and issubclass(found, Env)):
        raise ContractError(f"--env {name}: expected a subclass of agentrl.Env, found {found!r:.80}")
    return found


def check_env_args(cls: type[Env], args: Mapping[str, Any]) -> None:
    """Refuse constructor arguments that the environment does not take, with a suggestion, and missing ones.

    Raises:
        ConfigError: which one.
    """
    parameters = inspect.signature(cls).parameters
    for name, p in parameters.items():
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in args:
            raise ConfigError(f"environment {cls.label()} needs an argument {name!r}; give --env-arg {name}=VALUE")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in args:
        if name not in parameters:
            raise ConfigError(f"environment {cls.label()} takes no argument {name!r}{suggest(name, parameters)}")
