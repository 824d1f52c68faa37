"""A model's chat template, compiled once, in the environment that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import TemplateError
from agentrl.types import Message


class ChatTemplate:
    """Renders conversations to text."""

    def __init__(self, source: str | None, special: Mapping[str, str], where: str = "the model") -> None:
        """Compile.

        Raises:
            TemplateError: there is no template, or it does not compile.
        """
        if not source:
            raise TemplateError(f"{where} has no chat template; add one to tokenizer_config.json (key chat_template) or chat_template.jinja")
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"{where}: its chat template does not compile: {e.message} (line {e.lineno})") from e
        self._special = dict(special)
        self._where = where

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, generate: bool, **extra: Any) -> str:
        """The text of a conversation; `generate` adds the header of the next assistant turn.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        try:
            return self._template.render(messages=messages, tools=tools or None, add_generation_prompt=generate, **self._special, **extra)
        except jinja2.TemplateError as e:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TemplateError(f"{self._where}: its chat template refuses a conversation of roles ({roles}): {e}") from e


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
