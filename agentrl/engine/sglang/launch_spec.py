"""Which servers to start. Flags, model, ports and memory are checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.ports import port_is_free
from agentrl.engine.sglang.installation import Installation, gpus
from agentrl.engine.sglang.protocol import check_version
from agentrl.engine.sglang.server_flags import check_flags
from agentrl.engine.weight_files import weight_bytes
from agentrl.errors import ConfigError

RESERVED = 8
"""positions that SGLang reserves of the context length it is given"""


@dataclass(frozen=True, kw_only=True)
class AdapterForm:
    """What a server must know of the adapters that it is sent."""

    count: int
    rank: int
    targets: tuple[str, ...]
    """names of the adapted matrices"""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The servers of a run."""

    model: Path
    dtype: str
    context_length: int
    engines: int = 1
    gpus_per_engine: int = 1
    first_gpu: int = 0
    memory_saver: bool = False
    """the servers will sleep (colocated)"""
    routed_experts: bool = False
    """the servers return the experts of tokens"""
    adapters: AdapterForm | None = None
    """the form of the adapters that the servers take; None: they take none"""
    args: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's flags by name without leading dashes; True: a flag without a value, False: omitted"""


def check_spec(spec: LaunchSpec, installation: Installation, *, here: bool = True) -> None:
    """Check everything that can be known before a server starts. Warns if the version is untested.

    `here`: the servers run on this machine, whose ports and GPUs are checked too.

    Raises:
        ConfigError: the servers could not start.
    """
    advice = "update it, or name another interpreter with --engine-python"
    check_version(installation.version, str(installation.python), advice)
    check_flags(spec.args, installation)
    if not (spec.model / "config.json").exists():
        raise ConfigError(f"{spec.model} is not a model folder: it has no config.json")
    fraction = _memory_fraction(spec.args)
    if here:
        _check_port(spec)
        _check_gpus(spec, fraction)


def _check_port(spec: LaunchSpec) -> None:
    port = spec.args.get("port")
    if port is None:
        return
    last = 65536 - spec.engines
    if not str(port).isdecimal() or not 0 < int(str(port)) <= last:
        raise ConfigError(f"--sglang-port is the first engine's port, a number from 1 to {last}, found {port!r}")
    for used in range(int(str(port)), int(str(port)) + spec.engines):
        if not port_is_free(used):
            raise ConfigError(f"--sglang-port {port}: port {used} is in use; omit the flag to use free ports")


def _memory_fraction(args: Mapping[str, Any]) -> float:
    given = args.get("mem_fraction_static", args.get("mem-fraction-static", 0.88))
    try:
        fraction = float(str(given))
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < 1:
        raise ConfigError(f"--sglang-mem-fraction-static is a share between 0 and 1, found {given!r}")
    return fraction


def _check_gpus(spec: LaunchSpec, memory_fraction: float) -> None:
    """There are enough GPUs with enough memory; nothing is required on a machine without GPUs."""
    cards = gpus()
    if not cards:
        return
    needed = spec.first_gpu + spec.engines * spec.gpus_per_engine
    if needed > len(cards):
        beside = f", beside a trainer of {spec.first_gpu}," if spec.first_gpu else ""
        advice = "; --colocate makes them share GPUs" if spec.first_gpu else ""
        raise ConfigError(
            f"{spec.engines} engines of {spec.gpus_per_engine} GPUs{beside} need {needed} GPUs; this machine has {len(cards)}{advice}"
        )
    weights = weight_bytes(spec.model) / spec.gpus_per_engine / 2**20
    for number, card in list(enumerate(cards))[spec.first_gpu : needed]:
        if card is None:
            continue
        free, total = card
        if weights > min(free, memory_fraction * total):
            raise ConfigError(
                f"GPU {number} has {free} of {total} MiB free, the engine's share ({memory_fraction:g}) is {memory_fraction * total:.0f} MiB, "
                f"and the weights alone take {weights:.0f} MiB; use a smaller model, more GPUs per engine or a larger --sglang-mem-fraction-static"
            )


def command_line(
    spec: LaunchSpec, installation: Installation, number: int, port: int, *, host: str = "127.0.0.1"
) -> list[str]:
    """The command that starts server `number` on the machine where this is called."""
    flags: dict[str, Any] = {
        "model-path": spec.model,
        "dtype": spec.dtype,
        "context-length": spec.context_length + RESERVED,
        "host": host,
        "port": port,
        "tp-size": spec.gpus_per_engine,
        "skip-server-warmup": True,
        "enable-return-routed-experts": spec.routed_experts,
    }
    if spec.adapters is not None:
        flags |= {"enable-lora": True, "max-lora-rank": spec.adapters.rank}
        flags |= {"lora-target-modules": spec.adapters.targets, "max-loras-per-batch": spec.adapters.count + 1}
        flags |= {} if gpus() else {"lora-backend": "torch_native"}
    if gpus():
        flags |= {
            "base-gpu-id": spec.first_gpu + number * spec.gpus_per_engine,
            "enable-memory-saver": spec.memory_saver,
        }
    else:
        flags |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags |= {"disable-overlap-schedule": True, "sleep-on-idle": True}
        flags |= {"max-total-tokens": max(8192, 8 * spec.context_length), "max-running-requests": 32}
    flags |= {k.replace("_", "-"): v for k, v in spec.args.items()} | {"port": port}
    words = [str(installation.python), "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    return words
