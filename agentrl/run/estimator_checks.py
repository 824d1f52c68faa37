"""What an advantage estimator and a loss need of the settings and the environment, checked before anything starts."""

from __future__ import annotations

from agentrl.config import Config, TrainSettings
from agentrl.errors import ConfigError
from agentrl.run.components import Components
from agentrl.train.estimators import find_estimator


def require_estimator(config: Config) -> None:
    """Refuse an estimator that needs what the settings lack or contradict.

    Raises:
        UsageError: the estimator is unknown, or the settings do not give it what it needs.
    """
    settings = config.train
    estimator = find_estimator(settings.advantage_estimator)
    named = f"--advantage-estimator {settings.advantage_estimator}"
    if "teacher" in estimator.needs and not settings.opd_teacher:
        raise ConfigError(f"{named} learns from a teacher alone; give --opd-teacher")
    if "branches" in estimator.needs and not config.rollout.branch_at:
        raise ConfigError(f"{named} compares siblings at a branch; give --branch-at with the turns to branch at")
    if config.lora.lora_adapters and "critic" in estimator.needs:
        raise ConfigError(
            f"{named} has one critic, and --lora-adapter trains several policies; choose another estimator"
        )
    if estimator.policy_loss == "sequence":
        if settings.calculate_per_token_loss:
            raise ConfigError(
                f"{named} weighs episodes equally, whatever their length; give --calculate-per-token-loss false"
            )
        if settings.proximal_log_probs != "forward":
            raise ConfigError(
                f"{named} needs the trainer's old log-probabilities of whole episodes; give --proximal-log-probs forward"
            )


def require_state_keys(components: Components) -> None:
    """Refuse an estimator that compares turns in equal states, in an environment that gives no keys of states.

    Raises:
        ConfigError: the environment gives no state keys.
    """
    name = components.config.train.advantage_estimator
    if "state_keys" in find_estimator(name).needs and not components.gives_state_keys:
        raise ConfigError(
            f"--advantage-estimator {name} compares turns that begin in the same state, but {components.env_class.label()} does not name its "
            "states; return StepResult(state_key=...) in every step and set gives_state_keys = True, or choose another estimator"
        )


def require_groups(config: Config) -> None:
    """Refuse groups of one episode, which have no advantage, unless there is another term to train on.

    Raises:
        ConfigError: the groups are too small.
    """
    settings = config.train
    compares = "group" in find_estimator(settings.advantage_estimator).needs
    further = settings.kl_loss_coef or settings.entropy_coef
    if config.rollout.n_samples_per_prompt == 1 and compares and not further:
        raise ConfigError(
            "--n-samples-per-prompt 1 trains nothing: the advantage of an episode is its difference from the others of its group; "
            "give at least 2 (or --kl-loss-coef or --entropy-coef, to train on these terms alone)"
        )


def loss_warnings(settings: TrainSettings) -> list[str]:
    """What the loss of these settings does not do, although its name suggests it."""
    warnings = []
    if settings.kl_loss_coef and settings.kl_loss_type == "k1" and not settings.use_unbiased_kl:
        warnings.append(
            "--kl-loss-type k1 has no gradient in expectation while the ratio is 1: E[∇ log π] = 0; "
            "give k2 or k3, or --use-unbiased-kl"
        )
    return warnings
