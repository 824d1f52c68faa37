"""Trainer ranks on the nodes of a ray cluster: an actor for each rank, in a separate bundle, is its node's agent (node_agent.py).

The ranks of a machine have one placement group. If the machine dies, ray moves the group to another one with room. ray is imported only when it
is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentrl.core.ray_cluster import bundle_of, connect, listed, options_of, release, reserve
from agentrl.core.secret_socket import Controller
from agentrl.errors import ConfigError
from agentrl.train.megatron.node_agent import NodeAgent

JOIN_S = 300.0
"""how long an actor may take to import agentrl and to join; its room is reserved before"""


class AgentActor:
    """The actor's code."""

    def serve(self, controller: Controller, number: int) -> None:
        """Run the agent until the controller ends or is gone."""
        NodeAgent(controller, number).serve()


class RayRanks:
    """The room of a trainer's ranks in a ray cluster: `nodes` machines with `ranks_per_node` ranks each."""

    def __init__(self, address: str, nodes: int, ranks_per_node: int) -> None:
        """Connect to the cluster and reserve the room.

        Raises:
            ConfigError: the cluster does not answer, or has too little.
        """
        check_ranks(address, nodes, ranks_per_node)
        self._ranks_per_node = ranks_per_node
        self._groups: list[Any] = []
        self._actors: dict[int, Any] = {}
        self._served: dict[int, Any] = {}
        try:
            for _ in range(nodes):
                self._groups.append(reserve(bundle_of(1), ranks_per_node, "STRICT_PACK"))
        except BaseException:
            self.release()
            raise

    @property
    def address(self) -> str:
        """The address of this machine in the cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start_agents(self, numbers: Sequence[int], controller: Controller) -> None:
        """Start the actors of these ranks, unless they are there; they wait while their room is not there."""
        import ray

        bundle = bundle_of(1)
        for number in numbers:
            if number in self._served and not ray.wait([self._served[number]], timeout=0)[0]:
                continue
            node, index = divmod(number, self._ranks_per_node)
            options = options_of(self._groups[node], index, bundle)
            actor = self._actors[number] = ray.remote(AgentActor).options(**options).remote()
            self._served[number] = actor.serve.remote(controller, number)

    def why(self) -> str:
        """Why an actor did not join, as far as ray knows."""
        import ray

        ended, _ = ray.wait(list(self._served.values()), num_returns=len(self._served), timeout=0)
        for reference in ended:
            try:
                ray.get(reference, timeout=1)
            except ray.exceptions.RayError as e:
                return f"its ray actor ended: {str(e).strip().splitlines()[-1][:300]}"
        return "its ray actor waits for room, or cannot reach this machine"

    def release(self) -> None:
        """End the actors and give the room back; idempotent."""
        import ray

        if ray.is_initialized():
            for actor in self._actors.values():
                ray.kill(actor)
        self._actors = {}
        for group in self._groups:
            release(group)


def check_ranks(address: str, nodes: int, ranks_per_node: int) -> None:
    """Refuse ranks for which the cluster has too little, however idle it is.

    Raises:
        ConfigError: it has too little, or does not answer.
    """
    connect(address)
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundle = bundle_of(1)
    rooms = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in alive]
    if sum(room // ranks_per_node for room in rooms) < nodes:
        name = "GPU" if "GPU" in bundle else "CPU"
        has = "; ".join(f"{number} × {text}" for text, number in sorted(Counter(map(listed, alive)).items()))
        raise ConfigError(
            f"the trainer needs {nodes} × {ranks_per_node} {name}s, each {ranks_per_node} on one machine (--actor-num-nodes × "
            f"--actor-num-gpus-per-node); the machines of the ray cluster at {address} have {has}"
        )


def has_gpus(address: str) -> bool:
    """Whether ranks run on GPUs there.

    Raises:
        ConfigError: the cluster does not answer.
    """
    connect(address)
    return "GPU" in bundle_of(1)
