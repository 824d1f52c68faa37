"""A model's chat template, compiled once, in the environment that Hugging Face templates expect.

That is: `raise_exception`, `strftime_now`, a `tojson` that escapes nothing for HTML, loop controls, and the `{% generation %}` block
(here a block like any other: what is trained is known from what was sampled, not from the template).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import TemplateError
from agentrl.render.template_trace import Hole, Pattern, Trace, blind, joined, to_json
from agentrl.types import Message


class ChatTemplate:
    """Renders conversations to text."""

    def __init__(
        self, source: str | None, special: Mapping[str, str], where: str = "the model", *, now: datetime | None = None
    ) -> None:
        """Compile. `now` is what `strftime_now` says, all the time; None: the moment of compiling, so that a run does not change at midnight.

        Raises:
            TemplateError: there is no template, or it does not compile.
        """
        if not source:
            raise TemplateError(
                f"{where} has no chat template; add one to tokenizer_config.json (key chat_template) or chat_template.jinja"
            )
        moment = now or datetime.now()
        env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        env.filters["tojson"] = to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = moment.strftime
        for name, function in env.filters.items():
            if name not in _FOLLOWED:
                env.filters[name] = _unfollowed(function)
        try:
            self._template = env.from_string(source)
            self._traceable = not any(_in_a_literal(c) for c in env.parse(source).find_all(nodes.Compare))
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"{where}: its chat template does not compile: {e.message} (line {e.lineno})") from e
        self.source = source
        self._special = dict(special)
        self._where = where

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, generate: bool, **extra: Any
    ) -> str:
        """The text of a conversation; `generate` adds the header of the next assistant turn.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=generate, **self._special, **extra
            )
        except _REFUSALS as e:
            raise self._refusal(messages, e) from e

    def trace(
        self,
        messages: Sequence[Message],
        trace: Trace,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        generate: bool,
        **extra: Any,
    ) -> Pattern | None:
        """Render messages that hold `Hole`s; None if the holes could not be followed.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        context = self._template.new_context(
            dict(messages=messages, tools=tools or None, add_generation_prompt=generate, **self._special, **extra)
        )
        try:
            whole = joined(self._template.root_render_func(context))
        except _REFUSALS as e:
            raise self._refusal(messages, e) from e
        if trace.opaque or trace.balance or not self._traceable:
            return None
        return Pattern(whole.parts if isinstance(whole, Hole) else (whole,), tuple(trace.conditions))

    def _refusal(self, messages: Sequence[Message], e: Exception) -> TemplateError:
        roles = ", ".join(str(m.get("role")) for m in messages)
        return TemplateError(f"{self._where}: its chat template refuses a conversation of roles ({roles}): {e}")


_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ZeroDivisionError,
    RecursionError,
)
"""what a template raises, on purpose or because it does not expect a message"""


_FOLLOWED = frozenset(
    {
        "trim",
        "tojson",
        "length",
        "count",
        "string",
        "safe",
        "upper",
        "lower",
        "default",
        "d",
        "list",
        "first",
        "last",
        "items",
        "selectattr",
        "rejectattr",
        "map",
        "reverse",
    }
)
"""filters that do nothing with a text but what a `Hole` sees"""


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(joined)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls of a plain text's methods with holes as arguments read them unseen."""
        if isinstance(getattr(obj, "__self__", None), str) and not isinstance(obj.__self__, Hole):
            blind(args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def _unfollowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that may read a text without the hole noticing."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        blind(args, kwargs)
        return function(*args, **kwargs)

    return wrapped


def _in_a_literal(compare: nodes.Compare) -> bool:
    """`x in 'literal'` reads x unseen."""
    return any(
        op.op in ("in", "notin") and isinstance(op.expr, nodes.Const) and isinstance(op.expr.value, str)
        for op in compare.ops
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
