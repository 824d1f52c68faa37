"""The shape of the model that a checkpoint was saved from (`model.json`), which is compared before anything is loaded. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.errors import StoreError
from agentrl.train.megatron.model_config import ModelConfig

FILE = "model.json"


def write_model(folder: Path, model: ModelConfig) -> None:
    """Write the shape of the model into a checkpoint."""
    (folder / FILE).write_text(json.dumps(_shape(model), indent=1, sort_keys=True) + "\n")


def require_model(folder: Path, model: ModelConfig) -> None:
    """Compare a checkpoint with the model that is to load it. Checkpoints of an older agentrl lack the file and are not compared.

    Raises:
        StoreError: it is of another model, or not complete.
    """
    if not (folder / ".metadata").is_file():
        raise StoreError(f"{folder} is not a complete checkpoint of the trainer: it has no file .metadata")
    file = folder / FILE
    if not file.exists():
        return
    try:
        saved = json.loads(file.read_text())
    except ValueError as e:
        raise StoreError(f"{file} is not JSON: {e}") from e
    own, saved = json.loads(json.dumps(_shape(model))), _shape_of(saved)
    different = [name for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]
    if different:
        name = different[0]
        raise StoreError(
            f"{folder} was saved from another model: its {name} is {saved.get(name)}, that of this model {own.get(name)}; "
            "give the model that the run was started with (--hf-checkpoint)"
        )


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
