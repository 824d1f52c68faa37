"""What a context policy asks of the policy: a summary of the conversation, which the policy samples. Users import it from `agentrl.render`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """Returned by a context policy in place of messages: the policy writes a summary, and a segment with it begins.

    Example:
        >>> SummaryRequest(instruction="Summarise what you found so far.", keep=1).max_tokens
        256
    """

    instruction: str
    """what the policy is asked, as a user's message after the newest observation"""
    keep: int = 2
    """number of the newest turns that stay in the conversation, after the first prompt and the summary"""
    max_tokens: int = 256
    """maximum tokens of the summary"""
