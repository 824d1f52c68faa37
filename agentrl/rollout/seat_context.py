"""How the context of a seat grows between two of its turns, and the turns of a role that is played by text."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import ContractError, EnvFailure, boundary, shown
from agentrl.render.context_policy import ContextView, context_view, split_after_last_turn
from agentrl.render.truncation import NextContext, continue_context, is_long, open_segment
from agentrl.rollout.seat import Reply, Seat
from agentrl.rollout.summary import ask_for_summary, write_summary
from agentrl.rollout.turn import TurnDraft
from agentrl.types import Action, StopReason

_TEXT_ONLY = -1
"""`Turn.segment` of a turn without tokens"""

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode


async def extend_context(episode: Episode, draft: TurnDraft, seat: Seat) -> StopReason | None:
    """Append what a turn's observation adds to the context of a role that has acted before."""
    runner, renderer, limits, messages = (
        episode.runner,
        episode.runner.renderer,
        episode.runner.limits,
        draft.observation.messages,
    )
    role, last = seat.role, seat.last
    assert last is not None, "a role that has a prompt was the next to act, and acted"
    context_room = limits.context_length - episode.recorder.length(role)
    budget_room = limits.max_response_tokens - episode.response_length()
    reply, tools = renderer.message(last.action), episode.tool_schemas()
    grown = (renderer, seat.conversation, reply, messages, episode.recorder.last_generated(last.index, role))
    most = min(limits.context_length, seat.prompt_length + limits.max_response_tokens)
    policy = runner.context_policy or getattr(episode.instance.env, "context_policy", None)
    request: SummaryRequest | None = None
    view: ContextView | None = None
    if policy is not None:
        view = context_view(
            *grown,
            first=seat.prompt_messages,
            length=episode.recorder.length(role),
            limit=most,
            tools=tools,
            turns_left=limits.max_turns - seat.turns,
        )
        rewritten = await (runner.rewrite_context or runner.call_context_policy)(policy, view)
        if isinstance(rewritten, SummaryRequest):
            request = rewritten
        elif rewritten is not None:
            draft.context = tuple(rewritten)
    room = min(context_room, budget_room) - 1
    if request is not None:
        history = [*seat.conversation, reply]
        render = partial(ask_for_summary, grown, request, room, most, tools)
    elif draft.context is not None:
        history, newest_messages = split_after_last_turn(draft.context)
        render = partial(open_segment, renderer, history, newest_messages, "the context policy", most - 1, tools)
    else:
        history = [*seat.conversation, reply]
        render = partial(continue_context, *grown, max_tokens=room, max_segment_tokens=most - 1, tools=tools)
    continuation = await asyncio.to_thread(render) if is_long(messages) else render()
    if continuation is None:
        return StopReason.CONTEXT_FULL if context_room < budget_room else StopReason.MAX_TOKENS
    _append(episode, draft, continuation, role)
    seat.conversation = [*history, *continuation.messages]
    if request is None or view is None:
        return None
    return await _summarise(episode, seat, request, view, most)


async def _summarise(
    episode: Episode, seat: Seat, request: SummaryRequest, view: ContextView, most: int
) -> StopReason | None:
    """Have the role write a summary, and begin the segment that holds it."""
    summary, stop, opened = await write_summary(episode, seat, request, view, most)
    if summary is not None and opened is not None:
        summary.observation_cut_tokens = opened.cut_tokens
        _append(episode, summary, replace(opened, cut_tokens=0), seat.role)
    return stop


def _append(episode: Episode, draft: TurnDraft, continuation: NextContext, role: str) -> None:
    """Add what follows a turn to the record of a role's context."""
    if continuation.new_segment is not None:
        draft.info["new_segment"] = continuation.new_segment
        episode.recorder.open(continuation.pieces, turn=draft.index, agent_id=role, images=continuation.images)
    else:
        episode.recorder.extend(continuation.pieces, turn=draft.index, agent_id=role, images=continuation.images)
    if continuation.cut_tokens:
        draft.observation = replace(draft.observation, messages=tuple(continuation.messages))
        draft.observation_cut_tokens = continuation.cut_tokens


async def speak(episode: Episode, reply: Reply) -> TurnDraft:
    """The text of a role that no model of this run plays: its turn begins."""
    episode.end_turn()
    seat, index = episode.seat, len(episode.turns)
    episode.activity, seed, started = f"the turn of {seat.role}", episode.turn_seed(index), time.perf_counter()
    limit_s = episode.runner.env_class.timeout_s
    with boundary(EnvFailure, f"player of {seat.role}"):
        text = await episode.runner.pools.env.call(reply, list(seat.conversation), seed=seed, timeout_s=limit_s)
    if not isinstance(text, str):
        raise ContractError(f"the player of {seat.role} must return a text, found {type(text).__name__}: {shown(text)}")
    seat.conversation.append({"role": "assistant", "content": text})
    episode.draft = TurnDraft(
        index=index,
        segment=_TEXT_ONLY,
        context_length=0,
        context_crc=0,
        seed=seed,
        action=Action(text),
        matched_stop=None,
        timings={"start_s": started - episode.started, "generate_s": time.perf_counter() - started},
        agent_id=seat.role,
    )
    episode.begin_turn(episode.draft)
    return episode.draft
