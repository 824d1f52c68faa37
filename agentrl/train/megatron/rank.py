"""One trainer rank: its part of the model, and the commands of the Trainer protocol on it.

Gradients are plain sums of weighted token losses over micro-batches and data-parallel ranks. In megatron's terms: `calculate_per_token_loss`
(no division by micro-batches, gradients scaled by 1 before the reduction) with a token count of 0, for which `finalize_model_grads` does not
divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.train.base import LossConfig, Row
from agentrl.train.megatron import adapters, checkpoint
from agentrl.train.megatron.adapter_slots import AdapterSlots
from agentrl.train.megatron.delivery.sender import Sender
from agentrl.train.megatron.engine_forward import EngineForward
from agentrl.train.megatron.hf_weights import CarriedTensors, HuggingFaceWeights, gather, named_tensors
from agentrl.train.megatron.image_layout import Grid, processor
from agentrl.train.megatron.log_probs import VocabShard, token_log_probs
from agentrl.train.megatron.loss import token_loss
from agentrl.train.megatron.micro_batch import MicroBatch, collate
from agentrl.train.megatron.model import DTYPES, build, unwrapped
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.offload import Offloader
from agentrl.train.megatron.profile import profiled
from agentrl.train.megatron.rank_pool import RankInfo, RankSetup, WrittenFile

Share = tuple[Sequence[Row], Sequence[Sequence[int]]]
"""rows of this data-parallel rank, and the indices of the rows of each micro-batch"""
SHARD_BYTES = 5 << 30
"""most bytes of an exported file; a larger tensor has a file to itself"""
GPU_MULTIPLE = 16
"""Lengths are padded to a multiple of this on a GPU, which fast kernels require."""


class TrainerRank:
    """One rank. Every method is called on all ranks at once."""

    def __init__(self, setup: RankSetup) -> None:
        model_config = read_model_config(setup.model)
        weights = HuggingFaceWeights(setup.model)
        self.built = build(
            model_config,
            weights,
            setup.megatron,
            DTYPES[setup.dtype],
            reference=setup.reference,
            critic=setup.critic,
            lora=setup.lora,
            seed=setup.seed,
        )
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        config = self.built.config
        sequence_parallel = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.context = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        self.tree_packing = setup.tree_packing
        chunks = 2 * self.context[1] if self.context[1] > 1 else 1
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.info = RankInfo(
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            context_parallel_rank=self.context[0],
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            reports=self.tensor_rank == 0 and parallel_state.is_pipeline_last_stage(),
            multiple=sequence_parallel * chunks * (GPU_MULTIPLE if gpu else 1),
            device=torch.cuda.get_device_name() if gpu else "",
        )
        layout = self.built.layout
        columns = layout.padded_vocab_size // config.tensor_model_parallel_size
        start = self.tensor_rank * columns
        self._vocab_shard = VocabShard(
            size=min(columns, layout.vocab_size - start), start=start, group=self.tensor_group
        )
        self._engine_forward: EngineForward | None = None
        if setup.true_on_policy:
            if gpu:
                raise ConfigError(
                    "--true-on-policy-mode is for CPUs: the local engine's arithmetic is not that of a GPU; without it, every run reports the "
                    "difference to the engine as train/rollout_log_prob_diff_max"
                )
            self._engine_forward = EngineForward(setup.model, layout)
        vision = model_config.vision
        self._grid: Grid | None = None if vision is None else processor(setup.model, vision).grid
        self._carried = CarriedTensors(weights, vision.prefix) if vision and self.built.vision else {}
        """tensors of the model folder that are exported as they are"""
        self.steps = 0
        """optimizer steps so far"""
        self._offloader = Offloader(self.built) if gpu else None
        self._sender = Sender(self.built, self.device)
        self._pending_saves: list[checkpoint.PendingSave] = []
        self._slots: AdapterSlots | None = None
        if setup.lora is not None and setup.lora.adapters:
            self._slots = AdapterSlots(self.built, model_config, weights, setup.lora, setup.seed)

    def select(self, adapter: str) -> None:
        """Make the next command one of this adapter, of several."""
        assert self._slots is not None, "the trainer has one set of weights"
        self._sync_params()
        self.steps = self._slots.select(adapter, self.steps)

    def log_probs(self, share: Share, reference: bool, trained_only: bool) -> list[Any] | None:
        """(log-probs of the chosen tokens, their places) of each micro-batch, see `MicroBatch`; None on ranks that do not report."""
        without_adapters = reference and self.built.lora is not None
        model = self.built.reference if reference and not without_adapters else self.built.wrapped
        if model is None:
            raise RuntimeError("this trainer has no reference model: it was started with reference=False")

        def after(batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> Any:
            values, _ = self._token_log_probs(model, hidden, batch)
            return values[: len(batch.places)].cpu().numpy(), batch.places

        model.eval()
        options = {"forward_only": True, "collect_non_loss_data": True}
        with torch.no_grad(), adapters.switched_off(model) if without_adapters else nullcontext():
            log_probs = self._run(model, share, after, trained_only=trained_only, **options)
        return log_probs if self.info.reports else None

    def step(self, share: Share, loss: LossConfig, lr: float, profile: Path | None = None) -> dict[str, Any]:
        """One optimizer step: the totals (see `_forward_backward`), the gradient norm, the most GPU memory that was allocated, in MiB, and the
        bytes of this rank's optimizer states.

        The norm is None if the loss or a gradient is not finite; then nothing is changed.
        `profile`: a folder for a trace of the step (see profile.py).
        """
        if self._offloader is not None:
            torch.cuda.reset_peak_memory_stats()
        with nullcontext() if profile is None else profiled(profile, torch.distributed.get_rank()):
            totals = self._forward_backward(share, loss)
            norm = self._update(lr) if self._is_finite(totals) else None
        peak = None if self._offloader is None else torch.cuda.max_memory_allocated() >> 20
        states = checkpoint.optimizer_bytes(self.built.optimizer)
        return {"totals": totals, "grad_norm": norm, "peak_mib": peak, "optimizer_bytes": states}

    def _is_finite(self, totals: dict[str, Any] | None) -> bool:
        """Whether the loss and the gradients of all ranks are finite; the same answer on all ranks."""
        if not self.built.checks_finite:
            return True
        wrapped = self.built.wrapped
        loss = torch.tensor(0.0 if totals is None else totals["sums"][0], device=self.device)
        norms = [b.grad_data.norm() for b in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]
        bad = (~torch.stack([x.float() for x in (loss, *norms)]).isfinite()).any().float()
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        return not bool(bad)

    def _update(self, lr: float) -> float:
        """One step of the optimizer; returns the norm of the gradient."""
        optimizer = self.built.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
        succeeded, norm, _ = optimizer.step()
        if not succeeded:
            raise RuntimeError("the optimizer skipped the step: a gradient was not finite")
        self.steps += 1
        return float(norm)

    def gradients(self, share: Share, loss: LossConfig, path: Path) -> dict[str, Any] | None:
        """Write the gradients of a batch under Hugging Face names, without an optimizer step; returns the totals."""
        wrapped = self.built.wrapped
        # the attribute is for buckets whose reduction overlaps with the backward pass, the option for the others
        wrapped.force_all_reduce = True
        totals = self._forward_backward(share, loss, force_all_reduce=True)
        wrapped.force_all_reduce = False
        parameters: Iterable[tuple[str, Any]] = named_tensors(self.built.model, buffers=False)
        self._write(path, ((name, p.main_grad) for name, p in parameters if p.requires_grad))
        wrapped.zero_grad_buffer()
        return totals

    def export(self, path: Path) -> list[WrittenFile] | None:
        """Write this stage's weights; the files on the rank that wrote."""
        self._sync_params()
        return self._write(path, adapters.weights(self.built.model), self._carried)

    def export_adapter(self, path: Path) -> list[WrittenFile] | None:
        """Write this stage's adapters by the names of peft, in float32 as peft has them; the files on the rank that wrote."""
        self._sync_params()
        return self._write(path, ((name, p.float()) for name, p in adapters.adapter_tensors(self.built.model)))

    def deliver(self, action: str, arguments: dict[str, Any]) -> Any:
        """Send the weights to engines; `action` names a method of `Sender`."""
        self._sync_params()
        return getattr(self._sender, action)(**arguments)

    def begin_save(self, path: Path) -> None:
        """Copy the state, and start to write a distributed checkpoint into the empty folder `path`."""
        self._sync_params()
        self._pending_saves.append(checkpoint.PendingSave(self.built, path, self.steps))

    def finish_save(self) -> None:
        """Wait for the checkpoints that `begin_save` started."""
        if not self._pending_saves:
            raise RuntimeError("no checkpoint is being written")
        pending, self._pending_saves = self._pending_saves, []
        for save in pending:
            save.finish()

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        self.steps = checkpoint.load(self.built, path)

    def offload(self) -> None:
        """Free the GPU memory; nothing on the CPU."""
        if self._offloader is not None:
            self._offloader.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        if self._offloader is not None:
            self._offloader.restore()

    def free_mib(self) -> int | None:
        """Free memory of this rank's GPU in MiB, whichever process uses the rest; None on a CPU."""
        return torch.cuda.mem_get_info()[0] >> 20 if torch.cuda.is_available() else None

    def _token_log_probs(self, model: Any, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the chosen tokens; of a critic, values and zeros."""
        weight = unwrapped(model).output_weight
        if self.built.critic:
            values = (hidden @ weight.t()).flatten().float()[batch.prediction]
            return values, torch.zeros_like(values)
        if self._engine_forward is not None:
            return self._engine_forward.log_probs(hidden, batch)
        log_probs, entropy = token_log_probs(hidden, weight, batch.labels, batch.temperature, self._vocab_shard)
        return log_probs[batch.prediction], entropy[batch.prediction]

    def _run(
        self, model: Any, share: Share, after: Callable[..., Any], *, trained_only: bool, **options: Any
    ) -> list[Any]:
        """Run the share's micro-batches through megatron's schedule; `after(batch, output)` runs on the last stage."""
        rows, parts = share
        exact = self._engine_forward
        multiple = self.info.multiple
        batches = (
            collate(
                [rows[i] for i in part],
                trained_only=trained_only,
                tree=self.tree_packing,
                multiple=multiple,
                context=self.context,
                share=1 / (len(parts) * parallel_state.get_data_parallel_world_size()),
                grid=self._grid,
                device=self.device,
            )
            for part in parts
        )

        def forward(batches: Any, module: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            if batch.images is not None and built.vision is not None:
                batch = replace(batch, images=built.vision.with_features(batch.images))
            if exact is not None:
                return exact.logits(unwrapped(module), batch), partial(after, batch)
            return module(batch, **precision), partial(after, batch)

        # the wrapper of a bf16 model would convert the hidden states to fp32
        built = self.built
        precision = {"fp32_output": False} if built.config.bf16 else {}
        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=batches,
            model=model,
            num_microbatches=len(parts),
            seq_length=multiple,  # unused: shapes are sent with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            **options,
        )

    def _forward_backward(self, share: Share, loss: LossConfig, **options: Any) -> dict[str, Any] | None:
        """Compute the gradients. Returns sums, maxima (see loss.py) and log-probs of the share; None on ranks that do not report."""
        built = self.built
        built.wrapped.train()
        built.wrapped.zero_grad_buffer()
        built.optimizer.zero_grad()
        no_tokens = torch.zeros((), dtype=torch.int, device=self.device)

        def after(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            values, entropy = self._token_log_probs(built.wrapped, hidden, batch)
            total, sums, maxima = token_loss(values, entropy, batch.data, loss)
            return total, no_tokens.clone(), (sums, maxima, values.detach()[: len(batch.places)], batch.places)

        results = self._run(built.wrapped, share, after, trained_only=True, **options)
        if not self.info.reports:
            return None
        sums, maxima, values, places = zip(*results, strict=True)
        return {
            "sums": torch.stack(sums).sum(0).tolist(),
            "maxima": torch.stack(maxima).max(0).values.tolist(),
            "log_probs": [(v.cpu().numpy(), p) for v, p in zip(values, places, strict=True)],
        }

    def _sync_params(self) -> None:
        """With overlap_param_gather the weights of a step are incomplete until they are requested."""
        if self.built.wrapped.ddp_config.overlap_param_gather:
            self.built.wrapped.start_param_sync(force_sync=True)

    @torch.no_grad()
    def _write(
        self, path: Path, parts: Iterable[tuple[str, Tensor]], carried: Mapping[str, Tensor] | None = None
    ) -> list[WrittenFile] | None:
        """Write tensors of this stage, by megatron's names, under Hugging Face names in files of at most SHARD_BYTES; and those of `carried`,
        whose names are Hugging Face's.
        """
        groups = self.built.groups
        if not groups.any_copy:
            return None
        writes = groups.dense_copy and self.tensor_rank == 0
        tensors: dict[str, Tensor] = {}
        files: list[WrittenFile] = []
        size = 0

        def flush() -> None:
            name = f"stage{self.info.pipeline_rank:03d}-{len(files):05d}.safetensors"
            save_file(tensors, path / name, metadata={"format": "pt"})
            files.append(WrittenFile(name, list(tensors), size))
            tensors.clear()

        for name, tensor in chain(gather(parts, self.built.layout, groups), (carried or {}).items()):
            if writes:
                if tensors and size + tensor.nbytes > SHARD_BYTES:
                    flush()
                    size = 0
                tensors[name] = tensor.to("cpu", copy=True).contiguous()
                size += tensor.nbytes
        if not writes:
            return None
        if tensors:
            flush()
        return files
