"""Reward functions written for slime, as rewards of agentrl."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.reward import Reward
from agentrl.slime_hooks.sample import sample_of

_TIMEOUT_S = 600.0


def slime_reward(
    function: Callable[..., Any], args: Namespace, decode: Callable[[Sequence[int]], str], *, group: bool
) -> Reward:
    """The reward of `--custom-rm-path`.

    Args:
        function: `(args, sample) -> float or dict`, sync or async; with `group`, `(args, samples) -> list`.
        args: the settings by their names.
        decode: ids to text, for `Sample.response`.
        group: it scores a whole group at once (`--group-rm`).
    """

    def score(given: Any) -> Any:
        return function(args, [sample_of(t, decode) for t in given] if group else sample_of(given, decode))

    async def score_async(given: Any) -> Any:
        return await score(given)

    chosen = score_async if inspect.iscoroutinefunction(function) else score
    return Reward(chosen, "reward", group=group, timeout_s=_TIMEOUT_S)
