"""What servers to start, checked before anything starts: flags, model, ports, memory; and their command lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.ports import port_is_free
from agentrl.engine.sglang.installation import Installation, gpus
from agentrl.engine.sglang.protocol import LEAST, warn_if_untested
from agentrl.engine.sglang.server_flags import check_flags
from agentrl.engine.weight_files import weight_bytes
from agentrl.errors import ConfigError

RESERVED = 8
"""positions that SGLang keeps back from the context length it is given"""


@dataclass(frozen=True)
class LaunchSpec:
    """What to start."""

    model: Path
    dtype: str
    context_length: int
    engines: int = 1
    gpus_per_engine: int = 1
    first_gpu: int = 0
    memory_saver: bool = False
    """the engine will sleep (colocated)"""
    args: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's flags by name, without dashes in front; True: a flag without a value, False: left out"""


def check_spec(spec: LaunchSpec, installation: Installation) -> None:
    """Everything that can be known to fail before a server is started; warns of an untested version.

    Raises:
        ConfigError: one sentence.
    """
    _check_version(installation)
    check_flags(spec.args, installation)
    if not (spec.model / "config.json").exists():
        raise ConfigError(f"{spec.model} is no model folder: it has no config.json")
    _check_port(spec)
    share = _memory_share(spec.args)
    cards = gpus()
    if not cards:
        return
    needed = spec.first_gpu + spec.engines * spec.gpus_per_engine
    if needed > len(cards):
        beside, share_them = (
            (f", beside a trainer of {spec.first_gpu},", "; --colocate has them share") if spec.first_gpu else ("", "")
        )
        raise ConfigError(
            f"{spec.engines} engines of {spec.gpus_per_engine} GPUs{beside} need {needed} GPUs; this machine has {len(cards)}{share_them}"
        )
    weights = weight_bytes(spec.model) / spec.gpus_per_engine / 2**20
    for number, card in list(enumerate(cards))[spec.first_gpu : needed]:
        if card is None:
            continue
        free, total = card
        if weights > min(free, share * total):
            raise ConfigError(
                f"GPU {number} has {free} of {total} MiB free, the engine's share ({share:g}) is {share * total:.0f} MiB, "
                f"and the weights alone take {weights:.0f} MiB; use a smaller model, more GPUs per engine or a larger --sglang-mem-fraction-static"
            )


def _check_version(installation: Installation) -> None:
    """Names of development builds cannot be compared: they are only untested."""
    released = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", installation.version)
    if released and tuple(map(int, released.groups()[:3])) < LEAST:
        raise ConfigError(
            f"{installation.python} has SGLang {installation.version}, agentrl needs {'.'.join(map(str, LEAST))} or later: "
            "update it, or name another interpreter with --engine-python"
        )
    warn_if_untested(installation.version)


def _check_port(spec: LaunchSpec) -> None:
    port = spec.args.get("port")
    if port is None:
        return
    last = 65536 - spec.engines
    if not str(port).isdecimal() or not 0 < int(str(port)) <= last:
        raise ConfigError(f"--sglang-port is the first engine's, a number from 1 to {last}, found {port!r}")
    for used in range(int(str(port)), int(str(port)) + spec.engines):
        if not port_is_free(used):
            raise ConfigError(
                f"--sglang-port {port}: port {used} is in use; leave the flag out to have a free one chosen"
            )


def _memory_share(args: Mapping[str, Any]) -> float:
    given = args.get("mem_fraction_static", args.get("mem-fraction-static", 0.88))
    try:
        share = float(str(given))
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(f"--sglang-mem-fraction-static is a share between 0 and 1, found {given!r}")
    return share


def command_line(spec: LaunchSpec, installation: Installation, number: int, port: int) -> list[str]:
    """The server's command."""
    cpu = not gpus()
    flags: dict[str, Any] = {
        "model-path": spec.model,
        "dtype": spec.dtype,
        "context-length": spec.context_length + RESERVED,
        "host": "127.0.0.1",
        "port": port,
        "tp-size": spec.gpus_per_engine,
        "skip-server-warmup": True,
    }
    if cpu:
        flags |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags |= {"disable-overlap-schedule": True, "sleep-on-idle": True}
        flags |= {"max-total-tokens": max(8192, 8 * spec.context_length), "max-running-requests": 32}
    else:
        flags |= {
            "base-gpu-id": spec.first_gpu + number * spec.gpus_per_engine,
            "enable-memory-saver": spec.memory_saver,
        }
    flags |= {k.replace("_", "-"): v for k, v in spec.args.items()} | {"port": port}
    words = [str(installation.python), "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    return words
