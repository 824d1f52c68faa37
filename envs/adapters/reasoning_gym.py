"""reasoning-gym's data sets: `--env reasoning_gym:chain_sum`. Each task is answered in one turn and scored by the data set.

Arguments (`--env-arg`): those of the data set's configuration, such as `max_terms=4`; `size`, the tasks of a split; and `answer`: 'tags' (the
text inside `<answer>` and `</answer>`) or 'text' (the whole text).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import orjson

from agentrl.envs.adapters.base import Adapted, arguments_key
from agentrl.errors import ConfigError, describe, suggest
from agentrl.types import Action, StepResult, Task

_SEEDS = {"train": 1_000_003, "test": 2_000_003}
"""seed of the data set of each split"""
_ASK = {"tags": "\n\nGive the final answer inside <answer> and </answer>.", "text": "\n\nWrite only the answer."}


class ReasoningGym(Adapted):
    """A data set of reasoning-gym. The reward is the data set's score, from 0 to 1."""

    prefix, extra, example = "reasoning_gym", "reasoning-gym", "chain_sum"

    def __init__(self, size: int = 1000, answer: Literal["tags", "text"] = "tags", **config: Any) -> None:
        if answer not in _ASK:
            raise ConfigError(f"{self.label()}: answer must be tags or text, found {answer!r}")
        self.answer = answer
        self._arguments = (size, arguments_key(config))
        self._dataset("train")

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """The arguments of the adapter and of the data set's configuration."""
        factory = cls.package("reasoning_gym.factory")
        if target not in factory.DATASETS:
            raise ConfigError(f"--env reasoning_gym:{target}: no such data set{suggest(target, factory.DATASETS)}")
        own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
        fields = dataclasses.fields(factory.DATASETS[target][1])
        more = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for f in fields
            if f.name not in ("size", "seed")
        ]
        return {"__signature__": inspect.Signature([*own, *more])}

    @classmethod
    def tasks(cls, split: str, size: int = 1000, answer: str = "tags", **config: Any) -> Iterator[Task]:
        """The questions of a split, with the answer as label."""
        if split not in _SEEDS:
            raise ConfigError(f"there is no split {split!r}; there are 'train' and 'test'")
        dataset = _dataset(cls.target, split, size, arguments_key(config))
        for number in range(size):
            entry = dataset[number]
            place = {"split": split, "number": number}
            yield Task(f"{split}-{number}", entry["question"] + _ASK.get(answer, ""), entry["answer"], place)

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Accept only tasks of the data set: it scores no others."""
        if not {"split", "number"} <= set(task.metadata):
            raise ConfigError(f"{cls.label()} scores only its own questions; leave --prompt-data out")

    def reset(self, task: Task, *, seed: int) -> Any:
        """The question."""
        self.split, self.number = task.metadata["split"], int(task.metadata["number"])
        return task.messages

    def step(self, action: Action) -> StepResult:
        """Score the answer."""
        given = action.text.strip() if self.answer == "text" else action.answer
        if given is None:
            given = self.package("reasoning_gym.utils").extract_answer(action.text)
        dataset = self._dataset(self.split)
        score = float(dataset.score_answer(answer=given, entry=dataset[self.number]))
        return StepResult(reward=score, terminated=True, info={"answer": given})

    def _dataset(self, split: str) -> Any:
        return _dataset(self.target, split, *self._arguments)


@lru_cache(maxsize=16)
def _dataset(target: str, split: str, size: int, config: str) -> Any:
    """The data set of a split. It is generated entry by entry, each from the seed and its number.

    Raises:
        ConfigError: the configuration is refused.
    """
    try:
        return ReasoningGym.package("reasoning_gym").create_dataset(
            target, seed=_SEEDS[split], size=size, **orjson.loads(config)
        )
    except (TypeError, ValueError, AssertionError) as e:
        raise ConfigError(f"--env reasoning_gym:{target}: its configuration {config} is refused: {describe(e)}") from e
