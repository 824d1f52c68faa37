"""`Env` and `ToolEnv`, the base classes of environments, and the registry of environments by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

from agentrl.core.constructor_arguments import check_arguments
from agentrl.core.real_number import MAX_MAGNITUDE, real_number
from agentrl.core.redaction import redact
from agentrl.core.registry import Registry
from agentrl.errors import ConfigError, ContractError, shown
from agentrl.tool import (
    Isolation,
    Tool,
    ToolSpec,
    check_isolation,
    check_limit,
    declared_tools,
    spec_of,
    tools_of,
)
from agentrl.types import Action, Message, Observation, StepResult, Task


def overridable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the method's type, so that a subclass may override an async method by a sync one."""
    return method


ObservationLike = Observation | str | Sequence[Message]
"""the return type of `Env.reset`"""


class Env:
    """The base class of environments. One instance plays one episode of one task.

    Override `step`, and the other methods where their defaults do not fit. `reset`, `step`, `close` and `@tool` methods may be sync, and then
    run in a thread, or async. The constructor's arguments are the environment's settings (`--env-arg NAME=VALUE`). One more instance is
    created and closed before a run, to check them. An environment handles messages and actions, never tokens.

    Example:
        >>> class Guess(Env):
        ...     def reset(self, task, *, seed):
        ...         self.secret = task.label
        ...         return f"{task.prompt} Answer with one number."
        ...
        ...     def step(self, action):
        ...         if not action.text.strip().isdigit():
        ...             return StepResult("That is not a number.", reward=-0.1)
        ...         guess = int(action.text)
        ...         if guess == self.secret:
        ...             return StepResult(reward=1.0, terminated=True)
        ...         return StepResult("higher" if guess < self.secret else "lower")
        >>> env = Guess()
        >>> env.reset(Task("0", "Which number do I think of?", label=7), seed=0)
        'Which number do I think of? Answer with one number.'
        >>> env.step(Action("5")).observation
        'higher'
    """

    name: ClassVar[str] = ""
    """shown in records and tables; empty: the class name"""
    rewards: ClassVar[Sequence[Any]] = ()
    """`@reward` functions, or their names, that score the episodes; `--reward` overrides them"""
    tools: ClassVar[Sequence[Any]] = ()
    """`@tool` functions, `Tool` classes and `Tool` objects; `@tool` methods need not be listed"""
    action_format: ClassVar[Any] = None
    """how the policy writes its actions: a name in agentrl.render.FORMATS ('search_r1', 'hermes', …), or an `ActionFormat`, such as
    `TagFormat(calls={"code": ("python", "code")})` of agentrl.render for tags of one's own; None: the model family's format"""
    system_prompt: ClassVar[str | None] = None
    """the content of a system message before the first observation; None: no such message"""
    shows_tools: ClassVar[bool] = False
    """True: its prompts describe the tools and how to call them, so a chat template that cannot show tools is accepted"""
    roles: Sequence[str] = ()
    """the speakers of an episode, if it has several: observations say which role reads them and acts next (`Observation.of(text, to=role)`), and
    each role is trained by its own rewards (`StepResult.rewards`); an instance may set it too. Empty: the policy is the only one"""
    players: ClassVar[Mapping[str, Any]] = {}
    """who plays a role, if not the policy: a function of the role's messages that returns a text, or what `--player ROLE=PLAYER` accepts, which
    overrides it"""
    context_policy: ClassVar[Any] = None
    """shortens long conversations: `DropOldTurns()`, `TruncateOldResults()`, `Summarise(write)` or `SummariseByPolicy()` of agentrl.render, or a
    function or method of a `ContextView` that returns the new messages, a `SummaryRequest`, or None for no change; None: never shortened"""
    eval_score: ClassVar[str] = "reward"
    """the evaluation score shown in the closing summary and the curve: 'reward', or the name of a reward component"""
    eval_groups: ClassVar[Sequence[str]] = ()
    """keys of `Task.metadata` by whose values the mean reward of an evaluation is also reported (`eval/test/reward_hops2`)"""
    max_concurrency: ClassVar[int | None] = None
    """episodes of this class that run at the same time, besides the limit of `--concurrency` on all; None: no separate limit"""
    gives_state_keys: bool = False
    """True: `StepResult.state_key` is set in every step, which turn-level estimators (gigpo) need; an instance may set it too"""
    threads: ClassVar[int] = 32
    """sync methods that run at the same time, over all episodes of this class"""
    input_key: ClassVar[str] = "prompt"
    """column of data files that holds the prompt; `--input-key` overrides it"""
    label_key: ClassVar[str] = "label"
    """column of data files that holds the label; `--label-key` overrides it"""
    timeout_s: ClassVar[float] = 120.0
    """time limit of the constructor and of each call of reset, step, state and close, in seconds"""
    isolation: ClassVar[Isolation] = "thread"
    """'process': each instance runs in a separate process, with its tools. A hang, a crash or a leak ends that process only, and the episode is
    started again; the process and everything it started are killed after `close`. `--env-isolation` overrides it"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the class attributes that are limits.

        Raises:
            ContractError: `threads`, `max_concurrency`, `timeout_s` or `isolation` cannot be used.
        """
        super().__init_subclass__(**kwargs)
        check_limit(f"environment {cls.__name__}", "timeout_s", cls.timeout_s)
        check_limit(f"environment {cls.__name__}", "threads", cls.threads, least=1)
        check_isolation(f"environment {cls.__name__}", cls.isolation)
        if cls.max_concurrency is not None:
            check_limit(f"environment {cls.__name__}", "max_concurrency", cls.max_concurrency, least=1)

    @overridable
    async def check_ready(self) -> None:
        """Check what the environment needs besides its arguments, such as a server. Called once before a run, on an instance that plays no episode.

        Raises:
            ConfigError: it is not there; the run does not start.

        Example:
            >>> from pathlib import Path
            >>> from agentrl.errors import ConfigError
            >>> class Maps(Env):
            ...     def check_ready(self):
            ...         if not Path("/maps").is_dir():
            ...             raise ConfigError("Maps needs the folder /maps; download it with `make maps`")
        """

    @overridable
    async def reset(self, task: Task, *, seed: int) -> ObservationLike:
        """Begin an episode. Called once, before `step`. The default returns the task's prompt.

        An override may have one more parameter, `group_seed`: a seed that is the same in all episodes of a group and in their retries. Use it
        for what the episodes are compared on, such as the board, the secret, or the numbers of an exercise.

        Args:
            task: the task to play; a copy of this episode's own. What rewards need of the episode, `state` returns.
            seed: seed for all random choices of the environment. The same seed must lead to the same episode. Each episode has another
                seed, also within a group.

        Returns:
            The first observation: an `Observation`, a str, or a list of messages. It must not be empty. In one group it should be the same
            in every episode, as advantages compare the episodes of a group.

        Raises:
            InfraError: infrastructure failed. The episode is started again, and is not scored.

        Example:
            >>> from random import Random
            >>> class Dice(Env):
            ...     def reset(self, task, *, seed, group_seed):
            ...         self.random = Random(seed)
            ...         return f"Guess the next throw after {Random(group_seed).randint(1, 6)}."
            >>> Dice().reset(Task("0", ""), seed=1, group_seed=0) == Dice().reset(Task("0", ""), seed=2, group_seed=0)
            True
        """
        return task.messages

    @overridable
    async def step(self, action: Action) -> StepResult:
        """Play one turn.

        Args:
            action: the parsed generation of the policy. Its tool calls have been executed; `action.results` holds their results.

        Returns:
            A `StepResult` with the observation and the reward of this turn. Unless it ends the episode, its observation must not be empty.

        Raises:
            InfraError: infrastructure failed. The episode is started again, and is not scored. Any other exception has the same effect, as
                do calls that exceed `timeout_s`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(action) -> StepResult")

    @overridable
    async def close(self) -> None:
        """Free resources. Called exactly once per instance, also after an exception, a timeout or a cancellation."""

    def state(self) -> Mapping[str, Any]:
        """The final state of the episode, for rewards and the record. Called once, before `close`.

        Returns:
            JSON values by name. Rewards read them as `trajectory.state`.
        """
        return {}

    @classmethod
    def tasks(cls, split: str) -> Iterable[Task]:
        """The environment's own tasks. `--prompt-data` and `--eval-prompt-data` override them.

        An override may have further parameters: each receives the environment's argument of its name (`--env-arg`), or the default of the
        constructor's parameter of that name.

        Args:
            split: 'train' or 'test'.

        Returns:
            The tasks, always in the same order.

        Raises:
            ConfigError: the environment has no tasks, or none of this split.

        Example:
            >>> class Sums(ToolEnv):
            ...     def __init__(self, digits: int = 1):
            ...         self.digits = digits
            ...
            ...     @classmethod
            ...     def tasks(cls, split, digits):
            ...         return [Task(f"{n}", f"{n} + {n} = ?", str(2 * n)) for n in range(10**digits)]
            >>> from agentrl.env import tasks_of
            >>> len(list(tasks_of(Sums, "train", {"digits": 2})))
            100
        """
        raise ConfigError(f"environment {cls.label()} has no tasks; give some with --prompt-data FILE")

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Check a task before the run starts. The default accepts every task.

        Args:
            task: a task from a data file or from `tasks`.

        Raises:
            DataError: the environment cannot play this task; the message states why.
        """

    @classmethod
    def label(cls) -> str:
        """The name shown in records and tables."""
        return redact(cls.name or cls.__name__)

    def tool_specs(self, task: Task | None = None) -> list[ToolSpec]:
        """The tools of this instance: those in `tools`, then the `@tool` methods. `Tool` classes are instantiated (see `tool_instances`).

        An override may have a parameter `task`, and return the tools of that task. It is None when the environment is checked before a run.
        A call of a tool whose `fn` is None is not made: `step` finds it in `action.calls`, without a result. Tools in the column `tools` of a
        data file are such tools, unless the environment has one of that name.

        Args:
            task: the task of the episode; None: the check before a run.

        Returns:
            The tools, each with another name.

        Raises:
            ContractError: two tools have the same name, or one has no usable name or signature.

        Example:
            >>> from agentrl import ToolSpec
            >>> class Desk(ToolEnv):
            ...     def tool_specs(self, task):
            ...         names = task.metadata["applications"] if task else ()
            ...         return [ToolSpec(name, f"Open {name}.", {"type": "object"}, lambda: "open") for name in names]
            >>> [spec.name for spec in Desk().tool_specs(Task("0", "Write a letter.", metadata={"applications": ["editor"]}))]
            ['editor']
        """
        specs = []
        for item in self.tools:
            obj = item() if inspect.isclass(item) and issubclass(item, Tool) else item
            if isinstance(obj, Tool):
                self.tool_instances.append(obj)
            specs.append(spec_of(obj))
        specs += tools_of(self)
        require_unique_tools(self.label(), specs)
        return specs

    @property
    def tool_instances(self) -> list[Tool]:
        """The `Tool` objects of this episode; the runner sets them up and closes them."""
        instances: list[Tool] = self.__dict__.setdefault("_tool_instances", [])
        return instances


class ToolEnv(Env):
    """An environment that consists of tools and a reward.

    Its observations are the tool results and messages about calls that could not be parsed. An answer ends the episode, as does a turn
    without a tool call, or one that calls a tool without a function (the calls are then what the policy answers).

    Example:
        >>> from agentrl import reward, tool
        >>> @reward
        ... def exact_match(trajectory):
        ...     return float(trajectory.answer == trajectory.label)
        >>> class Capitals(ToolEnv):
        ...     action_format = "search_r1"
        ...     rewards = [exact_match]
        ...
        ...     @tool
        ...     def search(self, query: str) -> str:
        ...         '''Look up a country.'''
        ...         return {"France": "Paris"}.get(query, "nothing found")
        >>> [spec.name for spec in Capitals().tool_specs()]
        ['search']
    """

    @overridable
    async def step(self, action: Action) -> StepResult:
        """Return the tool results as the observation; see `Env.step`."""
        if action.answer is not None or len(action.results) < len(action.calls):
            return StepResult(terminated=True)
        messages = tool_messages(action)
        return StepResult(messages, terminated=not messages)


def tool_messages(action: Action) -> list[Message]:
    """One message per tool result, and one with the errors of calls that could not be parsed."""
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


def takes_group_seed(env_class: type[Env]) -> bool:
    """True if an environment's `reset` has a parameter `group_seed`."""
    return "group_seed" in _parameters(env_class.reset)


@lru_cache(maxsize=4096)
def _parameters(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)


def task_tools(env: Env, task: Task | None) -> list[ToolSpec]:
    """The tools of an instance for a task: the environment's, then those in the task's column `tools` that the environment does not have.

    Raises:
        ContractError: two tools have the same name, or one has no usable name or signature.
    """
    specs = env.tool_specs(task) if "task" in _parameters(type(env).tool_specs) else env.tool_specs()
    require_unique_tools(env.label(), specs)
    declared = declared_tools(task.metadata.get("tools") or ()) if task else []
    require_unique_tools(f"{env.label()}, task {task.id if task else ''}", declared)
    own = {spec.name for spec in specs}
    return [*specs, *(spec for spec in declared if spec.name not in own)]


def require_unique_tools(where: str, specs: Sequence[ToolSpec]) -> None:
    """Refuse two tools of one name.

    Raises:
        ContractError: there are two.
    """
    names = [s.name for s in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ContractError(f"environment {where} has two tools of the same name: {twice}")


def tasks_of(env_class: type[Env], split: str, args: Mapping[str, Any]) -> Iterable[Task]:
    """The environment's own tasks of a split, for these arguments of its constructor."""
    wanted = list(inspect.signature(env_class.tasks).parameters.values())[1:]
    defaults = {n: p.default for n, p in inspect.signature(env_class).parameters.items() if p.default is not p.empty}
    if any(p.kind is p.VAR_KEYWORD for p in wanted):
        return env_class.tasks(split, **args)
    known = {**defaults, **args}
    return env_class.tasks(
        split, **{p.name: known[p.name] for p in wanted if p.name in args or (p.name in known and p.default is p.empty)}
    )


def constructor_is_trivial(make: Callable[[], Env], env_class: type[Env]) -> bool:
    """True if creating the environment runs no user code, which could block."""
    cls = make.func if isinstance(make, partial) and not make.args and not make.keywords else make
    constructs = any(vars(c).keys() & {"__init__", "__new__"} for c in env_class.__mro__[:-1])
    return cls is env_class and not constructs


def check_reward(value: Any, env_class: type[Env]) -> float:
    """The step reward as a float.

    Raises:
        ContractError: it is not a finite number, or too large.
    """
    number = real_number(value)
    if number is None:
        raise ContractError(
            f"{env_class.label()}.step returned the reward {shown(value)}; it must be a finite number, at most {MAX_MAGNITUDE:g}"
        )
    return number


def check_flag(name: str, value: Any, env_class: type[Env]) -> bool:
    """`StepResult.terminated` or `truncated` as a bool; numpy's bools and 0 or 1 count too.

    Raises:
        ContractError: it is something else, for example an array.
    """
    if isinstance(value, bool):
        return value
    number = real_number(value) if getattr(value, "shape", ()) == () else None
    if number not in (0.0, 1.0):
        raise ContractError(
            f"{env_class.label()}.step: StepResult.{name} must be True or False, found {type(value).__name__}: {shown(value)}"
        )
    return number == 1.0


def _only_env(module: Any) -> Any:
    """The Env subclass that a file defines, if there is exactly one."""
    classes = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Env) and c.__module__ == module.__name__
    ]
    return classes[0] if len(classes) == 1 else None


ENVS = Registry("env", {"search_r1": "agentrl.envs.search_r1:SearchR1"}, default=_only_env)


ADAPTERS = Registry(
    "env adapter",
    {
        prefix: f"agentrl.envs.adapters.{prefix}:{name}"
        for prefix, name in {
            "gymnasium": "Gymnasium",
            "mcp": "McpServers",
            "openenv": "OpenEnv",
            "reasoning_gym": "ReasoningGym",
            "textarena": "TextArena",
            "verifiers": "Taskset",
        }.items()
    },
)
"""Classes by the prefix of `--env PREFIX:TARGET`; each has a classmethod `of(target)` that returns an Env class."""


def register_env(name: str) -> Callable[[type[Env]], type[Env]]:
    """Class decorator that registers an Env as `--env NAME`.

    Args:
        name: the name for the command line.

    Example:
        >>> @register_env("coin")
        ... class Coin(Env):
        ...     def step(self, action):
        ...         return StepResult(terminated=True)
        >>> from agentrl.env import make_env_class
        >>> make_env_class("coin").__name__
        'Coin'
    """
    return ENVS.register(name)


def make_env_class(name: str | None) -> type[Env]:
    """The Env class of `--env NAME` or `--env PREFIX:TARGET`; without a name `ToolEnv`, which plays the tasks of data files.

    Raises:
        UnknownNameError: the name is not registered.
        ConfigError: the file or module cannot be imported.
        ContractError: the object is not a subclass of Env.
    """
    if name is None:
        return ToolEnv
    prefix, colon, target = name.partition(":")
    adapted = colon and prefix in ADAPTERS.names() and name not in ENVS.names()
    env_class = ADAPTERS.resolve(prefix).of(target) if adapted else ENVS.resolve(name)
    if not (inspect.isclass(env_class) and issubclass(env_class, Env)):
        raise ContractError(f"--env {name}: expected a subclass of agentrl.Env, found {env_class!r:.80}")
    return env_class


def check_env_args(cls: type[Env], args: Mapping[str, Any]) -> None:
    """Check the constructor arguments of an environment.

    Raises:
        ConfigError: an argument is missing or unknown.
    """
    check_arguments(f"environment {cls.label()}", cls, args, "--env-arg")
