"""Which flags SGLang's server has, read from its source without importing it, and which of them are not the user's to give."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.engine.sglang.installation import Installation
from agentrl.errors import ConfigError, suggest

_REFUSED: dict[str, str] = {
    "dtype": "give --dtype",
    "context-length": "give --rollout-max-context-len",
    "config": "SGLang's flags go into the table [sglang] of --config",
    "enable-memory-saver": "give --colocate",
    "weight-version": "versions are agentrl's",
    "tokenizer-worker-num": "one process must know whether the server is paused and which weights it has",
    "delete-ckpt-after-loading": "the trainer reads the model's folder too",
    "preferred-sampling-params": "episodes are sampled as they say: --rollout-temperature, --rollout-top-p, --rollout-top-k",
    **dict.fromkeys(("model-path", "model"), "give --hf-checkpoint"),
    **dict.fromkeys(("tokenizer-path", "skip-tokenizer-init"), "stop strings need the model's own tokenizer"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), "give --rollout-num-gpus-per-engine"),
    **dict.fromkeys(("dp-size", "data-parallel-size"), "give --rollout-num-gpus: several engines"),
    **dict.fromkeys(
        ("pp-size", "pipeline-parallel-size"), "an engine's GPUs are tensor parallel: --rollout-num-gpus-per-engine"
    ),
    **dict.fromkeys(
        ("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr", "use-ray"),
        "engines run on this machine; for those of others give --rollout-external-engine-addrs",
    ),
    **dict.fromkeys(
        ("device", "base-gpu-id", "gpu-id-step"),
        "engines take the GPUs that CUDA_VISIBLE_DEVICES leaves, after the trainer's",
    ),
    **dict.fromkeys(
        ("host", "api-key", "admin-api-key", "ssl-keyfile", "ssl-certfile"),
        "engines listen on this machine only, and are asked over plain HTTP without a key",
    ),
    **dict.fromkeys(
        ("is-embedding", "encoder-only", "disaggregation-mode", "grpc-mode", "smg-grpc-mode"),
        "every engine must answer /generate by itself",
    ),
}
"""flags of SGLang that contradict what agentrl sets, counts or sends, and what to use"""


def check_flags(args: Mapping[str, Any], installation: Installation) -> None:
    """Refuse flags that SGLang lacks, and those that are not the user's to give.

    Raises:
        ConfigError: one sentence.
    """
    known = known_flags(installation)
    for name in args:
        flag = name.replace("_", "-")
        if flag in _REFUSED:
            raise ConfigError(f"--sglang-{flag} is not taken: {_REFUSED[flag]}")
        if flag not in known:
            raise ConfigError(f"SGLang {installation.version} has no flag --{flag}{suggest(flag, known)}")


def known_flags(installation: Installation) -> set[str]:
    """Names of all server flags: those of `add_argument`, and the fields of ServerArgs that `add_cli_args_from_dataclass` makes flags of."""
    names: set[str] = set()
    base = installation.package / "srt"
    for file in [base / "server_args.py", *sorted((base / "arg_groups").glob("fields/*.py"))]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                names |= _spellings(node.args, node.keywords)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names |= _of_field(node.target.id, node.annotation)
    return {name.removeprefix("--") for name in names}


def _of_field(name: str, annotation: ast.expr) -> set[str]:
    """The flags of a field `name: A[type, "help"]` or `name: A[type, Arg(…)]`; other fields have none."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return set()
    own = ast.Constant("--" + name.replace("_", "-"))
    for about in annotation.slice.elts[1:]:
        if isinstance(about, (ast.Constant, ast.JoinedStr)):
            return _spellings([own], [])
        if isinstance(about, ast.Call) and ast.unparse(about.func) == "Arg":
            given = {k.arg: k.value for k in about.keywords}
            if "no_cli" in given:
                return set()
            aliases = getattr(given.get("aliases"), "elts", ())
            return _spellings([given.get("cli_name", own), *aliases], about.keywords)
    return set()


def _spellings(names: Iterable[ast.expr], options: Iterable[ast.keyword]) -> set[str]:
    found = {n.value for n in names if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if any(o.arg == "action" and "BooleanOptionalAction" in ast.unparse(o.value) for o in options):
        found |= {name.replace("--", "--no-", 1) for name in found}
    return found
