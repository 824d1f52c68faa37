"""A fingerprint of the weights in safetensors files. It is equal exactly if names, types, shapes and bytes of all tensors are equal.

It does not depend on the order of tensors or on their distribution over files. The sender computes it after writing, the receiver after
reading. Files are mapped into memory and hashed by several threads, without torch, so that any type can be hashed as bytes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from agentrl.errors import StoreError


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> bytes:
    """Return the digest of a tensor: of its name, safetensors type (F32, BF16 …), shape, and bytes in C order, little endian."""
    digest = blake2b(json.dumps([name, dtype, list(shape)]).encode(), digest_size=16)
    digest.update(data)
    return digest.digest()


def combine(digests: Iterable[bytes]) -> str:
    """Return the fingerprint of tensors from their digests in any order, as 32 hexadecimal digits."""
    return blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()


def fingerprint(folder: Path) -> str:
    """Return the fingerprint of all tensors in `folder`/*.safetensors.

    Raises:
        StoreError: there is no such file, or one is truncated.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{folder} holds no *.safetensors files")
    with ExitStack() as stack, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(tensor_digest, *item) for file in files for item in _tensors(file, stack)]
        digests = [job.result() for job in jobs]
        del jobs
    return combine(digests)


def _tensors(file: Path, stack: ExitStack) -> Iterator[tuple[str, str, list[int], memoryview]]:
    """Yield name, type, shape and mapped bytes of each tensor of a file, without reading them."""
    handle = stack.enter_context(file.open("rb"))
    size = file.stat().st_size
    if size < 8:
        raise StoreError(f"{file} is not a complete safetensors file: it has {size} bytes")
    view = memoryview(stack.enter_context(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)))
    stack.callback(view.release)
    start = 8 + int.from_bytes(view[:8], "little")
    if start > size:
        raise StoreError(
            f"{file} is not a complete safetensors file: its header ends at byte {start}, the file at {size}"
        )
    for name, entry in json.loads(bytes(view[8:start])).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if start + end > size:
            raise StoreError(f"{file} is truncated: tensor {name!r} ends at byte {start + end}, the file at {size}")
        part = view[start + begin : start + end]
        stack.callback(part.release)
        yield name, entry["dtype"], entry["shape"], part
