"""The tasks of a run, to train and to be evaluated on: of a file or the environment's own, each checked before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from agentrl.config import Config
from agentrl.core.registry import raised
from agentrl.data.data_files import load_tasks
from agentrl.env import Env
from agentrl.errors import ContractError, DataError, UsageError
from agentrl.render import Renderer
from agentrl.types import Task

MOST_TASKS = 10_000_000
"""of an environment's own, where no limit is given: one may yield them without end"""


class TaskSets:
    """Where the settings say that tasks come from."""

    def __init__(self, config: Config, env_class: type[Env], renderer: Renderer) -> None:
        self.config, self.env_class, self.renderer = config, env_class, renderer
        self._known_roles: set[str] = set()

    def training(self) -> list[Task]:
        """The tasks to train on: `--prompt-data`, else the environment's own of the split 'train'.

        Raises:
            DataError: none, too many, or one the environment refuses.
            ContractError: the environment yields something else.
        """
        data = self.config.data
        if data.prompt_data:
            return self._file(data.prompt_data)[: data.data_limit]
        return self._own("train", data.data_limit)

    def evaluation(self) -> dict[str, list[Task]]:
        """Evaluation sets by name: `--eval-prompt-data`, else, unless there is `--prompt-data`, the environment's split 'test' if it has one."""
        settings = self.config.eval
        pairs: Sequence[str] = settings.eval_prompt_data
        if pairs:
            sets = {pairs[i]: self._file(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        elif self.config.data.prompt_data:
            return {}
        else:
            sets = {"test": self._own("test", settings.eval_limit)}
        return {name: tasks[: settings.eval_limit] for name, tasks in sets.items() if tasks}

    def _check_task(self, task: Task) -> None:
        """The environment's own check, and whether the template knows the roles of a prompt that goes in as it is."""
        self.env_class.check_task(task)
        if self.env_class.reset is Env.reset:
            unknown = {m["role"] for m in task.messages} - {"user", "assistant", "tool", *self._known_roles}
            self.renderer.check(sorted(unknown))
            self._known_roles |= unknown

    def _file(self, spec: str) -> list[Task]:
        data = self.config.data
        return load_tasks(
            spec,
            input_key=data.input_key or self.env_class.input_key,
            label_key=data.label_key or self.env_class.label_key,
            check=self._check_task,
        )

    def _own(self, split: str, limit: int | None) -> list[Task]:
        tasks: list[Task] = []
        for task in islice(_tasks_of(self.env_class, split), limit):
            if limit is None and len(tasks) == MOST_TASKS:
                raise DataError(
                    f"{self.env_class.label()}.tasks({split!r}) yields more than {MOST_TASKS} tasks, perhaps without end; say how many "
                    f"to take: --data-limit N to train on, --eval-limit N to evaluate on"
                )
            if not isinstance(task, Task):
                raise ContractError(
                    f"{self.env_class.label()}.tasks({split!r}) must yield agentrl.Task, found {type(task).__name__}: {task!r:.80}"
                )
            try:
                self._check_task(task)
            except UsageError as e:
                raise DataError(f"{self.env_class.label()}, split {split}, task {task.id}: {e}") from e
            tasks.append(task)
        return tasks


def _tasks_of(env: type[Env], split: str) -> Iterator[Any]:
    """What the environment yields; what it raises is its contract broken."""
    call = f"{env.label()}.tasks({split!r})"
    try:
        found = env.tasks(split)
        if not isinstance(found, Iterable):
            raise ContractError(f"{call} must return an iterable of agentrl.Task, found {found!r:.80}")
        yield from found
    except UsageError:
        raise
    except Exception as e:  # user code may raise anything
        raise ContractError(f"{call} raised: {raised(e, sys.modules[env.__module__].__file__ or '')}") from e
