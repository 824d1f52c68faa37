"""Checks a folder of new weights before an engine is asked to read it, without torch: an engine that finds out halfway is spoilt."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.errors import EngineFailure, StoreError

Shapes = dict[str, tuple[int, ...]]


def check_fingerprint(weights: WeightsManifest) -> None:
    """The folder is whole, as its sender left it.

    Raises:
        EngineFailure: it has another fingerprint.
        OSError, StoreError: it cannot be read.
    """
    found = fingerprint(weights.path)
    if found != weights.fingerprint:
        raise EngineFailure(
            f"the weights in {weights.path} have fingerprint {found}, the sender says {weights.fingerprint}; "
            "they were changed or cut on the way: send them again",
            "weights fingerprint",
        )


def check_weights(weights: WeightsManifest, model_dir: Path | None) -> None:
    """The folder is whole, as its sender left it, and holds the tensors that the model in `model_dir` (if given) has.

    Raises:
        EngineFailure: it is not; nothing was changed.
    """
    try:
        check_fingerprint(weights)
        faults = _faults(tensor_shapes(weights.path), tensor_shapes(model_dir)) if model_dir else []
    except (OSError, StoreError, ValueError, KeyError) as e:
        raise EngineFailure(f"the weights in {weights.path} cannot be read: {e}", "weights unreadable") from e
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        said = "; ".join(faults[:5])
        raise EngineFailure(
            f"the weights in {weights.path} do not fit; nothing was changed. {said}{more}", "weights do not fit"
        )


def tensor_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors of a folder, from the heads of its safetensors files."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            head = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in head.items() if name != "__metadata__"}
    return shapes


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _faults(new: Shapes, own: Shapes) -> list[str]:
    """What differs; an output layer that only one side writes is a tied one."""
    if not own:
        return []
    tied = {"lm_head.weight"}
    faults = [f"{name}: not a tensor of this model" for name in sorted(set(new) - set(own) - tied)]
    faults += [f"{name}: missing" for name in sorted(set(own) - set(new) - tied)]
    both = sorted(set(new) & set(own))
    return faults + [f"{n}: shape {list(new[n])}, expected {list(own[n])}" for n in both if new[n] != own[n]]
