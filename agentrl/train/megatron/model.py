"""Builds one rank's part of the model with megatron-core: process groups, GPTModel, DistributedDataParallel and the optimizer.

Megatron's settings are three dataclasses of its own; a person's come by their field names, the model's shape from config.json, and what
follows from running here (device, precision, plain sums instead of means) from us. Contradictions are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
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
from torch import Tensor

from agentrl.train.megatron.hf_weights import HuggingFaceWeights, Layout, load, named_parameters, source
from agentrl.train.megatron.layers import block_spec
from agentrl.train.megatron.megatron_settings import Settings, check_settings, insisted
from agentrl.train.megatron.model_config import ModelShape, Rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(GPTModel):
    """GPTModel that computes logits at chosen positions only."""

    def __init__(self, *args: Any, rope: Rope, **kwargs: Any) -> None:
        super().__init__(*args, position_embedding_type="rope", rotary_base=rope.theta, **kwargs)
        self._chosen: Tensor | None = None
        if rope.llama3:
            self.rotary_pos_emb.inv_freq = _llama3_frequencies(self.rotary_pos_emb.inv_freq, rope.llama3)
        if self.post_process:
            self._gathered = self.config.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1
            if (
                self._gathered
            ):  # the output layer is fed whole positions; its input gradients are summed instead of scattered
                self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True
            self.output_layer.register_forward_pre_hook(self._choose)

    def forward(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """inputs [b, s], chosen [n] indices into the flattened [s, b] -> logits [1, n, v] on the last stage, hidden states [s, b, h] before."""
        self._chosen = chosen
        return super().forward(inputs, None, None)

    def _choose(self, _: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        if self._gathered:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden.flatten(0, 1).index_select(0, self._chosen)[:, None], *args[1:])


def _llama3_frequencies(frequencies: Tensor, p: Mapping[str, float]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1 model card; transformers)."""
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    blend = ((turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])).clamp(0, 1)
    return (1 - blend) * frequencies / p["factor"] + blend * frequencies


@dataclass
class Built:
    """One rank's part of the model."""

    config: TransformerConfig
    layout: Layout
    wrapped: DistributedDataParallel
    """what the schedule runs"""
    optimizer: Any
    reference: torch.nn.Module | None
    """the frozen copy, likewise"""

    @property
    def model(self) -> PolicyModel:
        """The bare model inside the wrappers."""
        return bare(self.wrapped)


def bare(model: Any) -> Any:
    """Take the wrappers off."""
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def transformer_config(shape: ModelShape, settings: Settings, dtype: torch.dtype) -> TransformerConfig:
    """The model's shape, what a person set, and what we insist on.

    Raises:
        ConfigError: a setting contradicts config.json or cannot work.
    """
    cpu, bf16 = not torch.cuda.is_available(), dtype is torch.bfloat16
    fixed = {
        **insisted(shape),
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        "calculate_per_token_loss": True,  # plain sums: see rank.py
        "perform_initialization": False,  # all weights are read
        "variable_seq_lengths": True,
    }
    check_settings(settings, shape, cpu=cpu)
    default = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": cpu,
        "bias_activation_fusion": not cpu,
        "bias_dropout_fusion": not cpu,
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",  # asked for with variable_seq_lengths, also where there are no experts
    }
    return TransformerConfig(**{**default, **_pick(TransformerConfig, settings), **fixed})


def _pick(kind: type, settings: Settings) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {k: v for k, v in settings.items() if k in names}


def _gpt(config: TransformerConfig, shape: ModelShape, layout: Layout) -> PolicyModel:
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        rope=shape.rope,
    )
    for name, parameter in named_parameters(model):
        kind = source(name, layout).kind
        if kind != "copy" and not getattr(parameter, "tensor_model_parallel", False):
            # megatron marks what tensor parallelism cuts only while it initialises; unmarked, rank 0's part alone counts in the gradient's norm
            set_tensor_model_parallel_attributes(
                parameter, True, 1 if kind == "columns" else 0, 2 if kind == "glu" else 1
            )
    return model if not torch.cuda.is_available() else model.cuda(torch.cuda.current_device())


def build(
    shape: ModelShape, weights: HuggingFaceWeights, settings: Settings, dtype: torch.dtype, *, reference: bool
) -> Built:
    """Build and fill this rank's part; process groups exist already. Raises ConfigError, DataError."""
    config = transformer_config(shape, settings, dtype)
    tp, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    queries = config.num_attention_heads // config.num_query_groups
    padded = -(-shape.vocab_size // tp) * tp
    layout = Layout(config.num_query_groups, queries, shape.head_dim, shape.vocab_size, padded, shape.tied)

    def filled() -> PolicyModel:
        model = _gpt(config, shape, layout)
        load(model, weights, layout, rank, tp)
        return model

    def half(model: Any) -> Any:
        return Float16Module(config, model) if config.bf16 else model

    frozen = half(filled().requires_grad_(False).eval()) if reference else None
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "check_for_nan_in_grad": True}
    ddp_config = DistributedDataParallelConfig(**{**ddp, **_pick(DistributedDataParallelConfig, settings)})
    wrapped = DistributedDataParallel(config, ddp_config, half(filled()))
    optimizer = get_megatron_optimizer(optimizer_config(settings, dtype), [wrapped])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = wrapped.no_sync
    return Built(config, layout, wrapped, optimizer, frozen)


def optimizer_config(settings: Settings, dtype: torch.dtype) -> OptimizerConfig:
    """Adam, distributed; the learning rate comes with every step. `clip_grad` 0 means no clipping, and the norm is still computed."""
    default = {"optimizer": "adam", "lr": 0.0, "use_distributed_optimizer": True}
    own = {"bf16": dtype is torch.bfloat16, "params_dtype": dtype}
    values = {**default, **_pick(OptimizerConfig, settings), **own}
    if not values.get("clip_grad", 1.0):
        values["clip_grad"] = math.inf
    return OptimizerConfig(**values)
