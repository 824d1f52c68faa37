"""`MegatronTrainer`: the Trainer protocol over worker processes that run megatron-core. This is the controller's side, without torch."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import LoraSettings
from agentrl.core.atomic_write import new_folder
from agentrl.core.routed_experts import RouterShape
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.errors import ConfigError, InvariantError, NonFiniteError, StoreError
from agentrl.train.base import OPTIONAL_INPUTS, Floats, LossConfig, Row
from agentrl.train.batch_plan import Plan, packing, trainer_plan
from agentrl.train.megatron.checkpoint_model import adapter_folder, require_model, write_model
from agentrl.train.megatron.image_layout import Grid, check_images, processor
from agentrl.train.megatron.lora import resolve, trained_parameters, write_adapter
from agentrl.train.megatron.megatron_settings import (
    can_have,
    check_tree,
    check_true_on_policy,
    check_vision,
    rank_counts,
)
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.nodes import Nodes
from agentrl.train.megatron.rank_place import RankPlace, ThisMachine
from agentrl.train.megatron.rank_pool import RankInfo, RankPool, RankSetup, WrittenFile
from agentrl.train.megatron.step_metrics import MAXIMA, SUMS, step_metrics
from agentrl.train.megatron.throughput import mfu, plan_work, row_work
from agentrl.train.rows import without_experts

DEFAULT_MICRO_BATCH_TOKENS = 4096
START_TIMEOUT_S = 600.0
MAX_LOG_RATIO = 88.0
"""exp of a larger number is not finite in fp32"""
_LOSS_CHOICES = {
    "kind": ("policy", "sft", "value"),
    "policy_loss": ("clip", "sequence", "cispo"),
    "kl_loss_type": ("k1", "k2", "k3", "low_var_kl"),
    "tis_mode": ("truncate", "mask"),
}
MODEL_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of the files that a Hugging Face folder holds besides weights: config, tokenizer, chat template."""


class MegatronTrainer:
    """Ranks behind the `Trainer` protocol (train/base.py), on this machine or on several."""

    restarts = 0

    def __init__(
        self,
        model: Path,
        *,
        megatron: Mapping[str, Any] | None = None,
        world_size: int | None = None,
        seed: int = 0,
        micro_batch_tokens: int | None = None,
        micro_batch_rows: int | None = None,
        dtype: str = "float32",
        reference: bool = False,
        critic: bool = False,
        lora: LoraSettings | None = None,
        tree_packing: bool = True,
        true_on_policy: bool = False,
        run_dir: Path,
        threads: int | None = None,
        timeout_s: float = 3600.0,
        collective_timeout_s: float | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Start the ranks and load the model.

        Args:
            model: Hugging Face folder (config.json and safetensors).
            megatron: fields of megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.
            world_size: number of ranks, a multiple of tensor × pipeline × context parallel size; None: one data-parallel copy.
            seed: seed of every rank's random generators.
            micro_batch_tokens: maximum tokens of a micro-batch on a rank; a longer row is a micro-batch by itself. None: 4096.
            micro_batch_rows: maximum rows of a micro-batch; None: no such bound.
            dtype: float32, or bfloat16 (with fp32 master weights and gradients).
            reference: keep a frozen copy of `model` for reference log-probs. With adapters there is no copy: they are switched off.
            lora: train adapters in place of all weights, if its settings say so.
            tree_packing: compute a prefix that rows of a micro-batch share once.
            true_on_policy: compute log-probs with the local engine's arithmetic, on CPU ranks that each hold the whole model.
            critic: a value model: the transformer of `model` with a linear head of one output, `score.weight`, which is 0 if `model` has none.
            run_dir: logs are written to run_dir/trainer, those of a critic to run_dir/critic.
            threads: CPU threads of each rank; None: the machine's cores divided evenly. Results are bit-exact only at equal threads.
            timeout_s: maximum duration of a command.
            collective_timeout_s: maximum duration of a collective operation of the ranks; None: that of a command.
            nodes: the machines on which the ranks run; None: this one.

        Raises:
            ConfigError: settings contradict each other or the model, or a node does not fit.
            WorkerError: a rank did not start.
        """
        settings = dict(megatron or {})
        check_tree(settings, tree_packing=tree_packing)
        if true_on_policy:
            check_true_on_policy(settings, dtype, tree_packing=tree_packing)
        ranks, ranks_per_copy = rank_counts(settings, world_size)
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"the trainer's dtype must be float32 or bfloat16; found {dtype!r}")
        self.model, self.dtype, self.timeout_s = Path(model), dtype, timeout_s
        self._shape = read_model_config(self.model)
        check_vision(self.model, self._shape, critic=critic, true_on_policy=true_on_policy)
        vision = self._shape.vision
        self._grid: Grid | None = None if vision is None else processor(self.model, vision).grid
        self._lora = resolve(lora or LoraSettings(), self.model, self._shape, settings, tree_packing=tree_packing)
        self.adapters = tuple(name for name, _ in self._lora.adapters) if self._lora else ()
        context = settings.get("context_parallel_size", 1)
        self.micro_batch_tokens = (micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS) * context
        self.tree_packing = tree_packing
        self.micro_batch_rows = micro_batch_rows
        places: Sequence[RankPlace] = [ThisMachine(rank) for rank in range(ranks)]
        if nodes is not None:
            places = nodes.places(self.model, run_dir, partial(can_have, settings))
        ranks = len(places)
        threads = threads or max(1, (os.cpu_count() or 1) // (nodes.ranks_per_machine if nodes else ranks))
        self.pool = RankPool(places, run_dir.absolute() / ("critic" if critic else "trainer"), threads)
        host, port = places[0].rendezvous()
        setups = [
            RankSetup(
                model=self.model.absolute(),
                megatron=settings,
                dtype=dtype,
                reference=reference,
                critic=critic,
                lora=self._lora,
                true_on_policy=true_on_policy,
                tree_packing=tree_packing,
                seed=seed,
                threads=threads,
                rank=rank,
                local_rank=place.local_rank,
                world=ranks,
                host=host,
                port=port,
                timeout_s=timeout_s if collective_timeout_s is None else collective_timeout_s,
            )
            for rank, place in enumerate(places)
        ]
        arguments = [{"setup": setup} for setup in setups]
        self.ranks: list[RankInfo] = self.pool.request("start", arguments, min(timeout_s, START_TIMEOUT_S))
        self.copies, self.stages = ranks // ranks_per_copy, max(r.pipeline_rank for r in self.ranks) + 1
        self.multiple = self.ranks[0].multiple

    def log_probs(
        self,
        rows: Sequence[Row],
        *,
        reference: bool = False,
        trained_only: bool = False,
        adapter: str | None = None,
    ) -> list[Floats]:
        """See `Trainer.log_probs`."""
        of = self._of(adapter)
        if reference:  # another model, whose routers choose other experts
            rows = without_experts(rows)
        plan = self._plan("log_probs", rows)
        results = self._request_shares("log_probs", rows, plan, reference=reference, trained_only=trained_only, **of)
        return self._by_row(rows, plan, results, trained_only=trained_only)

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """See `Critic.values`."""
        return self.log_probs(without_experts(rows), trained_only=True)

    def step(
        self,
        rows: Sequence[Row],
        loss: LossConfig,
        lr: float,
        *,
        profile: Path | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """See `Trainer.step`; a critic returns no log-probs."""
        of = self._of(adapter)
        _check_loss(rows, loss)
        if loss.kind == "value":
            rows = without_experts(rows)
        plan = self._plan("step", rows)
        started = time.perf_counter()
        results = self._request_shares("step", rows, plan, loss=loss, lr=lr, profile=profile, **of)
        rates = self._rates(rows, plan, results, time.perf_counter() - started)
        totals = [r["totals"] for r in results]
        log_probs = self._by_row(rows, plan, [t and t["log_probs"] for t in totals], trained_only=True)
        if results[0]["grad_norm"] is None:
            raise NonFiniteError(_why_not_finite(rows, log_probs))
        metrics: dict[str, Any] = {
            **_metrics(totals, loss),
            **packing(self, rows, plan),
            "grad_norm": results[0]["grad_norm"],
            "lr": lr,
        }
        metrics["rates"] = rates
        return metrics if loss.kind == "value" else {**metrics, "log_probs": log_probs}

    def _rates(self, rows: Sequence[Row], plan: Plan, results: Sequence[Any], seconds: float) -> dict[str, float]:
        """Tokens per second, MFU, the optimizer's states and the largest memory of a step that took `seconds`."""
        rates = {"tokens_per_s": row_work(rows).tokens / seconds}
        work = plan_work(rows, plan, tree=self.tree_packing)
        adapters = trained_parameters(self._shape, self._lora) if self._lora else None
        device = self.ranks[0].device
        if (utilisation := mfu(self._shape, work, seconds, device, len(self.ranks), adapters)) is not None:
            rates["mfu"] = utilisation
        rates["optimizer_mib"] = sum(r["optimizer_bytes"] for r in results) / 2**20
        peaks = [r["peak_mib"] for r in results if r["peak_mib"] is not None]
        return rates | ({"peak_memory_mib_max": max(peaks)} if peaks else {})

    def gradients(self, rows: Sequence[Row], loss: LossConfig, path: Path) -> dict[str, float]:
        """Write the gradients of a batch as safetensors under Hugging Face names into the new folder `path`, without an optimizer step.

        For tests and diagnosis. Returns the metrics of `step` except grad_norm.
        """
        _check_loss(rows, loss)
        assert not self.adapters, "gradients are those of one set of weights"
        path.mkdir(parents=True)
        return _metrics(
            self._request_shares("gradients", rows, self._plan("gradients", rows), loss=loss, path=path), loss
        )

    def deliver(self, action: str, **arguments: Any) -> list[Any]:
        """See `Trainer.deliver`."""
        results = self._request("deliver", action=action, arguments=arguments)
        return [r for r in results if r is not None]

    def export_weights(self, path: Path, *, adapter: str | None = None) -> WeightsManifest:
        """See `Trainer.export_weights`. transformers' from_pretrained can read the folder."""
        of = self._of(adapter)
        with new_folder(path) as folder:
            files = [file for rank in self._request("export", path=folder, **of) for file in rank or ()]
            _copy_model_files(self.model, folder, self.dtype)
            _name_files(folder, files)
            digest = fingerprint(folder)
        return WeightsManifest(path, digest)

    def export_adapter(self, path: Path, *, adapter: str | None = None) -> None:
        """See `Trainer.export_adapter`."""
        assert self._lora is not None, "the trainer has no adapters"
        of = self._of(adapter)
        with new_folder(path) as folder:
            written = self._request("export_adapter", path=folder, **of)
            write_adapter(
                folder, [folder / file.name for rank in written for file in rank or ()], self._lora, self.model
            )

    def save(self, path: Path) -> None:
        """See `Trainer.save`."""
        with new_folder(path) as folder:
            self._begin_save(folder)()

    def begin_save(self, path: Path) -> Callable[[], None]:
        """See `Trainer.begin_save`."""
        path.mkdir(parents=True)
        return self._begin_save(path)

    def _begin_save(self, folder: Path) -> Callable[[], None]:
        places = self._checkpoints(folder)
        for path, of in places:
            path.mkdir(parents=True, exist_ok=True)
            self._request("begin_save", path=path, **of)

        def finish() -> None:
            self._request("finish_save")
            for path, _ in places:
                write_model(path, self._shape, self._lora)

        return finish

    def load(self, path: Path) -> None:
        """See `Trainer.load`."""
        if not path.is_dir():
            raise StoreError(f"there is no checkpoint at {path}")
        places = self._checkpoints(path)
        for folder, _ in places:
            require_model(folder, self._shape, self._lora)
        for folder, of in places:
            self._request("load", path=folder, **of)

    def offload(self) -> None:
        """See `Trainer.offload`."""
        self._request("offload")

    def onload(self) -> None:
        """See `Trainer.onload`."""
        self._request("onload")

    def free_mib(self) -> int | None:
        """See `Trainer.free_mib`."""
        free: int | None = self._request("free_mib")[0]
        return free

    def close(self) -> None:
        """See `Trainer.close`."""
        self.pool.close()

    def __enter__(self) -> MegatronTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, adapter: str | None) -> dict[str, str]:
        """What tells the ranks which of several adapters a command is for."""
        if adapter not in (self.adapters or (None,)):
            raise InvariantError(
                f"the trainer has the adapters {', '.join(self.adapters) or '(one set of weights)'}; found {adapter!r}"
            )
        return {} if adapter is None else {"adapter": adapter}

    def _checkpoints(self, folder: Path) -> list[tuple[Path, dict[str, str]]]:
        """The checkpoints inside a checkpoint: one of each of several adapters, or itself."""
        return [(adapter_folder(folder, name), self._of(name)) for name in self.adapters] or [(folder, {})]

    def _request(self, command: str, **arguments: Any) -> list[Any]:
        """Results of a command by rank, with the same arguments for all."""
        return self.pool.request(command, [arguments] * len(self.ranks), self.timeout_s)

    def _plan(self, command: str, rows: Sequence[Row]) -> list[list[list[int]]]:
        if not rows:
            raise InvariantError(f"{command}: the batch is empty")
        _check_experts(rows, self._shape.router)
        check_images(rows, self._shape.vision, self._grid)
        return trainer_plan(self, rows)

    def _request_shares(
        self, command: str, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], **arguments: Any
    ) -> list[Any]:
        """Results of a command by rank. Each rank receives its rows, and its micro-batches as indices into them."""
        shares = []
        for parts in plan:
            order = [row for part in parts for row in part]
            position = {row: n for n, row in enumerate(order)}
            shares.append(([rows[row] for row in order], [[position[row] for row in part] for part in parts]))
        by_rank = [{"share": shares[r.data_parallel_rank], **arguments} for r in self.ranks]
        return self.pool.request(command, by_rank, self.timeout_s)

    def _by_row(
        self,
        rows: Sequence[Row],
        plan: Sequence[Sequence[Sequence[int]]],
        results: Sequence[Any],
        *,
        trained_only: bool,
    ) -> list[Floats]:
        """Log-probs of each row from those of the ranks' micro-batches."""
        chosen = [r.chosen(trained_only=trained_only) for r in rows]
        values = [[np.zeros(sum(len(chosen[row]) for row in part), np.float32) for part in parts] for parts in plan]
        for rank, result in zip(self.ranks, results, strict=True):
            if rank.reports:
                for whole, (some, places) in zip(values[rank.data_parallel_rank], result, strict=True):
                    whole[places] = some
        log_probs = [np.zeros(len(r.tokens), np.float32) for r in rows]
        for part, whole in zip(chain(*plan), chain(*values), strict=True):
            ends = np.cumsum([len(chosen[row]) for row in part])
            for row, piece in zip(part, np.split(whole, ends[:-1]), strict=False):
                log_probs[row][chosen[row]] = piece
        return log_probs


def _metrics(totals: Sequence[dict[str, Any] | None], loss: LossConfig) -> dict[str, float]:
    reported = [t for t in totals if t is not None]
    sums = {name: float(sum(t["sums"][i] for t in reported)) for i, name in enumerate(SUMS)}
    maxima = {name: max(t["maxima"][i] for t in reported) for i, name in enumerate(MAXIMA)}
    return step_metrics(sums, maxima, loss)


def _why_not_finite(rows: Sequence[Row], log_probs: Sequence[Floats]) -> str:
    """A sentence that names the token: the first one without a finite log-prob, else the one with the largest probability ratio."""
    unchanged = "the step was not taken, and the weights are unchanged"
    for row, values in zip(rows, log_probs, strict=True):
        if not np.isfinite(values).all():
            token = int(np.flatnonzero(~np.isfinite(values))[0])
            return f"the log-prob of {row.place(token)} is {values[token]}; {unchanged}"
    ratios = [
        (float(difference.max()), row, int(difference.argmax()))
        for row, values in zip(rows, log_probs, strict=True)
        if row.old_log_probs is not None
        for difference in [np.where(row.weights != 0, values - row.old_log_probs, -np.inf)]
    ]
    if ratios:
        largest, row, token = max(ratios, key=lambda r: r[0])
        if largest > MAX_LOG_RATIO:
            return f"the loss is not finite: the probability ratio of {row.place(token)} is exp({largest:.0f}); {unchanged}"
    return f"a gradient is not finite, although every log-prob is ({len(rows)} rows); {unchanged}"


def _check_loss(rows: Sequence[Row], loss: LossConfig) -> None:
    """Refuse a batch that lacks an input of the loss, before any rank receives it."""
    for name, allowed in _LOSS_CHOICES.items():
        if (found := getattr(loss, name)) not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}; found {found!r}")
    if loss.eps_clip_c is not None and loss.eps_clip_c <= 1:
        raise ConfigError(f"eps_clip_c must be greater than 1 (or None: off); found {loss.eps_clip_c}")
    needed = {"returns": loss.kind == "value", "ref_log_probs": loss.kind == "policy" and loss.kl_loss_coef}
    for name in OPTIONAL_INPUTS:
        present = sum(getattr(r, name) is not None for r in rows)
        if 0 < present < len(rows):
            raise InvariantError(f"{present} of {len(rows)} rows have {name}; all or none must")
        if needed.get(name) and not present:
            raise InvariantError(
                f"the {loss.kind} loss needs {name} (kl_loss_coef {loss.kl_loss_coef}), but no row has them"
            )


def _check_experts(rows: Sequence[Row], router: RouterShape | None) -> None:
    """Refuse recorded experts that only some rows have, or that are not this model's, before any rank receives them."""
    recorded = [row for row in rows if row.routed_experts is not None]
    if not recorded:
        return
    if len(recorded) < len(rows):
        raise InvariantError(f"{len(recorded)} of {len(rows)} rows have routed experts; all or none must")
    if router is None:
        raise InvariantError(f"{recorded[0].place(0)}: it has routed experts, but the model is dense")
    for row in recorded:
        assert row.routed_experts is not None
        if fault := router.fault(row.routed_experts):
            raise InvariantError(f"{row.place(0)}: its routed experts are not those of this model: {fault}")


def _name_files(folder: Path, files: Sequence[WrittenFile]) -> None:
    """Give the files of all ranks the names that transformers gives them, with an index if they are several."""
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        index = {
            "metadata": {"total_size": sum(file.bytes for file in files)},
            "weight_map": {tensor: name for file, name in zip(files, names, strict=True) for tensor in file.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file, name in zip(files, names, strict=True):
        (folder / file.name).rename(folder / name)


def _copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Copy the files of a Hugging Face folder except weights; config.json receives the dtype of the exported weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in MODEL_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
