"""The tasks that a run trains and evaluates on, from files or from the environment. Each is checked before the run starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentrl.config import Config
from agentrl.core.registry import raised
from agentrl.data.data_files import load_tasks
from agentrl.data.prompt_check import PromptCheck
from agentrl.env import Env, require_unique_tools, tasks_of
from agentrl.errors import ContractError, DataError, UsageError
from agentrl.render import Renderer
from agentrl.tool import declared_tools
from agentrl.types import Task

MAX_TASKS = 10_000_000
"""Tasks taken from an environment without a limit setting. More are an error, because a generator may be infinite."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The tasks of an evaluation set."""

    tasks: list[Task]
    groups: Sequence[str]
    """metadata keys by whose values the score is reported too; see `Env.eval_groups`"""
    env: str = ""
    """`EpisodeSpec.env` of its episodes"""
    samples: int | None = None
    """episodes per task; None: `--n-samples-per-eval-prompt`"""


class TaskSets:
    """Loads the tasks that the settings name."""

    def __init__(self, config: Config, env_class: type[Env], renderer: Renderer) -> None:
        self.config, self.env_class, self.renderer = config, env_class, renderer
        self.prompts = PromptCheck(renderer, env_class)
        """what the prompts must fit; the run sets its context length and the environment's tools"""
        self._known_roles: set[str] = set()
        self._without_reasoning: set[str] = set()
        self.counts: list[str] = []
        """what was read from data files and what of it is used, for the log"""
        self.eval_samples: dict[str, int] = {}
        """episodes per task of the evaluation sets that have their own number"""

    def training(self) -> list[Task]:
        """Return the training tasks: those of `--prompt-data`, else the environment's split 'train'.

        Raises:
            DataError: there are too many tasks, or the environment refuses one.
            ContractError: the environment yields something other than tasks.
        """
        data = self.config.data
        if data.prompt_data:
            return self._from_file("--prompt-data", data.prompt_data, data.data_limit, leave_out=True)
        tasks = self._own("train", data.data_limit)
        return self._with_room(f"{self.env_class.label()}, split train", tasks, None, leave_out=True)

    def evaluation(self) -> dict[str, list[Task]]:
        """Return the evaluation sets by name: those of `--eval-prompt-data`, else the environment's split 'test' unless `--prompt-data` is set."""
        settings = self.config.eval
        pairs: Sequence[str] = settings.eval_prompt_data
        if pairs:
            sets = self._evaluation_files(pairs)
        elif self.config.data.prompt_data:
            return {}
        else:
            tasks = self._own("test", settings.eval_limit)
            sets = {"test": self._with_room(f"{self.env_class.label()}, split test", tasks, None, leave_out=False)}
        return {name: tasks for name, tasks in sets.items() if tasks}

    def _check_task(self, task: Task) -> None:
        """Run the environment's check, and check that the policy would see the task's tools.

        If the prompt is rendered unchanged, also check that the chat template knows its roles.
        """
        self.env_class.check_task(task)
        self._check_tools(task)
        if self.env_class.reset is Env.reset:
            unknown = {m["role"] for m in task.messages} - {"user", "assistant", "tool", *self._known_roles}
            self.renderer.check(sorted(unknown))
            self._known_roles |= unknown
            if self.prompts.require_whole(task):
                self._without_reasoning.add(task.id)

    def _check_tools(self, task: Task) -> None:
        """Refuse a task with tools that the policy cannot see or call.

        Raises:
            DataError: the action format or the chat template has no place for them.
            ContractError: a name cannot be used for a tool, or two tools have the same.
        """
        declared = declared_tools(task.metadata.get("tools") or ())
        require_unique_tools(f"{self.env_class.label()}, task {task.id}", declared)
        if not declared or self.env_class.shows_tools:
            return
        names, form = ", ".join(spec.name for spec in declared), self.renderer.format
        if form.inline:
            raise DataError(
                f"its column 'tools' has {names}, and the action format {form.name} calls only its own tags; "
                "choose another with --action-format, or leave the column out"
            )
        if form.needs_tools and not self.renderer.shows_tools:
            raise DataError(
                f"its column 'tools' has {names}, and the model's chat template omits tools, so the policy would not see them; "
                "give --tools-in-prompt, describe them in the prompt and set shows_tools = True in the environment, or leave the column out"
            )

    def _evaluation_files(self, pairs: Sequence[str]) -> dict[str, list[Task]]:
        """The evaluation sets of pairs NAME PATH. A name may be followed by the keys of its set: `NAME:input_key=A,n_samples_per_eval_prompt=4`."""
        limit = self.config.eval.eval_limit
        sets: dict[str, list[Task]] = {}
        for named, path in zip(pairs[::2], pairs[1::2], strict=True):
            name, keys = split_keys(named)
            if samples := keys.pop(_SAMPLES, ""):
                self.eval_samples[name] = int(samples)
            if name in sets:
                raise DataError(f"--eval-prompt-data: two sets with the name {name!r}")
            sets[name] = self._from_file(f"--eval-prompt-data {name}", path, limit, leave_out=False, **keys)
        return sets

    def _from_file(self, flag: str, spec: str, limit: int | None, *, leave_out: bool, **keys: str) -> list[Task]:
        """The first `limit` tasks of a file, counted; without those whose prompts leave no room, if these are to be left out."""
        places: list[str] = []
        self._without_reasoning.clear()
        tasks = self._file(spec, places, **keys)
        used = self._counted(flag, spec, tasks, limit)
        return self._with_room(f"{flag} {spec}", used, places, leave_out=leave_out)

    def _with_room(self, source: str, tasks: list[Task], places: list[str] | None, *, leave_out: bool) -> list[Task]:
        """The tasks whose prompts leave room in the context; the others are counted and named, and kept unless they are to be left out.

        Raises:
            DataError: no prompt leaves room.
        """
        sizes = [self.prompts.excess(task) for task in tasks]
        long = [
            (places[i] if places else f"task {tasks[i].id}", size) for i, size in enumerate(sizes) if size is not None
        ]
        if not long:
            return tasks
        leave_out = leave_out and self.prompts.exact
        sentence = self.prompts.sentence(source, len(tasks), long, left_out=leave_out)
        if leave_out and len(long) == len(tasks):
            raise DataError(sentence)
        self.counts.append(sentence)
        return [task for task, size in zip(tasks, sizes, strict=True) if size is None] if leave_out else tasks

    def _counted(self, flag: str, spec: str, tasks: list[Task], limit: int | None) -> list[Task]:
        used = tasks[:limit]
        unlabelled = sum(t.label is None for t in used)
        with_tools = sum(bool(t.metadata.get("tools")) for t in used)
        line = f"{flag} {spec}: {len(tasks)} rows read, {len(used)} used"
        if len(used) < len(tasks):
            line += f", {len(tasks) - len(used)} left out by the limit of {limit}"
        if unlabelled:
            line += f"; {unlabelled} without a label"
        if with_tools:
            line += f"; {with_tools} with tools of their own, which the policy sees beside the environment's"
        if count := sum(t.id in self._without_reasoning for t in used):
            line += f"; {count} with reasoning of earlier turns, which the chat template leaves out of the prompt"
        self.counts.append(line)
        return used

    def _file(
        self,
        spec: str,
        places: list[str],
        input_key: str = "",
        label_key: str = "",
        metadata_key: str = "",
        tool_key: str = "",
    ) -> list[Task]:
        data, env = self.config.data, self.config.env
        return load_tasks(
            spec,
            input_key=input_key or data.input_key or self.env_class.input_key,
            label_key=label_key or data.label_key or self.env_class.label_key,
            metadata_key=metadata_key or data.metadata_key,
            tool_key=tool_key or data.tool_key,
            label_required=bool(label_key or data.label_key),
            numbers=bool(env.custom_generate_function_path or env.rollout_function_path),
            check=self._check_task,
            places=places,
        )

    def _own(self, split: str, limit: int | None) -> list[Task]:
        tasks: list[Task] = []
        for task in islice(_tasks_of(self.env_class, split, self.config.env.env_args), limit):
            if limit is None and len(tasks) == MAX_TASKS:
                raise DataError(
                    f"{self.env_class.label()}.tasks({split!r}) yields more than {MAX_TASKS} tasks and may be infinite; "
                    f"set --data-limit N for training or --eval-limit N for evaluation"
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


_COLUMNS = ("input_key", "label_key", "metadata_key", "tool_key")
_SAMPLES = "n_samples_per_eval_prompt"


def split_keys(named: str) -> tuple[str, dict[str, str]]:
    """Split `NAME:input_key=A,label_key=B` into the name and the keys.

    Raises:
        DataError: what follows the name is not such keys.
    """
    name, colon, rest = named.partition(":")
    keys: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, _, value = pair.partition("=")
        fits = value and (
            key in _COLUMNS or (key == _SAMPLES and value.isascii() and value.isdigit() and int(value) > 0)
        )
        if not fits or key in keys:
            raise DataError(
                f"--eval-prompt-data: expected NAME or NAME:input_key=COLUMN,label_key=COLUMN,{_SAMPLES}=N, found {named!r}"
            )
        keys[key] = value
    return name, keys


def _tasks_of(env: type[Env], split: str, args: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the environment yields. What it raises becomes a ContractError."""
    call = f"{env.label()}.tasks({split!r})"
    try:
        tasks = tasks_of(env, split, args)
        if not isinstance(tasks, Iterable):
            raise ContractError(f"{call} must return an iterable of agentrl.Task, found {tasks!r:.80}")
        yield from tasks
    except UsageError:
        raise
    except Exception as e:  # user code may raise anything
        raise ContractError(f"{call} raised: {raised(e, sys.modules[env.__module__].__file__ or '')}") from e
