"""The renderer: a conversation to ids; the delta between two generations, proven against the model's template; sampled ids to an action."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import orjson

from agentrl.core.message_images import Image, PlacedImage, image_parts, images_in
from agentrl.core.sequences import first_difference
from agentrl.errors import TemplateError
from agentrl.render.accelerators.memo import Memo
from agentrl.render.assistant_turn import TurnWriter, WrittenTurn, with_call_ids
from agentrl.render.base import ActionFormat, Delta, Family, HistoryPolicy, Pieces
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.delta_proof import HISTORY_KINDS, DeltaProof, DeltaProver, history_kind
from agentrl.render.delta_template import DeltaTemplate, merged, split_provenance
from agentrl.render.formats.text_values import decode_calls
from agentrl.render.images import Images
from agentrl.render.injection_guard import InjectionGuard
from agentrl.render.message_shape import shape_of
from agentrl.render.prompt_parts import LeftOut, left_out, may_leave_out
from agentrl.render.template_probe import QUESTION, TemplateProbe
from agentrl.render.tokenizer import Tokenizer
from agentrl.render.tool_prompt import FORMAT, with_tools
from agentrl.types import Action, FinishReason, Message, Provenance

GENERIC = Family(name="generic", marks=(), format="hermes")
_MAX_PROOFS = 4096
_MAX_PROMPTS = 256
_PREFILL_IDS = 16
"""ids at the end of a context that are decoded to find what the template prefilled"""


class Renderer:
    """Token ids for one model's conversations in one action format.

    Example:
        >>> renderer = make_renderer(Tokenizer.load("Qwen/Qwen3-0.6B"))
        >>> prompt = renderer.prompt([{"role": "user", "content": "Which river flows through Bordeaux?"}])
        >>> delta = renderer.delta([{"role": "user", "content": "Are you sure?"}], sampled_ids)
    """

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
        tools_in_prompt: bool = False,
        **template_args: Any,
    ) -> None:
        """Probe the template. See `make_renderer` for the usual way to build one.

        Args:
            tokenizer: The model's tokenizer, with its chat template.
            action_format: How the policy writes its actions.
            where: The model, for errors.
            family: What is known about the template's family.
            history: What to do where the template rewrites history.
            raw_content: Added tokens inside content count as tokens, as in the template's own rendering. Tool output can then
                impersonate the user.
            surplus: Calls over the limit become errors, are ignored, or all calls of the turn are refused.
            now: The template's date. None: now.
            images: The model's image processor. None: the model accepts no images; an error: raised at the first image.
            tools_in_prompt: Write the tools into the system message if the template leaves them out (see tool_prompt.py).
            template_args: Variables of the template (enable_thinking=False, …).

        Raises:
            TemplateError: no chat template, one that cannot render a user and an assistant turn, or a tokenizer without its tokens.
        """
        self.tokenizer = tokenizer
        self.format = action_format
        self.family = family.name
        self.history_policy = history
        self.new_segments: Counter[str] = Counter()
        """reasons why new segments opened, with their counts"""
        self.images = images
        self._family = family
        self._surplus = surplus
        self._tools_in_prompt = tools_in_prompt
        self._where = where
        if tools_in_prompt and action_format.name != FORMAT:
            raise TemplateError(
                f"--tools-in-prompt describes calls of the action format {FORMAT}, the model's is {action_format.name}; "
                f"give --action-format {FORMAT}, or describe the tools in the environment's system_prompt"
            )
        self._template = ChatTemplate(
            tokenizer.chat_template, tokenizer.special, where, now=now, adapt=family.adapt, args=template_args
        )
        self._probe = TemplateProbe(self._template, tokenizer, family, where)
        self._accepts_parts = self._probe.accepts_parts()
        self._probe.check_tokens()
        self._read_turn_ends()
        self.prefill = self._probe.prefill()
        """what the template writes at the beginning of the assistant's turn for the policy: an open `<think>`"""
        self._guard = InjectionGuard(
            tokenizer, off=raw_content, markers=action_format.markers, headers=self._probe.header_tokens()
        )
        self._writer = TurnWriter(self._template, tokenizer, self._guard, family, self.ends, where)
        self._prover = DeltaProver(self._template, tuple(self.ends), family)
        self._proofs: dict[tuple[Any, ...], tuple[DeltaProof, DeltaTemplate | None]] = {}
        self._prompts: Memo[bytes, Pieces] = Memo(_MAX_PROMPTS)
        """first contexts, which the members of a group share"""

    def _read_turn_ends(self) -> None:
        family, added = self._family, self.tokenizer.added
        written = self._probe.turn_ends()
        known = [t for t in (*family.ends, *family.headers) if t in added]
        self.ends: dict[str, int] = {t: added[t] for t in (*known, *written)}
        """tokens that end an assistant's turn"""
        stops = (*(known or written), *family.other_stops, self.tokenizer.special.get("eos_token", ""))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(added[t] for t in stops if t in added))
        """stop tokens for the engine"""
        self._header_ids = frozenset(added[t] for t in family.headers if t in added)
        self._last_ids = frozenset((*self.stop_token_ids, *self.ends.values()))

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for the engine."""
        return self.format.stop

    @property
    def end_id(self) -> int:
        """The token that ends an assistant's turn (the first, where a family has several)."""
        return next(iter(self.ends.values()))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the prompt holds the tools' schemas: the template writes them, or this renderer does."""
        return self._tools_in_prompt or self._probe.shows_tools()

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether this renderer writes the tools into the system message."""
        return self._tools_in_prompt and not self._probe.shows_tools()

    # -- messages to ids ---------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Pieces:
        """The first context: the model's own rendering of the conversation, ready for the first generation.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools, left out if the action format does not need them.

        Returns:
            The ids, all of provenance PROMPT.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        schemas = list(tools) if self.format.needs_tools else []
        if schemas and self._writes_tools:
            messages, schemas = with_tools(messages, schemas), []
        key = _conversation_key(messages, schemas)
        pieces = self._prompts.get(key) if key is not None else None
        if pieces is None:
            pieces = self._render_prompt(messages, schemas)
            if key is not None:
                self._prompts.put(key, pieces)
        return pieces

    def left_out(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> LeftOut:
        """What the template leaves out of the prompt of these messages (arguments as in `prompt`).

        Raises:
            TemplateError: the template refuses the conversation.
        """
        if not may_leave_out(messages):
            return LeftOut((), 0)
        schemas = list(tools) if self.format.needs_tools and not self._writes_tools else []
        return left_out(messages, lambda marked: self._prompt_text(marked, schemas)[0])

    def require_whole(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        numbers: Container[int] | None = None,
    ) -> LeftOut:
        """Refuse messages of which the prompt would not show every content and call; returns what else is left out: reasoning and names.

        `numbers`: refuse only parts of the messages with these indices; None: of all.

        Raises:
            TemplateError: the template leaves some out, or refuses the conversation.
        """
        found = self.left_out(messages, tools)
        refused = found if numbers is None else found.of_messages(numbers)
        if refused.parts:
            raise TemplateError(refused.sentence(self._where))
        return found

    def _prompt_text(self, messages: Sequence[Message], schemas: list[Any]) -> tuple[str, int]:
        """The prompt's text, escaped, and the base to encode it with."""
        escaped, schemas, base = self._guard.conversation(self._adapted(messages), schemas)
        return self._template.render(escaped, tools=schemas, generate=True), base

    def _render_prompt(self, messages: Sequence[Message], schemas: list[Any]) -> Pieces:
        ids = tuple(self.tokenizer.encode_escaped(*self._prompt_text(messages, schemas)))
        return self._expand_images(((Provenance.PROMPT, ids),), messages, Provenance.PROMPT)

    def delta(
        self,
        messages: Sequence[Message],
        sampled: Sequence[int],
        *,
        history: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Delta:
        """What follows the ids just sampled: the observation and the header of the next turn.

        Args:
            messages: The observation, at least one message.
            sampled: The ids of the assistant's turn.
            history: The messages before the assistant's turn. None: the delta must be proven for every history.
            tools: The schemas given to `prompt`. None: the delta must be proven with and without tools.

        Returns:
            The pieces to append, or a Delta whose `new_segment` gives the reason why the whole conversation must be rendered: the
            template cannot be proven, or the history policy demands it.

        Raises:
            TemplateError: the messages hold images that the model or the action format does not accept.
        """
        if self.format.inline:
            if next(image_parts(messages), None) is not None:
                raise TemplateError(
                    f"the action format {self.format.name} puts observations inline: they cannot hold images"
                )
            return Delta(self._inline_pieces(messages))
        adapted = self._adapted(messages)
        kinds = HISTORY_KINDS if history is None else (history_kind(history),)
        proof, template, contents = self._prove(adapted, kinds, self._with_tools(tools))
        reason, turn_end = self._end_turn(sampled, proof)
        if reason is not None:
            self.new_segments[reason] += 1
            return Delta((), new_segment=reason)
        pieces = template.pieces(contents) if template is not None and not self._guard.off else None
        if pieces is None:
            pieces = self._render_delta(adapted, kinds[0], proof)
        if turn_end:
            pieces = merged((*turn_end, *pieces))
        return Delta(self._expand_images(pieces, adapted, Provenance.OBSERVATION))

    def encode_turn(
        self, message: Message, *, history: Sequence[Message] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The ids that a policy would have sampled for an assistant's message, with the end token: for data that was not sampled.

        Arguments and errors are those of `write_turn`.
        """
        return self.write_turn(message, history=history, tools=tools).ids

    def write_turn(
        self, message: Message, *, history: Sequence[Message] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> WrittenTurn:
        """The ids that a policy would have sampled for an assistant's message after the header that it would have seen.

        Args:
            message: The assistant's message. Control tokens spelt in it are text.
            history: The messages before it. (): a user's question.
            tools: The schemas given to `prompt`.

        Raises:
            TemplateError: the template cannot express the message.
        """
        (turn,) = _join_text_parts([message])
        if self.format.inline:  # no end token within one assistant turn
            return WrittenTurn(self._writer.write_inline(turn))
        before = history or [{"role": "user", "content": QUESTION}]
        schemas = list(tools) if self.format.needs_tools else []
        return self._writer.write(before if self._accepts_parts else _join_text_parts(before), turn, schemas)

    # -- ids to actions ----------------------------------------------------------------------------------------------

    def parse(
        self,
        ids: Sequence[int],
        finish_reason: FinishReason,
        max_calls: int,
        *,
        context: Sequence[int] | None = None,
        matched_stop: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Action:
        """Parse sampled ids into an action.

        Args:
            ids: The sampled ids, with or without the end token.
            finish_reason: Why the generation ended.
            max_calls: Calls beyond this number are surplus.
            context: The ids before them. They show whether the template prefilled text, which some templates do not after a tool's
                result. None: it did, as after a user's message.
            matched_stop: The stop that the engine reports. A stop token that only the engine knows ends the turn like those of the template.
            tools: The schemas given to `prompt`. Arguments that the format writes as text are decoded by them; those of other tools stay text.

        Returns:
            The action. Its text includes the prefilled text (an open `<think>`), but no end token.
        """
        ended = bool(ids) and (ids[-1] in self._last_ids or ids[-1] == matched_stop)
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        if self.prefill and (context is None or self.tokenizer.decode(context[-_PREFILL_IDS:]).endswith(self.prefill)):
            text = self.prefill + text
        action = self.format.parse(text, finish_reason, max_calls)
        if self.format.text_values and action.calls:
            action = decode_calls(action, tools)
        if self._surplus == "error" or all(e.kind != "surplus" for e in action.errors):
            return action
        if self._surplus == "refuse":
            return replace(action, calls=())
        return replace(action, errors=tuple(e for e in action.errors if e.kind != "surplus"))

    def message(self, action: Action) -> Message:
        """The policy's turn as a message of the conversation."""
        return self.format.structured_message(action) if self._family.structured else self.format.message(action)

    def with_call_ids(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation with the ids of calls as the model itself writes them, where its template shows ids as part of the call."""
        return with_call_ids(messages, self._family.call_id) if self._family.call_id else list(messages)

    # -- images ------------------------------------------------------------------------------------------------------

    def placed(self, pieces: Pieces, messages: Sequence[Message]) -> list[PlacedImage]:
        """The positions of the messages' images in the pieces rendered from them, counted from the first token."""
        images = images_in(messages)
        return self._image_processor().placed(pieces, images) if images else []

    def pixels(self, images: Sequence[Image]) -> dict[str, Any] | None:
        """What the model's forward pass needs besides the ids (`Sample.multimodal_train_inputs`), or None without images."""
        return self._image_processor().pixels(images) if images else None

    def is_placeholder(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids contain the token that stands for an image, which no engine can tell from an image."""
        return isinstance(self.images, Images) and self.images.placeholder_id in ids

    def _expand_images(self, pieces: Pieces, messages: Sequence[Message], provenance: Provenance) -> Pieces:
        if next(image_parts(messages), None) is None:
            return pieces
        return self._image_processor().expand(pieces, images_in(messages), provenance)

    def _image_processor(self) -> Images:
        if isinstance(self.images, Images):
            return self.images
        raise self.images or TemplateError(
            "a message holds an image, but the model has no image processor (preprocessor_config.json)"
        )

    # -- proofs ------------------------------------------------------------------------------------------------------

    def proof(
        self,
        messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> DeltaProof:
        """What is proven about messages of this shape (arguments as in `delta`)."""
        kinds = HISTORY_KINDS if history is None else (history_kind(history),)
        return self._prove(self._adapted(messages), kinds, self._with_tools(tools))[0]

    def check(self, roles: Sequence[str] = ("user", "assistant", "tool")) -> None:
        """Refuse, before the first episode, roles that would fail in it.

        Raises:
            TemplateError: the template does not know one of the roles.
        """
        for role in roles:
            if role == "tool":
                result: Message = {"role": role, "content": "x", "name": "f", "tool_call_id": "abcdefgh0"}
                reason = self.proof([result], history=[{"role": "user", "content": "x"}], tools=()).reason
                if reason is not None:
                    raise TemplateError(f"messages of role {role!r} cannot follow an assistant's turn: {reason}")
            elif role not in ("user", "assistant") and not self._probe.shows_role(role):
                raise TemplateError(f"{self._where}: its chat template leaves messages of role {role!r} out")

    def _prove(
        self, messages: Sequence[Message], kinds: Sequence[str], with_tools: Sequence[bool]
    ) -> tuple[DeltaProof, DeltaTemplate | None, list[str]]:
        """The proof for messages of this shape, its compiled pattern, and the messages' texts."""
        shape, texts, _ = shape_of(messages)
        key = (shape, kinds, with_tools)
        known = self._proofs.get(key)
        if known is None:
            if len(self._proofs) >= _MAX_PROOFS:
                self._proofs.clear()
            proof = self._prover.prove(messages, kinds, with_tools)
            template = DeltaTemplate(proof.pattern, self.tokenizer) if proof.pattern is not None else None
            known = self._proofs[key] = proof, template
        return *known, texts

    def _with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> tuple[bool, ...]:
        """Whether to prove without and with tools. With tools both, for a template that moves its list of tools rewrites history."""
        return (False, True) if self.format.needs_tools and (tools is None or tools) else (False,)

    # -- deltas ------------------------------------------------------------------------------------------------------

    def _end_turn(self, sampled: Sequence[int], proof: DeltaProof) -> tuple[str | None, Pieces]:
        """A reason for a new segment, or what must follow the sampled ids to end the turn as the template does."""
        if proof.reason is not None:
            return proof.reason, ()
        if proof.drops_reasoning and self.history_policy == "rerender":
            return "the template drops earlier thinking", ()
        last, end = (sampled[-1] if sampled else None), self.ends[proof.end]
        if last == end:
            return None, ()
        is_header = end in self._header_ids
        if last in self._header_ids:
            return f"the policy ended its turn with another header than {proof.end}", ()
        if last in self.ends.values():
            if self.history_policy == "rerender" or is_header:
                return f"the template ends the turn with {proof.end}, the policy did with another token", ()
            return None, ()
        return None, ((Provenance.TEMPLATE if is_header else Provenance.FORCED, (end,)),)

    def _render_delta(self, messages: Sequence[Message], kind: str, proof: DeltaProof) -> Pieces:
        """The tail of messages that cannot be filled into a pattern. What it shares at both ends with empty contents is the template's."""
        escaped, _, base = self._guard.conversation(messages, [])
        empty = [{**m, "content": "\x00"} if isinstance(m.get("content"), str) else m for m in escaped]
        ids, bare = (
            self.tokenizer.encode_escaped(self._prover.render_tail(m, kind, proof), base) for m in (escaped, empty)
        )
        head = first_difference(ids, bare)
        tail = first_difference(ids[head:][::-1], bare[head:][::-1])
        return merged(split_provenance(ids, ids[:head], ids[len(ids) - tail :]))

    def _inline_pieces(self, messages: Sequence[Message]) -> Pieces:
        """An observation inside the assistant's turn; text between added tokens is encoded as one section."""
        parts = self.format.inline_parts(messages)
        escaped, base = self._guard.texts([text for text, is_content in parts if is_content])
        contents = iter(escaped)
        text = "".join(next(contents) if is_content else text for text, is_content in parts)
        head, tail = self.tokenizer.encode(parts[0][0]), self.tokenizer.encode(parts[-1][0])
        return merged(split_provenance(self.tokenizer.encode_escaped(text, base), head, tail))

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the family and its template accept them."""
        return self._family.adapt(messages if self._accepts_parts else _join_text_parts(messages))


def _join_text_parts(messages: Sequence[Message]) -> list[Message]:
    """The messages with contents of nothing but text parts as one text, for templates that would leave parts out."""
    return [
        {**m, "content": "".join(p["text"] for p in m["content"])} if _is_text_parts(m.get("content")) else m
        for m in messages
    ]


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, (list, tuple)) and all(
        isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
    )


def _conversation_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes | None:
    """A key that is equal for equal conversations, or None if there are images or values without a JSON form."""
    if next(image_parts(messages), None) is not None:
        return None
    try:
        return orjson.dumps((messages, tools))
    except TypeError:
        return None


def strip_control(text: str) -> str:
    """Text for a terminal: control characters are shown as escapes, since tool output is untrusted."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m.group()):02x}", text)
