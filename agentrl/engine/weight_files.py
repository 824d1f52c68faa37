"""Checks of a folder of new weights before a server loads it, without torch. A server that fails halfway must be discarded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.errors import EngineFailure, StoreError

Shapes = dict[str, tuple[int, ...]]
_TIED = {"lm_head.weight"}
"""An output layer that only one side has is tied to the embedding."""
_QUOTED_FAULTS = 5


def check_fingerprint(weights: WeightsManifest) -> None:
    """The folder is complete and unchanged.

    Raises:
        EngineFailure: its fingerprint is not the manifest's.
        OSError, StoreError: it cannot be read.
    """
    computed = fingerprint(weights.path)
    if computed != weights.fingerprint:
        raise EngineFailure(
            f"the weights in {weights.path} have fingerprint {computed}, expected {weights.fingerprint}; "
            "they were changed or truncated in transit; send them again",
            "weights fingerprint",
        )


def check_weights(weights: WeightsManifest, model_dir: Path | None) -> None:
    """The folder is complete and unchanged, and has the tensors of the model in `model_dir` (if given).

    Raises:
        EngineFailure: it is not; nothing was loaded.
    """
    try:
        check_fingerprint(weights)
        faults = _differences(tensor_shapes(weights.path), tensor_shapes(model_dir)) if model_dir else []
    except (OSError, StoreError, ValueError, KeyError, SafetensorError) as e:
        raise EngineFailure(f"the weights in {weights.path} cannot be read: {e}", "weights unreadable") from e
    refuse_weights(weights.path, faults)


def refuse_weights(path: Path, faults: Sequence[str]) -> None:
    """Raise EngineFailure if there are faults."""
    if faults:
        more = f" and {len(faults) - _QUOTED_FAULTS} more" if len(faults) > _QUOTED_FAULTS else ""
        raise EngineFailure(
            f"the weights in {path} do not fit; nothing was changed. {'; '.join(faults[:_QUOTED_FAULTS])}{more}",
            "weights do not fit",
        )


def tensor_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors in a folder's safetensors files."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    return shapes


def weight_bytes(folder: Path) -> int:
    """Size of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _differences(new: Shapes, own: Shapes) -> list[str]:
    """What differs from the model's own tensors; nothing if those are unknown."""
    if not own:
        return []
    faults = [f"{name}: not a tensor of this model" for name in sorted(set(new) - set(own) - _TIED)]
    faults += [f"{name}: missing" for name in sorted(set(own) - set(new) - _TIED)]
    shared = sorted(set(new) & set(own))
    return faults + [
        f"{name}: shape {list(new[name])}, expected {list(own[name])}" for name in shared if new[name] != own[name]
    ]
