"""The sizes of the window from the settings, and which groups are trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.config import Config
from agentrl.core.registry import Registry
from agentrl.errors import ConfigError, ContractError
from agentrl.schedule.window import Pace
from agentrl.types import EpisodeSpec, Group, by_role

DEFAULT_WINDOW = 0.3
"""share of the buffer among which training may choose, as in torchtitan's windowed FIFO"""
EQUAL = 1e-6
"""scores that differ by less are equal"""
GroupFilter = Callable[[Group], bool]
"""whether to train on a group"""
BufferFilter = Callable[[list[Sequence[EpisodeSpec]]], Sequence[Sequence[EpisodeSpec]]]
"""which of the groups that were stopped are played again, in order"""


def pace_of(config: Config) -> Pace:
    """The window of the settings.

    Raises:
        ConfigError: no run can keep it, or a sample could be staler than `max_staleness`.
    """
    schedule, batch = config.schedule, config.rollout.rollout_batch_size
    interval = schedule.update_weights_interval
    if schedule.schedule == "sync":
        started = schedule.over_sampling_batch_size or batch
        pace = Pace(batch=batch, buffer=started, stops_rest=started > batch)
    elif schedule.schedule == "one_step_off":
        pace = Pace(batch=batch, buffer=(interval + 1) * batch, interval=interval, whole_rollouts=True)
    else:
        buffer = schedule.async_buffer_size or 2 * batch * interval
        window = schedule.consumption_window or max(1, int(DEFAULT_WINDOW * buffer))
        pace = Pace(batch=batch, buffer=buffer, window=window, interval=interval)
    allowed = schedule.max_staleness
    if allowed is not None and pace.max_staleness > allowed:
        raise ConfigError(
            f"--max-staleness {allowed} cannot be kept: with a buffer of {pace.buffer} groups, a window of {pace.window} and {batch} groups "
            f"per rollout a sample may be {pace.max_staleness} rollouts old; give a smaller --async-buffer-size or --consumption-window"
        )
    return pace


def nonzero_std(group: Group) -> bool:
    """Keep groups whose scores differ, those of a role if there are several; the others have no gradient (the dynamic sampling of DAPO,
    arXiv:2503.14476, §3.2).
    """
    return any(
        max(scores) - min(scores) >= EQUAL
        for scores in ([t.score for t in part] for part in by_role(group.trajectories))
    )


FILTERS = Registry("group filter", {"nonzero_std": "agentrl.schedule.pace:nonzero_std"})
"""group filters by name"""
BUFFER_FILTERS = Registry("buffer filter", {})
"""buffer filters by name"""


def resolve_filter(name: str | None) -> GroupFilter | None:
    """The function behind `--dynamic-sampling-filter-path`; None: every group is trained on.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, or not a function.
    """
    return None if name is None else _function(FILTERS, "--dynamic-sampling-filter-path", name, "a Group")


def resolve_buffer_filter(name: str | None) -> BufferFilter | None:
    """The function behind `--buffer-filter-path`; None: all stopped groups are given back.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, or not a function.
    """
    return None if name is None else _function(BUFFER_FILTERS, "--buffer-filter-path", name, "a list of groups")


def _function(registry: Registry, flag: str, name: str, takes: str) -> Callable[..., Any]:
    function: Any = registry.resolve(name)
    if not callable(function):
        raise ContractError(f"{flag} {name}: expected a function of {takes}, found {function!r:.80}")
    chosen: Callable[..., Any] = function
    return chosen
