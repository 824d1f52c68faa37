"""What a template's renderings of plain conversations show: how a turn ends, what is written into it for the policy, what is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import Family
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.delta_proof import DUMMY_TOOL, PLACEHOLDER
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message

QUESTION = "Question5e21"
_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]")
"""what looks like a control token"""


class TemplateProbe:
    """Renders conversations of placeholder texts."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, family: Family, where: str) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._family = family
        self._where = where

    def turn_ends(self) -> list[str]:
        """The added tokens that the template writes after an assistant's text, whether or not the conversation continues.

        Raises:
            TemplateError: there are none, or the template refuses the plainest conversation.
        """
        user, assistant = _user("a"), _assistant(PLACEHOLDER)
        ends: list[str] = []
        tail = ""
        for conversation in ([user, assistant], [user, assistant, user]):
            text = self._template.render(conversation, generate=False)
            if PLACEHOLDER not in text:
                raise TemplateError(f"{self._where}: its chat template leaves the assistant's text out")
            tail = text.rpartition(PLACEHOLDER)[2]
            match = self._tokenizer.pattern.search(tail)
            if match is not None and not tail[: match.start()].strip():
                ends.append(match.group())
        if not ends:
            missing = re.match(r"\s*(<\S+?>|\[\S+?\])", tail)
            hint = f"; the tokenizer does not know {missing.group(1)!r} as a special token" if missing else ""
            raise TemplateError(
                f"{self._where}: its chat template does not end an assistant turn with a special token of its "
                f"tokenizer (it ends with {tail[:40]!r}){hint}; such a model cannot be rendered token-exactly"
            )
        return list(dict.fromkeys(ends))

    def prefill(self) -> str:
        """The open `<think>` with which the template begins the assistant's turn, or ''."""
        asked = self.after_question([_user(QUESTION)], generate=True)
        whole = self._template.render([_user(QUESTION), _assistant(PLACEHOLDER), _user(QUESTION)], generate=False)
        added = asked.removeprefix(whole.partition(QUESTION)[2].partition(PLACEHOLDER)[0])
        at = added.rfind("<think>")
        return added[at:] if at >= 0 and "</think>" not in added[at:] else ""

    def check_tokens(self) -> None:
        """Refuse a tokenizer that lacks control tokens of a known family's template: as text, headers could be faked by content.

        Raises:
            TemplateError: it lacks some; they are named.
        """
        text = self._template.render([_user("a"), _assistant("b"), _user("a")], generate=True)
        missing = [t for t in dict.fromkeys(_CONTROL.findall(text)) if t not in self._tokenizer.added]
        if missing and self._family.marks:
            raise TemplateError(
                f"{self._where}: its chat template ({self._family.name}) writes {', '.join(missing)}, which its "
                "tokenizer does not know as special tokens; add them to the tokenizer (added_tokens in tokenizer.json) "
                "or use the tokenizer that belongs to the template"
            )

    def header_tokens(self) -> frozenset[str]:
        """The added tokens that name the speaker: those around plain messages, without the tags of thinking."""
        conversation = [_user("a"), _assistant("b"), _user("a")]
        tokens: set[str] = set()
        for first in ([], [{"role": "system", "content": "a"}]):
            try:
                text = self._template.render([*first, *conversation], generate=True)
            except TemplateError:  # it accepts no system message
                continue
            tokens.update(m.group() for m in self._tokenizer.pattern.finditer(text))
        return frozenset(tokens - {"<think>", "</think>"})

    def accepts_parts(self) -> bool:
        """Whether the template shows content that is a list of parts."""
        text = self._try_render([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}])
        return QUESTION in text and "'type'" not in text

    def shows_tools(self) -> bool:
        """Whether the template puts the tools' schemas into the prompt."""
        tool = {**DUMMY_TOOL, "function": {**DUMMY_TOOL["function"], "name": QUESTION}}
        return QUESTION in self._try_render([_user("x")], tools=[tool])

    def shows_role(self, role: str) -> bool:
        """Whether the template shows a message of this role before the user's.

        Raises:
            TemplateError: the template refuses it.
        """
        return QUESTION in self._template.render([{"role": role, "content": QUESTION}, _user("x")], generate=True)

    def after_question(self, messages: Sequence[Message], *, generate: bool) -> str:
        """What the template writes after a user's `QUESTION`."""
        return self._template.render(messages, generate=generate).rpartition(QUESTION)[2]

    def _try_render(self, messages: Sequence[Message], tools: Any = None) -> str:
        try:
            return self._template.render(messages, tools=tools, generate=True)
        except TemplateError:
            return ""


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
