"""The shared mechanism: a delta that is proven against the model's own template, or a new segment; never a guess (design §5.1).

For new messages M the template renders a synthetic conversation `user, assistant(P)` with and without M. What follows the placeholder
P in the longer one, `tail(M)`, must start with what follows it in the shorter one (the assistant's end), and must not depend on the
synthetic history: it is computed over two different histories, once per shape of M, and compared. Then `tail(M)` is exactly what the
template puts between an assistant turn and the next, whatever was said before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import ActionFormat, Delta, Pieces
from agentrl.render.jinja import ChatTemplate
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Action, FinishReason, Message, Provenance

_P = "Placeholder7d1f"
_HISTORIES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "first question"}, {"role": "assistant", "content": "an answer"}, {"role": "user", "content": "b"}],
)


class Renderer:
    """Token ids for one model's conversations in one action format."""

    def __init__(self, tokenizer: Tokenizer, action_format: ActionFormat, *, where: str = "the model", family: str = "generic", **template_args: Any) -> None:
        """`template_args` go to the template (enable_thinking=False, …).

        Raises:
            TemplateError: no chat template, or one that cannot render a user and an assistant turn.
        """
        self.tokenizer = tokenizer
        self.format = action_format
        self.family = family
        self._args = template_args
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special, where)
        self._shapes: dict[tuple[Any, ...], str | None] = {}
        self._scaffolds: dict[tuple[Any, ...], list[int]] = {}
        self.end_token = self._find_end_token(where)
        """the added token that ends an assistant turn"""
        self.end_id = tokenizer.added[self.end_token]

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for the engine."""
        return self.format.stop

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Stop tokens for the engine: the end of the assistant's turn."""
        return (self.end_id,)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Pieces:
        """The first context: the model's own rendering of the conversation, ready for the first generation."""
        text, base = self._render(messages, tools if self.format.needs_tools else None)
        return ((Provenance.PROMPT, tuple(self.tokenizer.encode_shielded(text, base))),)

    def delta(self, messages: Sequence[Message], sampled: Sequence[int]) -> Delta:
        """What follows the ids just sampled: observation and the next header. `messages` may not be empty.

        Returns a Delta with `new_segment` set (and no pieces) if the template cannot be proven for messages of this shape: the caller
        then renders the whole conversation anew.
        """
        if self.format.inline:
            return Delta(self._inline(messages))
        shape = tuple((m["role"], bool(m.get("tool_calls"))) for m in messages)
        if shape not in self._shapes:
            self._shapes[shape] = self._prove(messages)
        reason = self._shapes[shape]
        if reason is not None:
            return Delta((), new_segment=reason)
        shielded, base = self._shield(messages)
        ids = self.tokenizer.encode_shielded(self._after_end(_HISTORIES[0], shielded), base)
        body = self._split(ids, shape, messages)
        ended = bool(sampled) and sampled[-1] == self.end_id
        return Delta(body if ended else ((Provenance.FORCED, (self.end_id,)), *body))

    def parse(self, ids: Sequence[int], finish_reason: FinishReason, max_calls: int) -> Action:
        """The action in sampled ids (an end token at their end is not part of its text)."""
        body = ids[:-1] if ids and ids[-1] == self.end_id else ids
        return self.format.parse(self.tokenizer.decode(body), finish_reason, max_calls)

    # -- the template ------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, int]:
        shielded, base = self._shield(messages)
        return self._template.render(shielded, tools=tools, generate=True, **self._args), base

    def _shield(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Shield the contents of all messages that are not the model's own."""
        mine = [i for i, m in enumerate(messages) if m["role"] != "assistant" and isinstance(m["content"], str)]
        texts, base = self.tokenizer.shield([messages[i]["content"] for i in mine])
        out = list(messages)
        if base:
            for i, text in zip(mine, texts, strict=True):
                out[i] = {**messages[i], "content": text}
        return out, base

    def _find_end_token(self, where: str) -> str:
        text = self._template.render([*_HISTORIES[0], {"role": "assistant", "content": _P}], tools=None, generate=False, **self._args)
        tail = text.rpartition(_P)[2]
        found = next((t for t in sorted(self.tokenizer.added, key=len, reverse=True) if tail.lstrip().startswith(t)), None)
        if not text.count(_P) or found is None:
            raise TemplateError(
                f"{where}: its chat template does not end an assistant turn with a special token of its tokenizer (it ends with {tail[:40]!r}); "
                "such a model cannot be rendered token-exactly"
            )
        return found

    def _tail(self, history: Sequence[Message], messages: Sequence[Message], *, generate: bool) -> str:
        assistant = {"role": "assistant", "content": _P}
        text = self._template.render([*history, assistant, *messages], tools=None, generate=generate, **self._args)
        return text.rpartition(_P)[2]

    def _after_end(self, history: Sequence[Message], messages: Sequence[Message]) -> str:
        """`tail(M)` without the end token it starts with."""
        return self._tail(history, messages, generate=True).partition(self.end_token)[2]

    def _prove(self, messages: Sequence[Message]) -> str | None:
        """None if tail(M) is proven for this shape, else why not."""
        probe = [{**m, "content": f"probe {i}"} for i, m in enumerate(messages)]
        tails = []
        for history in _HISTORIES:
            try:
                end, tail = self._tail(history, [], generate=False), self._tail(history, probe, generate=True)
            except TemplateError as e:
                return str(e)
            if not end.strip() or not tail.startswith(end):
                return f"the template renders an assistant turn differently once {messages[0]['role']} follows it"
            if not all(m["content"] in tail for m in probe):
                return "the template leaves content out"
            tails.append(tail)
        return None if len(set(tails)) == 1 else "the template's text between turns depends on the history"

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _split(self, ids: list[int], shape: tuple[Any, ...], messages: Sequence[Message]) -> Pieces:
        """Provenance by what the same scaffold without content begins and ends with."""
        if shape not in self._scaffolds:
            empty = [{**m, "content": "\x00"} for m in messages]
            self._scaffolds[shape] = self.tokenizer.encode(self._after_end(_HISTORIES[0], empty))
        return _pieces(ids, self._scaffolds[shape])

    def _inline(self, messages: Sequence[Message]) -> Pieces:
        parts = self.format.inline_parts(messages)
        contents, base = self.tokenizer.shield([t for t, is_content in parts if is_content])
        rest = iter(contents)
        ids = self.tokenizer.encode_shielded("".join(next(rest) if is_content else t for t, is_content in parts), base)
        key = ("inline", len(parts))
        if key not in self._scaffolds:
            self._scaffolds[key] = self.tokenizer.encode("".join("\x00" if is_content else t for t, is_content in parts))
        return _pieces(ids, self._scaffolds[key])


def _pieces(ids: list[int], scaffold: list[int]) -> Pieces:
    n = min(len(ids), len(scaffold))
    head = next((i for i in range(n) if ids[i] != scaffold[i]), n)
    tail = next((i for i in range(n - head) if ids[-1 - i] != scaffold[-1 - i]), n - head)
    cut = (ids[:head], ids[head : len(ids) - tail], ids[len(ids) - tail :])
    kinds = (Provenance.TEMPLATE, Provenance.OBSERVATION, Provenance.TEMPLATE)
    return tuple((k, tuple(c)) for k, c in zip(kinds, cut, strict=True) if c)


def strip_control(text: str) -> str:
    """Text for a terminal: control characters shown as escapes (tool output is untrusted)."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m.group()):02x}", text)
