"""The local engine's forward pass over the parameters of a megatron model, with gradients: `--true-on-policy-mode`.

The engine's numbers are those of transformers' modules, products of fixed shapes, and attention over blocks of keys (engine/local). With chunks of
one token they depend only on the ids up to a token. Here the same modules and the same attention run on the trainer's parameters, which are
viewed as Hugging Face tensors, so log-probs are bit-equal to the engine's under the same weights, and autograd follows the same operations.
It is slow, and is for one CPU rank per copy of a small model: it proves that nothing but the arithmetic separates engine and trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from agentrl.engine.local.attention import Batch
from agentrl.engine.local.kv_cache import BlockPool, Chunk, Session
from agentrl.engine.local.model import LocalModel
from agentrl.errors import ConfigError
from agentrl.train.megatron.adapters import weights
from agentrl.train.megatron.hf_weights import WeightLayout, conversion, final_shape, to_hugging_face
from agentrl.train.megatron.micro_batch import MicroBatch

_CPU = torch.device("cpu")


class EngineForward:
    """Computes logits of a micro-batch's predictions as the local engine does."""

    def __init__(self, folder: Path, layout: WeightLayout) -> None:
        self._engine = LocalModel(folder, dtype=torch.float32, device=_CPU, single_token_chunks=True)
        self._layout = layout
        if not self._engine.batch_invariant:
            raise ConfigError(
                f"{folder}: the experts of a mixture compute tokens together, so that the local engine's numbers depend on the batch; "
                "leave out --true-on-policy-mode"
            )
        _recompute_buffers(self._engine.model)

    def logits(self, model: Any, batch: MicroBatch) -> Tensor:
        """[u, vocab]: the logits of the predictions, with the parameters of `model`. The micro-batch is packed without trees."""
        parameters = self._hugging_face(model)
        ids, starts = batch.inputs[0].tolist(), (batch.positions == 0).nonzero()[:, 0].tolist()
        chunks = [chunk for a, b in zip(starts, [*starts[1:], len(ids)], strict=True) for chunk in _chunks(ids[a:b])]
        pool, found = BlockPool(_CPU), []
        for chunk in chunks:
            chunk.session.allocate(chunk.end, pool)
        wanted, most = sorted(set(batch.index.tolist())), self._engine.batch_sizes[-1]
        for start in range(0, len(chunks), most):
            part = chunks[start : start + most]
            here = [at - start for at in wanted if start <= at < start + len(part)]
            found.append(self._part(parameters, part, pool, here))
        rows = torch.cat(found)
        number = {at: row for row, at in enumerate(wanted)}
        return rows[torch.tensor([number[at] for at in batch.index.tolist()])]

    def log_probs(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the chosen tokens, by the formula of engine/local/sampler.py."""
        log_probs = torch.log_softmax(logits.float() / batch.temperature[:, None], -1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        chosen = log_probs.gather(1, batch.labels[:, None])[:, 0]
        return chosen[batch.prediction], entropy[batch.prediction]

    def _part(self, parameters: dict[str, Tensor], chunks: list[Chunk], pool: BlockPool, here: list[int]) -> Tensor:
        """Logits after the tokens `here` of one forward of the engine. Keys and values go into the pool, as in the engine."""
        engine = self._engine
        batch = Batch.build(chunks, engine.padded_size(len(chunks)), pool)
        batch.distinct = False  # blocks are gathered: what is read in place is overwritten by the next part
        padding = [0] * (engine.padded_size(len(here)) - len(here)) if here else [0]
        arguments = {
            "input_ids": batch.ids,
            "position_ids": batch.positions,
            "use_cache": False,
            "logits_to_keep": torch.tensor([*here, *padding]),
            "agentrl_batch": batch,
        }
        logits: Tensor = functional_call(engine.model, parameters, (), arguments).logits[0]
        return logits[: len(here)]

    def _hugging_face(self, model: Any) -> dict[str, Tensor]:
        """The weights by Hugging Face names: differentiable views of the parameters, or sums with the products of adapters."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in weights(model, buffers=False):
            convert = conversion(name, self._layout)
            made = to_hugging_face([parameter], convert.kind, self._layout)
            tensors |= {
                target: tensor.reshape(final_shape(tensor, convert.kind))
                for target, tensor in zip(convert.names, made, strict=True)
            }
        return tensors


def _recompute_buffers(model: Any) -> None:
    """Compute the rotary frequencies again: no file holds them, and where cpu_shim.py replaces torch factories they are left uninitialised."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            for name, buffer in type(module)(config=model.config.get_text_config()).named_buffers():
                getattr(module, name).copy_(buffer)


def _chunks(ids: list[int]) -> list[Chunk]:
    """One session, token by token."""
    session = Session("", ids=ids)
    return [Chunk(session, at, at + 1) for at in range(len(ids))]
