"""Which family a model's template belongs to, and the action formats by name. A family is one row here and one small file."""

from __future__ import annotations

from typing import Any

from agentrl.errors import UnknownNameError
from agentrl.render.base import ActionFormat
from agentrl.render.hermes import HermesFormat
from agentrl.render.tags import TagFormat
from agentrl.render.template import Renderer
from agentrl.render.tokenizer import Tokenizer

FORMATS: dict[str, ActionFormat] = {f.name: f for f in (HermesFormat(), TagFormat())}
"""Action formats by name."""

_FAMILIES: tuple[tuple[str, str, str], ...] = (("chatml", "<|im_start|>", "hermes"),)
"""(family, a string that its template holds, its own action format)"""


def make_renderer(tokenizer: Tokenizer, action_format: str | None = None, *, where: str = "the model", **template_args: Any) -> Renderer:
    """The renderer for a model; `action_format` None: the family's own (hermes for templates of no known family).

    Raises:
        UnknownNameError: no such format.
        TemplateError: the template cannot be used.
    """
    template = tokenizer.chat_template or ""
    family, own = next(((name, fmt) for name, mark, fmt in _FAMILIES if mark in template), ("generic", "hermes"))
    chosen = action_format or own
    if chosen not in FORMATS:
        raise UnknownNameError.of("action format", chosen, FORMATS)
    return Renderer(tokenizer, FORMATS[chosen], where=where, family=family, **template_args)
