"""Rules between settings. The bounds of a single setting are in its field, in settings.py."""

from __future__ import annotations

from agentrl.config.settings import Config
from agentrl.errors import ConfigError

_SGLANG_ONLY = (
    "colocate weight_sync update_weight_disk_dir rollout_num_gpus rollout_external_engine_addrs engine_python "
    "engine_pythonpath"
).split()


def check(config: Config) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: The first contradiction.
    """
    _check_rollout(config)
    if config.train.kl_loss_coef and not config.train.use_kl_loss:
        raise ConfigError("--kl-loss-coef has no effect without --use-kl-loss; add --use-kl-loss")
    _check_engine(config)
    _check_eval_data(config.eval.eval_prompt_data)


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
        return
    given = [f"--{name.replace('_', '-')}" for name in _SGLANG_ONLY if getattr(engine, name)]
    given += [f"--sglang-{name.replace('_', '-')}" for name in config.sglang]
    if config.rollout.runner_processes > 1:
        given.append("--runner-processes")
    if given:
        raise ConfigError(f"{given[0]} needs --engine sglang (the engine is {engine.engine})")


def _check_eval_data(pairs: tuple[str, ...]) -> None:
    if len(pairs) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of NAME and PATH, found an odd number of values: {len(pairs)}"
        )
    names = pairs[::2]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--eval-prompt-data has two sets with the name {repeated[0]!r}; give each set its own name")
