"""Distributed checkpoints (megatron-core's dist_checkpointing) of model, optimizer and random state, readable at another parallel size.

The optimizer is written in model space ('fully_reshardable'). That format does not contain the step count, which torch's AdamW keeps as one
tensor per parameter. It is restored from the parameter groups, and cloned for each parameter: megatron gives all parameters the same tensor,
which every parameter's update would advance.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from agentrl.train.megatron.adapters import adapter_tensors
from agentrl.train.megatron.checkpoint_pickles import require_safe
from agentrl.train.megatron.gpu_kernels import step_device, use_fused_adam
from agentrl.train.megatron.hf_weights import conversion
from agentrl.train.megatron.model import Built

_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
_NO_PARAMETERS: Any = "no parameters"
"""Key of the state of an optimizer that has no parameters here, as that of experts on a pipeline stage without any."""


class PendingSave:
    """A checkpoint that a thread of this rank writes from a copy of the state, which may change at once."""

    def __init__(self, built: Built, path: Path, steps: int) -> None:
        """Copy the state to host memory and start to write it into the empty folder `path`; called on all ranks."""
        state = _state(built, loading=False)
        state |= {"generators": _sharded_generators(), "steps": steps, "layout": _layout()}
        # megatron's queue is another process, which imports all of this again, for writers that are processes; this writer is a thread
        filesystem_async._results_queue = queue.Queue()
        self._request = dist_checkpointing.save(state, str(path), async_sharded_save=True)
        self._thread: threading.Thread | None = None
        if self._request.async_fn is not None:
            _, buckets, results = self._request.async_fn_args
            transforms = self._request.async_fn.args[0]
            arguments = (transforms, [_copied(bucket) for bucket in buckets], results)
            self._thread = threading.Thread(target=_write, args=arguments, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until all ranks have written, and write the metadata; called on all ranks.

        Raises:
            CheckpointException: a file could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        torch.distributed.barrier()
        for finalize in self._request.finalize_fns:
            finalize()


def _copied(bucket: Any) -> Any:
    file, key, (objects, tensors) = bucket
    return file, key, (objects, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors])


def _write(transforms: Any, buckets: list[Any], results: Any) -> None:
    """Write the files of a rank, one after the other, as megatron's writer processes do, and report to `results`."""
    written: queue.Queue[Any] = queue.Queue()
    started: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(buckets):
        started.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, started, use_fsync=True
        )
    outcomes = dict(written.get() for _ in buckets)
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    results.put(errors[0] if errors else outcomes)


def load(built: Built, path: Path) -> int:
    """Read a checkpoint into model, optimizer and random generators; returns its optimizer steps. Called on all ranks.

    The generators are left unchanged if the tensor or pipeline parallel size differs from the checkpoint's.

    Raises:
        StoreError: a pickle in the checkpoint is damaged or could run code.
    """
    require_safe(path)
    same = tuple(dist_checkpointing.load_common_state_dict(str(path))["layout"]) == _layout()
    random_state = {"generators": _sharded_generators()} if same else {}
    with _steps_from_groups(built.optimizer):
        state = dist_checkpointing.load({**_state(built, loading=True), **random_state}, str(path))
        _set_model(built, state["model"])
        built.optimizer.load_state_dict(state["optimizer"])
    use_fused_adam(built.optimizer)
    for part in _parts(built.optimizer):
        adam: Any = part.optimizer
        if isinstance(adam, torch.optim.Adam):
            for parameter, values in adam.state.items():
                if parameter is not _NO_PARAMETERS and isinstance(values.get("step"), torch.Tensor):
                    values["step"] = values["step"].clone().to(step_device(adam, parameter))
    if same:
        set_generators(state["generators"])
    return int(state["steps"])


def _state(built: Built, *, loading: bool) -> dict[str, Any]:
    initialise_states(built.optimizer)
    model = built.model.sharded_state_dict() if built.lora is None else _adapter_state(built)
    optimizer = built.optimizer.sharded_state_dict({"model": model}, is_loading=loading, metadata=_FORMAT)
    return {"model": model, "optimizer": optimizer}


def _adapter_state(built: Built) -> dict[str, ShardedTensor]:
    """The adapters alone, by names that number layers over the whole model."""
    tensor, ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    states = {}
    for name, parameter in adapter_tensors(built.model):
        dimension = {"rows": 0, "columns": 1}.get(conversion(name, built.layout).kind)
        offsets = [] if dimension is None else [(dimension, tensor, ranks)]
        replica = 0, tensor if dimension is None else 0, copy
        states[name] = ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica)
    return states


@torch.no_grad()
def _set_model(built: Built, state: dict[str, Any]) -> None:
    """Set what `_state` saved of the model."""
    if built.lora is None:
        built.model.load_state_dict(state)
        return
    for name, parameter in adapter_tensors(built.model):
        parameter.copy_(state[name])


def optimizer_bytes(optimizer: Any) -> int:
    """The bytes of this rank's optimizer states: the moments, and the fp32 copies of weights in half precision."""
    adams = adams_of(optimizer)
    parameters = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    states = [t for adam in adams for values in adam.state.values() for t in values.values()]
    copies = parameters if optimizer.config.bf16 else []
    return sum(t.nbytes for t in (*states, *copies) if isinstance(t, torch.Tensor))


def _layout() -> tuple[int, int]:
    """Pipeline and tensor parallel size."""
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _sharded_generators() -> ShardedObject:
    """One state for each tensor and pipeline rank; data-parallel and context-parallel ranks have the same."""
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("generators", generators(), _layout(), place, replica_id=replica)


@torch.no_grad()
def initialise_states(optimizer: Any) -> None:
    """Create the initial state of a torch Adam that has not stepped yet: megatron can neither write nor fill an empty state."""
    adams = adams_of(optimizer)
    for adam in adams:
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                step = torch.zeros((), dtype=torch.float32, device=step_device(adam, parameter))
                adam.state[parameter] = {"step": step, **zeros}
    steps = [values["step"] for adam in adams for key, values in adam.state.items() if key is not _NO_PARAMETERS]
    for adam in adams:
        if not any(group["params"] for group in adam.param_groups):
            adam.state[_NO_PARAMETERS] = {"step": steps[0].clone().cpu()}


def adams_of(optimizer: Any) -> list[Any]:
    """The optimizers of torch inside megatron's."""
    return [part.optimizer for part in _parts(optimizer) if isinstance(part.optimizer, torch.optim.Adam)]


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@contextmanager
def _steps_from_groups(optimizer: Any) -> Iterator[None]:
    """While loading, each parameter keeps the step count of its parameter group, which the checkpoint lacks."""

    def keeping(part: Any, original: Any) -> Any:
        def fill(parameter: Any, tensors: dict[str, Any]) -> None:
            group, order = part.model_param_group_index_map[parameter]
            state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
            original(parameter, {"step": state["step"], **tensors} if "step" in state else tensors)

        return fill

    parts = [p for p in _parts(optimizer) if hasattr(p, "_set_main_param_and_optimizer_states")]
    for part in parts:
        part._set_main_param_and_optimizer_states = keeping(part, part._set_main_param_and_optimizer_states)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def generators() -> dict[str, Any]:
    """The state of this rank's random generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Restore what `generators` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
