"""Generated conversations: what the policy says, what is returned, and what the family's own template makes of the whole.

`hugging_face` renders with transformers' machinery, not ours, and real histories, not synthetic ones: an independent witness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from template_models import Model, template_source

from agentrl.errors import TemplateError
from agentrl.render import Renderer
from agentrl.types import Action, FinishReason, Message, Provenance

NOW = datetime(2026, 5, 4)
_TEXTS = (
    "What is the capital of France?", "ok", "x", "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "東京は日本の首都です。", "🙂👩‍👩‍👧 café nai\u0308ve", "def f(x):\n    if x:\n        return {'a': [1, 2]}\n\treturn None\n",
    '{"results": [{"id": 1, "text": "a \\"quoted\\" word"}]}', "line one\n\nline two\n", "  leading", "trailing  ", "\n\nframed\n\n",
    "a < b && c > d; <b>bold</b> </s", "1234567890 3.14159 1e-9", "<", "tab\tand\r\nreturn", "مرحبا بالعالم", "हिन्दी पाठ",
)  # fmt: skip


_THOUGHTS = (
    "",
    "so",
    "I should look.\n\nThen I can answer.",
    "思考 🙂\n- a < b\n",
    " ",
    '{"name": "search"}',
    "\n\ntwice\n\n" * 40,
)
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": about, "parameters": {
        "type": "object", "properties": {"query": {"type": "string", "description": "What for: <b>'x' & \"y\"</b>, 東京."}, **more},
        "required": ["query"],
    }}}
    for name, about, more in (
        ("search", "Look something up.", {}),
        ("look_up", "Zwölf Boxkämpfer.\n\nSecond paragraph.", {
            "limit": {"type": "integer", "default": 3}, "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        }),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """One turn: what the policy sampled and what the environment answered."""

    text: str
    calls: int
    end: str
    observation: tuple[Message, ...]
    mark: str = ""
    """a word in what the template shows of the turn; '': it was thought only"""


@dataclass(frozen=True)
class Conversation:
    first: tuple[Message, ...]
    turns: tuple[Exchange, ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """of the template"""


def text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.03:
        return ""
    if kind < 0.05:
        return rng.choice((" ", "\n", "\t \n"))
    if kind < 0.07:
        return " ".join(rng.choice(_TEXTS) for _ in range(rng.randint(200, 600)))
    return " ".join(rng.choice(_TEXTS) for _ in range(rng.randint(1, 3)))


def conversation(model: Model, seed: int, *, middle: bool = True) -> Conversation:
    """Turns with tools and users, with and without tools in the prompt and thinking, several calls and results, empty and long texts.

    `middle`: system messages also in the middle.
    """
    rng = random.Random(f"{model.name}-{seed}")
    options = rng.choice(({}, {model.reads: True}, {model.reads: False})) if model.reads else {}
    first: list[Message] = [{"role": "user", "content": text(rng) or "hello"}]
    if rng.random() < 0.5:
        first.insert(0, {"role": "system", "content": text(rng) or "be brief"})
    turns: list[Exchange] = []
    for i in range(rng.randint(1, 5)):
        thought = _thought(model, rng, options, turns[-1].observation[-1]["role"] if turns else "user")
        mark, kind = f"mark{seed}x{i}", rng.random()
        if kind < 0.6:
            turns.append(_calling(model, rng, thought, mark))
            continue
        reply = rng.choice(("", "I see. ")) + mark
        whole = thought + model.answer(reply)
        if kind > 0.9 and thought:
            whole, mark = thought.removesuffix("<|start|>assistant").removesuffix("<|end|>"), ""
        observation: list[Message] = [{"role": "user", "content": text(rng)}]
        if middle and rng.random() < 0.2:
            observation.insert(rng.randint(0, 1), {"role": "system", "content": text(rng) or "note"})
        turns.append(Exchange(whole, 0, model.end, tuple(observation), mark))
    return Conversation(tuple(first), tuple(turns), TOOLS if rng.random() < 0.5 else (), options)


def _calling(model: Model, rng: random.Random, thought: str, mark: str) -> Exchange:
    """A turn with one call or several, each answered, sometimes with a word about what could not be read."""
    n = rng.choice((1, 1, 2, 3)) if model.calls is not None else 1
    names = [rng.choice(("search", "look_up")) for _ in range(n)]
    queries = [rng.choice(_TEXTS) for _ in names[1:]] + [f"{mark} {rng.choice(_TEXTS)}"]
    if n == 1 and rng.random() < 0.5:
        call = model.call(names[0], queries[0])
        reply = (
            call
            if not thought
            else thought + call.rpartition("</think>")[2].rpartition("<|start|>assistant")[2].lstrip("\n")
        )
    elif model.calls is None:
        reply = thought + model.call(names[0], queries[0]).rpartition("<|start|>assistant")[2]
    else:
        reply = thought + model.calls([(name, {"query": q}) for name, q in zip(names, queries, strict=True)])
    results: list[Message] = [
        {"role": "tool", "name": name, "tool_call_id": _call_id(model, name, k), "content": text(rng)}
        for k, name in enumerate(names)
    ]
    if rng.random() < 0.15:
        results.append({"role": "tool", "name": "error", "tool_call_id": "error", "content": "error: at most 3 calls"})
    return Exchange(reply, n, model.call_end or model.end, tuple(results), mark)


def _thought(model: Model, rng: random.Random, options: dict[str, Any], after: str) -> str:
    """With which the turn begins: always where the template opens it, never where the template has closed it."""
    if model.think is None or options.get("enable_thinking") is False:
        return ""
    thought = model.think(rng.choice(_THOUGHTS))
    if model.name == "deepseek" or (model.name == "deepseek_v31" and options):
        return thought if after != "tool" else ""
    if model.name == "deepseek_v31":
        return ""
    return thought if model.name == "qwen3_5" or rng.random() < 0.8 else ""


def _call_id(model: Model, name: str, k: int) -> str:
    return (
        f"abcdefgh{k}"
        if model.name == "mistral"
        else f"functions.{name}:{k}"
        if model.name.startswith("kimi_k2")
        else f"call_{k}"
    )


@dataclass
class Played:
    """A conversation as the renderer put it together."""

    pieces: list[tuple[Provenance, tuple[int, ...]]]
    deltas: list[tuple[tuple[int, ...], str | None]]
    """(ids, reason of a new segment) after each turn"""
    messages: list[list[Message]]
    """the conversation before each delta, the policy's turn last"""

    refused: bool = False
    """the template takes no conversation that continues like this: it ended there"""

    @property
    def ids(self) -> list[int]:
        return [i for _, ids in self.pieces for i in ids]

    @property
    def segment(self) -> list[int]:
        """The last one."""
        start = max(i for i, (kind, _) in enumerate(self.pieces) if kind is Provenance.PROMPT)
        return [i for _, ids in self.pieces[start:] for i in ids]


def play(renderer: Renderer, conversation: Conversation) -> Played:
    """What the runner does, without engine and environment."""
    tokenizer, tools = renderer.tokenizer, conversation.tools
    messages: list[Message] = [dict(m) for m in conversation.first]
    played = Played(list(renderer.prompt(messages, tools)), [], [])
    for turn in conversation.turns:
        sampled = (*tokenizer.encode(turn.text), tokenizer.added[turn.end])
        action: Action = renderer.parse(sampled, FinishReason.STOP, 8, context=played.ids)
        assert (len(action.calls), action.errors) == (turn.calls, ()), (turn.text, action)
        delta = renderer.delta(turn.observation, sampled, history=messages, tools=tools)
        messages = [*messages, renderer.message(action)]
        played.messages.append(messages)
        messages = [*messages, *turn.observation]
        played.pieces += [(Provenance.SAMPLED, sampled), *delta.pieces]
        played.deltas.append((tuple(i for _, ids in delta.pieces for i in ids), delta.new_segment))
        if delta.new_segment is not None:
            try:
                played.pieces += renderer.prompt(messages, tools)
            except TemplateError:
                played.refused = True
                break
    return played


def hugging_face(
    model: Model, renderer: Renderer, messages: Sequence[Message], *, generate: bool, tools: Sequence[Any] = ()
) -> str:
    """The family's own rendering, by transformers."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(template_source(model))
    special = renderer.tokenizer.special
    adapted = renderer._family.adapt([dict(m) for m in messages])
    args = {**renderer._template._variables, **special, "strftime_now": NOW.strftime}
    if model.name in (
        "deepseek",
        "deepseek_v31",
    ):  # these want a call's arguments as text; here they are in the content
        assert not any(m.get("tool_calls") for m in adapted)
    return compiled.render(messages=adapted, tools=list(tools) or None, add_generation_prompt=generate, **args)
