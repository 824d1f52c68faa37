"""The machines of a run whose trainer has ranks on several: who node 0 is, how the others find it, what they must share.

Node 0 writes its address and the run's secret to `nodes.json` in the run folder, readable by its owner only. The other nodes wait for that file, so
they have the folder, the address and the right to join at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config import Config, TrainSettings
from agentrl.core.atomic_write import new_file
from agentrl.core.secret_socket import Controller
from agentrl.engine.sglang.installation import gpus
from agentrl.errors import ConfigError, WorkerError
from agentrl.run.run_log import Echo
from agentrl.train.megatron.megatron_settings import rank_counts
from agentrl.train.megatron.node_agent import NodeAgent
from agentrl.train.megatron.nodes import JOIN_S, Nodes

FILE = "nodes.json"
POLL_S = 0.5


def node_rank(config: Config, environment: Mapping[str, str] = os.environ) -> int:
    """The number of this node; 0 where all ranks are on one machine, or where ray places them.

    Raises:
        ConfigError: it is not given, or cannot be.
    """
    train = config.train
    if train.actor_num_nodes == 1 or config.engine.ray_address is not None:
        return 0
    if int(environment.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise ConfigError("agentrl starts the ranks of a node itself; give torchrun --nproc-per-node 1")
    given = train.node_rank
    if given is None:
        word = environment.get("NODE_RANK", environment.get("GROUP_RANK", ""))
        if not word.isdecimal() or int(word) >= train.actor_num_nodes:
            raise ConfigError(
                f"--actor-num-nodes {train.actor_num_nodes} needs --node-rank, or the environment variable NODE_RANK, from 0 to "
                f"{train.actor_num_nodes - 1} on each node; found {word!r}"
            )
        given = int(word)
    return given


def require_weights_folder(config: Config) -> None:
    """Refuse ranks on several machines without a folder for their weights.

    Raises:
        ConfigError: there is none.
    """
    nodes, address, folder = (
        config.train.actor_num_nodes,
        config.engine.ray_address,
        config.engine.update_weight_disk_dir,
    )
    if (nodes > 1 or address is not None) and not folder:
        given = f"--actor-num-nodes {nodes}" if address is None else f"--ray-address {address}"
        raise ConfigError(
            f"{given} needs --update-weight-disk-dir, a folder that all nodes share: the engine reads the weights of the trainer's ranks "
            "from it"
        )


def make_nodes(config: Config, run: Path) -> Nodes | None:
    """The machines of the trainer's ranks, of which this is node 0; None: this one alone. Nobody has joined yet.

    Raises:
        ConfigError: this is not node 0, or its address is missing or cannot be used.
    """
    if (number := node_rank(config)) > 0:
        raise ConfigError(
            f"this is node {number} of a run on several machines, which only has trainer ranks; start `agentrl train` with --node-rank here"
        )
    train, disk = config.train, config.engine.update_weight_disk_dir
    shared = [Path(disk)] if disk else []
    if config.engine.ray_address is not None:
        return _on_ray(config.engine.ray_address, config, shared)
    if train.actor_num_nodes == 1:
        return None
    host = train.master_addr or os.environ.get("MASTER_ADDR")
    if not host:
        raise ConfigError(
            f"--actor-num-nodes {train.actor_num_nodes} needs --master-addr, or the environment variable MASTER_ADDR: the address of this "
            "machine at which the other nodes reach it"
        )
    port = os.environ.get("MASTER_PORT", "0")
    if not port.isdecimal():
        raise ConfigError(
            f"the environment variable MASTER_PORT must be a number, found {port!r}; or give --master-port"
        )
    assert train.actor_num_gpus_per_node is not None, "checked with the settings"
    return Nodes(
        range(1, train.actor_num_nodes),
        ranks_per_node=train.actor_num_gpus_per_node,
        local_ranks=train.actor_num_gpus_per_node,
        host=host,
        port=train.master_port or int(port),
        call=lambda missing, controller: _publish(run / FILE, controller),
        release=lambda: (run / FILE).unlink(missing_ok=True),
        advice=lambda: f"start the same command there with --node-rank and --run {run}",
        shared=shared,
    )


def ranks_per_node(config: Config) -> int:
    """Trainer ranks on each machine; without --actor-num-gpus-per-node one data-parallel copy."""
    return config.train.actor_num_gpus_per_node or rank_counts(config.megatron, None)[0]


def gpus_of_trainer(config: Config) -> int:
    """GPUs of a machine with trainer ranks; 0: they run on CPUs.

    Raises:
        ConfigError: the ray cluster of --ray-address has too little for them.
    """
    address = config.engine.ray_address
    if address is None:
        return len(gpus())
    per_node = ranks_per_node(config)
    from agentrl.train.megatron.ray_nodes import check_ranks, has_gpus

    check_ranks(address, config.train.actor_num_nodes, per_node)
    return per_node if has_gpus(address) else 0


def _on_ray(address: str, config: Config, shared: Sequence[Path]) -> Nodes:
    from agentrl.train.megatron.ray_nodes import JOIN_S as ACTORS_JOIN_S
    from agentrl.train.megatron.ray_nodes import RayRanks

    per_node = ranks_per_node(config)
    ranks = RayRanks(address, config.train.actor_num_nodes, per_node)
    return Nodes(
        range(config.train.actor_num_nodes * per_node),
        ranks_per_node=1,
        ranks_per_machine=per_node,
        host=ranks.address,
        call=ranks.start_agents,
        advice=ranks.why,
        release=ranks.release,
        shared=shared,
        join_s=ACTORS_JOIN_S,
    )


def _publish(path: Path, controller: Controller) -> None:
    meeting = {"host": controller.host, "port": controller.port, "secret": controller.secret.hex()}
    with new_file(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(meeting))


def _meeting(path: Path) -> Controller | None:
    """Where the controller listens, if it has written that."""
    try:
        meeting = json.loads(path.read_text())
        return Controller(str(meeting["host"]), int(meeting["port"]), bytes.fromhex(meeting["secret"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}; all nodes run as the same user") from e


def join_run(config: Config, run: Path | None, echo: Echo, *, wait_s: float = JOIN_S) -> None:
    """Run this node's trainer ranks until node 0 ends the run.

    Args:
        config: the settings, as of node 0.
        run: the run folder.
        echo: shows a message to the user.
        wait_s: how long node 0 may take to start; with --use-fault-tolerance also to start again.

    Raises:
        ConfigError: node 0 does not start, or its run folder is not here.
        WorkerError: node 0 is gone.
    """
    number = node_rank(config)
    if run is None:
        raise ConfigError(
            f"--node-rank {number} finds its run by its folder, which all nodes share; give --run on every node"
        )
    while True:
        agent = _joined(run, number, wait_s)
        echo(f"node {number} of {config.train.actor_num_nodes} has joined the run in {run}")
        if agent.serve():
            echo("the run has ended")
            return
        if not config.run.use_fault_tolerance:
            raise WorkerError(
                "node 0 is gone, or another process has this node's number; start the run again, with --resume on every node"
            )
        echo(f"node 0 is gone; this node waits {wait_s:g} s for it to start again")


def _joined(run: Path, number: int, wait_s: float) -> NodeAgent:
    """The agent of this node, once node 0 admits it. A file of a run before is not a meeting place any more."""
    deadline, problem = time.monotonic() + wait_s, "that file does not exist here"
    while time.monotonic() < deadline:
        if (controller := _meeting(run / FILE)) is not None:
            try:
                return NodeAgent(controller, number)
            except (OSError, WorkerError) as e:
                problem = f"nobody admits this node at {controller.host}:{controller.port} ({e})"
        time.sleep(POLL_S)
    raise ConfigError(
        f"node {number} waited {wait_s:g} s for {run / FILE}, which node 0 writes: {problem}; start node 0 with the same --run, a folder that "
        "all nodes share"
    )


def flags_of_node(train: TrainSettings) -> Sequence[str]:
    """The flags of this node, which a run folder does not hold."""
    given = {"--node-rank": train.node_rank, "--master-addr": train.master_addr, "--master-port": train.master_port}
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
