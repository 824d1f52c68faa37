"""Generated conversations: what the policy says, what comes back, and what the family's own template makes of the whole.

`hugging_face` renders with transformers' machinery, not ours, and real histories, not synthetic ones: an independent witness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from template_models import BY_NAME, Model, template_source

from agentrl.render import Renderer
from agentrl.types import Action, FinishReason, Message, Provenance

NOW = datetime(2026, 5, 4)
_TEXTS = (
    "What is the capital of France?", "ok", "x", "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "東京は日本の首都です。", "🙂👩‍👩‍👧 café nai\u0308ve", "def f(x):\n    if x:\n        return {'a': [1, 2]}\n\treturn None\n",
    '{"results": [{"id": 1, "text": "a \\"quoted\\" word"}]}', "line one\n\nline two\n", "  leading", "trailing  ", "\n\nframed\n\n",
    "a < b && c > d; <b>bold</b> </s", "1234567890 3.14159 1e-9", "<", "tab\tand\r\nreturn", "مرحبا بالعالم", "हिन्दी पाठ",
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """One turn: what the policy sampled and what the environment answered."""

    text: str
    calls: int
    end: str
    observation: tuple[Message, ...]


@dataclass(frozen=True)
class Conversation:
    first: tuple[Message, ...]
    turns: tuple[Exchange, ...]


def text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.03:
        return ""
    if kind < 0.05:
        return rng.choice((" ", "\n", "\t \n"))
    if kind < 0.07:
        return " ".join(rng.choice(_TEXTS) for _ in range(rng.randint(200, 600)))
    return " ".join(rng.choice(_TEXTS) for _ in range(rng.randint(1, 3)))


def conversation(model: Model, seed: int) -> Conversation:
    """Turns with tools and users, parallel and consecutive results, empty and long texts, unicode and code."""
    rng = random.Random(f"{model.name}-{seed}")
    first: list[Message] = [{"role": "user", "content": text(rng) or "hello"}]
    if rng.random() < 0.5:
        first.insert(0, {"role": "system", "content": text(rng) or "be brief"})
    turns = []
    for i in range(rng.randint(1, 5)):
        if rng.random() < 0.6:
            n = rng.choice((1, 1, 1, 2, 3))
            results = tuple(
                {"role": "tool", "name": "search", "tool_call_id": _call_id(model, k), "content": text(rng)}
                for k in range(n)
            )
            query = f"mark{seed}x{i} {rng.choice(_TEXTS[:4])}"
            turns.append(Exchange(_calls(model, query), 1, model.call_end or model.end, results))
        else:
            said = rng.choice(("", "I see. ")) + f"mark{seed}x{i}"
            observation: list[Message] = [{"role": "user", "content": text(rng)}]
            if "system" in model.roles and rng.random() < 0.2:
                observation.insert(0, {"role": "system", "content": text(rng) or "note"})
            turns.append(Exchange(model.say(said), 0, model.end, tuple(observation)))
    return Conversation(tuple(first), tuple(turns))


def _call_id(model: Model, k: int) -> str:
    return (
        f"abcdefgh{k}"
        if model.name == "mistral"
        else f"functions.search:{k}"
        if model.name == "kimi_k2"
        else f"call_{k}"
    )


def _calls(model: Model, query: str) -> str:
    return model.call("search", query)


@dataclass
class Played:
    """A conversation as the renderer put it together."""

    pieces: list[tuple[Provenance, tuple[int, ...]]]
    deltas: list[tuple[tuple[int, ...], str | None]]
    """(ids, reason of a new segment) after each turn"""
    messages: list[list[Message]]
    """the conversation before each delta, the policy's turn last"""

    @property
    def ids(self) -> list[int]:
        return [i for _, ids in self.pieces for i in ids]


def play(renderer: Renderer, conversation: Conversation, tools: Sequence[Any] = ()) -> Played:
    """What the runner does, without engine and environment."""
    tokenizer = renderer.tokenizer
    messages: list[Message] = [dict(m) for m in conversation.first]
    played = Played(list(renderer.prompt(messages, tools)), [], [])
    for turn in conversation.turns:
        sampled = (*tokenizer.encode(turn.text), tokenizer.added[turn.end])
        action: Action = renderer.parse(sampled, FinishReason.STOP, 8)
        assert (len(action.calls), action.errors) == (turn.calls, ()), (turn.text, action)
        delta = renderer.delta(turn.observation, sampled, history=messages, tools=tools)
        messages = [*messages, renderer.message(action)]
        played.messages.append(messages)
        messages = [*messages, *turn.observation]
        played.pieces += [(Provenance.SAMPLED, sampled), *delta.pieces]
        if delta.new_segment is not None:
            played.pieces += renderer.prompt(messages, tools)
        played.deltas.append((tuple(i for _, ids in delta.pieces for i in ids), delta.new_segment))
    return played


def hugging_face(model: Model, renderer: Renderer, messages: Sequence[Message], *, generate: bool) -> str:
    """The family's own rendering, by transformers."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(template_source(model))
    special = renderer.tokenizer.special
    adapted = renderer._family.adapt([dict(m) for m in messages])
    args = {**dict(BY_NAME[model.name].args), **special, "strftime_now": NOW.strftime}
    if model.name in (
        "deepseek",
        "deepseek_v31",
    ):  # these want a call's arguments as text; here they are in the content
        assert not any(m.get("tool_calls") for m in adapted)
    return compiled.render(messages=adapted, tools=None, add_generation_prompt=generate, **args)
