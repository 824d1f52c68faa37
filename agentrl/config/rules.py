"""What settings may be: bounds of each, and which contradict each other."""

from __future__ import annotations

import math

from agentrl.config.settings import FIELDS, Config
from agentrl.errors import ConfigError

_AT_LEAST: dict[str, int] = {
    name: least
    for least, names in {
        0: "keep_checkpoints max_retries eps_clip eps_clip_high kl_loss_coef entropy_coef lr lr_warmup_rollouts eval_interval eval_temperature",
        1: "save_interval max_turns max_invalid_actions max_calls_per_turn data_limit num_rollout rollout_batch_size n_samples_per_prompt "
        "global_batch_size num_steps_per_rollout rollout_max_response_len rollout_max_context_len max_tokens_per_turn concurrency "
        "runner_processes min_group_size update_weight_buffer_size rollout_num_gpus rollout_num_gpus_per_engine engine_max_running threads "
        "max_tokens_per_gpu actor_num_gpus_per_node n_samples_per_eval_prompt eval_limit sft_epochs sft_batch_size",
    }.items()
    for name in names.split()
}

_ABOVE: dict[str, int] = {"episode_timeout_s": 0, "tis_threshold": 0, "eps_clip_c": 1}
"""the bound itself is refused; those that depend on more than one setting, or say why, are in `check`"""


def check(config: Config) -> None:
    """Settings that contradict each other.

    Raises:
        ConfigError: one sentence.
    """
    r, t = config.rollout, config.train
    _check_bounds(config)
    left, right = r.rollout_batch_size * r.n_samples_per_prompt, config.global_batch_size * r.num_steps_per_rollout
    if left != right:
        raise ConfigError(
            f"rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout does not hold: "
            f"{r.rollout_batch_size} × {r.n_samples_per_prompt} = {left}, but {config.global_batch_size} × {r.num_steps_per_rollout} = {right}"
        )
    if not 0 < r.rollout_top_p <= 1 or (r.rollout_top_k != -1 and r.rollout_top_k < 1):
        raise ConfigError(
            f"--rollout-top-p must be above 0 and at most 1, --rollout-top-k at least 1 or -1 (off), found {r.rollout_top_p} and {r.rollout_top_k}"
        )
    if not 0 <= r.max_failure_share <= 1:
        raise ConfigError(f"--max-failure-share is a share from 0 to 1, found {r.max_failure_share}")
    if r.rollout_temperature <= 0:
        raise ConfigError(
            f"--rollout-temperature must be above 0 for training (greedy samples have no distribution), found {r.rollout_temperature}"
        )
    if (r.rollout_top_p < 1 or r.rollout_top_k > 0) and not r.allow_truncated_sampling:
        raise ConfigError(
            "training with top-p or top-k samples from another distribution than the trainer's; set --allow-truncated-sampling if that is meant"
        )
    if t.kl_loss_coef and not t.use_kl_loss:
        raise ConfigError("--kl-loss-coef has no effect without --use-kl-loss; add it")
    if not config.data.apply_chat_template:
        raise ConfigError(
            "--apply-chat-template false is not supported: prompts go through the model's chat template; give the model one that adds nothing"
        )
    _check_engine(config)
    if not 0 <= config.run.seed < 2**63:
        raise ConfigError(f"--seed must be at least 0 and below 2**63, found {config.run.seed}")
    names = config.eval.eval_prompt_data[::2]
    if len(config.eval.eval_prompt_data) % 2:
        raise ConfigError(f"--eval-prompt-data takes NAME PATH pairs, found {len(config.eval.eval_prompt_data)} words")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--eval-prompt-data gives the name {doubled[0]!r} to more than one set; name each differently"
        )


def _check_bounds(config: Config) -> None:
    for name, section in FIELDS.items():
        value = getattr(getattr(config, section), name)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag} must be a finite number, found {value}")
        if value is not None and name in _AT_LEAST and value < _AT_LEAST[name]:
            raise ConfigError(f"{flag} must be at least {_AT_LEAST[name]}, found {value}")
        if value is not None and name in _ABOVE and value <= _ABOVE[name]:
            raise ConfigError(f"{flag} must be above {_ABOVE[name]}, found {value}")


def _check_engine(config: Config) -> None:
    e = config.engine
    if e.engine == "sglang":
        if e.colocate and e.weight_sync == "split":
            raise ConfigError("--weight-sync split needs cards of the engines' own; with --colocate use colocated")
        if e.rollout_external_engine_addrs and e.colocate:
            raise ConfigError(
                "--colocate needs servers that are started here; leave out --rollout-external-engine-addrs"
            )
        return
    ours = (
        "colocate",
        "weight_sync",
        "update_weight_disk_dir",
        "rollout_num_gpus",
        "rollout_external_engine_addrs",
        "engine_python",
        "engine_pythonpath",
    )
    given = [f"--{name.replace('_', '-')}" for name in ours if getattr(e, name)] + [
        f"--sglang-{k.replace('_', '-')}" for k in config.sglang
    ]
    if config.rollout.runner_processes > 1:
        given.append("--runner-processes")
    if given:
        raise ConfigError(f"{given[0]} needs --engine sglang (the engine is {e.engine})")
