"""The seats of an episode: each role has a separate conversation, and is played by the policy, by a frozen model, or by text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.base import Generator
from agentrl.errors import ContractError, suggest
from agentrl.rollout.turn import TurnDraft
from agentrl.types import Message, StepResult, role_id

Reply = Callable[..., Any]
"""`reply(messages, *, seed)` returns the text of a role's turn, sync or async: a scripted user, or a model that a server serves"""
Player = Generator | Reply
"""Who plays a role in the policy's place: a frozen model, or text."""
POLICY = "policy"
"""the one role of an environment without roles"""
_NAME = re.compile(r"[^#/.\s]+")


@dataclass(slots=True, eq=False)
class Seat:
    """One speaker of an episode."""

    role: str
    player: Player | None = None
    """None: the policy"""
    conversation: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    """number of messages in the first prompt; 0: it has not been asked yet"""
    prompt_length: int = 0
    """tokens of the first prompt"""
    first_prompt: tuple[Message, ...] = ()
    """the first prompt as it was before the policy's summary joined it; (): no summary yet"""
    turns: int = 0
    invalid_actions: int = 0
    last: TurnDraft | None = None
    """its last turn"""

    @property
    def generator(self) -> Generator | None:
        """The frozen model that plays it; None: the policy, or text."""
        if self.player is None:  # the usual case; isinstance reads all attributes of the protocol
            return None
        return self.player if isinstance(self.player, Generator) else None

    @property
    def reply(self) -> Reply | None:
        """What writes its turns as text; None: a model of this run plays it."""
        return None if self.player is None or isinstance(self.player, Generator) else self.player

    def session(self, episode_id: str) -> str:
        """The session of its requests at an engine."""
        return episode_id if self.role == POLICY else role_id(episode_id, self.role)


def make_seats(label: str, roles: Sequence[str], players: Mapping[str, Player]) -> dict[str, Seat]:
    """The seats of an environment's roles; without roles that of the policy.

    Raises:
        ContractError: the roles are not distinct names.
    """
    names = [roles] if isinstance(roles, str) else list(roles)
    if not names:
        return {POLICY: Seat(POLICY)}
    if isinstance(roles, str) or len(set(names)) < len(names) or not all(_is_name(name) for name in names):
        raise ContractError(
            f"{label}.roles must be distinct names without spaces, dots, slashes or '#', found {roles!r:.80}; "
            'write, for example, roles = ("white", "black")'
        )
    return {name: Seat(name, players.get(name)) for name in names}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and value != POLICY


def check_role(role: str, seats: Mapping[str, Seat], where: str) -> str:
    """The argument, if it is a role of the episode.

    Raises:
        ContractError: it is not.
    """
    if role not in seats:
        known = ", ".join(seats) if POLICY not in seats else "no roles"
        raise ContractError(f"{where} names the role {role!r}, and the environment has {known}{suggest(role, seats)}")
    return role


def check_role_rewards(
    result: StepResult, seats: Mapping[str, Seat], label: str, check: Callable[[Any], float]
) -> dict[str, float]:
    """`StepResult.rewards` as floats. `check`: converts one.

    Raises:
        ContractError: they are not a mapping of roles to numbers.
    """
    rewards: Any = result.rewards
    if not isinstance(rewards, Mapping):
        raise ContractError(
            f"{label}.step: StepResult.rewards must be a mapping of roles, found {type(rewards).__name__}"
        )
    return {
        check_role(role, seats, f"{label}.step: StepResult.rewards"): check(value) for role, value in rewards.items()
    }
