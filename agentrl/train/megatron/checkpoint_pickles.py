"""The pickles in a checkpoint, refused before they are read if they name anything but what torch and numpy write.

torch and megatron read three kinds of pickle from a checkpoint: `.metadata`, `common.pt`, and Python objects inside the `.distcp` files (the
state of random generators). An ordinary unpickler calls whatever a pickle names, so a checkpoint from elsewhere could run code.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from agentrl.errors import StoreError

_RECORD_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
"""Their dataclasses and enums are allowed."""
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("io", "BytesIO"),
    ("_io", "BytesIO"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_DAMAGE = (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, ImportError, OSError)
"""What unpickling raises on damaged bytes."""


def require_safe(folder: Path) -> None:
    """Check that a checkpoint has all its files, and every pickle in it.

    Raises:
        StoreError: a file is missing or too short; a pickle names something that checkpoints do not hold, or is damaged.
    """
    metadata = _metadata(folder / ".metadata")
    for file in (folder / "common.pt", *folder.glob("*.pt")):
        if file.exists():
            _check_torch_file(file.read_bytes(), file)
    for index, place in (metadata.storage_data or {}).items():
        file = folder / place.relative_path
        if Path(place.relative_path).name != place.relative_path:
            raise StoreError(f"{folder / '.metadata'} refers to a file outside the checkpoint: {place.relative_path!r}")
        if not file.is_file():
            raise StoreError(f"the checkpoint {folder} has no file {place.relative_path}, which holds {index.fqn!r}")
        if file.stat().st_size < place.offset + place.length:
            raise StoreError(f"{file} is too short: {index.fqn!r} ends at byte {place.offset + place.length}")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            if getattr(place, "transform_descriptors", None):
                raise StoreError(f"{file}: the object {index.fqn!r} is compressed, which agentrl does not write")
            try:
                with file.open("rb") as f:
                    f.seek(place.offset)
                    content = f.read(place.length)
            except (OSError, ValueError) as e:
                raise StoreError(f"{file}: the object {index.fqn!r} cannot be read: {e}") from e
            _check_torch_file(content, f"{file}, object {index.fqn!r}")


class _Unpickler(pickle.Unpickler):
    """Finds only what is allowed."""

    def __init__(self, file: IO[bytes], where: object) -> None:
        super().__init__(file)
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if not _is_allowed(module, name):
            raise StoreError(
                f"{self.where} holds a pickle that names {module}.{name}, which checkpoints do not hold; it is not read, because it could run code"
            )
        return super().find_class(module, name)


class _Inert:
    """Stands for whatever the pickle of a torch file names: only the names are checked."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


class _Checker(_Unpickler):
    """Checks names, and creates nothing of what they name."""

    def find_class(self, module: str, name: str) -> Any:
        if not (module == "torch" and name.endswith("Storage")):
            super().find_class(module, name)
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def _is_allowed(module: str, name: str) -> bool:
    if (module, name) in _ALLOWED:
        return True
    if module == "torch":
        return isinstance(getattr(torch, name, None), torch.dtype)
    found = getattr(import_module(module), name, None) if module in _RECORD_MODULES else None
    return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))


def _metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as f:
            metadata = _Unpickler(f, file).load()
    except StoreError:
        raise
    except _DAMAGE as e:
        _damaged(file, e)
    if not isinstance(metadata, Metadata):
        raise StoreError(f"{file} is not the metadata of a checkpoint")
    return metadata


def _check_torch_file(content: bytes, where: object) -> None:
    """Check the pickle in what `torch.save` wrote: a zip archive. torch would also read older formats, which are refused."""
    if not content.startswith(b"PK\x03\x04"):
        raise StoreError(f"{where} is not a file of torch.save")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            pickles = [name for name in names if name.endswith(".pkl")]
            if len(pickles) != 1 or not pickles[0].endswith("/data.pkl") or len(set(names)) != len(names):
                raise StoreError(f"{where} holds {', '.join(pickles) or 'no pickle'}, expected one data.pkl")
            with archive.open(pickles[0]) as f:
                _Checker(f, where).load()
    except StoreError:
        raise
    except (*_DAMAGE, zipfile.BadZipFile) as e:
        _damaged(where, e)


def _damaged(where: object, error: Exception) -> NoReturn:
    raise StoreError(f"{where} is damaged: {type(error).__name__}: {error}") from error
