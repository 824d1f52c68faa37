"""A process group of one trainer rank and the ranks of SGLang servers. Every wait is bounded and ends early when a server fails."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_c10d: Any = torch.distributed.distributed_c10d
_ABANDONED: list[Any] = []
"""Groups with a broadcast that will never complete. They are kept, since collecting one would wait for it."""


class BroadcastError(RuntimeError):
    """A group that cannot be formed, or a broadcast that cannot complete."""


class BroadcastGroup:
    """A group in which this process is rank 0, beside the default group.

    Args:
        name: must be the name that the servers use; SGLang derives key prefixes from it.
        port: of the store on this machine where the members meet.
        world: members, this process included.
        backend: nccl or gloo.
        timeout_s: limit for forming the group and for its operations.
        failed: returns True when a server has failed, which ends the wait.

    Raises:
        BroadcastError: a server failed or did not join in time.
    """

    def __init__(
        self, *, name: str, port: int, world: int, backend: str, timeout_s: float, failed: Callable[[], bool]
    ) -> None:
        self.name = name
        self._group: Any = None
        dist: Any = torch.distributed
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, world, True, timeout, wait_for_workers=False)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def join() -> Any:
            """Create the group as SGLang does on its side; blocks until all members have joined."""
            if device is not None:
                torch.cuda.set_device(device)
            group, _ = _c10d._new_process_group_helper(
                world,
                0,
                [],
                _c10d.Backend(backend),
                _c10d.PrefixStore(name, store),
                group_name=name,
                backend_options=None,
                timeout=timeout,
            )
            _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
            return group

        pool = ThreadPoolExecutor(1, thread_name_prefix="group")
        joining = pool.submit(join)
        pool.shutdown(wait=False)
        deadline = time.monotonic() + timeout_s
        while not joining.done():
            if failed() or time.monotonic() > deadline:
                raise BroadcastError("a server did not join the group")
            time.sleep(0.01)
        self._group = joining.result()

    def broadcast(self, content: Tensor, *, failed: Callable[[], bool], timeout_s: float) -> None:
        """Send `content` to all members. BroadcastError if `failed()` reports a failed server, or after `timeout_s`."""
        work = torch.distributed.broadcast(content, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if failed():
                self.close(pending=True)
                raise BroadcastError("a receiver refused the weights")
            if time.monotonic() > deadline:
                self.close(pending=True)
                raise BroadcastError(f"a broadcast took more than {timeout_s:g} s")
            time.sleep(0.0001)
        work.wait()

    def close(self, *, pending: bool = False) -> None:
        """Leave the group. `pending`: a broadcast is in progress.

        Destroying a gloo group waits for operations in progress and holds the interpreter lock; such a group is abandoned.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if pending and not torch.cuda.is_available():
            _ABANDONED.append(group)
        else:
            threading.Thread(target=_destroy, args=(group,), daemon=True).start()


def _destroy(group: Any) -> None:
    try:
        if torch.cuda.is_available():
            _c10d._abort_process_group(group)
        else:
            torch.distributed.destroy_process_group(group)
    except (RuntimeError, ValueError):
        return  # it was broken already
