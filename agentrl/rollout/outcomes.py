"""How an episode ends after its last turn: the stop reason of a failure, and the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentrl.errors import EngineAbort, EngineFailure, EnvFailure, Failure, RewardFailure, ToolFailure, UsageError
from agentrl.reward import Scorer
from agentrl.types import StopReason, Trajectory

FAILURES: Mapping[type[Failure], StopReason] = {
    EngineAbort: StopReason.ENGINE_ABORT,
    EngineFailure: StopReason.ENGINE_FAILURE,
    EnvFailure: StopReason.ENV_FAILURE,
    ToolFailure: StopReason.TOOL_FAILURE,
    RewardFailure: StopReason.REWARD_FAILURE,
}


async def scored(scorer: Scorer, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its rewards. A reward that fails becomes the stop reason."""
    try:
        return await scorer.score(trajectory)
    except Failure as e:
        return replace(trajectory, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause, detail=str(e))


def cause_of(error: Failure | UsageError) -> str:
    """The short cause of a failure, for the table of causes."""
    return error.cause if isinstance(error, Failure) else str(error)
