"""Which flags SGLang's server has, read from its source without importing it, and which of them are not the user's to give."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.engine.sglang_install import Installation
from agentrl.errors import ConfigError, suggest

_RESERVED = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "engines listen on this machine only",
    "dtype": "--dtype",
    "context-length": "--rollout-max-context-len",
    "weight-version": "versions are agentrl's",
    "skip-tokenizer-init": "stop strings need the tokenizer",
    "dp-size": "give --rollout-num-gpus: several engines",
    "data-parallel-size": "give --rollout-num-gpus: several engines",
    "tp-size": "--rollout-num-gpus-per-engine",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "tp": "--rollout-num-gpus-per-engine",
}
"""flags of SGLang that agentrl sets itself, and what to use"""


def check_flags(args: Mapping[str, Any], installation: Installation) -> None:
    """Refuse flags that SGLang lacks, and those that agentrl sets.

    Raises:
        ConfigError: one sentence.
    """
    known = known_flags(installation)
    for name in args:
        flag = name.replace("_", "-")
        if flag in _RESERVED:
            raise ConfigError(f"--sglang-{flag} is set by agentrl: {_RESERVED[flag]}")
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
