"""Sends a rank's weights to SGLang servers: by handles of shared or CUDA memory (colocated), or by broadcast in a group (split).

Each stage's first rank talks to the servers itself, so no weights pass through the controller. Nothing here waits for a peer without a
limit: a broadcast is watched together with the servers' answers, and a server that answers badly ends it. A server's failure is a result
(by address), not an exception, since the other ranks and servers go on.
"""

from __future__ import annotations

import datetime
import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
from megatron.core import parallel_state
from torch import Tensor

from agentrl.train.megatron.delivery.buckets import Bucket, buckets, serialise
from agentrl.train.megatron.delivery.fused_checksum import checksums
from agentrl.train.megatron.delivery.messages import Sent, Target
from agentrl.train.megatron.hf_weights import gather_views
from agentrl.train.megatron.model import Built

_c10d: Any = torch.distributed.distributed_c10d
DEPTH = 2
"""requests that a server may have before it has answered the first"""


class Lost(RuntimeError):
    """A broadcast that cannot be completed."""


class Sender:
    """The delivering side of one rank. Methods are called on all ranks; only a stage's first one sends."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self.built, self.device = built, device
        self.group: Any = None
        self.targets: list[Target] = []
        self.copy = parallel_state.get_data_parallel_rank()
        self.speaks = self.copy == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self._views: list[tuple[str, Tensor, list[int]]] = []
        self._places: list[int] = []
        """the storages of the parameters that the views look into"""

    def _weights(self) -> Iterable[tuple[str, Tensor, list[int]]]:
        """Names, tensors, shapes. Without tensor parallelism they are views of the parameters, made once and kept while those stay where they are."""
        built, group = self.built, parallel_state.get_tensor_model_parallel_group()
        places = [p.data.untyped_storage()._cdata for p in built.model.parameters()]
        if self._views and self._places == places:
            return self._views
        found = gather_views(built.model, built.layout, group, lambda p: p.data)
        if group.size() > 1:
            return found
        views, stay = list(found), set(places)
        if all(t.untyped_storage()._cdata in stay for _, t, _ in views):
            self._views, self._places = views, places
        return views

    def checksums(self, kind: str) -> dict[str, str] | None:
        """A checksum (fused.py) of every parameter under the names, and in the joined form, in which a server has them."""
        if self.copy:
            return None
        tensors = ((name, tensor.reshape(shape)) for name, tensor, shape in self._weights())
        found = checksums(tensors, self.built.layout.vocab_size, kind)
        return found if self.speaks else None

    def tensors(self, targets: Sequence[Target], bucket_bytes: int, timeout_s: float) -> Sent | None:
        """Deliver by handles, for servers on this machine (on a GPU: on this card)."""
        if self.copy:
            return None
        if self.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")
        started, sent, couriers = time.perf_counter(), Sent(), [Courier(t, timeout_s) for t in targets]
        for bucket in buckets(self._weights(), bucket_bytes, shared=self.speaks):
            if not self.speaks:
                continue
            if bucket.flat.is_cuda:
                torch.cuda.current_stream().synchronize()
            for courier in couriers:
                courier.send(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [serialise(bucket) for _ in range(courier.target.ranks)],
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                    },
                    bucket,
                )
            sent.bytes += bucket.used
            sent.buckets += 1
        sent.failed = {c.target.address: c.failure for c in couriers if c.finish() and c.failure}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        sent.seconds = time.perf_counter() - started
        return sent if self.speaks else None

    def open_group(
        self, targets: Sequence[Target], ports: Sequence[int], name: str, backend: str, timeout_s: float
    ) -> Sent | None:
        """Form a group of this stage's first rank and all ranks of all servers."""
        if not self.speaks:
            return None
        self.close_group()
        started, sent, offset, couriers = time.perf_counter(), Sent(), 1, []
        world = 1 + sum(t.ranks for t in targets)
        group, port = f"{name}-{self.stage}", ports[self.stage]
        for target in targets:
            courier = Courier(target, timeout_s)
            courier.send(
                "/init_weights_update_group",
                {
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": world,
                    "group_name": group,
                    "backend": backend,
                },
            )
            couriers.append(courier)
            offset += target.ranks
        try:
            self.group = _Group(group, port, world, backend, timeout_s, lambda: any(c.failing for c in couriers))
        except (Lost, RuntimeError, TimeoutError) as e:
            sent.failed = {
                c.target.address: c.failure or f"the group was not formed: {e}" for c in couriers if c.finish(0.5)
            }
            return sent
        sent.failed = {c.target.address: c.failure for c in couriers if c.finish() and c.failure}
        self.targets = list(targets)
        sent.seconds = time.perf_counter() - started
        return sent

    def broadcast(self, bucket_bytes: int, timeout_s: float) -> Sent | None:
        """Deliver by broadcast to the servers of the group."""
        if self.copy:
            return None
        started, sent = time.perf_counter(), Sent()
        couriers = [Courier(t, timeout_s) for t in self.targets]
        why = "" if self.group or not self.speaks else "there is no group"
        for bucket in buckets(self._weights(), bucket_bytes, shared=False):
            if why or not self.speaks:
                continue
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": self.group.name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            for courier in couriers:
                courier.send("/update_weights_from_distributed", body, bucket)
            try:
                self.group.broadcast(bucket.content, lambda: any(c.failing for c in couriers), timeout_s)
            except (Lost, RuntimeError) as e:
                why = str(e)
            sent.bytes += bucket.used
            sent.buckets += 1
        if self.speaks:
            for c in couriers:
                c.finish(0.5 if why else None)
            bad = {c.target.address: c.failure for c in couriers if c.failure}
            sent.failed = bad or ({c.target.address: why for c in couriers} if why else {})
            if sent.failed:
                self.close_group()
        sent.seconds = time.perf_counter() - started
        return sent if self.speaks else None

    def close_group(self) -> None:
        """Leave the group; the servers are told by the controller."""
        if self.group is not None:
            self.group.close()
        self.group, self.targets = None, []


class Courier:
    """Brings requests to one server in order, at most DEPTH ahead of its answers; after a failure it brings nothing more."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target, self.timeout_s = target, timeout_s
        self.failure = ""
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="courier")
        self._waiting: deque[tuple[Future[str], Bucket | None]] = deque()

    def send(self, path: str, body: dict[str, Any], bucket: Bucket | None = None) -> None:
        """Send one request; `bucket` is kept alive until it is answered."""
        while not self.failure and len(self._waiting) >= DEPTH:
            self._take(None)
        if not self.failure:
            self._waiting.append((self._pool.submit(post, self.target.address + path, body, self.timeout_s), bucket))

    @property
    def failing(self) -> bool:
        """An answer has come that is a failure."""
        while self._waiting and self._waiting[0][0].done():
            self._take(None)
        return bool(self.failure)

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait for all answers; always True."""
        while self._waiting:
            self._take(timeout_s)
        self._pool.shutdown(wait=False)
        return True

    def _take(self, timeout_s: float | None) -> None:
        answer, _ = self._waiting.popleft()
        try:
            self.failure = self.failure or answer.result(timeout_s)
        except TimeoutError:
            self.failure = self.failure or "it did not answer"


def post(url: str, body: dict[str, Any], timeout_s: float) -> str:
    """POST JSON; an empty string if the server says that it succeeded, else what went wrong."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        said = json.loads(content) if answer.status < 500 else {}
    except (OSError, http.client.HTTPException, ValueError) as e:
        return f"{parts.path}: {type(e).__name__}: {e}"
    finally:
        connection.close()
    if answer.status == 200 and said.get("success", True):
        return ""
    return f"{parts.path} answered {answer.status}: {content.decode(errors='replace')[:300]}"


class _Group:
    """A process group with servers' ranks, in which this rank is 0."""

    def __init__(self, name: str, port: int, world: int, backend: str, timeout_s: float, failing: Any) -> None:
        self.name = name
        limit = datetime.timedelta(seconds=timeout_s)
        dist: Any = torch.distributed
        store = dist.TCPStore("127.0.0.1", port, world, True, limit, wait_for_workers=False)
        self._pg = _join(store, name, world, backend, limit, failing)

    def broadcast(self, content: Tensor, failing: Any, timeout_s: float) -> None:
        """Send to all; ends with Lost when `failing()` says that a receiver is out, or in time."""
        work = torch.distributed.broadcast(content, src=0, group=self._pg, async_op=True)
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if failing():
                self.close(pending=True)
                raise Lost("a receiver refused the weights")
            if time.monotonic() > deadline:
                self.close(pending=True)
                raise Lost(f"a broadcast took more than {timeout_s:g} s")
            time.sleep(0.0001)
        work.wait()

    def close(self, *, pending: bool = False) -> None:
        """Give the group up. `pending`: in the middle of a broadcast.

        gloo's own end of a group waits for what is under way, and holds the interpreter meanwhile; such a group is left to itself.
        """
        if self._pg is None:
            return
        pg, self._pg = self._pg, None
        if pending and not torch.cuda.is_available():
            _LEFT.append(pg)
        else:
            threading.Thread(target=_give_up, args=(pg,), daemon=True).start()


_LEFT: list[Any] = []
"""groups with a broadcast that nobody takes; they may not be collected"""


def _give_up(pg: Any) -> None:
    try:
        if torch.cuda.is_available():
            _c10d._abort_process_group(pg)
        else:
            torch.distributed.destroy_process_group(pg)
    except (RuntimeError, ValueError):
        return  # it was broken already


def _join(store: Any, name: str, world: int, backend: str, limit: datetime.timedelta, failing: Any) -> Any:
    """A group beside the default one, made as SGLang makes its side of it: key prefixes and names must be the same.

    Forming it blocks until all have come, so it happens in a thread of its own, and a server that refuses ends the wait.
    """
    found: list[Any] = []

    card = torch.cuda.current_device() if torch.cuda.is_available() else None

    def form() -> None:
        if card is not None:
            torch.cuda.set_device(card)
        named = _c10d.PrefixStore(name, store)
        pg, _ = _c10d._new_process_group_helper(
            world, 0, [], _c10d.Backend(backend), named, group_name=name, backend_options=None, timeout=limit
        )
        _c10d._world.pg_group_ranks[pg] = {rank: rank for rank in range(world)}
        found.append(pg)

    pool = ThreadPoolExecutor(1, thread_name_prefix="group")
    forming = pool.submit(form)
    pool.shutdown(wait=False)
    deadline = time.monotonic() + limit.total_seconds()
    while not forming.done():
        if failing() or time.monotonic() > deadline:
            raise Lost("a server did not join the group")
        time.sleep(0.01)
    forming.result()
    return found[0]
