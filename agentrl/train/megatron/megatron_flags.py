"""Megatron's settings as command-line flags, by Megatron's own names, read from megatron-core's source without importing it (that takes seconds).

A flag is a field of TransformerConfig (with ModelParallelConfig, its base), OptimizerConfig or DistributedDataParallelConfig, spelled with dashes.
`ALIASES` adds the names by which users of Megatron-LM's arguments.py know some of them; `OURS` says which of our own flags stands for a
setting that the trainer decides itself.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, suggest

_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag."""

    name: str
    """tensor-model-parallel-size, without the dashes before it"""
    field: str
    """that it sets"""
    type: type
    """int, float, bool or str; of the elements, where `many`"""
    owners: tuple[str, ...]
    """the dataclasses that have the field"""
    default: Any = None
    """megatron-core's own; None where it has none or computes it"""
    choices: tuple[str, ...] = ()
    """the values allowed; empty: any"""
    many: bool = False
    """takes several values"""
    fixed: Any = None
    """what the bare flag sets the field to; None: the flag takes a value"""
    help: str = ""
    """megatron-core's own words"""

    def parse(self, words: Sequence[str]) -> tuple[str, Any]:
        """Field and value of the flag, given the words after it.

        Raises:
            ConfigError: too few, too many, or not of its type.
        """
        if self.fixed is not None:
            if words:
                raise ConfigError(f"--{self.name} takes no value; found {words[0]!r}")
            return self.field, self.fixed
        if len(words) != 1 and not (self.many and words):
            raise ConfigError(
                f"--{self.name} takes {'one or more values' if self.many else 'one value'}; found {len(words)}"
            )
        values = [self._value(word) for word in words]
        return self.field, values if len(values) > 1 else values[0]

    def _value(self, word: str) -> Any:
        if self.choices and word not in self.choices:
            raise ConfigError(
                f"--{self.name} takes {', '.join(self.choices)}; found {word!r}{suggest(word, self.choices)}"
            )
        try:
            return self.type(word)
        except ValueError:
            raise ConfigError(f"--{self.name} takes a value of type {self.type.__name__}; found {word!r}") from None


ALIASES: Mapping[str, tuple[str, Any]] = {
    "recompute-activations": ("recompute_granularity", "selective"),
    "accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "fp8-format": ("fp8", None),
    "fp4-format": ("fp4", None),
    "no-bias-swiglu-fusion": ("bias_activation_fusion", False),
    "no-bias-dropout-fusion": ("bias_dropout_fusion", False),
    "no-rope-fusion": ("apply_rope_fusion", False),
    "no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "no-persist-layer-norm": ("persist_layer_norm", False),
    "no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "ddp-bucket-size": ("bucket_size", None),
    "ddp-average-in-collective": ("average_in_collective", True),
    "decoder-first-pipeline-num-layers": ("num_layers_in_first_pipeline_stage", None),
    "decoder-last-pipeline-num-layers": ("num_layers_in_last_pipeline_stage", None),
}
"""flags of Megatron-LM that are not spelled as a field: the field and what the bare flag sets it to (None: it takes a value)"""

OURS: Mapping[str, str] = {
    "bf16": "the trainer's dtype",
    "fp16": "the trainer's dtype",
    "params_dtype": "the trainer's dtype",
    "pipeline_dtype": "the trainer's dtype",
    "lr": "the learning rate of the run",
    "min_lr": "the learning rate of the run",
    "calculate_per_token_loss": "nothing: losses are always plain sums",
    "variable_seq_lengths": "nothing: micro-batches always have lengths of their own",
    "perform_initialization": "nothing: all weights are read",
    "timers": "nothing",
    "config_logger_dir": "nothing",
}
"""fields that are no flags, and what decides them instead"""


@cache
def megatron_flags() -> Mapping[str, FlagSpec]:
    """All accepted flags by name, without the dashes before them; aliases and, for switches, negations (no-…) included.

    Raises:
        ConfigError: megatron-core is not installed, or does not look as expected.
    """
    fields: dict[str, FlagSpec] = {}
    for owner, spec in _fields():
        known = fields.get(spec.field, spec)
        fields[spec.field] = replace(known, owners=(*known.owners, owner))
    flags: dict[str, FlagSpec] = {}
    for spec in fields.values():
        on = replace(spec, fixed=True) if spec.type is bool else spec
        flags[spec.name] = on
        if spec.type is bool:
            flags["no-" + spec.name] = replace(on, name="no-" + spec.name, fixed=False)
    for name, (field, fixed) in ALIASES.items():
        spec = fields[field]
        text = spec.help if fixed is None else f"Sets {field} to {fixed!r}. {spec.help}"
        flags[name] = replace(spec, name=name, fixed=fixed, help=text)
    return flags


def _folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    for place in spec.submodule_search_locations or () if spec else ():
        if (Path(place) / "core" / "model_parallel_config.py").is_file():
            return Path(place) / "core"
    raise ConfigError("Megatron's flags need megatron-core, which is not installed; install agentrl[train]")


def _fields() -> Iterator[tuple[str, FlagSpec]]:
    """Every settable field, with the dataclass it is from."""
    for file, name in _CLASSES:
        tree = ast.parse((_folder() / file).read_text())
        body = next((n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if body is None:
            raise ConfigError(f"megatron-core's {file} has no class {name}; this version is not supported")
        owner = "TransformerConfig" if name == "ModelParallelConfig" else name
        for i, node in enumerate(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and not node.target.id.startswith("_")
            ):
                after = body[i + 1] if i + 1 < len(body) else None
                spec = (
                    None if node.target.id in OURS else _spec(node.target.id, node.annotation, node.value, _doc(after))
                )
                if spec:
                    yield owner, spec


def _doc(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _spec(field: str, annotation: ast.expr, value: ast.expr | None, text: str) -> FlagSpec | None:
    """None for what no flag can hold: functions, torch types, objects."""
    kinds, choices, many = _read(annotation)
    kinds -= {"None"}
    if not kinds or not kinds <= set(_SIMPLE):
        return None
    kind = next(_SIMPLE[k] for k in ("float", "int", "bool", "str") if k in kinds)
    if "str" in kinds:
        kind = str
    return FlagSpec(field.replace("_", "-"), field, kind, (), _default(value), choices, many, help=text)


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # dataclasses.field(default=…)
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _read(node: ast.expr) -> tuple[set[str], tuple[str, ...], bool]:
    """The plain types that an annotation allows, the literals, and whether it allows a list."""
    if isinstance(node, ast.Subscript):
        head, inner = ast.unparse(node.value).rpartition(".")[2], node.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if head == "Literal":
            return {"str"}, tuple(str(ast.literal_eval(p)) for p in parts), False
        read = [_read(p) for p in parts]
        kinds = set().union(*(r[0] for r in read))
        return (
            kinds,
            sum((r[1] for r in read), ()),
            head in ("List", "list", "Tuple", "tuple") or any(r[2] for r in read),
        )
    if isinstance(node, ast.BinOp):
        left, right = _read(node.left), _read(node.right)
        return left[0] | right[0], left[1] + right[1], left[2] or right[2]
    return {ast.unparse(node)}, (), False
