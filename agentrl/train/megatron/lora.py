"""Low-rank adapters (LoRA, Hu et al. 2021) in the form of peft: what is trained, an adapter's folder, and what is refused. No torch.

    y = W x + (alpha / rank) · B A dropout(x)          A [rank, in], B [out, rank]; B is 0 in a new adapter

Every matrix of a model that peft would adapt has an adapter of its own here too, although megatron joins q, k and v, gate and up.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from agentrl.config import LoraSettings
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.errors import ConfigError, DataError
from agentrl.train.megatron.families import Conversion, conversions
from agentrl.train.megatron.megatron_settings import Settings, weight_files
from agentrl.train.megatron.model_config import ModelConfig

logger = logging.getLogger(__name__)
PREFIX = "base_model.model."
"""what peft puts before the names of a model's modules"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_weights"
"""key of the base's fingerprint in the metadata of the weights"""
_MLP = ("gate_proj", "up_proj", "down_proj")
_MARK = ".adapter."
_PARTS = {"a": "lora_A", "b": "lora_B"}
_KINDS = {"qkv": ("copy", "rows"), "glu": ("copy", "rows"), "columns": ("columns", "copy")}
"""Kind of a weight's conversion (families/base.py) -> those of its adapters' A and B"""
_WITHOUT_EFFECT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
}  # fmt: skip
"""Keys of adapter_config.json that are read, or that do not change what an adapter computes. Of the others, only empty values are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapters of a model."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    """names of the adapted matrices, as the ends of their names in transformers"""
    base: str
    """fingerprint of the weights that are adapted"""
    start: Path | None = None
    """folder of the adapters to start from; None: new ones"""
    adapters: tuple[tuple[str, Path | None], ...] = ()
    """names of several adapters of this form, each with the folder to start from; empty: there is one, without a name"""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether a megatron parameter belongs to an adapter."""
    return _MARK in name


def adapted(convert: Conversion, targets: Sequence[str]) -> list[str]:
    """The targets among the matrices that a megatron weight consists of, in their order; empty if it can have no adapter."""
    names = [target_name(name) for name in convert.names] if convert.kind in _KINDS else []
    return [name for name in names if name in targets]


def adapter_conversions(table: Mapping[str, Conversion], targets: Sequence[str]) -> dict[str, Conversion]:
    """The conversion of every parameter of the adapters, to the names in peft's files."""
    found = {}
    for name, convert in table.items():
        for target in adapted(convert, targets):
            module = next(n for n in convert.names if target_name(n) == target).removesuffix(".weight")
            for (part, peft), kind in zip(_PARTS.items(), _KINDS[convert.kind], strict=True):
                own = f"{name.removesuffix('.weight')}{_MARK}{target}.{part}"
                found[own] = Conversion(kind, (f"{PREFIX}{module}.{peft}.weight",))
    return found


def target_name(name: str) -> str:
    """The name of a matrix among the targets, from that of its weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _channels(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each matrix that can be adapted, in the order of a layer."""
    shape = model.transformer
    hidden, width = int(shape["hidden_size"]), int(shape["ffn_hidden_size"])
    queries = int(shape["num_attention_heads"]) * model.head_dim
    keys = int(shape["num_query_groups"]) * model.head_dim
    return {
        **{name: (size, hidden) for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))},
        "o_proj": (hidden, queries),
        **dict.fromkeys(("gate_proj", "up_proj"), (width, hidden)),
        "down_proj": (hidden, width),
    }


def tensor_shapes(model: ModelConfig, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The tensors of peft's file and their shapes."""
    channels = _channels(model)
    shapes = {}
    for convert in adapter_conversions(conversions(model), targets).values():
        module, _, part = convert.names[0].removesuffix(".weight").rpartition(".")
        out, inputs = channels[target_name(module)]
        shapes[convert.names[0]] = (rank, inputs) if part == "lora_A" else (out, rank)
    return shapes


def trained_parameters(model: ModelConfig, lora: Lora) -> int:
    """The number of parameters of all adapters."""
    return sum(a * b for a, b in tensor_shapes(model, lora.rank, lora.targets).values())


def describe(folder: Path, model: ModelConfig, lora: Lora) -> str:
    """What is trained of a model, in one line."""
    total = 0
    for file in weight_files(folder):
        with safe_open(file, framework="np") as handle:
            total += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118, it is not iterable
    start = "" if lora.start is None else f", from {lora.start}"
    each = ""
    if lora.adapters:
        names = ", ".join(name if path is None else f"{name} from {path}" for name, path in lora.adapters)
        each = f" in each of {len(lora.adapters)} adapters ({names})"
    return (
        f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {' '.join(lora.targets)}{start}: "
        f"{trained_parameters(model, lora):,} parameters are trained{each}, {total:,} are frozen"
    )


# -- what is refused before a rank starts --------------------------------------------------------------------------------


def resolve(
    settings: LoraSettings, folder: Path, model: ModelConfig, megatron: Settings, *, tree_packing: bool
) -> Lora | None:
    """The adapters that the settings describe; None: all weights are trained.

    Raises:
        ConfigError: the model cannot have them, or a setting contradicts another.
        DataError: the folder to start from is not complete, or holds adapters of another model.
    """
    if not settings.used:
        return None
    _check_model(folder, model, megatron)
    if settings.lora_dropout and tree_packing:
        raise ConfigError(
            f"--lora-dropout {settings.lora_dropout:g} draws a mask for each row, but --tree-packing computes a prefix that rows share once; "
            "set --lora-dropout to 0, or --tree-packing false"
        )
    names = tuple(dict.fromkeys(settings.lora_adapters.values()))
    if settings.lora_adapter_path is not None:
        start = Path(settings.lora_adapter_path)
        return (
            _of_folders(settings, start, names, folder, model) if names else _of_folder(settings, start, folder, model)
        )
    targets = _targets(settings.lora_target_modules, model, "--lora-target-modules")
    return Lora(
        rank=settings.lora_rank,
        alpha=settings.lora_alpha or 2.0 * settings.lora_rank,
        dropout=settings.lora_dropout,
        targets=targets,
        base=base_fingerprint(folder),
        adapters=tuple((name, None) for name in names),
    )


def _check_model(folder: Path, model: ModelConfig, megatron: Settings) -> None:
    if model.latent is not None:
        raise ConfigError(
            f"{folder}: adapters on latent attention (model_type {model.family!r}) are not supported; leave out --lora-rank"
        )
    if model.vision is not None:
        raise ConfigError(
            f"{folder}: adapters on a model of images (model_type {model.family!r}) are not supported; leave out --lora-rank"
        )
    if megatron.get("moe_router_bias_update_rate"):
        raise ConfigError(
            "--moe-router-bias-update-rate changes the base, which --lora-rank keeps frozen; leave one of them out"
        )


def _targets(names: Sequence[str], model: ModelConfig, where: str) -> tuple[str, ...]:
    """The matrices to adapt, in the order of the layer. `where`: what names them, for messages."""
    chosen = tuple(_channels(model)) if tuple(names) == ("all-linear",) else tuple(names)
    possible = {target for c in conversions(model).values() for target in adapted(c, tuple(_channels(model)))}
    if model.experts and (of_experts := [n for n in _MLP if n in chosen]):
        raise ConfigError(
            f"{where} {' '.join(names)}: adapters on the experts of a mixture ({of_experts[0]}) are not supported; "
            "give --lora-target-modules q_proj k_proj v_proj o_proj"
        )
    if missing := [name for name in chosen if name not in possible]:
        have = " ".join(name for name in _channels(model) if name in possible)
        raise ConfigError(
            f"{where} {' '.join(names)}: a model of type {model.family!r} has no separate {missing[0]} to adapt; it has {have}"
        )
    return tuple(name for name in _channels(model) if name in chosen)


def _of_folders(settings: LoraSettings, start: Path, names: Sequence[str], folder: Path, model: ModelConfig) -> Lora:
    """Several adapters of one form, each from the folder of its name in `start`."""
    each = {name: _of_folder(settings, start / name, folder, model) for name in names}
    first = each[names[0]]
    for name, other in each.items():
        for what, a, b in (
            ("rank", first.rank, other.rank),
            ("alpha", first.alpha, other.alpha),
            ("targets", first.targets, other.targets),
        ):
            if a != b:
                raise ConfigError(
                    f"--lora-adapter-path {start}: the adapters of a run share one form, but the {what} of {names[0]} is {a} and that of {name} {b}"
                )
    return replace(first, start=None, adapters=tuple((name, start / name) for name in names))


def _of_folder(settings: LoraSettings, adapter: Path, folder: Path, model: ModelConfig) -> Lora:
    config = _read_config(adapter)
    shapes, metadata = _read_shapes(adapter)
    names = {target_name(name.removesuffix(".weight").rpartition(".")[0]) for name in shapes}
    targets = _targets(
        [n for n in _channels(model) if n in names] or sorted(names), model, f"{adapter}: target_modules"
    )
    rank, alpha = config["r"], config["lora_alpha"]
    for flag, given, own in (
        ("--lora-rank", settings.lora_rank or None, rank),
        ("--lora-alpha", settings.lora_alpha, alpha),
    ):
        if given not in (None, own):
            raise ConfigError(f"{flag} {given:g} contradicts {adapter}, whose adapters have {own:g}; leave it out")
    if settings.lora_target_modules != ("all-linear",) and set(settings.lora_target_modules) != set(targets):
        raise ConfigError(
            f"--lora-target-modules {' '.join(settings.lora_target_modules)} contradicts {adapter}, which adapts {' '.join(targets)}; "
            "leave it out"
        )
    _check_shapes(adapter, folder, shapes, tensor_shapes(model, rank, targets))
    base = base_fingerprint(folder)
    own_base = metadata.get(BASE)
    if own_base is not None and own_base != base:
        raise DataError(
            f"{adapter} holds adapters of another base: of weights with the fingerprint {own_base}, those of {folder} have {base}; "
            "give the model that they were trained on (--hf-checkpoint)"
        )
    named = str(config.get("base_model_name_or_path") or "")
    if own_base is None and Path(named).name != folder.name:
        logger.warning(
            "%s does not say which weights it adapts, only that the model is %r; they are taken to be %s",
            adapter,
            named,
            folder,
        )
    return Lora(rank=rank, alpha=alpha, dropout=settings.lora_dropout, targets=targets, base=base, start=adapter)


def _read_config(adapter: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise ConfigError(f"--lora-adapter-path {adapter} is not a folder of peft: it has no file {name}")
    file = adapter / CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except ValueError as e:
        raise DataError(f"{file} is not JSON: {e}") from e
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {config.get('peft_type')!r}; only 'LORA' can be trained")
    for name, least in (("r", 1), ("lora_alpha", 0)):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise DataError(f"{file}: {name} is {value!r}; expected a number of at least {least}")
    others = {k: v for k, v in config.items() if k not in _WITHOUT_EFFECT and v and (k, v) != ("bias", "none")}
    if others:
        name, value = next(iter(others.items()))
        raise ConfigError(f"{file}: {name} is {value!r}; adapters with it cannot be trained")
    return config


def _read_shapes(adapter: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the tensors of an adapter, and the metadata of its file."""
    file = adapter / WEIGHTS
    try:
        with safe_open(file, framework="np") as handle:
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            return shapes, handle.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise DataError(f"{file} cannot be read as safetensors: {e}; was it truncated?") from e


def _check_shapes(
    adapter: Path, folder: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse an adapter that does not fit the model. `found`, `expected`: shapes by the names in peft's files."""
    for name in sorted(found.keys() | expected.keys()):
        own, need = found.get(name), expected.get(name)
        if own != need:
            what = f"has shape {own and list(own)}, expected {need and list(need)}"
            what = "is missing" if own is None else "has no counterpart in the model" if need is None else what
            raise DataError(
                f"{adapter} holds adapters of another base than {folder}: the tensor {name!r} {what}; "
                "give the model that they were trained on (--hf-checkpoint)"
            )


# -- the base ----------------------------------------------------------------------------------------------------------


def base_fingerprint(folder: Path) -> str:
    """The fingerprint of a model's weights, computed once for each state of its files."""
    stats = [(str(file), file.stat()) for file in weight_files(folder)]
    return _fingerprint(str(folder), tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))


@lru_cache
def _fingerprint(folder: str, _files: tuple[tuple[str, int, int], ...]) -> str:
    return fingerprint(Path(folder))


# -- a folder of peft ----------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, files: Sequence[Path], lora: Lora, model: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors into `folder`.

    Args:
        folder: exists.
        files: float32 safetensors files of the adapters, which are removed.
        lora: their settings.
        model: the base.
    """
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= load_file(file)
        file.unlink()
    save_file(tensors, folder / WEIGHTS, {"format": "pt", BASE: lora.base})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
