"""Tasksets of verifiers (v1) without a harness: `--env verifiers:my_taskset`. Each task is answered in one turn and scored by its rewards.

The target is what verifiers' own `--env.taskset.id` takes: an installed package that exports its `Taskset`. Arguments (`--env-arg`): those of its
configuration, and `test_size`, the first tasks, which are the split 'test'; the others are the split 'train', at most `size`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import orjson

from agentrl.envs.adapters.base import Adapted
from agentrl.errors import ConfigError, describe
from agentrl.types import Action, Message, StepResult, Task


class Taskset(Adapted):
    """The tasks of a verifiers taskset. The reward is the weighted sum of the task's rewards; rewards that need a runtime are refused."""

    prefix, extra, example = "verifiers", "verifiers", "my_taskset"

    def __init__(self, test_size: int = 100, size: int = 10_000, **config: Any) -> None:
        self._config = orjson.dumps(config, option=orjson.OPT_SORT_KEYS).decode()
        self._count = test_size + size

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
        if split not in ("train", "test"):
            raise ConfigError(f"there is no split {split!r}; there are 'train' and 'test'")
        theirs = _load(cls.target, orjson.dumps(config, option=orjson.OPT_SORT_KEYS).decode(), test_size + size)
        first, last = (0, test_size) if split == "test" else (test_size, test_size + size)
        for number, task in enumerate(theirs[first:last], first):
            yield Task(f"{split}-{number}", _prompt(task.data), metadata={"idx": number})

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
        for task in _load(self.target, self._config, self._count)[:1]:
            rewards = list(task.hooks("reward"))
            hooks = [fn.__name__ for fn in rewards if "runtime" in fn.__code__.co_varnames]
            if not rewards:
                raise ConfigError(
                    f"--env {self.label()}: its tasks have no rewards, so that every answer would score 0; an environment of verifiers scores them: "
                    "run it against the gateway instead"
                )
            needs = "a container" if task.NEEDS_CONTAINER else f"a runtime for {hooks[0]}" if hooks else ""
            if needs or type(task).toolsets(task.config):
                raise ConfigError(
                    f"--env {self.label()}: its tasks need {needs or 'tool servers'}, and so a harness of verifiers; "
                    "run that harness against the gateway instead"
                )

    def reset(self, task: Task, *, seed: int) -> Any:
        """The task's prompt."""
        self._task = _load(self.target, self._config, self._count)[int(task.metadata["idx"])]
        return task.messages

    async def step(self, action: Action) -> StepResult:
        """Score the answer by the task's rewards."""
        trace = _trace(self, self._task, action.text)
        await self._task.score(trace)
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return StepResult(
            reward=sum(parts.values()), terminated=True, info={"rewards": parts, "metrics": dict(trace.metrics)}
        )


@lru_cache(maxsize=16)
def _load(target: str, config: str, count: int) -> tuple[Any, ...]:
    """The first tasks of a taskset.

    Raises:
        ConfigError: its configuration is refused.
    """
    loaders = Taskset.package("verifiers.v1.utils.loaders")
    taskset = loaders.taskset_class(target)
    settings = (
        Taskset.package("verifiers.v1.utils.generic").concrete_type(
            taskset, Taskset.package("verifiers.v1.configs.taskset").TasksetConfig
        )
        or Taskset.package("verifiers.v1.configs.taskset").TasksetConfig
    )
    try:
        return tuple(islice(taskset(settings.model_validate({"id": target, **orjson.loads(config)})), count))
    except (
        TypeError,
        ValueError,
        RuntimeError,
        ImportError,
        LookupError,
        OSError,
    ) as e:  # what a configuration or missing data raises
        raise ConfigError(f"--env verifiers:{target}: its configuration {config} is refused: {describe(e)}") from e


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
