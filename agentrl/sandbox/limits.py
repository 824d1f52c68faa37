"""The limits of a sandbox."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from agentrl.errors import ContractError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of a sandbox. Where a limit cannot be enforced, the backend's `note` says so.

    Example:
        >>> SandboxLimits(time_s=2.0).memory_bytes // 2**20
        512
    """

    time_s: float = 10.0
    """wall time of one call, in seconds; then it is interrupted, and killed a second later"""
    cpu_s: float = 10.0
    """CPU time of the Python process in one call, and of each process that it starts, in seconds"""
    memory_bytes: int = 512 * MIB
    """address space of each process, and resident memory of all together, without the files"""
    disk_bytes: int = 64 * MIB
    """all files together; they lie in memory"""
    files: int = 4096
    """number of files and folders"""
    processes: int = 64
    """processes and threads"""
    open_files: int = 256
    """open files of a process"""
    output_bytes: int = 32_768
    """output of a call that is kept, from its beginning; the rest is discarded and counted"""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            kinds = (int, float) if name in ("time_s", "cpu_s") else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                kind = "number" if float in kinds else "integer"
                raise ContractError(f"a sandbox's limits: {name} must be a positive {kind}, found {value!r:.60}")
