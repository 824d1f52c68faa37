"""Runs that are started from Python, also in a notebook: what `agentrl train`, `rollout`, `eval` and `sft` do, as coroutines."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.flat_settings import Settings, unrecordable
from agentrl.core.redaction import remember_environment
from agentrl.core.registry import require_not_importing
from agentrl.core.terminal_text import print_now
from agentrl.env import ENVS, Env
from agentrl.errors import ConfigError, ContractError, shown
from agentrl.reward import REWARDS, Reward

if TYPE_CHECKING:
    from agentrl.run.resolve import Given

Echo = Callable[[str], None]
AnyPath = str | os.PathLike[str]


async def run_training(
    settings: Settings | None = None,
    *,
    resume: AnyPath | None = None,
    recorded: AnyPath | None = None,
    echo: Echo = print_now,
) -> Path:
    """Train a policy, as `agentrl train` does.

    In a notebook it is awaited: `await run_training(...)`. In a script: `asyncio.run(run_training(...))`. A run that is cancelled closes, and can
    be resumed. With `use_fault_tolerance` lost trainer ranks are started again; only the command line also starts a crashed run again.

    Args:
        settings: of the run. With `resume`, only those that may change, and the environment and rewards if they are Python objects.
        resume: folder of a run to continue from its last checkpoint, with its own settings; the result is bit-exact.
        recorded: folder of a run whose recorded episodes are trained on, with its settings, instead of new episodes.
        echo: shows a message to the user.

    Returns:
        The run folder. Its `hf/` holds the weights; `agentrl.store.Recording(folder)` reads the episodes.

    Raises:
        UsageError: something cannot work; raised before anything starts.

    Example:
        >>> from agentrl import Settings, run_training
        >>> async def main():
        ...     return await run_training(Settings(env="search_r1", model="search_r1_3m", num_rollout=40))
    """
    from agentrl.run.resolve import resolve_played, resolve_resumed, resolve_trained
    from agentrl.run.train_only import train_only
    from agentrl.run.training import train

    given = await _given("train", settings)
    if resume is not None and recorded is not None:
        raise ConfigError("resume and recorded exclude each other; give one of them")
    if recorded is not None:
        source = Path(recorded)
        return await train_only(resolve_trained(given, [source]), source, echo=echo)
    run = None if resume is None else Path(resume)
    config = resolve_resumed(given, run, how="resume") if run else resolve_played(given, scored=True)
    return await train(config, resume=run, echo=echo)


async def run_rollouts(settings: Settings, *, echo: Echo = print_now) -> Path:
    """Play and record `num_rollout` rollouts without training, as `agentrl rollout` does.

    Args:
        settings: of the run.
        echo: shows a message to the user.

    Returns:
        The run folder; `agentrl.store.Recording(folder)` reads the episodes.

    Raises:
        UsageError: something cannot work; raised before anything starts.

    Example:
        >>> from agentrl import Settings, run_rollouts
        >>> async def main():
        ...     return await run_rollouts(Settings(env="search_r1", model="search_r1_3m", num_rollout=1))
    """
    from agentrl.run.resolve import resolve_played
    from agentrl.run.rollouts import rollout_only

    return await rollout_only(resolve_played(await _given("rollout", settings), scored=False), echo=echo)


async def run_evaluation(settings: Settings, *, echo: Echo = print_now) -> dict[str, float]:
    """Evaluate a model as it is, as `agentrl eval` does.

    Args:
        settings: of the run. The tasks are those of `eval_prompt_data`, else of `prompt_data`, else the environment's split 'test'.
        echo: shows a message to the user.

    Returns:
        The metrics of the first evaluation set by name, such as `reward`. The run folder has those of all sets.

    Raises:
        UsageError: something cannot work; raised before anything starts.

    Example:
        >>> from agentrl import Settings, run_evaluation
        >>> async def main():
        ...     return (await run_evaluation(Settings(env="search_r1", model="search_r1_3m")))["reward"]
    """
    from agentrl.run.evaluation import evaluate_only
    from agentrl.run.resolve import resolve_played

    config = resolve_played(await _given("eval", settings), scored=True, evaluates=True)
    return await evaluate_only(config, echo=echo)


async def run_sft(
    sources: AnyPath | Sequence[AnyPath], settings: Settings | None = None, *, echo: Echo = print_now
) -> Path:
    """Train on recorded episodes or conversations, as `agentrl sft` does.

    Args:
        sources: run folders, or data sets of conversations: files, folders, patterns, hub ids.
        settings: of the run; those of recorded episodes are their run's unless they are given.
        echo: shows a message to the user.

    Returns:
        The run folder; its `hf/` holds the weights.

    Raises:
        UsageError: something cannot work; raised before anything starts.

    Example:
        >>> from agentrl import Settings, run_sft
        >>> async def main():
        ...     return await run_sft("chats.jsonl", Settings(model="path/to/model"))
    """
    from agentrl.run.resolve import resolve_trained
    from agentrl.run.sft import sft

    paths = [Path(s) for s in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]
    return await sft(resolve_trained(await _given("sft", settings), paths), paths, echo=echo)


async def _given(command: str, settings: Settings | None) -> Given:
    """The settings with names for their Python objects.

    Raises:
        UsageError: an environment or a reward is of another type.
    """
    from agentrl.run.resolve import Given

    require_not_importing()
    remember_environment(os.environ)
    flags = {} if settings is None else settings.given
    env = flags.get("env")
    if env is not None and not isinstance(env, str):
        env, args = _as_class(env)
        if args or "env_args" in flags:
            flags["env_args"] = {**args, **flags.get("env_args", {})}
        env_class = env if inspect.isclass(env) else await _class_of(env)
        if not issubclass(env_class, Env):
            raise ContractError(f"env: expected a subclass of agentrl.Env, found {env_class!r:.80}")
        flags["env"] = ENVS.give(env_class, env_class.__name__)
    rewards = flags.get("reward", ())
    if rewards:
        flags["reward"] = [
            _reward_name(r) for r in ([rewards] if isinstance(rewards, str) or callable(rewards) else rewards)
        ]
    return Given(command=command, flags=flags)


def _as_class(env: Any) -> tuple[Any, Mapping[str, Any]]:
    """The class and the arguments of a `functools.partial` of a class that config.toml can hold; anything else as it is."""
    of_class = isinstance(env, functools.partial) and inspect.isclass(env.func) and not env.args
    return (env.func, env.keywords) if of_class and unrecordable(env.keywords) is None else (env, {})


def _reward_name(given: Any) -> str:
    if isinstance(given, str):
        return given
    if not callable(given):
        raise ContractError(f"reward: expected a function, a @reward or a name, found {shown(given)}")
    label = given.name if isinstance(given, Reward) else getattr(given, "__name__", "reward")
    return REWARDS.give(given, label)


async def _class_of(make: Callable[[], Env]) -> type[Env]:
    """A class whose instances the function makes. It is called once to see which class they have.

    Raises:
        ContractError: it does not return an environment.
    """
    from agentrl.rollout.env_instance import ThreadPools

    if isinstance(make, Env):
        raise ContractError(
            "env: each episode has an instance of its own; give the class, or a function that makes an instance"
        )
    if not callable(make):
        raise ContractError(
            f"env: expected an Env class, a function that makes an instance, or a name, found {shown(make)}"
        )
    pools = ThreadPools(Env)
    try:
        made = await pools.env.call(make, timeout_s=Env.timeout_s)
        if not isinstance(made, Env):
            raise ContractError(f"env: the function must return an instance of agentrl.Env, found {shown(made)}")
        await pools.closing.call(made.close, timeout_s=made.timeout_s)
    finally:
        pools.close()
    cls: Any = type(made)

    class Made(cls):  # type: ignore[misc]
        """Its constructor is the user's function."""

        def __new__(_cls) -> Any:
            return make()

    Made.__name__, Made.__module__, Made.__doc__ = cls.__name__, cls.__module__, cls.__doc__
    Made.__signature__ = inspect.Signature()
    return Made
