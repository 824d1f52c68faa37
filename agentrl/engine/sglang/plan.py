"""From settings to SGLang servers. Everything is checked before anything starts; then a fleet is created from the plan."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.config import Config, EngineSettings
from agentrl.core.ports import free_port
from agentrl.core.routed_experts import RouterShape
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.installation import Installation, find_installation, gpus
from agentrl.engine.sglang.launch_spec import AdapterForm, LaunchSpec, check_spec, command_line
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.ray_servers import RayServers, check_resources
from agentrl.engine.sglang.router import servers_at
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The servers to start, or the external servers to use."""

    model: Path
    context_length: int
    addresses: tuple[str, ...] = ()
    """external servers; empty: start our own"""
    installation: Installation | None = None
    spec: LaunchSpec | None = None
    engines_at_start: int = 0
    """with which a run starts on a ray cluster; the others join later"""
    trains: bool = False
    """there is a trainer, which sends weights"""
    ray_address: str | None = None
    """the ray cluster on which the servers start; None: this machine"""
    router: RouterShape | None = None
    """what the model's routers choose from, if their choices are recorded"""
    adapters: AdapterForm | None = None
    """the form of the adapters that the servers are sent"""
    patience_s: float = 600.0
    """how long a generation waits for a ready server"""


def plan_servers(
    config: Config,
    model: Path,
    context_length: int,
    *,
    trains: bool,
    router: RouterShape | None = None,
    adapters: AdapterForm | None = None,
) -> ServerPlan:
    """Check everything that can be known before a server starts. `trains`: there is a trainer, which needs GPUs and sends weights.
    `router`, `adapters`: see `ServerPlan`.

    Raises:
        ConfigError: the servers could not start, or the trainer could not reach them.
    """
    e = config.engine
    addresses = servers_at([_address(a) for a in e.rollout_external_engine_addrs])
    _check_sync(e, addresses, trains=trains)
    plan = ServerPlan(
        model=model, context_length=context_length, router=router, adapters=adapters, patience_s=patience_of(config)
    )
    ranks = trainer_ranks(config.train.actor_num_gpus_per_node, config.megatron)
    all_ranks = ranks * config.train.actor_num_nodes if trains else 0
    runners = config.rollout.runner_processes if config.rollout.runner_processes > 1 else 0
    if addresses:
        if config.sglang:
            raise ConfigError(
                "--sglang-… flags apply to servers that agentrl starts; external servers have their own: omit the flags"
            )
        if e.ray_address is not None:
            check_resources(e.ray_address, None, ranks=all_ranks, runners=runners)
        return replace(plan, addresses=addresses)
    installation = find_installation(e.engine_python, [e.engine_pythonpath] if e.engine_pythonpath else [])
    gpu_count = e.rollout_num_gpus or e.rollout_num_gpus_per_engine
    if gpu_count % e.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"--rollout-num-gpus {gpu_count} is not a multiple of --rollout-num-gpus-per-engine {e.rollout_num_gpus_per_engine}"
        )
    spec = LaunchSpec(
        model=model,
        dtype=config.model.dtype,
        context_length=context_length,
        engines=gpu_count // e.rollout_num_gpus_per_engine,
        gpus_per_engine=e.rollout_num_gpus_per_engine,
        first_gpu=ranks if trains and not e.colocate else 0,
        memory_saver=e.colocate,
        routed_experts=router is not None,
        adapters=adapters,
        args=config.sglang,
    )
    check_spec(spec, installation, here=e.ray_address is None)
    at_start = _engines_at_start(e, spec)
    if e.ray_address is not None:
        check_resources(e.ray_address, replace(spec, engines=at_start), ranks=all_ranks, runners=runners)
    return replace(
        plan,
        installation=installation,
        spec=spec,
        engines_at_start=at_start,
        trains=trains,
        ray_address=e.ray_address,
    )


def _engines_at_start(e: EngineSettings, spec: LaunchSpec) -> int:
    """The engines with which a run starts.

    Raises:
        ConfigError: --rollout-min-num-gpus does not divide into engines, or is more than all.
    """
    least = e.rollout_min_num_gpus
    if least is None:
        return spec.engines
    if least % spec.gpus_per_engine or least > spec.engines * spec.gpus_per_engine:
        raise ConfigError(
            f"--rollout-min-num-gpus {least} must be a multiple of --rollout-num-gpus-per-engine {spec.gpus_per_engine} and at most "
            f"--rollout-num-gpus {spec.engines * spec.gpus_per_engine}"
        )
    return least // spec.gpus_per_engine


def patience_of(config: Config) -> float:
    """How long a generation waits for a ready server: it gives up before the episode's time limit does."""
    return min(ServerPlan.patience_s, config.rollout.episode_timeout_s / 2)


def sync_kind(e: EngineSettings) -> str:
    """How weights reach the servers: colocated, disk or split."""
    elsewhere = e.rollout_external_engine_addrs or e.ray_address
    return e.weight_sync or ("colocated" if e.colocate else "disk" if elsewhere else "split")


def _check_sync(e: EngineSettings, addresses: Sequence[str], *, trains: bool) -> None:
    folder = e.update_weight_disk_dir
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"--update-weight-disk-dir {folder} is not a folder that can be written here")
    if not trains:
        return
    kind = sync_kind(e)
    remote = next((a for a in addresses if not is_local(urlsplit(a).hostname or "")), None)
    if remote and kind != "disk":
        raise ConfigError(
            f"--weight-sync {kind} reaches servers on this machine only, and {remote} is on another; use disk with --update-weight-disk-dir"
        )
    if remote and not folder:
        raise ConfigError(
            f"{remote} is on another machine: name a folder that trainer and servers both see with --update-weight-disk-dir"
        )
    if e.ray_address is not None and not folder:
        raise ConfigError(
            "--ray-address starts servers on other machines: name a folder that trainer and servers both see with --update-weight-disk-dir"
        )
    if e.colocate and kind == "disk" and gpus():
        raise ConfigError(
            "--weight-sync disk does not free the engine's GPU memory, which --colocate requires; use --weight-sync colocated, its default"
        )


def is_local(host: str) -> bool:
    """Whether this machine can listen at `host`."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no such name
        return False
    for family, kind, _, _, address in infos:
        with socket.socket(family, kind) as s:
            try:
                s.bind(address)
            except OSError:
                continue
            return True
    return False


def trainer_ranks(requested: int | None, megatron: Mapping[str, Any]) -> int:
    """Number of GPUs that the trainer uses."""
    per_copy = int(megatron.get("tensor_model_parallel_size", 1)) * int(megatron.get("pipeline_model_parallel_size", 1))
    return requested or per_copy


def make_fleet(plan: ServerPlan, run_dir: Path | None) -> Fleet:
    """The fleet, not started. Logs go to run_dir/engine, or to a temporary folder."""
    if plan.spec is None or plan.installation is None:
        return Fleet([Member(_engine(address, plan)) for address in plan.addresses], patience_s=plan.patience_s)
    logs = (run_dir or Path(tempfile.mkdtemp(prefix="agentrl-"))) / "engine"
    if plan.ray_address is not None:
        first = plan.engines_at_start
        servers = RayServers.reserve(plan.ray_address, plan.spec, plan.installation, logs.absolute(), first)
        placed = [servers.server(number) for number in range(plan.spec.engines)]
        members = [Member(_engine(s.address, plan), s, late=n >= first) for n, s in enumerate(placed)]
        return Fleet(members, patience_s=plan.patience_s, release=servers.release, grows=not plan.trains)
    first_port = plan.spec.args.get("port")
    members = []
    for number in range(plan.spec.engines):
        port = int(str(first_port)) + number if first_port is not None else free_port()
        address = f"http://127.0.0.1:{port}"
        command = command_line(plan.spec, plan.installation, number, port)
        process = ServerProcess(command, plan.installation.environment, logs / f"engine{number}.log", address)
        members.append(Member(_engine(address, plan), process))
    return Fleet(members, patience_s=plan.patience_s)


def on_gpus(plan: ServerPlan) -> bool:
    """Whether our servers run on GPUs of this machine."""
    return plan.spec is not None and bool(gpus())


def _engine(address: str, plan: ServerPlan) -> SGLangEngine:
    return SGLangEngine(
        address,
        model_dir=plan.model,
        context_length=plan.context_length,
        router=plan.router,
        serves_adapters=plan.adapters is not None,
    )


def _address(text: str) -> str:
    """HOST:PORT or a URL as a URL without a path."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        complete = parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:  # an invalid port or bracket
        complete = False
    if not complete:
        raise ConfigError(f"--rollout-external-engine-addrs takes HOST:PORT, found {text!r}")
    return url.rstrip("/")
