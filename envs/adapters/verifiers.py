"""Tasksets of verifiers (v1) without a harness: `--env verifiers:my_taskset`. Each task is answered in one turn and scored by its rewards.

The target is what verifiers' own `--env.taskset.id` takes: an installed package that exports its `Taskset`. Arguments (`--env-arg`): those of its
configuration, and `test_size`, the first tasks, which are the split 'test'; the others are the split 'train', at most `size`. A package that exports
`load_environment` instead is an environment of verifiers before 0.4: see `verifiers_environment.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from itertools import islice
from threading import Lock
from typing import Any

import orjson

from agentrl.envs.adapters.base import Adapted, arguments_key, part_of
from agentrl.envs.adapters.verifiers_environment import Environment, exports_environment
from agentrl.errors import ConfigError, describe
from agentrl.types import Action, Message, StepResult, Task


class Taskset(Adapted):
    """The tasks of a verifiers taskset. The reward is the weighted sum of the task's rewards; rewards that need a runtime are refused."""

    prefix, extra, example = "verifiers", "verifiers", "my_taskset"

    def __init__(self, test_size: int = 100, size: int = 10_000, **config: Any) -> None:
        self._config = arguments_key(config)

    @classmethod
    def of(cls, target: str) -> Any:
        """The class of a taskset, or of an environment if the target exports one and no taskset."""
        if target and exports_environment(target) and not _exports_taskset(target):
            return Environment.of(target)
        return super().of(target)

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """Require the package and the taskset."""
        loaders = cls.package("verifiers.v1.utils.loaders")
        try:
            loaders.taskset_class(target)
        except (ImportError, AttributeError, TypeError, ValueError) as e:
            raise ConfigError(f"--env verifiers:{target}: {describe(e)}") from e
        return {}

    @classmethod
    def tasks(cls, split: str, test_size: int = 100, size: int = 10_000, **config: Any) -> Iterator[Task]:
        """The tasks of a split, in the order of the taskset."""
        theirs = _load(cls.target, arguments_key(config))
        for number in part_of(split, theirs.count(2 * test_size), test_size, size):
            if number >= theirs.count(number + 1):
                return
            yield Task(f"{split}-{number}", _prompt(theirs[number].data), metadata={"idx": number})

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Accept only tasks of the taskset: it scores no others."""
        if "idx" not in task.metadata:
            raise ConfigError(f"{cls.label()} scores only its own tasks; leave --prompt-data out")

    def check_ready(self) -> None:
        """Refuse tasks that need a harness.

        Raises:
            ConfigError: a task needs a container, tools or a runtime for its rewards, or has no rewards.
        """
        theirs = _load(self.target, self._config)
        if not theirs.count(1):
            return
        task = theirs[0]
        rewards = task.hooks("reward")
        if not rewards:
            raise ConfigError(
                f"--env {self.label()}: its tasks have no rewards, so that every answer would score 0; an environment of verifiers scores them: "
                "run it against the gateway instead"
            )
        needs = "a container" if task.NEEDS_CONTAINER else "tool servers" if type(task).toolsets(task.config) else ""
        own = [
            name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(self._base_task(), name)
        ]
        hooks = own + [fn.__name__ for fn in rewards if _needs_runtime(fn)]
        if needs or hooks:
            raise ConfigError(
                f"--env {self.label()}: its tasks need {needs or f'a runtime for {hooks[0]}'}, and so a harness of verifiers; "
                "run that harness against the gateway instead"
            )

    def _base_task(self) -> Any:
        return self.package("verifiers.v1.task").Task

    def reset(self, task: Task, *, seed: int) -> Any:
        """The task's prompt."""
        self._task = _load(self.target, self._config)[int(task.metadata["idx"])]
        return task.messages

    async def step(self, action: Action) -> StepResult:
        """Score the answer by the task's rewards."""
        trace = _trace(self, self._task, action.text)
        await self._task.score(trace)
        scored = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        parts = {name: reward.value for name, reward in scored.items() if reward.weight}
        metrics = dict(trace.metrics) | {name: reward.score for name, reward in scored.items() if not reward.weight}
        return StepResult(reward=sum(parts.values()), terminated=True, info={"rewards": parts, "metrics": metrics})


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _exports_taskset(target: str) -> bool:
    try:
        import_module("verifiers.v1.utils.loaders").taskset_class(target)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


class _Tasks:
    """The tasks of a taskset, which are read as far as they are needed: a taskset may be infinite, and generate each with effort."""

    def __init__(self, taskset: Any, label: str) -> None:
        self._rest, self._read, self._label = iter(taskset), list[Any](), label
        self._infinite = bool(taskset.INFINITE)
        self._lock = Lock()

    def count(self, most: int) -> int:
        """How many tasks there are; `most` if there are more."""
        if not self._infinite:
            self._read_to(most)
            return min(most, len(self._read))
        return most

    def __getitem__(self, number: int) -> Any:
        """A task by its place."""
        self._read_to(number + 1)
        return self._read[number]

    def _read_to(self, count: int) -> None:
        with self._lock:
            try:
                self._read.extend(islice(self._rest, max(0, count - len(self._read))))
            except _REFUSALS as e:
                raise ConfigError(f"{self._label} is refused: {describe(e)}") from e


_REFUSALS = (TypeError, ValueError, RuntimeError, ImportError, LookupError, OSError)
"""what a configuration or missing data raises"""


@lru_cache(maxsize=16)
def _load(target: str, config: str) -> _Tasks:
    """The tasks of a taskset.

    Raises:
        ConfigError: its configuration is refused.
    """
    loaders = Taskset.package("verifiers.v1.utils.loaders")
    base = Taskset.package("verifiers.v1.configs.taskset").TasksetConfig
    taskset = loaders.taskset_class(target)
    settings = Taskset.package("verifiers.v1.utils.generic").concrete_type(taskset, base) or base
    label = f"--env verifiers:{target}: its configuration {config}"
    try:
        return _Tasks(taskset(settings.model_validate({"id": target, **orjson.loads(config)})), label)
    except _REFUSALS as e:
        raise ConfigError(f"{label} is refused: {describe(e)}") from e


def _prompt(data: Any) -> str | tuple[Message, ...]:
    system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) and not system:
        return data.prompt
    messages = data.prompt or []
    turns: list[Message] = (
        [{"role": "user", "content": messages}]
        if isinstance(messages, str)
        else [m.model_dump(mode="json", exclude_none=True) for m in messages]
    )
    return (*system, *turns)


def _trace(env: Taskset, task: Any, answer: str) -> Any:
    """What the task's rewards read: the conversation with the answer."""
    traces, graph, types = (env.package(f"verifiers.v1.{name}") for name in ("trace", "graph", "types"))
    prompt = types.UserMessage(content=task.data.prompt_text)
    nodes = [
        graph.MessageNode(message=prompt),
        graph.MessageNode(parent=0, message=types.AssistantMessage(content=answer), sampled=True),
    ]
    config = env.package("verifiers.v1.configs.agent").AgentConfig()
    described = traces.TraceTask(type=type(task).__name__, data=task.data)
    return traces.Trace(task=described, agent=traces.AgentInfo(config=config), nodes=nodes)
