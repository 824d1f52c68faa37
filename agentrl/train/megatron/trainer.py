"""`MegatronTrainer`: the Trainer protocol over worker processes that run megatron-core. The controller's side; no torch here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.core.atomic_write import new_folder
from agentrl.core.ports import free_port
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.errors import ConfigError, InvariantError, StoreError
from agentrl.train.base import Floats, LossConfig, Row
from agentrl.train.batch_plan import batch_plan
from agentrl.train.megatron.hf_folder import copy_model_files
from agentrl.train.megatron.megatron_settings import Setup, world
from agentrl.train.megatron.rank_pool import Workers
from agentrl.train.megatron.step_metrics import MAXIMA, SUMS, metrics

DEFAULT_MICRO_BATCH_TOKENS = 4096


class MegatronTrainer:
    """Ranks of one machine behind the `Trainer` protocol (train/base.py)."""

    def __init__(
        self,
        model: Path,
        *,
        megatron: Mapping[str, Any] | None = None,
        world_size: int | None = None,
        seed: int = 0,
        micro_batch_tokens: int | None = None,
        dtype: str = "float32",
        reference: bool = False,
        run_dir: Path,
        threads: int | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """Start the ranks and load the model.

        Args:
            model: a Hugging Face folder (config.json and safetensors).
            megatron: settings by the field names of megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.
            world_size: ranks; a multiple of tensor × pipeline size, the rest is data parallel. None: one data-parallel rank.
            seed: of every rank's random generators.
            micro_batch_tokens: most tokens of a micro-batch, padding included (a longer row stands alone); None: 4096.
            dtype: float32 or bfloat16 (with fp32 master weights and gradients).
            reference: keep a frozen copy of `model` for reference log-probs.
            run_dir: logs go to run_dir/trainer.
            threads: CPU threads of each rank; None: the machine's cores shared out. Results are equal to the bit at equal threads only.
            timeout_s: the longest any command may take.

        Raises:
            ConfigError: settings that contradict each other or the model.
            WorkerError: a rank did not start.
        """
        self.settings = dict(megatron or {})
        ranks, per_copy = world(self.settings, world_size)
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"the trainer's dtype must be float32 or bfloat16; found {dtype!r}")
        self.model, self.dtype, self.timeout_s = Path(model), dtype, timeout_s
        self.micro_batch_tokens = micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
        threads = threads or max(1, (os.cpu_count() or 1) // ranks)
        self.workers = Workers(ranks, run_dir / "trainer", threads)
        port = free_port()
        setups = [
            {
                "setup": Setup(
                    self.model, self.settings, dtype, reference, seed, threads, rank, ranks, rank, port, timeout_s
                )
            }
            for rank in range(ranks)
        ]
        self.places: list[dict[str, Any]] = self.workers.ask("start", setups, min(timeout_s, 600.0))
        self.copies = ranks // per_copy
        self.stages: int = max(p["pp"] for p in self.places) + 1
        self.multiple: int = self.places[0]["multiple"]
        """padded lengths of micro-batches are multiples of this"""

    def _ask(self, command: str, **arguments: Any) -> list[Any]:
        return self.workers.ask(command, [arguments] * len(self.places), self.timeout_s)

    def _ask_shared(
        self, command: str, rows: Sequence[Row], **arguments: Any
    ) -> tuple[list[Any], list[list[list[int]]]]:
        """Ask with every rank given its data-parallel share of the rows. Returns the answers by rank, and the plan."""
        if not rows:
            raise InvariantError(f"{command}: the batch is empty")
        parts = batch_plan([len(r.tokens) for r in rows], self.copies, self.micro_batch_tokens)
        shares = []
        for share in parts:
            order = [i for part in share for i in part]
            number = {row: n for n, row in enumerate(order)}
            shares.append(([rows[i] for i in order], [[number[i] for i in part] for part in share]))
        return self.workers.ask(
            command, [{"share": shares[p["dp"]], **arguments} for p in self.places], self.timeout_s
        ), parts

    def log_probs(self, rows: Sequence[Row], *, reference: bool = False, trained_only: bool = False) -> list[Floats]:
        """See `Trainer.log_probs`. `trained_only`: only where `Row.weights` is not 0, the rest is 0; much cheaper."""
        answers, parts = self._ask_shared("log_probs", rows, reference=reference, trained_only=trained_only)
        return self._by_row(rows, parts, answers, trained_only=trained_only)

    def step(self, rows: Sequence[Row], loss: LossConfig, lr: float) -> dict[str, Any]:
        """See `Trainer.step`."""
        _check_loss(rows, loss)
        answers, parts = self._ask_shared("step", rows, loss=loss, lr=lr)
        totals = [a["totals"] for a in answers]
        log_probs = self._by_row(rows, parts, [t and t["log_probs"] for t in totals], trained_only=True)
        return {
            **self._metrics(totals, loss),
            "grad_norm": answers[0]["grad_norm"],
            "lr": lr,
            "log_probs": log_probs,
        }

    def gradients(self, rows: Sequence[Row], loss: LossConfig, path: Path) -> dict[str, float]:
        """Write the gradients of the batch as safetensors under Hugging Face names into the new folder `path`; nothing is updated.

        For tests and diagnosis. Returns the metrics of `step`, but the gradient's norm.
        """
        _check_loss(rows, loss)
        path.mkdir(parents=True)
        answers, _ = self._ask_shared("gradients", rows, loss=loss, path=path)
        return self._metrics(answers, loss)

    def _by_row(
        self,
        rows: Sequence[Row],
        parts: Sequence[Sequence[Sequence[int]]],
        answers: Sequence[Any],
        *,
        trained_only: bool,
    ) -> list[Floats]:
        """Log-probs as ranks gave them, by micro-batch, one array for each row."""
        out = [np.zeros(len(r.tokens), np.float32) for r in rows]
        for place, answer in zip(self.places, answers, strict=True):
            if not place["answers"]:
                continue
            for part, (values, counts) in zip(parts[place["dp"]], answer, strict=True):
                pieces = np.split(values[: sum(counts)], np.cumsum(counts)[:-1])
                for row, piece in zip(part, pieces, strict=False):
                    at = np.flatnonzero(rows[row].weights) if trained_only else slice(1, None)
                    out[row][at] = piece
        return out

    def _metrics(self, totals: Sequence[dict[str, Any] | None], loss: LossConfig) -> dict[str, float]:
        told = [t for t in totals if t is not None]
        sums = {name: float(sum(t["sums"][i] for t in told)) for i, name in enumerate(SUMS)}
        maxima = {name: max(t["maxima"][i] for t in told) for i, name in enumerate(MAXIMA)}
        return metrics(sums, maxima, loss)

    def export_weights(self, path: Path) -> WeightsManifest:
        """See `Trainer.export_weights`: a folder that transformers' from_pretrained reads."""
        with new_folder(path) as folder:
            written = [w for w in self._ask("export", path=folder) if w is not None]
            copy_model_files(self.model, folder, self.dtype)
            if len(written) > 1:
                index = {
                    "metadata": {"total_size": sum(w["bytes"] for w in written)},
                    "weight_map": {name: w["file"] for w in written for name in w["names"]},
                }
                (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            mark = fingerprint(folder)
        return WeightsManifest(path, mark)

    def deliver(self, action: str, **arguments: Any) -> list[Any]:
        """Have every stage's first rank bring its weights to engines (train/megatron/delivery/sender.py); the answers of those ranks, by stage."""
        return [a for a in self._ask("deliver", action=action, arguments=arguments) if a is not None]

    def save(self, path: Path) -> None:
        """See `Trainer.save`."""
        with new_folder(path) as folder:
            self._ask("save", path=folder)

    def load(self, path: Path) -> None:
        """See `Trainer.load`."""
        if not path.is_dir():
            raise StoreError(f"there is no checkpoint at {path}")
        self._ask("load", path=path)

    def offload(self) -> None:
        """See `Trainer.offload`."""
        self._ask("offload")

    def onload(self) -> None:
        """See `Trainer.onload`."""
        self._ask("onload")

    def free_mib(self) -> int | None:
        """See `Trainer.free_mib`."""
        found: int | None = self._ask("free_mib")[0]
        return found

    def close(self) -> None:
        """Stop all ranks; idempotent."""
        self.workers.close()

    def __enter__(self) -> MegatronTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_loss(rows: Sequence[Row], loss: LossConfig) -> None:
    """Refuse a batch that lacks what the loss needs, before any rank is troubled."""
    if loss.kind not in ("policy", "sft"):
        raise ConfigError(f"loss kind must be 'policy' or 'sft'; found {loss.kind!r}")
    if loss.kl_loss_type not in ("k1", "k2", "k3"):
        raise ConfigError(f"kl_loss_type must be k1, k2 or k3; found {loss.kl_loss_type!r}")
    if loss.eps_clip_c is not None and loss.eps_clip_c <= 1:
        raise ConfigError(f"eps_clip_c must be greater than 1 (or None: off); found {loss.eps_clip_c}")
    for name in ("old_log_probs", "ref_log_probs"):
        have = sum(getattr(r, name) is not None for r in rows)
        if 0 < have < len(rows):
            raise InvariantError(f"{have} of {len(rows)} rows have {name}; all or none must")
        if name == "ref_log_probs" and not have and loss.kind == "policy" and loss.kl_loss_coef:
            raise InvariantError(f"kl_loss_coef is {loss.kl_loss_coef}, but no row has ref_log_probs")
