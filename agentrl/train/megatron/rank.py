"""What one trainer rank does: the model's part it holds, and the commands of the Trainer protocol on it.

Gradients are plain sums of the weighted token losses, over micro-batches and data-parallel ranks. In megatron's terms: `calculate_per_token_loss`
(no division by micro-batches, gradients scaled by 1 before the reduction) with a token count of 0, at which `finalize_model_grads` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import save_file
from torch import Tensor

from agentrl.train.base import LossConfig, Row
from agentrl.train.megatron import checkpoint
from agentrl.train.megatron.delivery.sender import Sender
from agentrl.train.megatron.hf_weights import HuggingFaceWeights, gather
from agentrl.train.megatron.loss import token_loss, vocab_parallel_log_probs
from agentrl.train.megatron.megatron_settings import Setup
from agentrl.train.megatron.micro_batch import MicroBatch, collate
from agentrl.train.megatron.model import DTYPES, Built, build
from agentrl.train.megatron.model_config import read_shape
from agentrl.train.megatron.offload import Parking

Share = tuple[Sequence[Row], Sequence[Sequence[int]]]
"""rows of this data-parallel rank, and which of them make up each micro-batch"""


class TrainerRank:
    """One rank. Its methods are called on all ranks at once, each with its share."""

    def __init__(self, setup: Setup) -> None:
        self.folder = setup.model
        dtype = DTYPES[setup.dtype]
        shape = read_shape(setup.model)
        self.built: Built = build(
            shape, HuggingFaceWeights(setup.model), setup.megatron, dtype, reference=setup.reference
        )
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        config = self.built.config
        self.multiple = (config.tensor_model_parallel_size if config.sequence_parallel else 1) * (
            16 if self.device.type == "cuda" else 1
        )
        self.steps = 0
        self._parking = Parking(self.built) if self.device.type == "cuda" else None
        self._sender = Sender(self.built, self.device)

    @property
    def place(self) -> dict[str, int | bool]:
        """Where this rank stands; `answers`: its results are those of its data-parallel share; `multiple`: see `collate`."""
        tp = parallel_state.get_tensor_model_parallel_rank()
        return {
            "tp": tp,
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "answers": tp == 0 and parallel_state.is_pipeline_last_stage(),
            "multiple": self.multiple,
        }

    def _token_log_probs(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        start = parallel_state.get_tensor_model_parallel_rank() * columns
        return vocab_parallel_log_probs(
            logits[0],
            batch.labels,
            batch.temperature,
            vocab_size=self.built.layout.vocab_size,
            start=start,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _run(
        self, model: Any, share: Share, after: Callable[..., Any], *, trained_only: bool, **options: Any
    ) -> list[Any]:
        """Send the share's micro-batches through megatron's schedule; `after(batch, output)` runs on the last stage."""
        rows, parts = share
        batches = (
            collate([rows[i] for i in part], trained_only=trained_only, multiple=self.multiple, device=self.device)
            for part in parts
        )

        def forward(stream: Any, module: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(stream)
            return module(batch.inputs, batch.index), partial(after, batch)

        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=batches,
            model=model,
            num_microbatches=len(parts),
            seq_length=self.multiple,  # of no consequence: shapes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            **options,
        )

    def log_probs(self, share: Share, reference: bool, trained_only: bool) -> list[Any] | None:
        """Log-probs of the chosen tokens, one array per micro-batch, rows one after the other; None on ranks that do not answer."""
        model = self.built.reference if reference else self.built.wrapped
        if model is None:
            raise RuntimeError("this trainer holds no reference model: it was started with reference=False")

        def after(batch: MicroBatch, logits: Tensor, non_loss_data: bool) -> Any:
            values, _ = self._token_log_probs(logits, batch)
            return (values.cpu().numpy(), batch.counts)

        model.eval()
        with torch.no_grad():
            out = self._run(
                model, share, after, trained_only=trained_only, forward_only=True, collect_non_loss_data=True
            )
        return out if self.place["answers"] else None

    def _forward_backward(self, share: Share, loss: LossConfig, **options: Any) -> dict[str, Any] | None:
        built = self.built
        built.wrapped.train()
        built.wrapped.zero_grad_buffer()
        built.optimizer.zero_grad()
        no_tokens = torch.zeros((), dtype=torch.int, device=self.device)

        def after(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            values, entropy = self._token_log_probs(logits, batch)
            total, sums, maxima = token_loss(values, entropy, batch.data, loss)
            return total, no_tokens.clone(), (sums, maxima, values.detach(), batch.counts)

        out = self._run(built.wrapped, share, after, trained_only=True, **options)
        if not self.place["answers"]:
            return None
        sums, maxima, values, counts = zip(*out, strict=True)
        return {
            "sums": torch.stack(sums).sum(0).tolist(),
            "maxima": torch.stack(maxima).max(0).values.tolist(),
            "log_probs": [(v.cpu().numpy(), n) for v, n in zip(values, counts, strict=True)],
        }

    def step(self, share: Share, loss: LossConfig, lr: float) -> dict[str, Any]:
        """One optimizer step; the totals (see loss.py) and log-probs where this rank answers, and the gradient's norm."""
        totals = self._forward_backward(share, loss)
        optimizer = self.built.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
        done, norm, _ = optimizer.step()
        if not done:
            raise RuntimeError("the optimizer skipped the step: a gradient was not finite")
        self.steps += 1
        return {"totals": totals, "grad_norm": float(norm)}

    def gradients(self, share: Share, loss: LossConfig, path: Path) -> dict[str, Any] | None:
        """Write the gradients of one batch, under Hugging Face names, and step nowhere."""
        self.built.wrapped.force_all_reduce = (
            True  # of buckets that overlap with the backward pass; the option speaks of the others
        )
        totals = self._forward_backward(share, loss, force_all_reduce=True)
        self.built.wrapped.force_all_reduce = False
        self._write(path, lambda p: p.main_grad)
        self.built.wrapped.zero_grad_buffer()
        return totals

    def export(self, path: Path) -> dict[str, Any] | None:
        """Write this stage's weights; returns file name, tensor names and bytes on the rank that wrote."""
        self._complete()
        return self._write(path, lambda p: p.data)

    def _complete(self) -> None:
        """With overlap_param_gather, a step's weights are whole only once they have been asked for."""
        if self.built.wrapped.ddp_config.overlap_param_gather:
            self.built.wrapped.start_param_sync(force_sync=True)

    def _write(self, path: Path, value: Callable[[Any], Tensor]) -> dict[str, Any] | None:
        group = parallel_state.get_tensor_model_parallel_group()
        if parallel_state.get_data_parallel_rank():
            return None
        writes = parallel_state.get_tensor_model_parallel_rank() == 0
        tensors = {}
        for name, tensor in gather(self.built.model, self.built.layout, group, value):
            if writes:
                tensors[name] = tensor.to("cpu", copy=True).contiguous()
        if not writes:
            return None
        stage, stages = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        file = "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        return {"file": file, "names": list(tensors), "bytes": sum(t.nbytes for t in tensors.values())}

    def deliver(self, action: str, arguments: dict[str, Any]) -> Any:
        """Bring the weights to engines; `action` names a method of `Sender`."""
        self._complete()
        return getattr(self._sender, action)(**arguments)

    def save(self, path: Path) -> None:
        """Write a distributed checkpoint into the folder `path`."""
        self._complete()
        checkpoint.save(self.built, path, self.steps)

    def load(self, path: Path) -> int:
        """Read what `save` wrote; returns the optimizer steps done."""
        self.steps = checkpoint.load(self.built, path)
        return self.steps

    def offload(self) -> None:
        """Give GPU memory back; nothing on the CPU."""
        if self._parking is not None:
            self._parking.park()

    def onload(self) -> None:
        """Take it again."""
        if self._parking is not None:
            self._parking.restore()

    def free_mib(self) -> int | None:
        """Free memory of this rank's GPU, whoever uses the rest; None on a CPU."""
        return torch.cuda.mem_get_info()[0] >> 20 if torch.cuda.is_available() else None
