"""The model of the local engine: loading, one forward over a batch of chunks, and new weights in place."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.engine.base import WeightsManifest
from agentrl.engine.local.attention import NAME, Batch, block_attention
from agentrl.engine.local.kv_cache import BlockPool, Chunk
from agentrl.engine.weight_files import check_fingerprint, refuse_weights
from agentrl.errors import EngineFailure, StoreError

REFERENCE_SIZE = 64
"""Every other batch size must give the same bits as this one."""
BATCH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Candidates for the number of rows (tokens, padding included) of a forward."""
_LOADING = threading.Lock()
"""transformers changes globals while it loads a model: tensors are lost if two load at once"""
MAX_CHUNK = 128
"""maximum tokens of a prefill chunk (see kv_cache)"""


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep the progress bars of transformers off stderr."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class LocalModel:
    """A causal language model of transformers that computes batches of chunks. It belongs to one thread."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        single_token_chunks: bool = False,
        records_experts: bool = False,
    ) -> None:
        """`single_token_chunks`: the tokens of a context are chunks of one token too, so that a token's numbers depend only on the ids up to it.
        `records_experts`: `experts` returns those of each forward.
        """
        AttentionInterface.register(NAME, block_attention)
        try:
            with _LOADING, no_progress_bar():
                model, loading = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    attn_implementation=NAME,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, by name
                )
            if wrong := sorted([*loading["missing_keys"], *(k[0] for k in loading["mismatched_keys"])]):
                raise ValueError(f"{len(wrong)} tensors are missing or have another shape: {', '.join(wrong[:3])} …")
            self.model = model.to(device).eval()
            if wrong := _not_finite(dict(self.model.named_parameters())):
                raise ValueError(f"{len(wrong)} tensors hold values that are not finite: {', '.join(wrong[:3])}")
        except (OSError, ValueError, KeyError) as e:
            raise EngineFailure(
                f"no causal language model could be loaded from {folder}: {e}", "model not loaded"
            ) from e
        self.model.requires_grad_(False)
        self.device = device
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.batch_invariant = not any(
            getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        """the rows of a forward do not affect each other (they do where experts compute only the rows routed to them)"""
        self.batch_sizes = batch_invariant_sizes(self.model)
        """numbers of rows that a forward may have, ascending"""
        self.max_chunk = 1 if single_token_chunks else min(MAX_CHUNK, self.batch_sizes[-1])
        """maximum tokens of a prefill chunk"""
        self.eos_ids = _eos_ids(self.model)
        """the model's end tokens"""
        self._recorder = ExpertsRecorder(self.model) if records_experts else None

    def padded_size(self, tokens: int) -> int:
        """The smallest allowed number of rows for `tokens`."""
        return next(size for size in self.batch_sizes if size >= tokens)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], pool: BlockPool, logits_at: Sequence[int]) -> Tensor | None:
        """Compute chunks, those of one token first; returns logits `[rows, vocab]` after the batch's tokens `logits_at`.

        Rows past len(logits_at) are padding. None if `logits_at` is empty.
        """
        batch = Batch.build(chunks, self.padded_size(sum(chunk.tokens for chunk in chunks)), pool)
        padding = [0] * (self.padded_size(len(logits_at)) - len(logits_at)) if logits_at else [0]
        logits = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=torch.tensor([*logits_at, *padding], device=self.device),
            agentrl_batch=batch,
        ).logits
        return logits[0] if logits_at else None

    @torch.inference_mode()
    def not_finite(self) -> list[str]:
        """The names of the parameters and buffers that hold a value that is not finite."""
        return _not_finite(dict([*self.model.named_parameters(), *self.model.named_buffers()]))

    def experts(self, tokens: int) -> NDArray[Any] | None:
        """[tokens, layers, topk]: the experts of the first tokens of the last forward; None: they are not recorded."""
        return None if self._recorder is None else self._recorder.experts(tokens)

    def move(self, device: torch.device) -> None:
        """Move the weights."""
        self.model.to(device)

    @torch.inference_mode()
    def update(self, weights: WeightsManifest) -> None:
        """Replace all weights by those of a folder, or none.

        Raises:
            EngineFailure: unreadable, another fingerprint, values that are not finite, or names or shapes that are not this model's.
        """
        try:
            check_fingerprint(weights)
            new = _read(weights.path)
        except (OSError, SafetensorError, StoreError) as e:
            raise EngineFailure(f"the weights in {weights.path} cannot be read: {e}", "weights unreadable") from e
        for target, source in self._matched(new, weights.path):
            target.copy_(source)

    def _matched(self, new: dict[str, Tensor], path: Path) -> list[tuple[Tensor, Tensor]]:
        """Pairs (own tensor, new tensor). Tied tensors count as one.

        Raises:
            EngineFailure: names or shapes differ.
        """
        own = _separate_experts(self.model.state_dict())
        unusable = [f"{name}: holds values that are not finite" for name in _not_finite(new)]
        tied: dict[tuple[int, tuple[int, ...]], list[str]] = defaultdict(list)
        for name, tensor in own.items():
            tied[tensor.data_ptr(), tuple(tensor.shape)].append(name)
        faults = [f"{name}: not a tensor of this model" for name in new if name not in own]
        pairs = []
        for names in tied.values():
            given = [name for name in names if name in new]
            if not given:
                faults.append(f"{names[0]}: missing")
                continue
            target, source = own[given[0]], new[given[0]]
            if source.shape != target.shape:
                faults.append(f"{given[0]}: shape {list(source.shape)}, expected {list(target.shape)}")
            elif not all(torch.equal(source, new[name]) for name in given[1:]):
                faults.append(f"{' and '.join(given)}: this model ties them, their values differ")
            pairs.append((target, source))
        refuse_weights(path, faults + unusable)
        return pairs


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of tensors with a value that is not finite: such a value shows in the smallest or the largest."""
    numbers = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    return [name for name, t in numbers.items() if not torch.stack(torch.aminmax(t)).isfinite().all()]


class ExpertsRecorder:
    """Keeps the experts that a model's routers chose in its last forward. Layers without experts have zeros."""

    def __init__(self, model: Any) -> None:
        """Hook into every router: the part `gate` of an MLP that has experts, whose last output is their numbers."""
        layers = model.get_decoder().layers
        self._layers, self._chosen = len(layers), dict[int, Tensor]()
        for number, layer in enumerate(layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp.gate.register_forward_hook(partial(self._keep, number))

    def _keep(self, layer: int, _: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen[layer] = output[-1]

    def experts(self, tokens: int) -> NDArray[Any] | None:
        """[tokens, layers, topk]: those of the first tokens; None: the model has no router."""
        if not self._chosen:
            return None
        topk = next(iter(self._chosen.values())).shape[-1]
        experts = np.zeros((tokens, self._layers, topk), np.uint16)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen[:tokens].cpu().numpy()
        return experts


def _separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names in a model folder: transformers joins the experts of a layer in memory."""
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if prefix.endswith(".experts") and part in ("gate_up_proj", "down_proj"):
            for i, expert in enumerate(tensor):
                parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]}
                for module, view in (parts if part == "gate_up_proj" else {part: expert}).items():
                    separate[f"{prefix}.{i}.{module}.weight"] = view
        else:
            separate[name] = tensor
    return separate


def _eos_ids(model: Any) -> frozenset[int]:
    """End tokens of the generation config, else of the config."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, Sequence) else [ids])
    return frozenset()


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118 (not a dict)
    return tensors


@torch.inference_mode()
def batch_invariant_sizes(model: nn.Module) -> tuple[int, ...]:
    """The BATCH_SIZES for which every linear layer shape of the model gives the reference's bits on this machine.

    A matrix product may add in another order when it has another number of rows. Such sizes are not used, so a token's numbers depend neither
    on how many tokens are computed beside it, nor on its place among them.
    """
    shapes = {(m.weight.shape, m.bias is not None): m for m in model.modules() if isinstance(m, nn.Linear)}
    sizes = [size for size in BATCH_SIZES if size != REFERENCE_SIZE]
    for layer in shapes.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(BATCH_SIZES), layer.in_features, generator=generator).to(layer.weight)
        parts = x.split(REFERENCE_SIZE)
        expected = torch.cat([nn.functional.linear(p, layer.weight, layer.bias) for p in parts])
        shuffled = torch.randperm(len(x), generator=generator).to(x.device)
        sizes = [size for size in sizes if _agrees(layer, x, expected, shuffled[:size])]
    return tuple(sorted([*sizes, REFERENCE_SIZE]))


def _agrees(layer: nn.Linear, x: Tensor, expected: Tensor, rows: Tensor) -> bool:
    return torch.equal(nn.functional.linear(x[rows], layer.weight, layer.bias), expected[rows])
