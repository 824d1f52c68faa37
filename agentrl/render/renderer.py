"""The renderer: a conversation to ids, a delta that is proven against the model's own template or a new segment, ids to an action."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import orjson

from agentrl.core.message_images import Image, PlacedImage, image_parts, images_in
from agentrl.errors import TemplateError
from agentrl.render.base import ActionFormat, Delta, Family, HistoryPolicy, Pieces
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.delta_proof import DUMMY_TOOL, KINDS, Proof, Prover, kind_of
from agentrl.render.delta_template import Scaffold, cut, merged
from agentrl.render.images import Images
from agentrl.render.injection_guard import Shield
from agentrl.render.message_shape import shape_of
from agentrl.render.template_probe import (
    QUESTION,
    check_tokens,
    flattened,
    header_tokens,
    prefill_of,
    takes_parts,
    written_ends,
)
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Action, FinishReason, Message, Provenance

GENERIC = Family("generic", (), "hermes")
_CACHE = 4096
_TAIL = 16
"""ids that hold what a template prefills"""
_PROMPTS = 256
"""first contexts that are kept: the members of a group begin with the same one"""


class Renderer:
    """Token ids for one model's conversations in one action format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        action_format: ActionFormat,
        *,
        where: str = "the model",
        family: Family = GENERIC,
        history: HistoryPolicy = "append",
        raw_content: bool = False,
        surplus: Literal["error", "ignore", "refuse"] = "error",
        now: datetime | None = None,
        images: Images | TemplateError | None = None,
        **template_args: Any,
    ) -> None:
        """`template_args` go to the template (enable_thinking=False, …).

        `raw_content`: added tokens inside content count as such, as in the template's own rendering: tool output can then speak as
        the user. `surplus`: calls over the limit become errors, are left out, or make all calls of the turn be refused.

        Raises:
            TemplateError: no chat template, one that cannot render a user and an assistant turn, or a tokenizer without its tokens.
        """
        self.tokenizer = tokenizer
        self.format = action_format
        self.family = family.name
        self.history_policy = history
        self.new_segments: Counter[str] = Counter()
        """why new segments opened, and how often"""
        self.images = images
        """knows images in messages as the model does; None: the model takes none; an error: why it cannot"""
        self._where = where
        self._family = family
        self._surplus = surplus
        self._args = template_args
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special, where, now=now)
        self._proofs: dict[tuple[Any, ...], tuple[Proof, Scaffold | None]] = {}
        self._prompts: dict[bytes, Pieces] = {}
        self._inline: dict[int, tuple[list[int], ...]] = {}
        self._takes_parts = takes_parts(self._template, family, template_args)
        check_tokens(self._template, tokenizer, family, template_args, where)
        written = written_ends(self._template, tokenizer, family, template_args, where)
        headers = header_tokens(self._template, tokenizer, family, template_args)
        self._shield = Shield(tokenizer, raw_content, own=action_format.markers, headers=headers)
        known = [t for t in (*family.ends, *family.headers) if t in tokenizer.added]
        self.ends: dict[str, int] = {t: tokenizer.added[t] for t in dict.fromkeys((*known, *written))}
        """tokens that end an assistant's turn"""
        self._header_ids = frozenset(tokenizer.added[t] for t in (family.headers or ()) if t in tokenizer.added)
        stops = [
            *(known or written),
            *(t for t in (*family.other_stops, tokenizer.special.get("eos_token", "")) if t in tokenizer.added),
        ]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(tokenizer.added[t] for t in stops))
        """stop tokens for the engine"""
        self._last_ids = frozenset((*self.stop_token_ids, *self.ends.values()))
        self.prefill = prefill_of(self._template, family, template_args)
        """what the template writes at the beginning of the assistant's turn in the policy's place: an open `<think>`"""
        self._prover = Prover(self._template, tuple(self.ends), template_args, family)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for the engine."""
        return self.format.stop

    @property
    def end_id(self) -> int:
        """The token that ends an assistant's turn (the first, where a family has several)."""
        return next(iter(self.ends.values()))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Pieces:
        """The first context: the model's own rendering of the conversation, ready for the first generation.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        listed = list(tools) if self.format.needs_tools else []
        key = _key(messages, listed)
        known = self._prompts.get(key)
        if known is None:
            known = self._first(messages, listed)
            if len(self._prompts) >= _PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            if key:
                self._prompts[key] = known
        return known

    def _first(self, messages: Sequence[Message], listed: list[Any]) -> Pieces:
        adapted, listed, base = self._shield.conversation(self._adapted(messages), listed)
        text = self._template.render(adapted, tools=listed, generate=True, **self._args)
        return self._with_images(
            ((Provenance.PROMPT, tuple(self.tokenizer.encode_shielded(text, base))),), messages, Provenance.PROMPT
        )

    def delta(
        self,
        messages: Sequence[Message],
        sampled: Sequence[int],
        *,
        history: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Delta:
        """What follows the ids just sampled: observation and the next header. `messages` may not be empty.

        `history` (the messages before the assistant's turn) and `tools` (given to `prompt`) allow more: without them the delta is
        proven for every history, with and without tools. Returns a Delta with `new_segment` set (and no pieces) where the template
        cannot be proven, or the history policy says so: the caller then renders the whole conversation anew.
        """
        if self.format.inline:
            if next(image_parts(messages), None) is not None:
                raise TemplateError(
                    f"the action format {self.format.name} puts observations inline: they cannot hold images"
                )
            return Delta(self._inline_pieces(messages))
        adapted = self._adapted(messages)
        kinds = KINDS if history is None else (kind_of(history),)
        with_tools = self._with_tools(tools)
        proof, scaffold, contents = self._proven(adapted, kinds, with_tools)
        reason, lead = self._join(sampled, proof)
        if reason is not None:
            self.new_segments[reason] += 1
            return Delta((), new_segment=reason)
        body = scaffold.pieces(contents) if scaffold is not None and not self._shield.raw else None
        if body is None:
            body = self._rendered(adapted, kinds[0], proof)
        return Delta(self._with_images(merged((*lead, *body)), adapted, Provenance.OBSERVATION))

    def placed(self, pieces: Pieces, messages: Sequence[Message]) -> list[PlacedImage]:
        """Where the images of messages stand in the pieces that they were rendered to, counted from the first of these."""
        images = images_in(messages)
        return self._images().placed(pieces, images) if images else []

    def pixels(self, images: Sequence[Image]) -> dict[str, Any] | None:
        """What the model's forward takes of images, for `Sample.multimodal_train_inputs`; None without images."""
        return self._images().pixels(images) if images else None

    def is_placeholder(self, ids: Sequence[int]) -> bool:
        """Is among sampled ids one that stands for an image? No engine can tell it from an image."""
        return isinstance(self.images, Images) and self.images.placeholder_id in ids

    def parse(
        self,
        ids: Sequence[int],
        finish_reason: FinishReason,
        max_calls: int,
        *,
        context: Sequence[int] | None = None,
    ) -> Action:
        """The action in sampled ids. Its text holds what the template prefilled (an open `<think>`), and no end token.

        `context` (the ids before them) says whether it did: some templates do not after a tool's result, and observations inside a
        turn end without it. None: a context as after a user's message.
        """
        body = ids[:-1] if ids and ids[-1] in self._last_ids else ids
        text = self.tokenizer.decode(body)
        if self.prefill and (context is None or self.tokenizer.decode(context[-_TAIL:]).endswith(self.prefill)):
            text = self.prefill + text
        action = self.format.parse(text, finish_reason, max_calls)
        if self._surplus == "error" or all(e.kind != "surplus" for e in action.errors):
            return action
        if self._surplus == "refuse":
            return replace(action, calls=())
        return replace(action, errors=tuple(e for e in action.errors if e.kind != "surplus"))

    def message(self, action: Action) -> Message:
        """The policy's turn as a message of the conversation, for rendering it anew."""
        return self.format.structured_message(action) if self._family.structured else self.format.message(action)

    def said(self, message: Message) -> tuple[int, ...]:
        """The ids with which a policy would have said an assistant's message, its end token too: for data that was not sampled.

        Calls given as data are written as the template writes them.
        """
        text, end = str(message.get("content") or ""), self.end_id
        if self._family.writes_markup or any(message.get(k) for k in ("tool_calls", "reasoning_content", "thinking")):
            user: Message = {"role": "user", "content": QUESTION}
            header = self._after_question([user], generate=True)
            whole = self._after_question([user, message], generate=False)
            text = whole.removeprefix(header if whole.startswith(header) else header.removesuffix(self.prefill))
            at, written = max(((text.rfind(e), e) for e in self.ends if e in text), default=(-1, ""))
            if at >= 0:
                text, end = text[:at], self.ends[written]
        if message.get("tool_calls") and self._family.headers:
            end = self.ends[self._family.headers[-1]]
        ids = self.tokenizer.encode(text)
        return tuple(ids) if self.format.inline else (*ids, end)

    def proof(
        self,
        messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Proof:
        """What is proven about messages of this shape."""
        kinds = KINDS if history is None else (kind_of(history),)
        return self._proven(self._adapted(messages), kinds, self._with_tools(tools))[0]

    def check(self, roles: Sequence[str] = ("user", "assistant", "tool")) -> None:
        """Refuse before the first episode what would fail in it.

        Raises:
            TemplateError: the template does not know one of these roles.
        """
        user: Message = {"role": "user", "content": "x"}
        for role in roles:
            if role == "tool":
                result: Message = {"role": role, "content": "x", "name": "f", "tool_call_id": "abcdefgh0"}
                proof = self.proof([result], history=[user], tools=())
                if proof.reason is not None:
                    raise TemplateError(f"messages of role {role!r} cannot follow an assistant's turn: {proof.reason}")
            elif role not in ("user", "assistant"):
                first = self._family.adapt([{"role": role, "content": QUESTION}, user])
                text = self._template.render(first, tools=None, generate=True, **self._args)
                if QUESTION not in text:
                    raise TemplateError(f"{self._where}: its chat template leaves messages of role {role!r} out")

    @cached_property
    def shows_tools(self) -> bool:
        """Does the template put the tools' schemas into the prompt?"""
        function = {**DUMMY_TOOL["function"], "name": QUESTION}
        user: Message = {"role": "user", "content": "x"}
        try:
            text = self._template.render(
                self._family.adapt([user]), tools=[{**DUMMY_TOOL, "function": function}], generate=True, **self._args
            )
        except TemplateError:
            return False
        return QUESTION in text

    def _with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> tuple[bool, ...]:
        """With tools in the prompt the tail must be the one without them: a template that moves its list of tools rewrites history."""
        return (False, True) if self.format.needs_tools and (tools is None or tools) else (False,)

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """As the family and its template take them."""
        return self._family.adapt(messages if self._takes_parts else flattened(messages))

    def _after_question(self, messages: Sequence[Message], *, generate: bool) -> str:
        """What the template writes after a user's question."""
        text = self._template.render(self._family.adapt(messages), tools=None, generate=generate, **self._args)
        return text.rpartition(QUESTION)[2]

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _proven(
        self, messages: Sequence[Message], kinds: Sequence[str], tools: Sequence[bool]
    ) -> tuple[Proof, Scaffold | None, list[str]]:
        shape, texts, _ = shape_of(messages)
        key = (shape, kinds, tools)
        known = self._proofs.get(key)
        if known is None:
            if len(self._proofs) >= _CACHE:
                self._proofs.clear()
            proof = self._prover.prove(messages, kinds, tools)
            scaffold = Scaffold(proof.pattern, self.tokenizer) if proof.pattern is not None else None
            known = self._proofs[key] = proof, scaffold
        return *known, texts

    def _join(self, sampled: Sequence[int], proof: Proof) -> tuple[str | None, Pieces]:
        """A reason for a new segment, or what leads from the sampled ids to the tail: its end token, unless it was sampled."""
        if proof.reason is not None:
            return proof.reason, ()
        if proof.strips and self.history_policy == "rerender":
            return "the template drops earlier thinking", ()
        last, end = (sampled[-1] if sampled else None), self.ends[proof.end]
        if last == end:
            return None, ()
        header = end in self._header_ids
        if last in self._header_ids:
            return f"the policy ended its turn with another header than {proof.end}", ()
        if last in self.ends.values():
            if self.history_policy == "rerender" or header:
                return f"the template ends the turn with {proof.end}, the policy did with another token", ()
            return None, ()
        return None, ((Provenance.TEMPLATE if header else Provenance.FORCED, (end,)),)

    def _rendered(self, messages: Sequence[Message], kind: str, proof: Proof) -> Pieces:
        """The tail of messages that cannot be spliced; all but its common ends with the bare scaffold is content."""
        shielded, _, base = self._shield.conversation(messages, [])
        ids = self.tokenizer.encode_shielded(self._prover.render_tail(shielded, kind, proof), base)
        bare = [{**m, "content": "\x00"} if isinstance(m.get("content"), str) else m for m in shielded]
        scaffold = self.tokenizer.encode_shielded(self._prover.render_tail(bare, kind, proof), base)
        n = min(len(ids), len(scaffold))
        head = next((i for i in range(n) if ids[i] != scaffold[i]), n)
        tail = next((i for i in range(n - head) if ids[-1 - i] != scaffold[-1 - i]), n - head)
        return merged(cut(ids, ids[:head], ids[len(ids) - tail :] if tail else ()))

    def _with_images(self, pieces: Pieces, messages: Sequence[Message], provenance: Provenance) -> Pieces:
        """Placeholders of images expanded to as many tokens as each image has."""
        if next(image_parts(messages), None) is None:
            return pieces
        return self._images().expand(pieces, images_in(messages), provenance)

    def _images(self) -> Images:
        if isinstance(self.images, Images):
            return self.images
        raise self.images or TemplateError(
            "a message holds an image, but the model has no image processor (preprocessor_config.json)"
        )

    def _inline_pieces(self, messages: Sequence[Message]) -> Pieces:
        """An observation inside the assistant's turn: literals and contents, encoded as one section each between added tokens."""
        parts = self.format.inline_parts(messages)
        contents, base = self._shield.texts([t for t, is_content in parts if is_content])
        rest = iter(contents)
        ids = self.tokenizer.encode_shielded("".join(next(rest) if is_content else t for t, is_content in parts), base)
        key = len(parts)
        if key not in self._inline:
            self._inline[key] = self.tokenizer.encode(parts[0][0]), self.tokenizer.encode(parts[-1][0])
        return merged(cut(ids, *self._inline[key]))


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for equal conversations; b'' for one with images, or that is no plain JSON."""
    if next(image_parts(messages), None) is not None:
        return b""
    try:
        return orjson.dumps((messages, tools))
    except TypeError:
        return b""


def strip_control(text: str) -> str:
    """Text for a terminal: control characters shown as escapes (tool output is untrusted)."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m.group()):02x}", text)
