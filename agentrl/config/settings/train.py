"""Settings of training: estimator, loss, optimizer, trainer, supervised training."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from agentrl.config.settings.base import STRICT

ESTIMATOR_NAMES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gspo",
    "cispo",
    "ppo",
    "gigpo",
    "branch_rloo",
    "distillation",
)
"""Advantage estimators that are built in (agentrl/train/estimators)."""


def _estimator(value: str) -> str:
    if value not in ESTIMATOR_NAMES and ":" not in value and not value.endswith(".py"):
        raise ValueError(f"must be one of {', '.join(ESTIMATOR_NAMES)}, or file.py:function")
    return value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainSettings:
    """Loss and optimizer (Megatron's own settings are in [megatron])."""

    advantage_estimator: Annotated[str, AfterValidator(_estimator), "NAME"] = "grpo"
    """how advantages are computed: grpo, dr_grpo, rloo, gspo, cispo, ppo, gigpo … or file.py:function

    docs/estimators.md has the formula and the source of each: grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo,
    ppo, gigpo, branch_rloo, distillation. A function of a file has the decorator `@agentrl.train.estimators.estimator`."""
    normalize_advantages: bool = False
    """subtract the mean of the advantages of a rollout's trained tokens and divide by their standard deviation

    Groups of equal scores then have an advantage too: minus the mean."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """discount of ppo and reinforce_plus_plus per sampled token, and of gigpo per turn"""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of generalised advantage estimation in ppo"""
    gigpo_step_weight: Annotated[float, Field(ge=0)] = 1.0
    """weight of gigpo's turn-level advantage beside that of the episode"""
    eps_clip: Annotated[float, Field(ge=0)] = 0.2
    """clip range of the probability ratio, in both directions"""
    eps_clip_high: Annotated[float | None, Field(ge=0)] = None
    """upper clip range of the probability ratio (default: --eps-clip)"""
    eps_clip_c: Annotated[float | None, Field(gt=1)] = None
    """bound of the probability ratio for negative advantages, dual-clip PPO (default: off)"""
    use_kl_loss: bool = False
    """keep a frozen reference model and add the KL loss"""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL loss; needs --use-kl-loss"""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL divergence that is subtracted from the reward of every token, before advantages are computed"""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """estimator of the KL divergence, from Schulman 2020; low_var_kl is k3 with bounds"""
    use_unbiased_kl: bool = False
    """weight the KL loss by the ratio of the probabilities now and before the step, which makes its gradient unbiased"""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the entropy bonus"""
    calculate_per_token_loss: bool = False
    """average the loss over all tokens, instead of over the tokens of each episode and then over episodes"""
    use_tis: bool = False
    """importance sampling: weight tokens by exp(old - rollout log-probability), within bounds"""
    tis_level: Literal["token", "turn", "episode"] = "token"
    """what an importance weight of --use-tis is the ratio of: a token, all sampled tokens of a turn, or of an episode"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """importance weights outside their bounds become the bound (TIS), or 0 (MIS; IcePop with --tis-clip-low)"""
    tis_threshold: Annotated[float, Field(gt=0)] = 2.0
    """upper bound of the importance weight of --use-tis"""
    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """lower bound of the importance weight of --use-tis"""
    rejection_level: Literal["none", "token", "turn", "episode"] = "none"
    """do not learn from tokens, turns or episodes whose mean ratio of trainer to engine is outside --rejection-low and --rejection-high

    The mean is the geometric one. Rejected tokens have advantage 0 and are counted; denominators, KL loss and entropy stay as they are."""
    rejection_low: Annotated[float, Field(ge=0)] = 0.5
    """lower bound of the mean ratio; see --rejection-level"""
    rejection_high: Annotated[float, Field(gt=0)] = 2.0
    """upper bound of the mean ratio; see --rejection-level"""
    proximal_log_probs: Literal["forward", "interpolate", "rollout"] = "forward"
    """old log-probabilities of the ratio: by the trainer before the first step, interpolated by the age of the weights, or the engine's

    With one optimizer step per rollout, forward costs nothing, because they are those of the step itself. interpolate saves the forward pass with
    several steps: log π_old lies between the engine's and the current one, by the number of weight updates since the token was sampled."""
    overlong_buffer_len: Annotated[int, Field(ge=0)] = 0
    """penalise responses in the last N tokens before --rollout-max-response-len (DAPO); 0: off"""
    overlong_penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """penalty of a response at the limit; see --overlong-buffer-len"""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """learning rate after warm-up"""
    lr_warmup_rollouts: Annotated[int, Field(ge=0)] = 0
    """rollouts of linear learning-rate warm-up; in `agentrl sft`, optimizer steps"""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """learning-rate schedule over --num-rollout, in `agentrl sft` over its optimizer steps, down to a tenth of --lr"""
    non_finite_step: Literal["stop", "skip"] = "stop"
    """an optimizer step whose loss or gradient is not finite: stop the run, or leave the step out and go on

    The message names episode, turn and token. The weights are those before the step in either case."""
    opd_teacher: Annotated[tuple[str, ...], "NAME=PATH|URL"] = ()
    """teachers that score the sampled tokens, each a model folder or the address of an SGLang server (default: none)

    Each must have the policy's tokenizer. A task whose metadata has a key `teacher` is scored by the teacher of that name, other tasks by all
    teachers, whose log-probabilities are averaged. NAME= may be left out where tasks name no teachers."""
    opd_kl_coef: Annotated[float, Field(gt=0)] = 1.0
    """weight of the difference to the teacher's log-probability, which is subtracted from the advantage of each token"""
    critic_lr: Annotated[float | None, Field(ge=0)] = None
    """learning rate of the critic of ppo (default: --lr)"""
    critic_load: Annotated[str | None, "PATH"] = None
    """model folder that the critic of ppo starts from (default: the policy's)

    Without a tensor `score.weight` its values start at 0."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """clip range of a value's change since the rollout, in the loss of the critic of ppo"""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """rollouts in which only the critic of ppo learns, at the start of the run"""
    max_tokens_per_gpu: Annotated[int, Field(ge=1)] = 8192
    """maximum tokens of a micro-batch on a trainer rank, padding included

    A longer row is a micro-batch by itself. A prefix that rows of a micro-batch share counts once, see --tree-packing."""
    tree_packing: bool = True
    """compute a prefix that rows of a micro-batch share once: a group's prompt, the history of an episode's segments

    Loss and gradients are those of independent rows."""
    true_on_policy_mode: bool = False
    """the trainer computes with the local engine's arithmetic, so that their log-probabilities are equal to the last bit

    For small models on a CPU: several times slower. The ratio is relative to the engine's log-probabilities, exactly 1 in the first
    optimizer step, and train/true_on_policy_diff_max is their largest difference there."""
    micro_batch_size: Annotated[int | None, Field(ge=1)] = None
    """maximum rows of a micro-batch (default: only --max-tokens-per-gpu bounds it)"""
    actor_num_gpus_per_node: Annotated[int | None, Field(ge=1)] = None
    """trainer ranks of a machine, one per GPU (default: one copy)

    Without GPUs, the number of processes. One data-parallel copy is tensor × pipeline × context parallel size ranks."""
    actor_num_nodes: Annotated[int, Field(ge=1)] = 1
    """machines (nodes) with trainer ranks, --actor-num-gpus-per-node on each

    Start the same command on every node, with --node-rank, and with a run folder that all of them share. Node 0 runs everything, the others
    trainer ranks only."""
    node_rank: Annotated[int | None, Field(ge=0, exclude=True)] = None
    """number of this node, from 0, with --actor-num-nodes (default: the environment variable NODE_RANK, or GROUP_RANK of torchrun)"""
    master_addr: Annotated[str | None, "HOST", Field(exclude=True)] = None
    """address of node 0 at which the other nodes reach it, with --actor-num-nodes (default: the environment variable MASTER_ADDR)"""
    master_port: Annotated[int | None, Field(ge=1, lt=65536, exclude=True)] = None
    """port of node 0 for the other nodes, with --actor-num-nodes (default: the environment variable MASTER_PORT, or any free port)

    The other nodes read address, port and the secret of the run from nodes.json in the run folder."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraSettings:
    """Low-rank adapters (LoRA), which are trained in place of the weights."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """rank of the adapters; 0: all weights are trained

    Only the adapters have gradients and optimizer states. Engines receive the weights with the adapters merged into them. The reference of the KL
    divergence is the base, without a second copy of the model. The critic of ppo is trained whole."""
    lora_alpha: Annotated[float | None, Field(gt=0)] = None
    """the adapters' product is scaled by alpha / rank (default: twice the rank)"""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout of the adapters' inputs in training; needs --tree-packing false"""
    lora_target_modules: Annotated[
        tuple[Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...],
        Field(min_length=1),
        "NAME",
    ] = ("all-linear",)
    """matrices that have adapters, by their names in transformers; all-linear: those of attention and MLP"""
    lora_adapter_path: Annotated[str | None, "PATH"] = None
    """folder of peft with the adapters to start from (default: new ones)

    Rank, alpha and target modules are those in its adapter_config.json. Its base must be --hf-checkpoint. With --lora-adapter it has a folder for
    each name."""
    lora_adapters: Annotated[dict[str, str], "ENV|ROLE=NAME"] = field(default_factory=dict)
    """train several adapters: the one of an environment, of several, or of a role; repeatable (default: one for all)

    The base is shared and frozen. Each adapter is trained on the episodes of its environments, or the turns of its roles, as if it were alone, and
    has its own version. All have the form of --lora-rank."""

    @property
    def used(self) -> bool:
        """Whether adapters are trained."""
        return bool(self.lora_rank or self.lora_adapter_path)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftSettings:
    """Supervised training (`agentrl sft`)."""

    sft_epochs: Annotated[int, Field(ge=1)] = 1
    """passes over the episodes"""
    sft_batch_size: Annotated[int, Field(ge=1)] = 64
    """episodes per optimizer step"""
