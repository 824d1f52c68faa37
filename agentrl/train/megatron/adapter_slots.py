"""Several adapters of one base on a rank: one is in the model and its optimizer, the others wait in host memory.

A command names the adapter that it is for, which is brought in first. What changes places is all that training changes: A and B, their fp32 copies,
the moments and step counts of Adam, the count of optimizer steps and the random generators. So each adapter is trained as if it were alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.train.megatron.adapters import AdaptedWeights, adapter_tensors
from agentrl.train.megatron.checkpoint import adams_of, generators, initialise_states, set_generators
from agentrl.train.megatron.hf_weights import HuggingFaceWeights, load
from agentrl.train.megatron.lora import Lora
from agentrl.train.megatron.model import Built
from agentrl.train.megatron.model_config import ModelConfig


@dataclass(slots=True)
class _State:
    """What training changes of an adapter."""

    tensors: list[Tensor]
    steps: int
    generators: dict[str, Any]


class AdapterSlots:
    """The adapters of a rank by name.

    Args:
        built: the model, with the first adapter.
        model: its shape.
        weights: its base.
        lora: the adapters.
        seed: of new ones.
    """

    def __init__(self, built: Built, model: ModelConfig, weights: HuggingFaceWeights, lora: Lora, seed: int) -> None:
        initialise_states(built.optimizer)
        self._built = built
        self._states: dict[str, _State] = {}
        """of the adapters that wait"""
        for name, start in lora.adapters[1:] + lora.adapters[:1]:  # the last one stays
            _read(built, AdaptedWeights(weights, model, replace(lora, start=start), seed))
            self._states[name] = self._copied(0)
        self._current = lora.adapters[0][0]
        del self._states[self._current]

    def select(self, name: str, steps: int) -> int:
        """Bring an adapter in; returns its optimizer steps. `steps`: of the one that goes out."""
        if name == self._current:
            return steps
        self._states[self._current] = self._copied(steps)
        state, self._current = self._states.pop(name), name
        with torch.no_grad():
            for tensor, value in zip(_tensors(self._built), state.tensors, strict=True):
                tensor.copy_(value)
        set_generators(state.generators)
        return state.steps

    def _copied(self, steps: int) -> _State:
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(self._built)]
        return _State(tensors, steps, generators())


def _tensors(built: Built) -> Iterator[Tensor]:
    """The tensors that training changes, in an order that never changes."""
    yield from (parameter.data for _, parameter in adapter_tensors(built.model))
    for adam in adams_of(built.optimizer):
        parameters: Sequence[Tensor] = [p for group in adam.param_groups for p in group["params"]]
        yield from (p.data for p in parameters)
        for values in adam.state.values():
            yield from (values[name] for name in sorted(values) if isinstance(values[name], Tensor))


def _read(built: Built, weights: AdaptedWeights) -> None:
    """Read an adapter's A and B, or draw new ones."""
    load(adapter_tensors(built.model), weights, built.layout, built.groups)
    built.optimizer.reload_model_params()
