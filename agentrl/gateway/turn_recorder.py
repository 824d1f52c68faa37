"""Generations at the gateway become turns of the episode's record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentrl.core.message_images import Image
from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Generation
from agentrl.errors import EngineFailure, boundary
from agentrl.gateway.context_plan import ContextPlan, ContextPlanner
from agentrl.gateway.conversation_tree import SAMPLED_AGAIN, TURN_BRANCHED, GeneratedTurn
from agentrl.gateway.protocol import Reply
from agentrl.gateway.reply import reply_of
from agentrl.rollout.episode import Episode
from agentrl.rollout.turn import TurnDraft
from agentrl.types import (
    Action,
    FinishReason,
    Message,
    Observation,
    ParseError,
    Provenance,
    StopReason,
    ToolResult,
)


class Sampled(NamedTuple):
    """A generation that is not recorded yet."""

    generation: Generation
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The place of a request in its episode."""

    number: int
    """ordinal of the request"""
    seen: int
    """turns recorded before it"""
    at: float
    """clock in seconds"""


class TurnRecorder:
    """Records the generations of one episode."""

    def __init__(self, episode: Episode, planner: ContextPlanner, counts: Counter[str]) -> None:
        """`counts`: counts opened segments by their reason."""
        self.episode, self.planner, self.counts = episode, planner, counts
        self.drafts: list[TurnDraft] = []
        """the turns, whose observations arrive later"""
        self.bound: StopReason | None = None
        """the limit of the run that cut the last generation; None: none did"""

    def commit(self, plan: ContextPlan, arrival: Arrival, choice: int, sampled: Sampled) -> Reply:
        """Record a generation as a turn and return it as the client reads it."""
        index, generation, recorder = len(self.drafts), sampled.generation, self.episode.recorder
        info: dict[str, Any] = {"request": self._request_info(plan, arrival, choice)}
        if choice == 0:
            self._observe(plan, arrival, info["request"])
            if plan.left_out:
                self.counts.update(plan.left_out)
        reason = self._extend_record(plan, choice)
        if reason is not None:
            info["new_segment"] = reason
            self.counts[f"segment: {reason}"] += 1
        temperature = self.episode.runner.sampling.temperature
        with boundary(EngineFailure, "the engine's answer"):
            recorder.sampled(generation, turn=index, temperature=temperature, agent_id=plan.agent_id)
        action = self.parse(plan, generation)
        cut = generation.finish_reason is FinishReason.LENGTH
        self.bound = plan.bound if cut and not plan.clients_limit else None
        self.drafts.append(
            TurnDraft(
                index=index,
                segment=recorder.segment_index(plan.agent_id),
                context_length=len(plan.context),
                context_crc=ids_checksum(plan.context) if generation.context_crc is None else generation.context_crc,
                seed=sampled.seed,
                action=action,
                matched_stop=generation.matched_stop,
                timings={"generate_s": sampled.seconds, **generation.counts()},
                info=info,
                agent_id=plan.agent_id,
            )
        )
        renderer = self.episode.runner.renderer
        reply = reply_of(renderer, action, generation, plan.request, str(index), len(plan.context))
        turn = GeneratedTurn(
            index=index,
            segment=recorder.segment_index(plan.agent_id),
            end=recorder.length(plan.agent_id),
            ids=generation.ids,
            message=renderer.message(action),
            answered=reply.message,
            call_ids=tuple(c.id for c in action.calls),
            cut=cut,
            agent_id=plan.agent_id,
            answered_at=time.perf_counter(),
        )
        self.planner.add_turn(plan, turn)
        return reply

    def parse(self, plan: ContextPlan, generation: Generation) -> Action:
        limit, allowed = self.episode.runner.limits.max_calls_per_turn, plan.request.calls_allowed
        action = self.episode.runner.renderer.parse(
            generation.ids,
            generation.finish_reason,
            limit if allowed is None else min(limit, allowed),
            context=plan.context,
            matched_stop=generation.matched_stop,
            tools=plan.request.tools,
        )
        if generation.ids:
            return action
        return replace(action, errors=(ParseError("structure", "the generation is empty"),))

    def _extend_record(self, plan: ContextPlan, choice: int) -> str | None:
        """Put a plan's context into the record; returns why a segment opened, None for the first and for none."""
        recorder, parent = self.episode.recorder, plan.parent
        turn = -1 if parent is None else parent.index
        if parent is not None and not plan.opens and recorder.segment_length(parent.segment) == parent.end:
            recorder.resume(parent.segment)
            recorder.extend(plan.pieces, turn=turn, agent_id=plan.agent_id, images=plan.new_images)
            return None
        pieces = plan.pieces if plan.opens else ((Provenance.PROMPT, tuple(plan.context)),)
        recorder.open(pieces, turn=turn, agent_id=plan.agent_id, images=plan.images)
        if plan.opens and choice == 0:
            return plan.reason
        return SAMPLED_AGAIN if parent is None else TURN_BRANCHED if choice == 0 else SAMPLED_AGAIN

    def _observe(self, plan: ContextPlan, arrival: Arrival, info: dict[str, Any]) -> None:
        """Give the turn that a request continues its observation, the first time; else `info` keeps the new messages."""
        messages = plan.request.messages[plan.matched :]
        parent = None if plan.parent is None else self.drafts[plan.parent.index]
        if plan.parent is None or parent is None or parent.observation.messages:
            info["messages"] = _plain(messages)
            return
        if plan.cut_tokens:
            info["messages"] = _plain(messages)
        parent.observation = Observation(tuple(plan.observation))
        parent.observation_cut_tokens = plan.cut_tokens
        parent.timings["env_s"] = max(0.0, arrival.at - plan.parent.answered_at)
        self.episode.timings["env_s"] += parent.timings["env_s"]
        answers = [m for m in plan.observation if m["role"] == "tool"]
        results = [ToolResult(c.id, c.name, _text(m)) for c, m in zip(parent.action.calls, answers, strict=False)]
        parent.action = replace(parent.action, results=tuple(results))

    def _request_info(self, plan: ContextPlan, arrival: Arrival, choice: int) -> dict[str, Any]:
        """What a replay needs to make the request again, and what the client wanted."""
        request = plan.request
        optional = {
            "choice": choice,
            "n": request.n if request.n > 1 else 0,
            "stop": list(request.stop),
            "max_tokens": request.max_tokens,
            "overridden": dict(request.overridden),
            "changed": {str(i): _plain([m])[0] for i, m in plan.changed.items()},
        }
        info = {
            "protocol": request.protocol,
            "number": arrival.number,
            "seen": arrival.seen,
            "parent": -1 if plan.parent is None else plan.parent.index,
            "matched": plan.matched,
            **{k: v for k, v in optional.items() if v},
        }
        if request.calls_allowed is not None:
            info["calls_allowed"] = request.calls_allowed
        if plan.parent is None and request.tools:
            info["tools"] = request.tools
        return info


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(p.get("text", "")) for p in content)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Messages for the record, with images by their hash."""
    return [
        {**m, "content": [_plain_part(p) for p in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def _plain_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    image = part.get("image")
    return {**part, "image": {"sha256": image.sha256}} if isinstance(image, Image) else part
