"""Builds one rank's part of the model with megatron-core: GPTModel, DistributedDataParallel and the optimizer.

The fields of megatron's three dataclasses come from the user's settings, from the model's config.json, and from the trainer (device,
precision, sums instead of means). Contradictions are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from agentrl.train.megatron.adapters import AdaptedWeights, attach
from agentrl.train.megatron.families import check_names, conversions
from agentrl.train.megatron.gpu_kernels import use_fused_adam
from agentrl.train.megatron.hf_weights import (
    EXPERT_DIMENSION,
    WHOLE,
    Groups,
    HuggingFaceWeights,
    WeightLayout,
    conversion,
    load,
    named_tensors,
)
from agentrl.train.megatron.layers import TreeRotaryEmbedding, block_spec
from agentrl.train.megatron.lora import Lora, adapter_conversions
from agentrl.train.megatron.megatron_settings import Settings, check_settings, required_settings
from agentrl.train.megatron.micro_batch import MicroBatch
from agentrl.train.megatron.model_config import ModelConfig, Rope
from agentrl.train.megatron.rotary import axes, frequencies
from agentrl.train.megatron.vision_tower import VisionTower, load_vision_tower

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ValueHead(torch.nn.Module):
    """The output layer of a critic: a weight [1, h], the same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """The weight, for a distributed checkpoint."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix)


class PolicyModel(GPTModel):
    """GPTModel over a token tree, that returns the last hidden states of chosen tokens; log_probs.py computes what the loss needs of them."""

    def __init__(self, *args: Any, rope: Rope, critic: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, position_embedding_type="rope", rotary_base=rope.theta, **kwargs)
        self.rotary_pos_emb.__class__ = TreeRotaryEmbedding
        self._chosen: Tensor | None = None
        device = self.rotary_pos_emb.inv_freq.device
        self.rotary_pos_emb.inv_freq = frequencies(rope, rope.channels or self.config.kv_channels).to(device)
        if (own := axes(rope)) is not None:
            self.rotary_pos_emb.axes = own.to(device)
        if self.post_process and critic:
            self.output_layer = ValueHead(self.config)
        self._gathers = self.config.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the output weight, which may be the embedding's; on the last pipeline stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def forward(self, batch: MicroBatch) -> Tensor:
        """Hidden states: [u, h] of the predictions on the last pipeline stage, [s, 1, h] on the others."""
        self._chosen = batch.index
        self.rotary_pos_emb.positions = batch.positions
        routing = batch.routing
        if self._gathers:
            group = parallel_state.get_tensor_model_parallel_group()
            routing = routing.part(group.rank(), group.size())
        embedded = None if batch.images is None or not self.pre_process else self._with_images(batch)
        plan = replace(batch.attention, routing=routing)
        return super().forward(batch.inputs, None, None, decoder_input=embedded, packed_seq_params=plan)

    def _with_images(self, batch: MicroBatch) -> Tensor:
        """The embeddings of the tokens, with the features of images at theirs: [s, 1, h], or this sequence-parallel rank's part."""
        assert batch.images is not None
        assert batch.images.features is not None
        words = self.embedding(input_ids=batch.inputs, position_ids=None)
        source = batch.images.source
        if self._gathers:
            group = parallel_state.get_tensor_model_parallel_group()
            source = source.chunk(group.size())[group.rank()]
        features = batch.images.features[source.clamp(min=0)][:, None].to(words.dtype)
        return torch.where((source >= 0)[:, None, None], features, words)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        assert self._chosen is not None
        if self._gathers:  # the gradient of each position is already summed over the ranks
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states.flatten(0, 1).index_select(0, self._chosen)


@dataclass(kw_only=True)
class Built:
    """One rank's part of the model, with its optimizer."""

    config: TransformerConfig
    family: str
    """model_type in config.json"""
    layout: WeightLayout
    groups: Groups
    wrapped: DistributedDataParallel
    """the model in its wrappers, as megatron's schedule runs it"""
    optimizer: Any
    reference: torch.nn.Module | None
    """the frozen copy, wrapped for its precision; None with adapters too, whose reference is the model without them"""
    vision: VisionTower | None = None
    """on the first pipeline stage of a model of images; frozen, and the same for the reference"""
    lora: Lora | None = None
    """its adapters, which alone are trained; None: all weights are"""
    checks_finite: bool = True
    """an optimizer step is not taken if the loss or a gradient is not finite"""
    critic: bool = False
    """a value model"""

    @property
    def model(self) -> PolicyModel:
        """The model without its wrappers."""
        return unwrapped(self.wrapped)


def unwrapped(model: Any) -> PolicyModel:
    """The model without the wrappers for its precision and for data parallelism."""
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def build(
    model_config: ModelConfig,
    weights: HuggingFaceWeights,
    settings: Settings,
    dtype: torch.dtype,
    *,
    reference: bool,
    critic: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> Built:
    """Build this rank's part and load its weights. The process groups must exist.

    `critic`: a value model, whose head is `score.weight` (as in transformers' ForTokenClassification), or 0 without it.
    `lora`: train adapters only; `seed`: of new ones.

    Raises:
        ConfigError: a setting contradicts config.json or cannot work.
        DataError: the weights do not fit the model.
    """
    config = transformer_config(model_config, settings, dtype)
    world = config.tensor_model_parallel_size
    check_names(weights.folder, model_config, weights, critic=critic)
    groups = parallel_groups()
    table = conversions(model_config, critic=critic)
    if lora is not None:
        table |= adapter_conversions(table, lora.targets)
        weights = AdaptedWeights(weights, model_config, lora, seed)
    layout = WeightLayout(
        table=table,
        groups=config.num_query_groups,
        queries_per_group=config.num_attention_heads // config.num_query_groups,
        head_dim=model_config.head_dim,
        vocab_size=model_config.vocab_size,
        padded_vocab_size=-(-model_config.vocab_size // world) * world,
        tied=model_config.tied and not critic,
        critic=critic,
    )

    def loaded() -> Any:
        model = _gpt(config, model_config, layout, lora)
        load(named_tensors(model), weights, layout, groups)
        return model

    def in_precision(model: Any) -> Any:
        return Float16Module(config, model) if config.bf16 else model

    frozen = in_precision(loaded().requires_grad_(False).eval()) if reference and lora is None else None
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    checked = {"check_for_nan_in_grad": False}  # megatron would end the process; the rank checks, and skips the step
    ddp_config = DistributedDataParallelConfig(
        **{**ddp, **_fields_of(DistributedDataParallelConfig, settings), **checked}
    )
    wrapped = DistributedDataParallel(config, ddp_config, in_precision(loaded()))
    optimizer = get_megatron_optimizer(optimizer_config(settings, dtype), [wrapped])
    use_fused_adam(optimizer)
    vision = load_vision_tower(model_config, weights, dtype) if parallel_state.is_pipeline_first_stage() else None
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = wrapped.no_sync
    return Built(
        config=config,
        family=model_config.family,
        layout=layout,
        groups=groups,
        wrapped=wrapped,
        optimizer=optimizer,
        reference=frozen,
        vision=vision,
        lora=lora,
        critic=critic,
        checks_finite=settings.get("check_for_nan_in_grad", True),
    )


def parallel_groups() -> Groups:
    """The groups over which this rank's tensors are gathered."""
    dense = not parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        expert=parallel_state.get_expert_tensor_and_model_parallel_group(),
        expert_divisions=parallel_state.get_expert_tensor_parallel_world_size(),
        dense_copy=dense,
        expert_copy=not parallel_state.get_expert_data_parallel_rank(),
    )


def transformer_config(model: ModelConfig, settings: Settings, dtype: torch.dtype) -> TransformerConfig:
    """The fields that the model and the trainer require, the user's settings, and defaults that fit this machine.

    Raises:
        ConfigError: a setting contradicts config.json or cannot work.
    """
    cpu = not torch.cuda.is_available()
    check_settings(settings, model, cpu=cpu)
    defaults = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": cpu,
        "bias_activation_fusion": not cpu,
        "bias_dropout_fusion": not cpu,
        "gradient_accumulation_fusion": not cpu,
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths requires it, even without experts
        "moe_router_bias_update_rate": 0.0,
    }
    required = {
        **required_settings(model),
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,  # plain sums: see rank.py
        "perform_initialization": False,  # all weights are loaded
        "variable_seq_lengths": True,
    }
    return TransformerConfig(**{**defaults, **_fields_of(TransformerConfig, settings), **required})


def optimizer_config(settings: Settings, dtype: torch.dtype) -> OptimizerConfig:
    """Distributed Adam; the learning rate comes with every step. `clip_grad` 0 means no clipping; the norm is computed anyway."""
    defaults = {"optimizer": "adam", "lr": 0.0, "use_distributed_optimizer": True}
    required = {"bf16": dtype is torch.bfloat16, "params_dtype": dtype}
    values = {**defaults, **_fields_of(OptimizerConfig, settings), **required}
    if not values.get("clip_grad", 1.0):
        values["clip_grad"] = math.inf
    return OptimizerConfig(**values)


def _fields_of(kind: type, settings: Settings) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {k: v for k, v in settings.items() if k in names}


def _gpt(config: TransformerConfig, model_config: ModelConfig, layout: WeightLayout, lora: Lora | None) -> PolicyModel:
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config, model_config, adapters=lora is not None),
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=model_config.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=layout.tied,
        rope=model_config.rope,
        critic=layout.critic,
    )
    if lora is not None:
        attach(model, lora, layout)
    for name, parameter in named_tensors(model, buffers=False):
        kind = conversion(name, layout).kind
        marked = kind in WHOLE or kind in EXPERT_DIMENSION or getattr(parameter, "tensor_model_parallel", False)
        if not marked:
            # megatron marks divided parameters only while it initialises them; of unmarked ones only rank 0's part is in the gradient norm
            dimension, stride = (1 if kind == "columns" else 0), (2 if kind.startswith("glu") else 1)
            set_tensor_model_parallel_attributes(parameter, True, dimension, stride)
    return model.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else model
