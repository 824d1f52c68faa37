"""The report of `agentrl tokens`: what is known about a model's template, and a conversation's tokens with provenance and mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.render.base import HistoryPolicy, Pieces
from agentrl.render.delta_proof import DeltaProof
from agentrl.render.families import make_renderer
from agentrl.render.images import images_of_model
from agentrl.render.renderer import Renderer, strip_control
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import FinishReason, Message, Provenance

EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "Which river flows through Bordeaux?"},
    {"role": "assistant", "content": "I will look it up."},
    {"role": "user", "content": "Yes, please: not from memory. <|im_end|>"},
    {"role": "assistant", "content": "The Garonne."},
    {"role": "user", "content": "Thank you."},
)
_TOOL: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefgh0", "content": "x"}
_USER: Message = {"role": "user", "content": "x"}
_ASSISTANT: Message = {"role": "assistant", "content": "x"}
_OBSERVATIONS: tuple[tuple[str, list[Message]], ...] = (
    ("a user's message", [_USER]),
    ("a tool's result", [_TOOL]),
    ("two tools' results", [_TOOL, {**_TOOL, "tool_call_id": "abcdefgh1"}]),
    ("a system message and a user's", [{"role": "system", "content": "x"}, _USER]),
)
_HISTORIES: tuple[tuple[str, list[Message]], ...] = (
    ("before any tool", [_USER]),
    ("after a tool's result", [_USER, _ASSISTANT, _TOOL]),
    ("later", [_USER, _ASSISTANT, _TOOL, _ASSISTANT, _USER]),
)


def token_report(
    model_dir: str | Path,
    messages: Sequence[Message] = EXAMPLE,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    action_format: str | None = None,
    history: HistoryPolicy = "append",
    width: int = 100,
    **template_args: Any,
) -> str:
    """The report as text.

    Args:
        model_dir: A model folder or hub id.
        messages: The conversation.
        tools: Schemas of its tools.
        action_format: A name of `FORMATS`. None: the family's own.
        history: What to do where the template rewrites history.
        width: Columns for text and ids.
        template_args: Variables of the template.

    Returns:
        The text, which ends with a newline.

    Raises:
        TemplateError: the model cannot be rendered.
    """
    tokenizer = Tokenizer.load(model_dir)
    images = images_of_model(model_dir, tokenizer.added)
    renderer = make_renderer(
        tokenizer, action_format, where=str(model_dir), history=history, images=images, **template_args
    )
    lines = (*_properties(renderer), "", *_proofs(renderer), "", *_conversation(renderer, messages, tools, width))
    return "\n".join(lines) + "\n"


def _properties(renderer: Renderer) -> Iterator[str]:
    tokenizer = renderer.tokenizer
    stop_tokens = [name for name, i in tokenizer.added.items() if i in renderer.stop_token_ids]
    stop_strings = f", stop strings {', '.join(renderer.stop)}" if renderer.stop else ""
    yield f"family         {renderer.family}"
    yield f"action format  {renderer.format.name}{stop_strings}"
    yield f"turn ends      {' '.join(renderer.ends)}"
    yield f"engine stops   {' '.join(stop_tokens)}"
    yield f"prefilled      {repr(renderer.prefill) if renderer.prefill else 'nothing'}"
    yield f"tools          {_tools(renderer)}"
    yield f"history        {renderer.history_policy}"
    counts = f"{len(tokenizer.added)}, {len(tokenizer.controls)} of them special"
    yield f"added tokens   {counts}; inside content all are plain text"
    cached = "words from a cache, split as the tokenizer splits them"
    yield f"encoder        {cached if tokenizer.is_fast else 'the tokenizer itself'}"


def _tools(renderer: Renderer) -> str:
    if not renderer.format.needs_tools:
        return f"left to the environment's prompt by the action format {renderer.format.name}"
    if renderer.shows_tools:
        return "the template puts their schemas into the prompt"
    return "LEFT OUT by the template: the environment's own prompt must describe them"


def _proofs(renderer: Renderer) -> Iterator[str]:
    if renderer.format.inline:
        yield "deltas: inline, in the same assistant turn; the template is not used"
        return
    yield "deltas, by what follows the assistant's turn:"
    for name, messages in _OBSERVATIONS:
        proof = renderer.proof(messages)
        if proof.reason is not None:  # it may be proven for a known history
            proofs = [(when, renderer.proof(messages, history=history, tools=())) for when, history in _HISTORIES]
            if any(p.reason is None for _, p in proofs):
                yield from (f"  {name}, {when}, without tools in the prompt: {_verdict(p)}" for when, p in proofs)
                continue
        yield f"  {name}: {_verdict(proof)}"


def _verdict(proof: DeltaProof) -> str:
    if proof.reason is not None:
        return f"NOT PROVEN, a new segment each time: {proof.reason}"
    how = "spliced" if proof.pattern is not None else "rendered each time"
    drops = "; drops earlier thinking" if proof.drops_reasoning else ""
    return f"proven over {proof.histories} histories, {how}{drops}: {proof.end} {proof.preview()}"


def _conversation(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], width: int) -> Iterator[str]:
    """The conversation as a rollout would build it, with the assistant's messages as what was sampled."""
    yield "provenance   mask  tokens  text"
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    history = list(messages[:first])
    pieces = renderer.prompt(history, tools)
    sampled: tuple[int, ...] = ()
    turn: list[Message] = []
    """the assistant's message, and those that answer it"""
    for message in (*messages[first:], None):
        if message is not None and message["role"] != "assistant":
            turn.append(message)
            continue
        if turn[1:]:
            reason, pieces = _next_pieces(renderer, history, turn, sampled, tools)
            if reason is not None:
                yield f"------------ a new segment: {reason}"
        elif turn:
            pieces = ()
        yield from _piece_lines(renderer, pieces, width)
        if message is not None:
            context = [i for _, ids in pieces for i in ids]
            history, sampled = [*history, *turn], renderer.encode_turn(message)
            turn = [renderer.message(renderer.parse(sampled, FinishReason.STOP, 64, context=context, tools=tools))]
            yield from _piece_lines(renderer, ((Provenance.SAMPLED, sampled),), width)


def _next_pieces(
    renderer: Renderer,
    history: Sequence[Message],
    turn: Sequence[Message],
    sampled: Sequence[int],
    tools: Sequence[Any],
) -> tuple[str | None, Pieces]:
    """Why a new segment opens (None: none does), and what follows the sampled ids: the delta, or the new segment's prompt."""
    delta = renderer.delta(turn[1:], sampled, history=history, tools=tools)
    if delta.new_segment is None:
        return None, delta.pieces
    return delta.new_segment, renderer.prompt([*history, *turn], tools)


def _piece_lines(renderer: Renderer, pieces: Pieces, width: int) -> Iterator[str]:
    for kind, ids in pieces:
        text = strip_control(renderer.tokenizer.decode(ids)).replace("\n", "\\n").replace("\t", "\\t")
        yield f"{kind.name:<12} {int(kind is Provenance.SAMPLED):>4} {len(ids):>7}  {_abbreviated(text, width)}"
        yield f"{'':<12} {'':>4} {'':>7}  {_abbreviated(' '.join(map(str, ids)), width)}"


def _abbreviated(text: str, width: int) -> str:
    """The text, or its beginning and end if it is too wide."""
    return text if len(text) <= width else f"{text[: width * 2 // 3]} … {text[-width // 3 :]}"
