"""The files of a Hugging Face model besides its weights. No torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Copy what makes a Hugging Face folder besides weights (config, tokenizer, template), with the type that the weights now have."""
    for file in sorted(source.iterdir()):
        if (
            file.is_file()
            and (file.suffix in {".json", ".txt", ".model", ".jinja", ".tiktoken"})
            and not file.name.endswith(".index.json")
        ):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
