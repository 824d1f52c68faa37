"""A trainer on several machines, as its controller sees it: agents of nodes dial in, and ranks are started through them.

The agents are started by the user, one for each machine, or by ray (ray_nodes.py). Both sides prove that they know the run's secret before
anything else is read (core/secret_socket.py). A rank on a node is a process at the other end of a TCP connection to this process.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.core.secret_socket import Controller, Listener, differing_version
from agentrl.engine.sglang.installation import gpus
from agentrl.errors import ConfigError, WorkerError
from agentrl.train.megatron.node_agent import Hello, RankHello, folder_digest
from agentrl.train.megatron.rank_place import RankPlace, ThisMachine

logger = logging.getLogger(__name__)
JOIN_S = 600.0
"""how long the nodes of a run may take to join it"""
REJOIN_S = 300.0
"""how long the ranks wait for nodes that were lost, before they start on those that are left"""
RECALL_S = 5.0
"""how often lost nodes are called again: an agent may have been started where its machine was about to end"""
REQUEST_S = 30.0
"""a node that does not answer for this long is lost"""


class Node:
    """A node whose agent has dialled in."""

    def __init__(self, hello: Hello, connection: Connection) -> None:
        self.hello, self.lost = hello, False
        self._connection = connection
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"node {self.hello.number} ({self.hello.name})"

    def request(self, command: str, *, within_s: float = REQUEST_S, **arguments: Any) -> Any:
        """The result of a command of `NodeAgent`.

        Raises:
            WorkerError: the node is gone, does not answer, or raised.
        """
        with self._lock:
            try:
                if self.lost:
                    raise EOFError
                self._connection.send((command, arguments))
                if not self._connection.poll(within_s):
                    raise TimeoutError
                kind, value = self._connection.recv()
            except (EOFError, OSError) as e:
                self.lost = True
                self._connection.close()
                how = f"did not answer within {within_s:g} s" if isinstance(e, TimeoutError) else "is gone"
                raise WorkerError(f"{command}: {self} {how}") from None
        if kind == "error":
            raise WorkerError(f"{command}: {self} raised\n{value.rstrip()}")
        return value

    def end(self) -> None:
        """Tell the agent that the run has ended."""
        with self._lock, suppress(OSError):
            if not self.lost:
                self._connection.send(("end", {}))
                self._connection.close()
            self.lost = True


class NodeRank:
    """A rank's process on a node."""

    def __init__(self, node: Node, key: int, connection: Connection) -> None:
        self._node, self._key, self.connection = node, key, connection

    def ended(self, timeout_s: float) -> str | None:
        try:
            limit_s = REQUEST_S + timeout_s
            how: str | None = self._node.request("ended", within_s=limit_s, key=self._key, timeout_s=timeout_s)
        except WorkerError:
            return f"ended with its machine, {self._node}"
        return how

    def kill(self) -> None:
        with suppress(WorkerError):  # gone with its node
            self._node.request("kill", key=self._key)


class NodePlace:
    """Room for a rank on a node."""

    def __init__(self, nodes: Nodes, node: Node, local_rank: int) -> None:
        self._nodes, self._node, self.local_rank = nodes, node, local_rank

    def start(self, rank: int, log: Path, threads: int) -> NodeRank:
        key = next(self._nodes.keys)
        self._node.request("start", key=key, log=log, threads=threads)
        return NodeRank(self._node, key, self._nodes.rank_connection(key, self._node))

    def rendezvous(self) -> tuple[str, int]:
        return self._node.hello.host, self._node.request("free_port")


class Nodes:
    """The machines of a run.

    Args:
        numbers: those of the nodes whose agents dial in.
        ranks_per_node: ranks on each of them.
        local_ranks: ranks on this machine, which come first.
        host: address of this machine at which the nodes reach it.
        port: 0: any.
        ranks_per_machine: ranks on each machine, if several nodes are on one; None: `ranks_per_node`.
        call: starts the agents of these nodes, or asks for them. It is called again for nodes that were lost.
        advice: says what a user can do about a node that does not join, or why it did not.
        release: called when the run ends.
        shared: further folders that every node must see, besides that of the run.
        join_s: how long nodes may take to join.
        rejoin_s: how long the ranks wait for nodes that were lost.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        ranks_per_node: int,
        ranks_per_machine: int | None = None,
        local_ranks: int = 0,
        host: str,
        port: int = 0,
        call: Callable[[Sequence[int], Controller], None],
        advice: Callable[[], str],
        release: Callable[[], None],
        shared: Sequence[Path] = (),
        join_s: float = JOIN_S,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        self.ranks_per_node = ranks_per_node
        self.ranks_per_machine = ranks_per_machine or ranks_per_node
        self.keys = count()
        self._numbers, self._local_ranks, self._host = numbers, local_ranks, host
        self._call, self._advice, self._release, self._shared = call, advice, release, shared
        self._join_s, self._rejoin_s = join_s, rejoin_s
        self._started = False
        self._nodes: dict[int, Node] = {}
        self._rank_connections: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._closed = False
        try:
            self._listener = Listener(host, port, self._admit)
        except OSError as e:
            raise ConfigError(
                f"this machine cannot listen for the other nodes at {host}:{port}: {e}; --master-addr is an address of node 0, and "
                "--master-port a free port on it"
            ) from e
        self._controller = self._listener.controller

    # -- connections ---------------------------------------------------------------------------------------------------

    def _admit(self, hello: Any, connection: Connection, peer: str) -> None:
        """Sort in a connection: a node's, or that of a rank."""
        with self._changed:
            if not self._closed and isinstance(hello, RankHello):
                self._rank_connections[hello.key] = connection
            elif not self._closed and hello.number in self._numbers:
                before = self._nodes.get(hello.number)
                if before is not None and not before.lost:
                    logger.warning("%s joined again, from %s: the one before is not used any more", before, hello.name)
                    before.end()
                logger.info("node %d joined from %s (%s)", hello.number, hello.name, peer)
                self._nodes[hello.number] = Node(hello, connection)
            else:
                connection.close()
            self._changed.notify_all()

    def rank_connection(self, key: int, node: Node) -> Connection:
        """The connection of a rank that was started.

        Raises:
            WorkerError: it did not arrive.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._rank_connections, REQUEST_S):
                raise WorkerError(f"start: the connection of a rank on {node} did not arrive within {REQUEST_S:g} s")
            return self._rank_connections.pop(key)

    # -- places --------------------------------------------------------------------------------------------------------

    def places(self, model: Path, run_dir: Path, fits: Callable[[int], bool]) -> list[RankPlace]:
        """Room for the ranks, by rank.

        When ranks start again after a failure, nodes that do not come back are left out, and there are fewer places.

        Args:
            model: a folder that must be the same on all nodes.
            run_dir: the run folder, which all nodes must see.
            fits: whether a trainer can have that number of ranks.

        Raises:
            ConfigError: a node did not join, or does not fit to the others.
            WorkerError: too few nodes are left.
        """
        nodes = self._joined()
        for folder in (run_dir, *self._shared):
            self._check_shared(folder, nodes)
        for node in nodes:
            self._check(node, model)
        if len(nodes) < len(self._numbers):
            nodes = self._rest(nodes, fits)
        here: list[RankPlace] = [ThisMachine(local, self._host) for local in range(self._local_ranks)]
        return here + [NodePlace(self, node, local) for node in nodes for local in range(self.ranks_per_node)]

    def _joined(self) -> list[Node]:
        """The nodes, once all are here, or the time to wait for them is over."""
        again, self._started = self._started, True
        limit_s = self._rejoin_s if again else self._join_s
        missing = [n for n in self._numbers if not self._alive(n)]
        if missing:
            self._call(missing, self._controller)
            if again:
                logger.warning("the ranks wait %g s for %s to come back", limit_s, _listed(missing))
        deadline = time.monotonic() + limit_s

        def absent() -> list[int]:
            return [] if self._closed else [n for n in missing if n not in self._nodes]

        while absent() and (left_s := deadline - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(lambda: not absent(), min(left_s, RECALL_S))
            if again and (lost := absent()):
                self._call(lost, self._controller)
        with self._changed:
            if self._closed:
                raise WorkerError("the trainer was closed")
            missing = [n for n in self._numbers if n not in self._nodes]
            if missing and not again:
                raise ConfigError(f"{_listed(missing)} did not join within {limit_s:g} s; {self._advice()}")
            return [self._nodes[n] for n in self._numbers if n in self._nodes]

    def _alive(self, number: int) -> bool:
        """Whether a node answers; one that does not is forgotten."""
        node = self._nodes.get(number)
        if node is None:
            return False
        with suppress(WorkerError):
            node.request("free_port")
        if node.lost:
            with self._changed:
                if self._nodes.get(number) is node:
                    del self._nodes[number]
        return number in self._nodes

    def _rest(self, nodes: list[Node], fits: Callable[[int], bool]) -> list[Node]:
        """As many of the nodes that are left as a trainer can use."""
        for number in range(len(nodes), -1, -1):
            ranks = self._local_ranks + number * self.ranks_per_node
            if ranks and fits(ranks):
                logger.warning(
                    "%d of %d nodes are left: the trainer goes on with %d ranks; sums have another order, so the weights differ in the last bits",
                    number + bool(self._local_ranks), len(self._numbers) + bool(self._local_ranks), ranks,
                )  # fmt: skip
                return nodes[:number]
        raise WorkerError(f"{len(nodes)} of {len(self._numbers)} nodes are left, too few for the trainer's ranks")

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_shared(self, folder: Path, nodes: Sequence[Node]) -> None:
        """Refuse a folder of this machine alone.

        Raises:
            ConfigError: a node does not see what is written here.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text = secrets.token_hex(16)
        probe = folder.absolute() / f".probe-{text}"
        probe.write_text(text)
        try:
            blind = [node for node in nodes if not node.request("sees", probe=probe, text=text)]
        finally:
            probe.unlink()
        if blind:
            raise ConfigError(
                f"{blind[0]} does not see what is written to {folder.absolute()}; trainer ranks on several machines need a folder that all "
                "of them share, at the same path"
            )

    def _check(self, node: Node, model: Path) -> None:
        """Refuse a node that does not fit.

        Raises:
            ConfigError: it has another model, other versions, or too few GPUs.
        """
        if node.request("digest", folder=model.absolute()) != folder_digest(model):
            raise ConfigError(
                f"{node} has no or another model at {model.absolute()}; every node needs the same one at the same path"
            )
        if (differs := differing_version(node.hello.versions)) is not None:
            raise ConfigError(f"{node} {differs}")
        here = len(gpus()) if self._local_ranks else node.hello.gpus
        if 0 < node.hello.gpus < self.ranks_per_node or bool(here) != bool(node.hello.gpus):
            raise ConfigError(f"{node} has {node.hello.gpus} GPUs, but needs {self.ranks_per_node if here else 0}")

    def close(self) -> None:
        """Tell the nodes that the run has ended; idempotent."""
        with self._changed:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            self._changed.notify_all()
        self._listener.close()
        for node in nodes:
            node.end()
        self._release()


def _listed(numbers: Sequence[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
