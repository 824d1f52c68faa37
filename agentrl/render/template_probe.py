"""What is read off a template before anything else: how a turn ends, and what is written into it in the policy's place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import TemplateError
from agentrl.render.base import Family
from agentrl.render.chat_template import ChatTemplate
from agentrl.render.delta_proof import PLACEHOLDER
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message

QUESTION = "Question5e21"
_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]")


def written_ends(
    template: ChatTemplate, tokenizer: Tokenizer, family: Family, args: Mapping[str, Any], where: str
) -> list[str]:
    """The added tokens that the template writes after an assistant's text, last in the conversation or not.

    Raises:
        TemplateError: none; or the template refuses the plainest conversation.
    """
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}
    found: list[str] = []
    tail = ""
    for conversation in ([user, assistant], [user, assistant, user]):
        text = template.render(family.adapt(conversation), tools=None, generate=False, **args)
        if PLACEHOLDER not in text:
            raise TemplateError(f"{where}: its chat template leaves the assistant's text out")
        tail = text.rpartition(PLACEHOLDER)[2]
        match = tokenizer.pattern.search(tail)
        if match is not None and not tail[: match.start()].strip():
            found.append(match.group())
    if not found:
        missing = re.match(r"\s*(<\S+?>|\[\S+?\])", tail)
        hint = f"; the tokenizer does not know {missing.group(1)!r} as a special token" if missing else ""
        raise TemplateError(
            f"{where}: its chat template does not end an assistant turn with a special token of its tokenizer (it ends with {tail[:40]!r}){hint}; "
            "such a model cannot be rendered token-exactly"
        )
    return list(dict.fromkeys(found))


def prefill_of(template: ChatTemplate, family: Family, args: Mapping[str, Any]) -> str:
    """The open `<think>` with which the template begins the assistant's turn, if it does."""
    user, assistant = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": PLACEHOLDER}
    asked = template.render(family.adapt([user]), tools=None, generate=True, **args).rpartition(QUESTION)[2]
    whole = template.render(family.adapt([user, assistant, user]), tools=None, generate=False, **args)
    header = whole.partition(QUESTION)[2].partition(PLACEHOLDER)[0]
    added = asked.removeprefix(header) if asked.startswith(header) else asked
    at = added.rfind("<think>")
    return added[at:] if at >= 0 and "</think>" not in added[at:] else ""


def check_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, family: Family, args: Mapping[str, Any], where: str
) -> None:
    """Refuse a tokenizer that lacks control tokens which a known family's template writes: headers would be text that content can fake.

    Raises:
        TemplateError: it lacks some; they are named.
    """
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    text = template.render(family.adapt([user, assistant, user]), tools=None, generate=True, **args)
    missing = [t for t in dict.fromkeys(_CONTROL.findall(text)) if t not in tokenizer.added]
    if missing and family.marks:
        raise TemplateError(
            f"{where}: its chat template ({family.name}) writes {', '.join(missing)}, which its tokenizer does not know as special "
            "tokens; add them to the tokenizer (added_tokens in tokenizer.json), or take the tokenizer that belongs to the template"
        )


def header_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, family: Family, args: Mapping[str, Any]
) -> frozenset[str]:
    """The added tokens that say who speaks: those around plain messages, less the tags of thinking."""
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    found: set[str] = set()
    for first in ([], [{"role": "system", "content": "a"}]):
        try:
            text = template.render(family.adapt([*first, user, assistant, user]), tools=None, generate=True, **args)
        except TemplateError:  # it takes no system message
            continue
        found.update(m.group() for m in tokenizer.pattern.finditer(text))
    return frozenset(found - {"<think>", "</think>"})


def takes_parts(template: ChatTemplate, family: Family, args: Mapping[str, Any]) -> bool:
    """Does the template show content that comes as a list of parts?"""
    try:
        text = template.render(
            family.adapt([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]),
            tools=None,
            generate=True,
            **args,
        )
    except TemplateError:
        return False
    return QUESTION in text and "'type'" not in text


def flattened(messages: Sequence[Message]) -> list[Message]:
    """Contents of text parts alone as one text, for templates that would leave them out."""
    return [
        {**m, "content": "".join(p["text"] for p in m["content"])} if _only_text(m.get("content")) else m
        for m in messages
    ]


def _only_text(content: Any) -> bool:
    return isinstance(content, (list, tuple)) and all(
        isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
    )
