"""The model of the local engine: loading, one forward over a line of tokens, and new weights in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.engine.base import WeightsManifest
from agentrl.engine.local.attention import NAME, Line, block_attention
from agentrl.engine.local.kv_cache import BlockPool, Session
from agentrl.engine.weight_files import check_fingerprint
from agentrl.errors import EngineFailure, StoreError

REFERENCE_ROWS = 64
"""every other number of rows must give this one's bits"""
ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""numbers of rows a forward may have"""

MAX_PIECE = 128
"""tokens after which a context is cut (see local_kv)"""


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Transformers shows none on stderr; what a person sees of a run is ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class LocalModel:
    """A causal language model of transformers that runs lines of tokens. Not thread-safe: one thread owns it."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        AttentionInterface.register(NAME, block_attention)
        try:
            with no_progress_bar():
                model, found = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, attn_implementation=NAME, output_loading_info=True
                )
            if wrong := sorted([*found["missing_keys"], *(k[0] for k in found["mismatched_keys"])]):
                raise ValueError(f"{len(wrong)} tensors are missing or of another shape: {', '.join(wrong[:3])} …")
            self.model = model.to(device).eval()
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
        """rows of a forward do not meet each other (they do where experts take as many rows as are sent to them)"""
        self.rows = agreeing_rows(self.model)
        """numbers of rows a forward may have, ascending"""
        self.piece = min(MAX_PIECE, self.rows[-1])
        """most tokens of one piece"""
        self.eos_ids = _eos_ids(self.model)
        """the model's own end tokens"""

    def fit(self, count: int) -> int:
        """The smallest allowed number of rows that holds `count`."""
        return next(r for r in self.rows if r >= count)

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[tuple[Session, int, int]], pool: BlockPool, wanted: Sequence[int]
    ) -> Tensor | None:
        """Run pieces (session, start, end), those of one token first; logits `[rows, vocab]` after the tokens `wanted` of the line.

        Rows past len(wanted) are padding; None if nothing is wanted.
        """
        line = Line.build(batch, self.fit(sum(end - start for _, start, end in batch)), pool)
        keep = list(wanted) + [0] * (self.fit(len(wanted)) - len(wanted)) if wanted else [0]
        logits = self.model(
            input_ids=line.ids,
            position_ids=line.positions,
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self.device),
            agentrl_line=line,
        ).logits
        return logits[0] if wanted else None

    def move(self, device: torch.device) -> None:
        """Move the weights."""
        self.model.to(device)

    @torch.inference_mode()
    def update(self, weights: WeightsManifest) -> None:
        """Replace all weights by those of a folder, or none.

        Raises:
            EngineFailure: unreadable, another fingerprint, or names or shapes that are not this model's.
        """
        try:
            check_fingerprint(weights)
            new = _read(weights.path)
        except (OSError, SafetensorError, StoreError) as e:
            raise EngineFailure(f"the weights in {weights.path} cannot be read: {e}", "weights unreadable") from e
        for target, source in self._matched(new, weights.path):
            target.copy_(source)

    def _matched(self, new: dict[str, Tensor], path: Path) -> list[tuple[Tensor, Tensor]]:
        """Pairs (own tensor, new tensor); refuses unless every own tensor is met and nothing is left over. Tied tensors count as one."""
        own = self.model.state_dict()
        tied: dict[tuple[int, tuple[int, ...]], list[str]] = defaultdict(list)
        for name, tensor in own.items():
            tied[tensor.data_ptr(), tuple(tensor.shape)].append(name)
        faults = [f"{name}: not a tensor of this model" for name in new if name not in own]
        pairs = []
        for names in tied.values():
            given = [n for n in names if n in new]
            if not given:
                faults.append(f"{names[0]}: missing")
                continue
            target, source = own[given[0]], new[given[0]]
            if source.shape != target.shape:
                faults.append(f"{given[0]}: shape {list(source.shape)}, expected {list(target.shape)}")
            elif not all(torch.equal(source, new[n]) for n in given[1:]):
                faults.append(f"{' and '.join(given)}: this model ties them, their values differ")
            pairs.append((target, source))
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise EngineFailure(
                f"the weights in {path} do not fit; nothing was changed. {'; '.join(faults[:5])}{more}",
                "weights do not fit",
            )
        return pairs


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
def agreeing_rows(model: nn.Module) -> tuple[int, ...]:
    """The numbers of rows in ROWS for which every linear layer shape of the model gives the reference's bits on this machine.

    A matrix product may add up in another order when it has another number of rows. The shapes that do are not used, so a token's
    numbers do not depend on how many tokens are computed beside it, nor on its place among them.
    """
    shapes = {(m.weight.shape, m.bias is not None): m for m in model.modules() if isinstance(m, nn.Linear)}
    rows = [r for r in ROWS if r != REFERENCE_ROWS]
    for layer in shapes.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(ROWS), layer.in_features, generator=generator).to(layer.weight)
        parts = x.split(REFERENCE_ROWS)
        expected = torch.cat([nn.functional.linear(p, layer.weight, layer.bias) for p in parts])
        shuffled = torch.randperm(len(x), generator=generator).to(x.device)
        rows = [r for r in rows if _agrees(layer, x, expected, shuffled[:r])]
    return tuple(sorted([*rows, REFERENCE_ROWS]))


def _agrees(layer: nn.Linear, x: Tensor, expected: Tensor, chosen: Tensor) -> bool:
    return torch.equal(nn.functional.linear(x[chosen], layer.weight, layer.bias), expected[chosen])
