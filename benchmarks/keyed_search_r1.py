"""search_r1 with names of its states, for gigpo: the state before a turn is what the last search found."""

from __future__ import annotations

from dataclasses import replace

from agentrl.env import ToolEnv
from agentrl.envs.search_r1 import SearchR1
from agentrl.types import Action, StepResult


class KeyedSearchR1(SearchR1):
    """A turn that begins with the same results, in the same group, begins in the same state."""

    gives_state_keys = True

    async def step(self, action: Action) -> StepResult:
        """See `ToolEnv.step`."""
        result = await ToolEnv.step(self, action)
        return replace(result, state_key="\n".join(r.content for r in action.results) or action.text)
