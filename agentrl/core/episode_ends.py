"""Where a token came from, and how a generation and an episode ended. Users import these from `agentrl.types`."""

from __future__ import annotations

from enum import Enum, IntEnum


class Provenance(IntEnum):
    """The origin of a token. In RL only SAMPLED tokens may have loss_mask 1."""

    PROMPT = 0
    """a conversation rendered by the model's chat template, at the beginning of a segment"""
    SAMPLED = 1
    """sampled by the policy, exactly as the engine returned them"""
    OBSERVATION = 2
    """content from the environment or a tool"""
    TEMPLATE = 3
    """tokens of the chat template between turns"""
    FORCED = 4
    """appended in the policy's place and not sampled: an end token after a stop string"""
    DEMONSTRATION = 5
    """written by an expert or a data set in the policy's place; trained on in SFT only"""
    OTHER_AGENT = 6
    """sampled by a frozen model that plays another role of the episode; never trained on"""


class FinishReason(str, Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(str, Enum):
    """The outcome of an episode; the values are those of slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(str, Enum):
    """Why an episode ended. `status` is the outcome that follows from it."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    EPISODE_TIMEOUT = "episode_timeout"
    INVALID_ACTION_LIMIT = "invalid_action_limit"
    ENGINE_ABORT = "engine_abort"
    ENV_FAILURE = "env_failure"
    TOOL_FAILURE = "tool_failure"
    REWARD_FAILURE = "reward_failure"
    ENGINE_FAILURE = "engine_failure"

    @property
    def status(self) -> Status:
        """The outcome that follows from this reason."""
        return _STATUS[self]


_STATUS = {
    StopReason.TERMINATED: Status.COMPLETED,
    StopReason.INVALID_ACTION_LIMIT: Status.COMPLETED,
    StopReason.ENV_TRUNCATED: Status.TRUNCATED,
    StopReason.MAX_TURNS: Status.TRUNCATED,
    StopReason.MAX_TOKENS: Status.TRUNCATED,
    StopReason.CONTEXT_FULL: Status.TRUNCATED,
    StopReason.EPISODE_TIMEOUT: Status.TRUNCATED,
    StopReason.ENGINE_ABORT: Status.ABORTED,
    StopReason.ENV_FAILURE: Status.FAILED,
    StopReason.TOOL_FAILURE: Status.FAILED,
    StopReason.REWARD_FAILURE: Status.FAILED,
    StopReason.ENGINE_FAILURE: Status.FAILED,
}
