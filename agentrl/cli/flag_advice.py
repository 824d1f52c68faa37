"""Flags of slime, TRL, verl and Megatron-LM's scripts: which mean the same here, and what to do instead of the others. Only tables."""

from __future__ import annotations

from collections.abc import Container

SAME: dict[str, str] = {
    # TRL
    "num-generations": "n-samples-per-prompt",
    "learning-rate": "lr",
    "model-name-or-path": "hf-checkpoint",
    "output-dir": "run",
    "temperature": "rollout-temperature",
    "top-p": "rollout-top-p",
    "top-k": "rollout-top-k",
    "max-completion-length": "rollout-max-response-len",
    "epsilon": "eps-clip",
    "epsilon-high": "eps-clip-high",
    "max-grad-norm": "clip-grad",
    "adam-epsilon": "adam-eps",
    # slime
    "tis-clip": "tis-threshold",
    "use-tensorboard": "tensorboard",
    # verl, by the last words of its keys
    "adv-estimator": "advantage-estimator",
    "entropy-coeff": "entropy-coef",
    "clip-ratio": "eps-clip",
    "clip-ratio-high": "eps-clip-high",
    "clip-ratio-c": "eps-clip-c",
}
"""Flags of other programs that are accepted, and the flag of agentrl, or of Megatron, that each stands for."""

_MODEL = "the model's config.json decides it; leave it out"
_FOLDER = "the model folder has the tokenizer; leave it out"
_METRICS = "metrics are written to metrics.jsonl and, with --tensorboard, as TensorBoard events in the run folder; leave it out"
_ONE_MACHINE = "training runs on one machine, whose processes agentrl starts; leave it out"
_PACKED = "micro-batches are packed by tokens; give --max-tokens-per-gpu"
_ALL_WEIGHTS = "adapters and quantised weights are not trained; all weights are, and --tensor-model-parallel-size spreads them over GPUs"
_CRITIC = "there is no critic; advantages come from groups, see --advantage-estimator"
_EVAL_LIMITS = "evaluation has the limits of training; give --eval-temperature for its sampling"
_ENV = "write an Env and give --env file.py:Class"
_REWARD = "write a function with @reward and give --reward file.py:function"
_LOSS = "the loss is chosen by --advantage-estimator, --use-kl-loss and --entropy-coef; functions of users are --env and --reward"
_PROFILE = "profile the process from outside, for example with py-spy; leave it out"
_RECORDED = "every episode is recorded in the run folder; `agentrl view RUN` shows them"
_RESUME = "a checkpoint is always complete; to continue a run give --resume RUN"
_REFERENCE = "the reference model is a frozen copy of --hf-checkpoint, kept with --use-kl-loss; leave it out"
_ENGINE = "give --engine sglang, and SGLang's own flags as --sglang-NAME"
_SYNC = "give --weight-sync, which says how weights reach the engines"
_EPOCHS = "give --num-rollout; in `agentrl sft` give --sft-epochs"
_WARMUP = "give --lr-warmup-rollouts"
_INTERVALS = "rollouts are counted, not optimizer steps; give --eval-interval"
_COUNTED = "over-sampling is not supported; flat groups are counted as flat_groups"

REFUSED: dict[str, str] = {
    # slime
    "actor-num-nodes": "training runs on one machine; give --actor-num-gpus-per-node",
    "load": "to continue a run give --resume RUN; to start from other weights give --hf-checkpoint DIR",
    "save": "checkpoints are in the run folder; give --run DIR",
    "micro-batch-size": _PACKED,
    "normalize-advantages": "advantages are normalised in the group (--advantage-estimator grpo) or not (dr_grpo)",
    "true-on-policy-mode": "with --num-steps-per-rollout 1 the ratio is 1 by definition",
    "over-sampling-batch-size": _COUNTED,
    "partial-rollout": "partial rollouts are not supported; every rollout is finished",
    "async-buffer-size": "training is synchronous",
    "update-weights-interval": "weights are updated after every rollout",
    "custom-generate-function-path": _ENV,
    "custom-rm-path": _REWARD,
    "group-rm": "mark the reward itself: @reward(group=True)",
    "rm-type": "name a reward, such as --reward em",
    "use-fault-tolerance": "failed episodes are retried (--max-retries), and a stopped run continues with --resume",
    "streaming-data": "data files are read whole",
    "num-data-workers": "data files are read whole",
    "debug-rollout-only": "use `agentrl rollout`",
    "debug-train-only": "use `agentrl train --train-only RUN`",
    "save-debug-rollout-data": "every episode is recorded in the run folder",
    "load-debug-rollout-data": "use `agentrl train --train-only RUN`",
    "balance-data": "rows are always balanced over the trainer's ranks; leave it out",
    "balance-by-flops": "rows are always balanced over the trainer's ranks; leave it out",
    "use-dynamic-batch-size": _PACKED,
    "log-probs-max-tokens-per-gpu": _PACKED,
    "log-probs-chunk-size": _PACKED,
    "num-gpus-per-node": "give --rollout-num-gpus and --actor-num-gpus-per-node",
    "num-epoch": _EPOCHS,
    "train-backend": "the trainer is Megatron; leave it out",
    "distributed-backend": _ONE_MACHINE,
    "distributed-timeout-minutes": _ONE_MACHINE,
    "train-env-vars": "set environment variables before `agentrl`",
    "offload": "give --colocate",
    "offload-train": "give --colocate",
    "offload-rollout": "give --colocate",
    "rollout-function-path": _ENV,
    "data-source-path": "give the tasks with --prompt-data, or write `Env.tasks` and give --env",
    "rollout-max-prompt-len": "prompts are not left out; --rollout-max-context-len bounds prompt and response",
    "rollout-stop": "an action format has its own stop strings; give --action-format",
    "rollout-stop-token-ids": "an action format has its own stop strings; give --action-format",
    "rollout-seed": "every random draw follows from --seed",
    "rollout-skip-special-tokens": "token ids are never encoded again; leave it out",
    "dynamic-sampling-filter-path": _COUNTED,
    "buffer-filter-path": _COUNTED,
    "mask-offpolicy-in-partial-rollout": "partial rollouts are not supported; every rollout is finished",
    "rollout-data-postprocess-path": _ENV,
    "rollout-data-transport": "episodes stay in one process; leave it out",
    "apply-chat-template-kwargs": "give --template-arg NAME=VALUE",
    "multimodal-keys": "give images as parts of messages in the column --input-key",
    "metadata-key": "all other columns of a data file are the task's metadata; leave it out",
    "tool-key": "tools belong to the environment; give --env",
    "reward-key": "each component of a reward is scored by its weight; give --reward NAME=WEIGHT",
    "eval-reward-key": "set `Env.eval_score` to the name of the component, and give --env",
    "start-rollout-id": _RESUME,
    "eval-config": "give --eval-prompt-data NAME PATH for each set",
    "eval-function-path": _ENV,
    "eval-input-key": "give --input-key",
    "eval-label-key": "give --label-key",
    "skip-eval-before-train": "give --eval-interval 0 to train without evaluation",
    "ref-load": _REFERENCE,
    "ref-ckpt-step": _REFERENCE,
    "ref-update-interval": _REFERENCE,
    "ckpt-step": _RESUME,
    "async-save": _RESUME,
    "no-save-optim": _RESUME,
    "no-load-optim": _RESUME,
    "no-load-rng": _RESUME,
    "finetune": "to start from other weights give --hf-checkpoint DIR",
    "save-hf": "the final weights are in hf/ of the run folder; give --run DIR",
    "kl-coef": "the reward is not changed; the KL term is a loss: give --use-kl-loss and --kl-loss-coef",
    "use-unbiased-kl": "give --kl-loss-type",
    "disable-grpo-std-normalization": "give --advantage-estimator dr_grpo",
    "disable-rewards-normalization": "give --advantage-estimator dr_grpo",
    "use-rollout-logprobs": "old log-probabilities are the trainer's; give --use-tis to correct for the engine's",
    "get-mismatch-metrics": "train/rollout_log_prob_diff_mean is always measured; leave it out",
    "tis-clip-low": "the importance weight has an upper bound only; give --tis-threshold",
    "value-clip": _CRITIC,
    "gamma": _CRITIC,
    "lambd": _CRITIC,
    "pg-loss-type": "the loss is that of GRPO; give --advantage-estimator",
    "recompute-loss-function": "give --recompute-granularity",
    "only-train-params-name-list": _ALL_WEIGHTS,
    "freeze-params-name-list": _ALL_WEIGHTS,
    "log-passrate": "rewards are reported by group; leave it out",
    "model-name": "give --hf-checkpoint",
    "flush-cache-interval": "the engine's cache is emptied after each weight sync; leave it out",
    "update-weight-mode": _SYNC,
    "update-weight-transport": _SYNC,
    "qwen-gdn-backend": _MODEL,
    "freeze-indexer": _MODEL,
    "use-rollout-routing-replay": _MODEL,
    "use-routing-replay": _MODEL,
    "routing-replay-prefetch-microbatches": _MODEL,
    "enable-mtp-training": _MODEL,
    "force-fp8-ue8m0-scale": "weights are sent as they are trained; give --dtype",
    "release-train": "give --colocate",
    "allgather-cp": "rows are padded, not packed; give --tensor-model-parallel-size",
    "data-pad-size-multiplier": _PACKED,
    "rollout-sample-hook-path": _ENV,
    "rollout-sample-filter-path": "give --truncated-episodes, or let the reward return None, which leaves the episode out",
    "rollout-all-samples-process-path": _RECORDED,
    "rollout-data-dir": _RECORDED,
    "save-debug-train-data": _RECORDED,
    "dump-details": _RECORDED,
    "load-forge-rollout-data": "use `agentrl train --train-only RUN`",
    "load-debug-rollout-data-subsample": "use `agentrl train --train-only RUN`",
    "log-multi-turn": _RECORDED,
    "log-correct-samples": _RECORDED,
    "log-reward-category": "a reward that returns a dict is reported by its components; give --reward",
    "rollout-io-concurrency": "episodes stay in one process; leave it out",
    "rollout-session-id": "episodes stay in one process; leave it out",
    "rollout-cleanup-timeout": "servers are always watched and replaced; leave it out",
    "rollout-task-type": _ENV,
    "rollout-buffer-url": "training is synchronous",
    "fetch-trajectory-retry-times": "failed episodes are retried (--max-retries)",
    "min-batch-collection-ratio": "failed episodes are retried (--max-retries); see --max-failure-share",
    "loss-mask-type": "masks follow from what the policy sampled; leave it out",
    "eval-tool-key": "tools belong to the environment; give --env",
    "rm-url": _REWARD,
    "use-score-centering": _LOSS,
    "score-centering-top-k": _LOSS,
    "use-opsm": _LOSS,
    "disable-compute-advantages-and-returns": _LOSS,
    "use-rollout-entropy": "give --entropy-coef",
    "reset-optimizer-states": "the optimizer keeps its state over the run; leave it out",
    "use-stateless-adam": "the optimizer keeps its state over the run; leave it out",
    "megatron-config-path": "put Megatron's settings into [megatron] of --config",
    "check-weight-update-equal": "weights are verified after each sync; leave it out",
    "http-proxy": "set the environment variable HTTP_PROXY",
    "use-distributed-post": "give --runner-processes",
    "record-memory-history": _PROFILE,
    "buffer-sort-by-staleness": "training is synchronous",
    "disable-wandb-random-suffix": _METRICS,
    # models of Megatron-LM's scripts
    **dict.fromkeys(
        (
            "swiglu squared-relu openai-gelu disable-bias-linear group-query-attention untie-embeddings-and-output-weights "
            "norm-epsilon use-rotary-position-embeddings position-embedding-type rotary-base rotary-percent rotary-scaling-factor "
            "use-rope-scaling rope-scaling-factor rotary-seq-len-interpolation-factor vocab-size make-vocab-size-divisible-by "
            "padded-vocab-size max-position-embeddings seq-length num-experts spec post-self-attn-layernorm post-mlp-layernorm "
            "use-gated-attention model-type use-mcore-models"
        ).split(),
        _MODEL,
    ),
    **dict.fromkeys("tokenizer-type tokenizer-model vocab-file merge-file tokenizer-name-or-path".split(), _FOLDER),
    "train-iters": "give --num-rollout",
    "lr-warmup-iters": _WARMUP,
    "lr-warmup-fraction": _WARMUP,
    "lr-decay-iters": "the schedule ends with the last rollout; give --num-rollout",
    "distribute-optimizer-states": "give --use-distributed-optimizer",
    "context-parallel-comm-type": "rows are padded, not packed; give --tensor-model-parallel-size",
    # TRL and transformers
    "beta": "give --use-kl-loss and --kl-loss-coef",
    "delta": "give --eps-clip-c, the bound of the ratio for negative advantages",
    "num-iterations": "each episode is trained on once; --num-steps-per-rollout divides a rollout into optimizer steps",
    "num-train-epochs": _EPOCHS,
    "max-steps": _EPOCHS,
    "per-device-train-batch-size": "give --rollout-batch-size (tasks) and --max-tokens-per-gpu; in `agentrl sft` give --sft-batch-size",
    "per-device-eval-batch-size": "give --concurrency, the episodes that run at the same time",
    "gradient-accumulation-steps": "micro-batches are accumulated as needed; give --global-batch-size",
    "steps-per-generation": "give --num-steps-per-rollout",
    "generation-batch-size": "give --rollout-batch-size",
    "gradient-checkpointing": "give --recompute-activations",
    "lr-scheduler-type": "give --lr-decay-style",
    "warmup-steps": _WARMUP,
    "warmup-ratio": _WARMUP,
    "save-steps": "give --save-interval, in rollouts",
    "save-strategy": "give --save-interval, in rollouts",
    "save-total-limit": "give --keep-checkpoints",
    "eval-steps": _INTERVALS,
    "eval-strategy": _INTERVALS,
    "logging-steps": _METRICS,
    "logging-dir": _METRICS,
    "report-to": _METRICS,
    "run-name": "give --run, the run folder",
    "log-completions": _RECORDED,
    "dataset-name": "give --prompt-data",
    "dataset-config": "give --prompt-data",
    "dataset-train-split": "give --prompt-data PATH",
    "train-file": "give --prompt-data",
    "reward-funcs": "give --reward",
    "reward-weights": "give --reward NAME=WEIGHT",
    "reward-model-name-or-path": _REWARD,
    "environment-factory": "give --env",
    "max-tool-calling-iterations": "give --max-turns",
    "loss-type": "give --advantage-estimator and, for one mean over all tokens, --calculate-per-token-loss",
    "scale-rewards": "give --advantage-estimator: grpo divides by the deviation of the group, dr_grpo does not",
    "importance-sampling-level": "the ratio is that of each token; leave it out",
    "mask-truncated-completions": "give --truncated-episodes mask",
    "max-prompt-length": "prompts are not cut; --rollout-max-context-len bounds prompt and response",
    "max-length": "give --rollout-max-context-len",
    "max-seq-length": "give --rollout-max-context-len",
    "packing": _PACKED,
    "assistant-only-loss": "only what the policy writes is trained; leave it out",
    "completion-only-loss": "only what the policy writes is trained; leave it out",
    "chat-template-path": "the model folder has the chat template; put chat_template.jinja there",
    "chat-template-kwargs": "give --template-arg NAME=VALUE",
    "torch-dtype": "give --dtype",
    "attn-implementation": "the trainer has one attention; leave it out",
    "optim": "give --optimizer",
    "ddp-timeout": _ONE_MACHINE,
    "deepspeed": "the trainer is Megatron; give --tensor-model-parallel-size, --pipeline-model-parallel-size",
    "fsdp": "the trainer is Megatron; give --tensor-model-parallel-size, --pipeline-model-parallel-size",
    "resume-from-checkpoint": "give --resume RUN",
    "sync-ref-model": _REFERENCE,
    "use-peft": _ALL_WEIGHTS,
    "use-lora": _ALL_WEIGHTS,
    "load-in-4bit": _ALL_WEIGHTS,
    "load-in-8bit": _ALL_WEIGHTS,
    "use-liger-kernel": "the trainer has its own kernels; leave it out",
    # verl, by the last words of its keys
    "train-files": "give --prompt-data PATH",
    "val-files": "give --eval-prompt-data NAME PATH",
    "train-batch-size": "give --rollout-batch-size",
    "ppo-mini-batch-size": "give --global-batch-size, in episodes, not in tasks",
    "ppo-micro-batch-size-per-gpu": _PACKED,
    "ppo-max-token-len-per-gpu": "give --max-tokens-per-gpu",
    "max-response-length": "give --rollout-max-response-len",
    "rollout-n": "give --n-samples-per-prompt",
    "rollout-name": "give --engine",
    "model-path": "give --hf-checkpoint",
    "rollout-tensor-model-parallel-size": "give --rollout-num-gpus-per-engine",
    "gpu-memory-utilization": "give --sglang-mem-fraction-static",
    "total-epochs": _EPOCHS,
    "total-training-steps": "give --num-rollout",
    "n-gpus-per-node": "give --actor-num-gpus-per-node",
    "nnodes": _ONE_MACHINE,
    "save-freq": "give --save-interval",
    "test-freq": "give --eval-interval",
    "logger": _METRICS,
    "project-name": _METRICS,
    "experiment-name": "give --run, the run folder",
    "default-local-dir": "give --run, the run folder",
    "resume-mode": "give --resume RUN",
    "custom-reward-function-path": _REWARD,
    "multi-turn-max-assistant-turns": "give --max-turns",
    "loss-agg-mode": "give --calculate-per-token-loss for one mean over all tokens",
}
"""Flags of other programs that are not accepted, and what to do instead."""

REFUSED_PREFIXES: dict[str, str] = {
    "wandb-": _METRICS,
    "use-wandb": _METRICS,
    "mlflow-": _METRICS,
    "swanlab-": _METRICS,
    "tb-": _METRICS,
    "custom-eval-": _ENV,
    "custom-rollout-": _ENV,
    "custom-reward-": _REWARD,
    "custom-": _LOSS,
    "opd-": _LOSS,
    "opsm-": _LOSS,
    "use-opd": _LOSS,
    "ci-": "the checks of a run are always on; leave it out",
    "memory-snapshot-": _PROFILE,
    "memory-recorder": _PROFILE,
    "megatron-deepgemm-": _MODEL,
    "critic-": _CRITIC,
    "num-critic-": _CRITIC,
    "vllm-": _ENGINE,
    "use-vllm": _ENGINE,
    "eval-top-": _EVAL_LIMITS,
    "eval-max-": _EVAL_LIMITS,
    "eval-min-": _EVAL_LIMITS,
    "rollout-health-check-": "servers are always watched and replaced; leave it out",
    "slime-router-": "agentrl divides the requests over the engines; leave it out",
    "use-slime-router": "agentrl divides the requests over the engines; leave it out",
    "update-weight-delta-": _SYNC,
    "update-weight-local-": _SYNC,
    "update-weight-disk-keep": _SYNC,
    "rollout-queue-": "training is synchronous",
    "rollout-storage-": "training is synchronous",
    "lora-": _ALL_WEIGHTS,
    "bnb-": _ALL_WEIGHTS,
    "profile": _PROFILE,
    "use-pytorch-profiler": _PROFILE,
}
"""Beginnings of flags that are not accepted, and what to do instead."""

OTHER_VALUES: dict[tuple[str, str], str] = {
    ("kl_loss_type", "low_var_kl"): "give k3, the same estimator without its bounds",
    **{("advantage_estimator", name): _CRITIC for name in ("ppo", "gae")},
    **{
        ("advantage_estimator", name): "give grpo, dr_grpo or rloo"
        for name in ("gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo")
    },
    **{("dtype", name): "give bfloat16" for name in ("bf16", "auto", "float16", "fp16", "half")},
    **{("dtype", name): "give float32" for name in ("fp32", "float")},
    **{("engine", name): "give sglang" for name in ("vllm", "hf")},
}
"""Values of other programs for settings of ours, and what to give instead."""


def advice(name: str) -> str | None:
    """What to do instead of a flag that is not accepted, named without dashes before it; None: the flag is not in the tables."""
    by_prefix = (text for prefix, text in REFUSED_PREFIXES.items() if name.startswith(prefix))
    return REFUSED.get(name) or next(by_prefix, None)


def verl_advice(word: str, accepted: Container[str]) -> str | None:
    """What to give instead of a key of verl, such as actor_rollout_ref.rollout.n=8; None: the word is not such a key.

    The last words of a key say what it means. `accepted` are the names of flags that agentrl takes.
    """
    key, equals, _ = word.lstrip("+").partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    for count in (3, 2, 1):
        name = "-".join(parts[-count:]).replace("_", "-")
        if name in SAME or name in accepted:
            return f"give --{SAME.get(name, name)}"
        if text := advice(name):
            return text
    return "`agentrl train --help-all` lists all flags"
