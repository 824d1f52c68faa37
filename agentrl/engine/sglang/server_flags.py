"""The flags of SGLang's server: which exist, and which agentrl sets itself.

SGLang may be installed for another interpreter than ours, so that interpreter lists the flags, once.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping
from typing import Any

from agentrl.engine.sglang.installation import Installation
from agentrl.errors import ConfigError, suggest

REFUSED: dict[str, str] = {
    "dtype": "give --dtype",
    "context-length": "give --rollout-max-context-len",
    "config": "put SGLang's flags into the table [sglang] of --config",
    "enable-memory-saver": "give --colocate",
    "weight-version": "agentrl sets the versions of weights",
    "tokenizer-worker-num": "a single process must know whether the server is paused and which weights it has",
    "delete-ckpt-after-loading": "the trainer reads the model's folder too",
    "preferred-sampling-params": "give --rollout-temperature, --rollout-top-p and --rollout-top-k",
    **dict.fromkeys(
        (
            "enable-lora",
            "lora-paths",
            "max-lora-rank",
            "lora-target-modules",
            "max-loaded-loras",
            "max-loras-per-batch",
            "lora-eviction-policy",
            "lora-backend",
            "max-lora-chunk-size",
        ),
        "give --lora-rank, which merges adapters into the weights that engines receive, or --lora-adapter, which sends several",
    ),
    **dict.fromkeys(("model-path", "model"), "give --hf-checkpoint"),
    **dict.fromkeys(("tokenizer-path", "skip-tokenizer-init"), "stop strings need the model's tokenizer"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), "give --rollout-num-gpus-per-engine"),
    **dict.fromkeys(("dp-size", "data-parallel-size"), "give --rollout-num-gpus, which starts several engines"),
    **dict.fromkeys(
        ("pp-size", "pipeline-parallel-size"),
        "the GPUs of an engine are tensor parallel; give --rollout-num-gpus-per-engine",
    ),
    **dict.fromkeys(
        ("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr", "use-ray"),
        "an engine runs on one machine; for servers on others give --ray-address or --rollout-external-engine-addrs",
    ),
    **dict.fromkeys(
        ("device", "base-gpu-id", "gpu-id-step"),
        "engines use the GPUs in CUDA_VISIBLE_DEVICES, after those of the trainer",
    ),
    **dict.fromkeys(
        ("host", "api-key", "admin-api-key", "ssl-keyfile", "ssl-certfile"),
        "engines listen on this machine only, over plain HTTP without a key",
    ),
    **dict.fromkeys(
        ("is-embedding", "encoder-only", "disaggregation-mode", "grpc-mode", "smg-grpc-mode"),
        "every engine must answer /generate by itself",
    ),
}
"""Flags of SGLang that agentrl sets itself or cannot work with, and what to do instead."""

_LIST_FLAGS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
flags = {
    option.removeprefix("--"): {
        "type": getattr(action.type, "__name__", "switch" if action.nargs == 0 else "text"),
        "choices": action.choices and list(action.choices),
        "default": action.default,
        "help": action.help,
    }
    for action in parser._actions
    for option in action.option_strings
}
print("\\n" + json.dumps(flags, default=str))
"""


def check_flags(args: Mapping[str, Any], installation: Installation) -> None:
    """Refuse flags that SGLang does not have, and those in `REFUSED`.

    Raises:
        ConfigError: The first of them.
    """
    for name in args:
        flag = name.replace("_", "-")
        if flag in REFUSED:
            raise ConfigError(f"--sglang-{flag} is not accepted: {REFUSED[flag]}")
        known = server_flags(installation)
        if known and flag not in known:
            raise ConfigError(f"SGLang {installation.version} has no flag --{flag}{suggest(flag, known)}")


@functools.cache
def server_flags(installation: Installation) -> dict[str, dict[str, Any]]:
    """Type, choices, default and help of each flag, by its name without dashes.

    Empty if SGLang cannot be imported; the server reports the reason when it starts.
    """
    command = [str(installation.python), "-c", _LIST_FLAGS]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, env=installation.environment, timeout=120, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return {}
    flags: dict[str, dict[str, Any]] = json.loads(listed.stdout.splitlines()[-1])
    return flags
