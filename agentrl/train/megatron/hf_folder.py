"""Folders that appear whole or not at all, and the files of a Hugging Face model besides its weights. No torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from agentrl.errors import StoreError


class new_folder:  # noqa: N801, reads as a function
    """A folder written under a temporary name beside `path` and renamed when whole; removed when writing fails."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise StoreError(f"{path} exists already; choose a new folder")
        self.path, self.folder = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for file in self.folder.rglob("*"):
            if file.is_file():
                with file.open("rb") as f:
                    os.fsync(f.fileno())
        self.folder.rename(self.path)


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
