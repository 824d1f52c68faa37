"""Genuine ray clusters of several raylets on this machine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

# a busy machine may exceed the time in which a node must start; ray's niceness of 15 leaves its processes no time there
SETTINGS = {"RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"}


@contextmanager
def started(cpus: Sequence[int]) -> Iterator:
    """A cluster of a head without CPUs and one node for each number of CPUs."""
    with patch.dict(os.environ, SETTINGS):
        cluster = _start(cpus)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _start(cpus, attempts=3):
    """Try again: a busy machine may exceed that time too."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False)
        for number in cpus:
            cluster.add_node(num_cpus=number)
    except Exception as e:
        cluster.shutdown()
        if attempts == 1 or "timed out during startup" not in str(e):
            raise
        return _start(cpus, attempts - 1)
    return cluster
