"""Megatron's settings, checked against the model and this machine before anything starts. No torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentrl.errors import ConfigError, DataError, suggest
from agentrl.train.megatron.families import check_names
from agentrl.train.megatron.megatron_flags import FlagSpec, megatron_flags, why_not_settable
from agentrl.train.megatron.model_config import ModelConfig, read_model_config

logger = logging.getLogger(__name__)
Settings = Mapping[str, Any]
"""Values by the field names of megatron's dataclasses."""
_UNEVEN_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_OTHER_MODELS = (
    "mtp_", "dsa_", "linear_", "mamba_", "qk_clip", "use_kitchen", "kitchen_", "heterogeneous_", "hetereogenous_",
    "multi_latent_attention", "experimental_attention_variant", "attention_output_gate", "softmax_scale", "softmax_type",
    "window_", "no_rope_freq", "qk_l2_norm", "rotary_interleaved", "mrope_section", "is_hybrid_model",
    "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "glu_linear_offset",
    "activation_func_clamp_value", "apply_query_key_layer_scaling", "test_mode", "flash_decode",
)  # fmt: skip
"""Beginnings of TransformerConfig's fields that describe other models than those that the trainer builds."""
_EXPERT_SETTINGS = (
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Settings of models with experts. The other fields of megatron that start with moe_ follow from the model or are not supported."""
_OTHER_OPTIMIZERS = ("sgd_", "muon_")
_NO_EFFECT = {
    **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "every weight has the learning rate of the run"),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "losses are scaled for float16 only, in which nothing is trained",
    ),
    **dict.fromkeys(
        ("init_method_std", "embedding_init_method_std", "init_model_with_meta_device"),
        "all weights are loaded from the model",
    ),
    **dict.fromkeys(("inference_rng_tracker", "inference_sampling_seed"), "the engine samples, not the trainer"),
}
"""Fields that nothing reads, and why."""


_PARALLEL = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
"""the ways to divide a model over ranks"""


def check_trainer(
    folder: Path,
    settings: Settings,
    requested_ranks: int | None,
    gpus: int,
    *,
    nodes: int = 1,
    tree_packing: bool = True,
    critic: bool = False,
) -> None:
    """Check everything that can be known before a rank starts.

    Args:
        folder: the model.
        settings: megatron's.
        requested_ranks: ranks on each machine; None: one data-parallel copy, on one machine.
        gpus: GPUs of this machine; 0: the ranks run on its CPU.
        nodes: machines with ranks.
        tree_packing: rows that share a prefix are computed as a tree.
        critic: the folder may lack the output layer.

    Raises:
        UsageError: the trainer cannot start.
    """
    model = read_model_config(folder)
    check_settings(settings, model, cpu=not gpus)
    check_tree(settings, tree_packing=tree_packing)
    check_vision(folder, model, critic=critic)
    ranks, _ = rank_counts(settings, (requested_ranks or 0) * nodes or None)
    if 0 < gpus < (here := ranks // nodes):
        raise ConfigError(f"the trainer needs {here} GPUs, one for each rank; this machine has {gpus}")
    if left_out := check_names(folder, model, tensor_names(folder), critic=critic):
        logger.warning(
            "%s: %d tensors of layers for multi-token prediction are neither trained nor exported (%s …)",
            folder, len(left_out), left_out[0],
        )  # fmt: skip


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in a model folder.

    Raises:
        DataError: a file cannot be read.
    """
    names: list[str] = []
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="np") as handle:
                names += handle.keys()
        except (SafetensorError, OSError) as e:
            raise DataError(f"{file} cannot be read as safetensors: {e}; was it truncated?") from e
    return names


def check_tree(settings: Settings, *, tree_packing: bool) -> None:
    """Refuse settings with which a shared prefix does not have one value.

    Raises:
        ConfigError: dropout, which draws another mask for each row.
    """
    if tree_packing and settings.get("hidden_dropout"):
        raise ConfigError(
            f"[megatron] hidden_dropout = {settings['hidden_dropout']} draws a mask for each row, but --tree-packing computes a prefix "
            "that rows share once; set hidden_dropout to 0, or --tree-packing false"
        )


def check_vision(folder: Path, model: ModelConfig, *, critic: bool = False, true_on_policy: bool = False) -> None:
    """Refuse what is not defined for a model of images, and one whose images could not be prepared.

    Raises:
        ConfigError: a critic, the local engine's arithmetic, or no image processor.
    """
    if model.vision is None:
        return
    if critic or true_on_policy:
        what = "a critic of a model of images is" if critic else "--true-on-policy-mode for a model of images is"
        raise ConfigError(f"{folder}: {what} not supported; use an estimator without critic, and leave out the mode")
    if not (folder / "preprocessor_config.json").is_file():
        raise ConfigError(f"{folder} has no preprocessor_config.json, without which its images cannot be trained")


def check_true_on_policy(settings: Settings, dtype: str, *, tree_packing: bool) -> None:
    """Refuse what the local engine's arithmetic is not defined for.

    Raises:
        ConfigError: a model divided over ranks, another precision, or trees.
    """
    divided = [f"{name}_size" for name in _PARALLEL if settings.get(f"{name}_size", 1) > 1]
    if divided:
        raise ConfigError(
            f"--true-on-policy-mode computes as the local engine does, which does not divide a model; set [megatron] {divided[0]} to 1"
        )
    if dtype != "float32" or tree_packing:
        raise ConfigError(
            "--true-on-policy-mode needs --dtype float32 and --tree-packing false, as the local engine computes"
        )


def rank_counts(settings: Settings, requested: int | None) -> tuple[int, int]:
    """(number of ranks, ranks of one data-parallel copy). `requested`: number of ranks; None: one copy.

    Raises:
        ConfigError: a size is not positive, or the ranks do not divide into whole copies.
    """
    tensor, pipeline, context = _parallel_sizes(settings)
    copy = tensor * pipeline * context
    expert = settings.get("expert_model_parallel_size", 1) * settings.get("expert_tensor_parallel_size", tensor)
    ranks = requested or math.lcm(copy, expert * pipeline)
    for size, name in ((copy, "tensor × pipeline × context"), (expert * pipeline, "expert × expert tensor × pipeline")):
        if ranks % size:
            raise ConfigError(
                f"--actor-num-gpus-per-node: {ranks} ranks are not a multiple of {name} parallel size = {size}"
            )
    return ranks, copy


def _parallel_sizes(settings: Settings) -> tuple[int, int, int]:
    """Tensor, pipeline and context parallel size.

    Raises:
        ConfigError: one is below 1.
    """
    tensor, pipeline, context = (settings.get(f"{name}_size", 1) for name in _PARALLEL)
    if min(tensor, pipeline) < 1:
        raise ConfigError(f"tensor and pipeline model parallel sizes must be at least 1, found {tensor} and {pipeline}")
    if context < 1:
        raise ConfigError(f"context_parallel_size must be at least 1, found {context}")
    return tensor, pipeline, context


def can_have(settings: Settings, ranks: int) -> bool:
    """Whether that many ranks divide into whole copies."""
    try:
        rank_counts(settings, ranks)
    except ConfigError:
        return False
    return True


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        DataError: there are none, or a file named by the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    for name in names:
        if not (folder / name).exists():
            raise DataError(f"{folder} has no file {name}, which {index.name} names")
    files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} holds no *.safetensors files; save the model with save_pretrained(…, safe_serialization=True)"
        )
    return files


def required_settings(model: ModelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that follow from the model and the trainer."""
    return {
        **model.transformer,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def check_settings(settings: Settings, model: ModelConfig, *, cpu: bool) -> None:
    """Refuse settings that cannot work.

    Raises:
        ConfigError: unknown name, wrong type, or a contradiction.
    """
    _check_names(settings)
    for name, value in required_settings(model).items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{name} = {settings[name]!r} contradicts the model or the trainer, which need {value!r}; leave it out"
            )
    _check_parallel(settings, model)
    _check_kind(settings, model)
    _check_experts(settings, model, cpu=cpu)
    if settings.get("use_megatron_fsdp") or settings.get("use_custom_fsdp"):
        raise ConfigError(
            "use_megatron_fsdp is not supported; the optimizer is distributed already (use_distributed_optimizer)"
        )
    if cpu and (settings.get("fp8") or settings.get("fp4")):
        raise ConfigError("fp8 and fp4 need a GPU and Transformer Engine")


def _check_kind(settings: Settings, model: ModelConfig) -> None:
    """Refuse another optimizer, another kind of model, and values without effect. A value that is megatron's default is accepted."""
    optimizer = settings.get("optimizer", "adam")
    if optimizer != "adam":
        raise ConfigError(f"[megatron] optimizer must be 'adam', found {optimizer!r}")
    if settings.get("attention_dropout"):
        raise ConfigError(f"[megatron] attention_dropout must be 0, found {settings['attention_dropout']}")
    specs = {spec.field: spec for spec in megatron_flags().values()}
    for name, value in settings.items():
        if value is None or value == specs[name].default:
            continue
        other_expert = name.startswith("moe_") and name not in (*_EXPERT_SETTINGS, *model.transformer)
        if (name.startswith(_OTHER_MODELS) or other_expert) and name not in model.transformer:
            raise ConfigError(
                f"[megatron] {name} = {value!r} is for another kind of model than the trainer builds; leave it out"
            )
        if name.startswith(_OTHER_OPTIMIZERS):
            raise ConfigError(f"[megatron] {name} = {value!r} has no effect: the optimizer is adam; leave it out")
        if name in _NO_EFFECT:
            raise ConfigError(f"[megatron] {name} = {value!r} has no effect: {_NO_EFFECT[name]}; leave it out")


def _check_experts(settings: Settings, model: ModelConfig, *, cpu: bool) -> None:
    """Refuse settings of experts for a dense model, and layouts that do not divide the experts."""
    tensor, experts = settings.get("tensor_model_parallel_size", 1), settings.get("expert_model_parallel_size", 1)
    if not model.experts:
        defaults = {spec.field: spec.default for spec in megatron_flags().values()}
        given = [name for name in _EXPERT_SETTINGS if settings.get(name) not in (None, defaults[name])]
        if given or settings.get("num_moe_experts"):
            raise ConfigError(
                f"[megatron] {(given or ['num_moe_experts'])[0]} is for a mixture of experts, but the model is dense"
            )
        return
    if tensor > 1 and not settings.get("sequence_parallel"):
        raise ConfigError(
            "a mixture of experts with tensor_model_parallel_size > 1 needs sequence_parallel: give --sequence-parallel"
        )
    if experts < 1 or model.experts % experts:
        raise ConfigError(f"expert_model_parallel_size {experts} does not divide the model's {model.experts} experts")
    divisions = settings.get("expert_tensor_parallel_size", tensor)
    if divisions not in (1, tensor) or (divisions != tensor and experts == 1):
        raise ConfigError(
            f"expert_tensor_parallel_size must be {tensor}, as tensor_model_parallel_size, or 1 with expert_model_parallel_size > 1; "
            f"found {divisions}"
        )
    if cpu and experts > 1 and divisions > 1:
        raise ConfigError(
            "on CPUs experts are divided over ranks or within, not both (gloo gathers equal shapes only): set expert_tensor_parallel_size to 1"
        )
    if (width := model.transformer["moe_ffn_hidden_size"]) % divisions:
        raise ConfigError(f"expert_tensor_parallel_size {divisions} does not divide the experts' {width} channels")
    coefficient = settings.get("moe_aux_loss_coeff") or 0.0
    if not isinstance(coefficient, float | int) or coefficient < 0:
        raise ConfigError(f"moe_aux_loss_coeff must be a number of at least 0, found {coefficient!r}")


def _check_names(settings: Settings) -> None:
    specs = {spec.field: spec for spec in megatron_flags().values()}
    for name, value in settings.items():
        if name not in specs:
            if reason := why_not_settable(name):
                raise ConfigError(f"[megatron] {name} cannot be set: {reason}")
            raise ConfigError(f"[megatron]: megatron-core has no setting {name!r}{suggest(name, specs)}")
        _check_type(specs[name], value)


def _check_type(spec: FlagSpec, value: Any) -> None:
    values = value if spec.many and isinstance(value, list) else [value]
    allowed = {float: (float, int), str: (str, int, float), int: (int,), bool: (bool,)}[spec.type]
    if any(not isinstance(v, allowed) or (isinstance(v, bool) and spec.type in (int, float)) for v in values):
        raise ConfigError(f"[megatron] {spec.field} takes a value of type {spec.type.__name__}; found {value!r}")


def _check_parallel(settings: Settings, model: ModelConfig) -> None:
    tensor, pipeline, _ = _parallel_sizes(settings)
    shape = model.transformer
    for name, count in (
        ("key-value heads", shape["num_query_groups"]),
        ("feed-forward channels (intermediate_size)", shape["ffn_hidden_size"]),
    ):
        if count % tensor:
            raise ConfigError(f"tensor_model_parallel_size {tensor} does not divide the model's {count} {name}")
    layers = shape["num_layers"]
    if layers % pipeline and not any(settings.get(name) for name in _UNEVEN_STAGES):
        raise ConfigError(f"pipeline_model_parallel_size {pipeline} does not divide the model's {layers} layers")
    if settings.get("virtual_pipeline_model_parallel_size"):
        raise ConfigError(
            "virtual_pipeline_model_parallel_size is not supported: interleaved pipelines compute wrong numbers over gloo"
        )
    if settings.get("sequence_parallel") and tensor == 1:
        raise ConfigError("sequence_parallel needs tensor_model_parallel_size > 1")
