"""Megatron's settings as flags, under Megatron's names.

A flag is a field of TransformerConfig (with its base, ModelParallelConfig), OptimizerConfig or DistributedDataParallelConfig. `ALIASES` adds
names from Megatron-LM's arguments.py, and `DECIDED_BY_TRAINER` names the fields that the trainer decides itself.

The fields are read from megatron-core's source, because importing it takes six seconds (torch alone: 1.5) and every run with Megatron
settings needs them, to refuse a wrong one before anything starts.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config.describe import describe_type
from agentrl.errors import ConfigError

_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig", "TransformerConfig"),
    ("transformer/transformer_config.py", "TransformerConfig", "TransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig", "OptimizerConfig"),
    (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
        "DistributedDataParallelConfig",
    ),
)
"""File, class, and the dataclass that is constructed with its fields."""
_TYPES: dict[str, type] = {"str": str, "float": float, "int": int, "bool": bool}
"""Types that a flag can have. For a union, the first one listed here is used."""
_LISTS = {"list", "List", "tuple", "Tuple"}
_NOT_TYPES = {"Optional", "Union", "Literal", "None", "typing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """One flag."""

    name: str
    """Without the dashes before it: tensor-model-parallel-size."""
    field: str
    """The field that the flag sets."""
    type: type
    """int, float, bool or str; of the elements, if `many`."""
    owners: tuple[str, ...]
    """The dataclasses that have the field."""
    default: Any = None
    """megatron-core's default; None if it has none or computes it."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty: any."""
    many: bool = False
    """Whether the flag takes several values."""
    fixed: Any = None
    """What the flag sets without a value; None: it takes a value."""
    help: str = ""
    """megatron-core's description."""

    def parse(self, words: Sequence[str]) -> tuple[str, Any]:
        """Field and value of the flag, from the words after it.

        Raises:
            ConfigError: Too few words, too many, or not of its type.
        """
        if self.fixed is not None:
            if words:
                raise ConfigError(f"--{self.name} takes no value, found {words[0]!r}")
            return self.field, self.fixed
        if len(words) != 1 and not (self.many and words):
            raise ConfigError(
                f"--{self.name} takes {'one or more values' if self.many else 'one value'}, found {len(words)}"
            )
        values = [self._value(word) for word in words]
        return self.field, values if len(values) > 1 else values[0]

    def _value(self, word: str) -> Any:
        if self.choices and word not in self.choices:
            raise ConfigError(f"--{self.name} must be one of {', '.join(self.choices)}, found {word!r}")
        try:
            return self.type(word)
        except ValueError:
            raise ConfigError(f"--{self.name} must be {describe_type(self.type)}, found {word!r}") from None


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
"""Flags of Megatron-LM that are not named like a field: the field, and the value that the flag sets (None: the flag takes a value)."""

_DTYPE = "it follows from --dtype"
_OBJECT = "it is a Python object, which neither a flag nor a TOML key can give"

DECIDED_BY_TRAINER: Mapping[str, str] = {
    **dict.fromkeys("bf16 fp16 params_dtype pipeline_dtype autocast_dtype".split(), _DTYPE),
    **dict.fromkeys("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype".split(), _DTYPE),
    "lr": "it follows from --lr and its schedule",
    "min_lr": "it follows from --lr and its schedule (--lr-decay-style)",
    "calculate_per_token_loss": "losses are always plain sums",
    "variable_seq_lengths": "every micro-batch has its own length",
    "perform_initialization": "all weights are loaded from the model",
    "timers": "the trainer does not use it",
    "config_logger_dir": "the trainer does not use it",
    "activation_func": "it follows from the model's config.json",
    "attention_backend": "the trainer has its own attention",
    "cuda_graph_scope": "the trainer does not use it",
    "pipeline_model_parallel_layout": (
        "give --num-layers-in-first-pipeline-stage and --num-layers-in-last-pipeline-stage; the stages between them are equal"
    ),
}
"""Fields that cannot be set, and why."""


def why_not_settable(name: str) -> str | None:
    """Why a field of megatron-core cannot be set, by its name or the name of its flag; None: it can be set, or there is no such field."""
    field = name.replace("-", "_")
    names = (field, field.removeprefix("no_"), field.removeprefix("disable_"))
    for candidate in names:
        if candidate in DECIDED_BY_TRAINER:
            return DECIDED_BY_TRAINER[candidate]
    return next((_OBJECT for candidate in names if candidate in _unreadable_fields()), None)


@cache
def megatron_flags() -> Mapping[str, FlagSpec]:
    """All accepted flags by name without dashes, with aliases and the negations (no-…) of switches.

    Raises:
        ConfigError: megatron-core is not installed, or this version has other classes.
    """
    fields: dict[str, FlagSpec] = {}
    for spec in _read_fields():
        known = fields.get(spec.field)
        fields[spec.field] = replace(known, owners=known.owners + spec.owners) if known else spec
    flags: dict[str, FlagSpec] = {}
    for spec in fields.values():
        flags[spec.name] = spec
        if spec.type is bool:
            flags[spec.name] = replace(spec, fixed=True)
            flags[f"no-{spec.name}"] = replace(spec, name=f"no-{spec.name}", fixed=False)
    for name, (field, fixed) in ALIASES.items():
        text = fields[field].help if fixed is None else f"Sets {field} to {fixed!r}. {fields[field].help}"
        flags[name] = replace(fields[field], name=name, fixed=fixed, help=text)
    return flags


@cache
def _unreadable_fields() -> frozenset[str]:
    """Fields that neither a flag nor `DECIDED_BY_TRAINER` has: functions, torch's types and objects."""
    readable = {spec.field for spec in _read_fields()} | DECIDED_BY_TRAINER.keys()
    return frozenset(field for _, field, _, _ in _declared_fields() if not field.startswith("_")) - readable


def _declared_fields() -> Iterator[tuple[str, str, ast.AnnAssign, ast.stmt | None]]:
    """Dataclass, field, declaration, and the statement after it, once for each class that has the field."""
    core = _core_folder()
    for file, name, owner in _CLASSES:
        module = ast.parse((core / file).read_text())
        body = next((n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if body is None:
            raise ConfigError(f"megatron-core's {file} has no class {name}; this version is not supported")
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            yield owner, node.target.id, node, after


def _read_fields() -> Iterator[FlagSpec]:
    """Each field that a flag can set, once for each class that has it."""
    for owner, field, node, after in _declared_fields():
        annotation = ast.unparse(node.annotation)
        words = set(re.findall(r"[\w.]+", re.sub(r"'[^']*'", "str", annotation)))
        allowed = words - _NOT_TYPES - _LISTS
        if field.startswith("_") or field in DECIDED_BY_TRAINER or not allowed or not allowed <= _TYPES.keys():
            continue  # private, decided by the trainer, or a function, a torch type or an object
        yield FlagSpec(
            name=field.replace("_", "-"),
            field=field,
            type=next(kind for word, kind in _TYPES.items() if word in allowed),
            owners=(owner,),
            default=_default(node.value),
            choices=tuple(re.findall(r"'([^']*)'", annotation)),
            many=bool(words & _LISTS),
            help=_docstring(after),
        )


def _core_folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "core" / "model_parallel_config.py").is_file():
            return Path(folder) / "core"
    raise ConfigError("Megatron's flags need megatron-core, which is not installed; install agentrl[train]")


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # dataclasses.field(default=…)
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""  # type: ignore[union-attr]
