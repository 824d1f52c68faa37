"""Rules between settings. The bounds of a single setting are in its field, in settings/."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from agentrl.config.settings import ESTIMATOR_NAMES, FIELDS, Config, ScheduleSettings, TrainSettings, field_infos
from agentrl.core.registry import was_object
from agentrl.errors import ConfigError

_SGLANG_ONLY = (
    "colocate weight_sync update_weight_buffer_size update_weight_disk_dir rollout_num_gpus rollout_min_num_gpus "
    "rollout_num_gpus_per_engine rollout_external_engine_addrs engine_python engine_pythonpath"
).split()
_OUR_SERVERS_ONLY = (
    "rollout_num_gpus rollout_min_num_gpus rollout_num_gpus_per_engine engine_python engine_pythonpath"
).split()
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_]+")


def check(config: Config, given: Container[str] = FIELDS) -> None:
    """Refuse settings that contradict each other, and those of the `given` names that have no effect.

    Raises:
        ConfigError: The first of them.
    """
    _check_rollout(config)
    if config.train.kl_loss_coef and not config.train.use_kl_loss:
        raise ConfigError("--kl-loss-coef has no effect without --use-kl-loss; add --use-kl-loss")
    _check_loss(config)
    _check_true_on_policy(config)
    _check_engine(config)
    _check_nodes(config)
    _check_functions(config)
    _check_schedule(config)
    _check_eval_data(config.eval.eval_prompt_data)
    _check_eval_engine(config)
    _check_adapters(config)
    _check_objects(config)
    unread = [f"{_flag(name)} has no effect {what}" for name, what in _without_effect(config) if name in given]
    if unread:
        raise ConfigError.of_all(unread)


def _check_adapters(config: Config) -> None:
    """Refuse what several adapters in a run cannot be combined with."""
    if not config.lora.lora_adapters:
        return
    if not config.lora.used:
        raise ConfigError("--lora-adapter has no effect without --lora-rank; add it")
    for owner, name in config.lora.lora_adapters.items():
        if not _ADAPTER_NAME.fullmatch(name):
            raise ConfigError(
                f"--lora-adapter {owner}={name}: the name of an adapter consists of letters, digits and _; it is a folder's name too"
            )
    schedule, env = config.schedule, config.env
    age = "counts the age of samples in versions of one policy"
    for given, flag, why in (
        (
            config.rollout.runner_processes > 1,
            "--runner-processes",
            "tells its processes the weights version of only one policy",
        ),
        (config.engine.colocate, "--colocate", "takes the base from the engine's memory during training"),
        (
            config.engine.weight_sync not in (None, "disk"),
            f"--weight-sync {config.engine.weight_sync}",
            "brings whole weights to servers, while adapters are sent as folders",
        ),
        (schedule.schedule != "sync", f"--schedule {schedule.schedule}", age),
        (schedule.dynamic_sampling_filter_path, "--dynamic-sampling-filter-path", age),
        (schedule.over_sampling_batch_size, "--over-sampling-batch-size", age),
        (config.eval.eval_engine, "--eval-engine", "receives the weights of one policy"),
        (env.custom_generate_function_path, "--custom-generate-function-path", "names no adapter in its requests"),
        (env.rollout_function_path, "--rollout-function-path", "names no adapter in its requests"),
    ):
        if given:
            raise ConfigError(f"--lora-adapter trains several policies, and {flag} {why}; leave one of them out")


def _check_objects(config: Config) -> None:
    """Refuse objects of this program where other processes need them."""
    objects = filter(was_object, (config.env.env or "", *config.env.reward))
    if config.rollout.runner_processes > 1 and (name := next(objects, None)):
        raise ConfigError(
            f"--runner-processes needs objects that other processes can import, and {name} is not; define it in a file, or leave the flag out"
        )


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that are not at their defaults and that nothing reads, each with the reason and what to do."""
    engine, train, data = config.engine, config.train, config.data
    yield from _schedule_without_effect(config.schedule)
    yield from _unused_by_the_loss(train)
    if train.actor_num_nodes == 1 or engine.ray_address is not None:
        why = (
            "without --actor-num-nodes; add it"
            if engine.ray_address is None
            else "with --ray-address, which finds the nodes"
        )
        for name in ("node_rank", "master_addr", "master_port"):
            if _changed(train, name):
                yield name, why
    if not config.lora.used:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if _changed(config.lora, name):
                yield name, "without --lora-rank; add it"
    if not config.rollout.branch_at and _changed(config.rollout, "branch_samples"):
        yield "branch_samples", "without --branch-at; add it"
    run = config.run
    if run.distributed_timeout_minutes and 60 * run.distributed_timeout_minutes > run.trainer_timeout_s:
        yield "distributed_timeout_minutes", f"above --trainer-timeout-s {run.trainer_timeout_s:g}; raise that too"
    if config.env.group_rm and not config.env.custom_rm_path:
        yield "group_rm", "without --custom-rm-path; add it, or mark a reward with @reward(group=True)"
    if not (data.prompt_data or config.eval.eval_prompt_data):
        for name in ("input_key", "label_key", "metadata_key", "tool_key"):
            if _changed(data, name):
                yield name, "without a data file; add --prompt-data or --eval-prompt-data"
    if engine.engine == "local":
        return
    if _changed(engine, "engine_max_running"):
        yield "engine_max_running", "with --engine sglang; give --sglang-max-running-requests"
    if engine.weight_sync == "disk" and _changed(engine, "update_weight_buffer_size"):
        yield "update_weight_buffer_size", "with --weight-sync disk, which writes whole files; leave it out"
    if engine.rollout_external_engine_addrs:
        for name in _OUR_SERVERS_ONLY:
            if _changed(engine, name):
                yield name, "on servers that already run; leave out --rollout-external-engine-addrs or this flag"


def _schedule_without_effect(schedule: ScheduleSettings) -> Iterator[tuple[str, str]]:
    if schedule.schedule != "async":
        for name in ("async_buffer_size", "consumption_window", "partial_rollout"):
            if _changed(schedule, name):
                yield name, f"with --schedule {schedule.schedule}; give --schedule async"
    if schedule.schedule == "sync" and _changed(schedule, "update_weights_interval"):
        yield "update_weights_interval", "with --schedule sync; give --schedule async"
    if schedule.dynamic_sampling_filter_path is None and _changed(schedule, "max_resamples"):
        yield "max_resamples", "without --dynamic-sampling-filter-path"
    if schedule.over_sampling_batch_size is None and _changed(schedule, "buffer_filter_path"):
        yield "buffer_filter_path", "without --over-sampling-batch-size"


_ONLY_WITH_ESTIMATOR = {
    "gamma": ("ppo", "reinforce_plus_plus", "gigpo"),
    "lambd": ("ppo",),
    "gigpo_step_weight": ("gigpo",),
    "critic_lr": ("ppo",),
    "critic_load": ("ppo",),
    "value_clip": ("ppo",),
    "num_critic_only_steps": ("ppo",),
}
"""Settings that the other built-in estimators do not read."""


def _unused_by_the_loss(train: TrainSettings) -> Iterator[tuple[str, str]]:
    if not train.use_kl_loss:
        if not train.kl_coef and _changed(train, "kl_loss_type"):
            yield "kl_loss_type", "without --use-kl-loss or --kl-coef; add one of them"
        if train.use_unbiased_kl:
            yield "use_unbiased_kl", "without --use-kl-loss; add --use-kl-loss"
    for name in ("tis_level", "tis_mode", "tis_threshold", "tis_clip_low"):
        if not train.use_tis and _changed(train, name):
            yield name, "without --use-tis; add --use-tis"
    for name in ("rejection_low", "rejection_high"):
        if train.rejection_level == "none" and _changed(train, name):
            yield name, "without --rejection-level; add --rejection-level episode"
    if not train.opd_teacher and _changed(train, "opd_kl_coef"):
        yield "opd_kl_coef", "without --opd-teacher; add it"
    if not train.overlong_buffer_len and _changed(train, "overlong_penalty_factor"):
        yield "overlong_penalty_factor", "without --overlong-buffer-len; add it"
    if train.advantage_estimator == "cispo" and train.eps_clip_c is not None:
        yield "eps_clip_c", "with --advantage-estimator cispo, whose ratio is always bounded; leave it out"
    for name, estimators in _ONLY_WITH_ESTIMATOR.items():
        builtin = train.advantage_estimator in ESTIMATOR_NAMES
        if builtin and train.advantage_estimator not in estimators and _changed(train, name):
            yield name, f"with --advantage-estimator {train.advantage_estimator}; it is for {', '.join(estimators)}"


def _check_loss(config: Config) -> None:
    """Refuse a lower bound above the upper one, and combinations whose terms would be lost or always 1."""
    train = config.train
    for low, high in (("tis_clip_low", "tis_threshold"), ("rejection_low", "rejection_high")):
        if getattr(train, low) > getattr(train, high):
            raise ConfigError(
                f"{_flag(low)} {getattr(train, low)} is above {_flag(high)} {getattr(train, high)}; no ratio is between them"
            )
    if train.opd_teacher and config.rollout.rollout_temperature != 1:
        raise ConfigError(
            f"teachers score at temperature 1, and --rollout-temperature is {config.rollout.rollout_temperature}; give --rollout-temperature 1"
        )
    if train.proximal_log_probs == "rollout":
        for name, used in (("--use-tis", train.use_tis), ("--rejection-level", train.rejection_level != "none")):
            if used:
                raise ConfigError(
                    f"{name} compares the trainer's log-probabilities with the engine's; with --proximal-log-probs rollout there are "
                    "only the engine's: give --proximal-log-probs forward"
                )
    if train.proximal_log_probs == "interpolate" and config.rollout.num_steps_per_rollout == 1:
        raise ConfigError(
            "--proximal-log-probs interpolate has no effect with one optimizer step per rollout, whose old log-probabilities cost nothing; "
            "leave it out, or give --num-steps-per-rollout"
        )
    if train.proximal_log_probs == "interpolate" and (train.rejection_level != "none" or train.tis_level != "token"):
        raise ConfigError(
            "--proximal-log-probs interpolate is known token by token in the step itself; give --proximal-log-probs forward with "
            "--rejection-level, --tis-level turn or --tis-level episode"
        )


def _check_true_on_policy(config: Config) -> None:
    """Refuse what would let log-probs of engine and trainer differ, or hide that they do."""
    train = config.train
    if not train.true_on_policy_mode:
        return
    if config.engine.engine != "local":
        raise ConfigError(
            f"--true-on-policy-mode needs --engine local: the kernels of {config.engine.engine} are not the trainer's. Without it, every run "
            "reports their difference as train/rollout_log_prob_diff_mean and _max, and --use-tis corrects for it"
        )
    if config.schedule.schedule != "sync":
        raise ConfigError(
            f"--schedule {config.schedule.schedule} trains on tokens that older weights sampled, and --true-on-policy-mode on none; leave one out"
        )
    for name, used in (("--use-tis", train.use_tis), ("--rejection-level", train.rejection_level != "none")):
        if used:
            raise ConfigError(f"{name} corrects a difference that --true-on-policy-mode does not have; leave one out")
    if config.lora.lora_dropout:
        raise ConfigError(
            "--lora-dropout changes the trainer's log-probabilities, and --true-on-policy-mode allows no change; leave one out"
        )
    if train.proximal_log_probs == "interpolate":
        raise ConfigError("--proximal-log-probs interpolate has no effect with --true-on-policy-mode; leave one out")


def _changed(section: Any, name: str) -> bool:
    return bool(getattr(section, name) != field_infos(type(section))[name].default)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_rollout(config: Config) -> None:
    r = config.rollout
    sampled = r.rollout_batch_size * r.n_samples_per_prompt
    trained = config.global_batch_size * r.num_steps_per_rollout
    if sampled != trained:
        raise ConfigError(
            "rollout_batch_size × n_samples_per_prompt must equal global_batch_size × num_steps_per_rollout: "
            f"{r.rollout_batch_size} × {r.n_samples_per_prompt} = {sampled}, "
            f"but {config.global_batch_size} × {r.num_steps_per_rollout} = {trained}"
        )
    if (r.rollout_top_p < 1 or r.rollout_top_k > 0) and not r.allow_truncated_sampling:
        raise ConfigError(
            "with --rollout-top-p or --rollout-top-k, episodes are sampled from another distribution than the "
            "trainer's; give --allow-truncated-sampling to train on them"
        )


def _check_functions(config: Config) -> None:
    """Functions written for slime play whole episodes, in this process, and alone take prompts without the chat template."""
    if config.data.apply_chat_template is False and not (
        config.env.custom_generate_function_path or config.env.rollout_function_path
    ):
        raise ConfigError(
            "--apply-chat-template false gives a prompt unchanged to a function written for slime (--custom-generate-function-path); "
            "leave it out, and to add nothing to prompts give the model a template that adds nothing"
        )
    for name in ("custom_generate_function_path", "rollout_function_path"):
        if config.rollout.branch_at and getattr(config.env, name):
            raise ConfigError(f"{_flag(name)} plays whole episodes, which cannot be branched; leave out --branch-at")
        if config.rollout.use_rollout_routing_replay and getattr(config.env, name):
            raise ConfigError(
                f"{_flag(name)} puts its episodes together itself, without the engine's experts; leave out --use-rollout-routing-replay"
            )
    if config.rollout.runner_processes == 1:
        return
    for name in ("custom_generate_function_path", "rollout_function_path"):
        if getattr(config.env, name):
            raise ConfigError(f"{_flag(name)} runs in one process; leave out --runner-processes")


def _check_engine(config: Config) -> None:
    engine = config.engine
    if engine.engine == "sglang":
        if engine.colocate and engine.weight_sync == "split":
            raise ConfigError(
                "--weight-sync split needs separate GPUs for the engines; with --colocate use --weight-sync colocated"
            )
        if engine.rollout_external_engine_addrs and engine.colocate:
            raise ConfigError(
                "--colocate needs servers that are started here; leave out --rollout-external-engine-addrs"
            )
        if engine.ray_address is not None:
            _check_ray(config)
        elif engine.rollout_min_num_gpus is not None:
            raise ConfigError(
                "--rollout-min-num-gpus needs --ray-address: it is for engines that join later, on a ray cluster; give it, or leave this out"
            )
        return
    given = _server_flags(config)
    if config.rollout.runner_processes > 1:
        given.append("--runner-processes")
    if given:
        raise ConfigError(f"{given[0]} needs --engine sglang (the engine is {engine.engine})")


def _check_nodes(config: Config) -> None:
    """Refuse what does not reach trainer ranks on other machines."""
    train, engine = config.train, config.engine
    if train.actor_num_nodes == 1:
        return
    several = f"--actor-num-nodes {train.actor_num_nodes}"
    if train.actor_num_gpus_per_node is None:
        raise ConfigError(f"{several} needs --actor-num-gpus-per-node, the number of trainer ranks on each node")
    if train.node_rank is not None and train.node_rank >= train.actor_num_nodes:
        raise ConfigError(f"--node-rank {train.node_rank} is not a node of {several}, which are counted from 0")
    by_disk = engine.weight_sync or ("disk" if engine.rollout_external_engine_addrs or engine.ray_address else "split")
    if engine.engine == "sglang" and (engine.colocate or by_disk != "disk"):
        raise ConfigError(
            f"{several} needs --weight-sync disk, without --colocate: the other ways send weights from ranks on this machine only"
        )


def with_servers(config: Config) -> Config:
    """The settings with `--engine sglang` if they say how its servers run, as scripts of slime do, which have no such flag."""
    return replace(config, engine=replace(config.engine, engine="sglang")) if _server_flags(config) else config


def _server_flags(config: Config) -> list[str]:
    """The given flags that only SGLang's servers use."""
    engine = config.engine
    several = config.train.actor_num_nodes > 1 or engine.ray_address is not None
    read = ("update_weight_disk_dir",) if several else ()
    given = [_flag(name) for name in _SGLANG_ONLY if name not in read and _changed(engine, name)]
    return given + [f"--sglang-{name.replace('_', '-')}" for name in config.sglang]


def _check_schedule(config: Config) -> None:
    schedule, batch = config.schedule, config.rollout.rollout_batch_size
    started = schedule.over_sampling_batch_size
    given = [] if schedule.schedule == "sync" else [f"--schedule {schedule.schedule}"]
    given += [_flag(n) for n in ("over_sampling_batch_size", "dynamic_sampling_filter_path") if getattr(schedule, n)]
    if given and config.env.rollout_function_path:
        raise ConfigError(f"--rollout-function-path plays whole rollouts itself; leave out {given[0]}")
    if given and config.rollout.runner_processes > 1:
        raise ConfigError(f"{given[0]} runs episodes in one process; leave out --runner-processes")
    if started is not None and schedule.schedule != "sync":
        raise ConfigError(
            f"--schedule {schedule.schedule} drops no group, so --over-sampling-batch-size has no use; leave it out, or give --schedule sync"
        )
    if started is not None and started <= batch:
        raise ConfigError(
            f"--over-sampling-batch-size {started} starts no more groups than --rollout-batch-size {batch} trains on; give a larger number"
        )
    if config.engine.colocate and schedule.schedule != "sync":
        raise ConfigError(
            f"{given[0]} generates during training, so engines need memory of their own; leave out --colocate"
        )


def _check_eval_engine(config: Config) -> None:
    chosen = config.eval.eval_engine
    if not chosen:
        return
    if config.engine.engine == "local" and chosen != ("separate",):
        raise ConfigError(f"--eval-engine with --engine local can only be separate; found {' '.join(chosen)}")
    if config.rollout.runner_processes > 1:
        raise ConfigError("--eval-engine plays evaluations in one process; leave out --runner-processes")


def _check_ray(config: Config) -> None:
    """Refuse what does not reach servers on other machines."""
    engine = config.engine
    if engine.colocate or engine.weight_sync in ("colocated", "split"):
        flag = "--colocate" if engine.colocate else f"--weight-sync {engine.weight_sync}"
        raise ConfigError(
            f"{flag} reaches servers on this machine only; with --ray-address use --weight-sync disk, its default"
        )
    if "port" in config.sglang:
        raise ConfigError("--sglang-port is not used with --ray-address: each server takes a free port of its node")


def _check_eval_data(pairs: tuple[str, ...]) -> None:
    if len(pairs) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of NAME and PATH, found an odd number of values: {len(pairs)}"
        )
    names = pairs[::2]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--eval-prompt-data has two sets with the name {repeated[0]!r}; give each set its own name")
