"""A summary by the policy itself: a turn that the environment does not see, and the segment that begins with its text.

The instruction follows the newest observation as a user's message. What is sampled after it is SAMPLED and is trained in that segment. The next
segment begins with the first prompt, the summary's text and the newest turns, all of them PROMPT. The summary counts as a turn in all limits.

- Cut by length, it is used as it stands; the episode continues.
- Empty, the old turns leave without it, and an earlier summary stays.
- A tool call or an answer in it is only text: nothing is executed and the environment is not stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import TemplateError
from agentrl.render.context_policy import ContextView, split_after_last_turn, with_note
from agentrl.render.formats.block_format import THINKING
from agentrl.render.renderer import Renderer
from agentrl.render.truncation import Finish, NextContext, continue_context, open_segment
from agentrl.rollout.seat import Seat
from agentrl.rollout.turn import TurnDraft
from agentrl.types import Action, ParseError, StopReason

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode


def ask_for_summary(
    grown: tuple[Any, ...], request: SummaryRequest, room: int, most: int, tools: Sequence[Any]
) -> NextContext | None:
    """The context with the observation and the instruction, at most `room` tokens longer. None: not even the instruction fits.

    The observation is cut where no room would be left for the summary: the tokens that it may have, or half of `room` if that is less. Where the
    template refuses a user's message after the observation, the instruction is at the end of the observation's last message.
    `grown`, `most`: the first arguments and `max_segment_tokens` of `continue_context`.
    """

    def fit(finish: Finish) -> NextContext | None:
        reserved = min(request.max_tokens, room // 2)
        continued = partial(continue_context, *grown, tools=tools, finish=finish)
        return continued(max_tokens=room - reserved, max_segment_tokens=most - 1 - reserved) or continued(
            max_tokens=room, max_segment_tokens=most - 1
        )

    try:
        return fit(lambda kept: [*kept, {"role": "user", "content": request.instruction}])
    except TemplateError:
        return fit(lambda kept: with_note(kept, request.instruction))


async def write_summary(
    episode: Episode, seat: Seat, request: SummaryRequest, view: ContextView, most: int
) -> tuple[TurnDraft | None, StopReason | None, NextContext | None]:
    """Sample the summary and render the context that begins with it: its turn, and a stop reason or the context.

    `view`: the conversation as the context policy saw it. `most`: the limit of a segment, in tokens.
    """
    room, bound = episode.room()
    if room <= 0:
        return None, bound, None
    episode.activity = "summary"
    draft, generation = await episode.generate(min(room, request.max_tokens))
    renderer = episode.runner.renderer
    text = summary_text(renderer, draft.action)
    draft.summary, draft.action = request, _as_summary(draft.action, text)
    if renderer.is_placeholder(generation.ids):
        return draft, StopReason.INVALID_ACTION_LIMIT, None
    seat.first_prompt = seat.first_prompt or tuple(view.messages[: view.first])
    prompt = with_note(seat.first_prompt, text) if text else list(view.messages[: view.first])
    kept = view.turns()[-request.keep :] if request.keep else []
    draft.context = (*prompt, *(message for turn in kept for message in turn))
    history, newest = split_after_last_turn(draft.context) if kept else (prompt, [])
    opened = open_segment(renderer, history, newest, "a summary by the policy", most - 1, episode.tool_schemas())
    if opened is None:
        return draft, episode.room()[1], None
    seat.conversation = [*history, *opened.messages]
    return draft, None, opened


def summary_text(renderer: Renderer, action: Action) -> str:
    """The text of a summary, without thinking."""
    return THINKING.sub("", str(renderer.message(action).get("content") or "")).strip()


def _as_summary(action: Action, text: str) -> Action:
    """The action as that of a summary: nothing in it is executed, and what it should not hold is an error."""
    errors: tuple[ParseError, ...] = ()
    if action.calls:
        errors = (ParseError("call", "a summary must not call tools; the calls were not made", action.text),)
    elif not text:
        errors = (ParseError("empty", "the summary is empty"),)
    return replace(action, calls=(), errors=errors, answer=None)
