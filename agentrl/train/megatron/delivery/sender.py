"""Sends a rank's weights to SGLang servers: by handles of shared or CUDA memory (colocated), or by broadcast in a process group.

The first rank of each pipeline stage sends requests to the servers itself, so no weights pass through the controller. No wait for a peer is
unbounded. A server's failure is part of the report, not an exception: the other ranks and servers continue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from agentrl.train.base import DeliveryReport, Receiver
from agentrl.train.megatron.adapters import weights
from agentrl.train.megatron.delivery.broadcast_group import BroadcastGroup
from agentrl.train.megatron.delivery.buckets import buckets, serialise
from agentrl.train.megatron.delivery.request_queue import RequestQueue
from agentrl.train.megatron.delivery.server_checksums import COMPARABLE, ServerLayout, server_checksums
from agentrl.train.megatron.hf_weights import gather_views
from agentrl.train.megatron.model import Built

FAILED_WAIT_S = 0.5
"""How long a server's answer is awaited after another server has failed."""


class Sender:
    """The sending side of one rank. Methods are called on all ranks; only the first rank of each stage sends and returns a result."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self.built, self.device = built, device
        self.group: BroadcastGroup | None = None
        self.receivers: list[Receiver] = []
        """the servers in the group"""
        self.gathers = built.groups.any_copy
        self.sends = built.groups.dense_copy and parallel_state.get_tensor_model_parallel_rank() == 0
        self.stage = parallel_state.get_pipeline_model_parallel_rank()

    def _weights(self) -> Iterator[tuple[str, Tensor, list[int]]]:
        """(name, tensor, shape) of every weight; all ranks of the first copy must consume it."""
        return gather_views(weights(self.built.model), self.built.layout, self.built.groups)

    def checksums(self, kind: str, ranks: int = 1) -> dict[str, str] | None:
        """A checksum (see server_checksums.py) of every parameter, under the names of a server of so many tensor-parallel ranks; none of a family
        that cannot be compared.
        """
        if not self.gathers or self.built.family not in COMPARABLE:
            return {} if self.sends else None
        tensors = ((name, tensor.reshape(shape)) for name, tensor, shape in self._weights())
        config = self.built.config
        layout = ServerLayout(
            vocab_size=self.built.layout.vocab_size,
            experts=config.num_moe_experts or 0,
            key_value_heads=config.num_query_groups,
            ranks=ranks,
        )
        sums = server_checksums(tensors, layout, kind)
        return sums if self.sends else None

    def tensors(self, receivers: Sequence[Receiver], bucket_bytes: int, timeout_s: float) -> DeliveryReport | None:
        """Deliver by handles, to servers on this machine (on a GPU: on the same GPU)."""
        if not self.gathers:
            return None
        if self.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")
        started, report = time.perf_counter(), DeliveryReport()
        queues = [RequestQueue(r, timeout_s) for r in receivers]
        for bucket in buckets(self._weights(), bucket_bytes, shared=self.sends):
            if not self.sends:
                continue
            if bucket.flat.is_cuda:
                torch.cuda.current_stream().synchronize()
            for queue in queues:
                body = {
                    "serialized_named_tensors": [serialise(bucket) for _ in range(queue.receiver.ranks)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                queue.send("/update_weights_from_tensor", body, bucket)
            report.bytes += bucket.used
            report.buckets += 1
        report.failed = _finish(queues)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        report.seconds = time.perf_counter() - started
        return report if self.sends else None

    def open_group(
        self, receivers: Sequence[Receiver], ports: Sequence[int], name: str, backend: str, timeout_s: float
    ) -> DeliveryReport | None:
        """Form a group of this stage's first rank and all ranks of all servers."""
        if not self.sends:
            return None
        self.close_group()
        started, report = time.perf_counter(), DeliveryReport()
        queues = [RequestQueue(r, timeout_s) for r in receivers]
        world = 1 + sum(r.ranks for r in receivers)
        group, port, first_rank = f"{name}-{self.stage}", ports[self.stage], 1
        for queue in queues:
            body = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": first_rank,
                "world_size": world,
                "group_name": group,
                "backend": backend,
            }
            queue.send("/init_weights_update_group", body)
            first_rank += queue.receiver.ranks
        try:
            self.group = BroadcastGroup(
                name=group,
                port=port,
                world=world,
                backend=backend,
                timeout_s=timeout_s,
                failed=lambda: any(q.failed for q in queues),
            )
        except (RuntimeError, TimeoutError) as e:
            failed = _finish(queues, FAILED_WAIT_S)
            report.failed = {r.address: failed.get(r.address, f"the group was not formed: {e}") for r in receivers}
            return report
        report.failed = _finish(queues)
        self.receivers = list(receivers)
        report.seconds = time.perf_counter() - started
        return report

    def broadcast(self, bucket_bytes: int, timeout_s: float) -> DeliveryReport | None:
        """Deliver by broadcast to the servers of the group."""
        if not self.gathers:
            return None
        started, report = time.perf_counter(), DeliveryReport()
        queues = [RequestQueue(r, timeout_s) for r in self.receivers]
        error = "" if self.group or not self.sends else "there is no group"
        for bucket in buckets(self._weights(), bucket_bytes, shared=False):
            if error or not self.group:
                continue  # the other ranks of the stage still gather tensors
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": self.group.name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            for queue in queues:
                queue.send("/update_weights_from_distributed", body, bucket)
            try:
                self.group.broadcast(bucket.content, failed=lambda: any(q.failed for q in queues), timeout_s=timeout_s)
            except RuntimeError as e:
                error = str(e)
            report.bytes += bucket.used
            report.buckets += 1
        failed = _finish(queues, FAILED_WAIT_S if error else None)
        report.failed = failed or ({r.address: error for r in self.receivers} if error else {})
        if report.failed:
            self.close_group()
        report.seconds = time.perf_counter() - started
        return report if self.sends else None

    def close_group(self) -> None:
        """Leave the group. The controller makes the servers leave."""
        if self.group is not None:
            self.group.close()
        self.group, self.receivers = None, []


def _finish(queues: Sequence[RequestQueue], timeout_s: float | None = None) -> dict[str, str]:
    """Wait for all answers; server address -> failure."""
    for queue in queues:
        queue.finish(timeout_s)
    return {q.receiver.address: q.failure for q in queues if q.failure}
