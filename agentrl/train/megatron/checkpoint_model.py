"""The shape of the model that a checkpoint was saved from (`model.json`), which is compared before anything is loaded. No torch.

A checkpoint of adapters holds only them. Its `model.json` has the key `lora` with their rank, alpha and targets, and the fingerprint of the base.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.errors import StoreError
from agentrl.train.megatron.lora import Lora
from agentrl.train.megatron.model_config import ModelConfig

FILE = "model.json"
ADAPTERS = "adapters"
"""folder of the adapters inside a checkpoint of several"""


def adapter_folder(folder: Path, name: str) -> Path:
    """Where a checkpoint of several adapters has that of one, which is a checkpoint of adapters by itself."""
    return folder / ADAPTERS / name


def write_model(folder: Path, model: ModelConfig, lora: Lora | None = None) -> None:
    """Write the shape of the model, and what its adapters are, into a checkpoint."""
    values = _shape(model) | ({} if lora is None else {"lora": _adapters(lora)})
    (folder / FILE).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def read_adapters(folder: Path) -> dict[str, Any] | None:
    """What the adapters of a checkpoint are; None: it holds all weights.

    Raises:
        StoreError: the file is damaged.
    """
    file = folder / FILE
    return _read(file).get("lora") if file.exists() else None


def require_model(folder: Path, model: ModelConfig, lora: Lora | None = None) -> None:
    """Compare a checkpoint with the model that is to load it. Checkpoints of an older agentrl lack the file and are not compared.

    Raises:
        StoreError: it is of another model, or not complete.
    """
    if not (folder / ".metadata").is_file():
        raise StoreError(f"{folder} is not a complete checkpoint of the trainer: it has no file .metadata")
    file = folder / FILE
    if not file.exists() and lora is None:
        return
    values = _read(file) if file.exists() else {}
    _require_adapters(folder, values.pop("lora", None), lora)
    own, saved = json.loads(json.dumps(_shape(model))), _shape_of(values)
    different = [name for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]
    if different:
        name = different[0]
        raise StoreError(
            f"{folder} was saved from another model: its {name} is {saved.get(name)}, that of this model {own.get(name)}; "
            "give the model that the run was started with (--hf-checkpoint)"
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except ValueError as e:
        raise StoreError(f"{file} is not JSON: {e}") from e
    return values


def _require_adapters(folder: Path, saved: dict[str, Any] | None, lora: Lora | None) -> None:
    own = None if lora is None else _adapters(lora)
    if saved == own:
        return
    if saved is None:
        raise StoreError(
            f"{folder} holds all weights of a model and no adapters; leave out --lora-rank and --lora-adapter-path"
        )
    if own is None:
        raise StoreError(f"{folder} holds adapters of rank {saved.get('rank')} and no other weights; give --lora-rank")
    name = next(n for n in (*own, *saved) if own.get(n) != saved.get(n))
    if name == "base":
        raise StoreError(
            f"{folder} holds adapters of another base: of weights with the fingerprint {saved.get(name)}, those of this model have {own[name]}; "
            "give the model that the run was started with (--hf-checkpoint)"
        )
    raise StoreError(
        f"{folder} holds adapters whose {name} is {saved.get(name)}, expected {own.get(name)}; give the settings of its run"
    )


def _adapters(lora: Lora) -> dict[str, Any]:
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets), "base": lora.base}


def _shape(model: ModelConfig) -> dict[str, Any]:
    values = asdict(model)
    for name in ("family", "untrained_layers"):  # they do not change what is built
        del values[name]
    return _shape_of({**values.pop("transformer"), **values})


def _shape_of(values: Any) -> Any:
    """Without the keys whose feature the model lacks: an older agentrl did not write them."""
    if not isinstance(values, dict):
        return values
    return {name: _shape_of(value) for name, value in values.items() if value is not None and value is not False}
