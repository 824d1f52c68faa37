"""A model's chat template, compiled once, in the environment that Hugging Face templates expect.

That is: `raise_exception`, `strftime_now`, a `tojson` that escapes nothing for HTML, loop controls, and the `{% generation %}` block (here
without effect: which tokens are trained follows from what was sampled, not from the template).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import TemplateError
from agentrl.render.base import unchanged
from agentrl.render.template_trace import Pattern, SymbolicText, Trace, concat, mark_untraceable, to_json
from agentrl.types import Message

_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError, RecursionError,
)  # fmt: skip
"""what a template raises, on purpose or because it does not expect a message"""
_MARK = "Argument9a4f"
_TRACED_FILTERS = frozenset(
    "trim tojson length count string safe upper lower default d list first last items "
    "selectattr rejectattr map reverse".split()
)
"""filters that read a text only through operations that a `SymbolicText` records"""


class ChatTemplate:
    """Renders conversations to text."""

    def __init__(
        self,
        source: str | None,
        special: Mapping[str, str],
        where: str = "the model",
        *,
        now: datetime | None = None,
        adapt: Callable[[Sequence[Message]], list[Message]] = unchanged,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile.

        Args:
            source: The Jinja text.
            special: Named special tokens (bos_token, eos_token, …).
            where: The model, for errors.
            now: What `strftime_now` returns. None: the moment of compiling, so that a run does not change at midnight.
            adapt: Converts messages with roles that the template does not know (`Family.adapt`).
            args: Further variables of the template (enable_thinking=False, …).

        Raises:
            TemplateError: there is no template, or it does not compile.
        """
        if not source:
            raise TemplateError(
                f"{where} has no chat template; add one to tokenizer_config.json (key chat_template) or "
                "chat_template.jinja"
            )
        env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        for name, function in env.filters.items():
            if name not in _TRACED_FILTERS:
                env.filters[name] = _untraced_filter(function)
        env.filters["tojson"] = to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = (now or datetime.now()).strftime
        try:
            self._template = env.from_string(source)
            self._traceable = not any(map(_searches_in_literal, env.parse(source).find_all(nodes.Compare)))
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"{where}: its chat template does not compile: {e.message} (line {e.lineno})") from e
        self.source = source
        self._where = where
        self._adapt = adapt
        self._variables = {**special, **(args or {})}

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, generate: bool
    ) -> str:
        """The text of a conversation; `generate` adds the header of the next assistant turn.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        adapted = self._with_arguments(self._adapt(messages))
        try:
            return self._template.render(self._context(adapted, tools, generate))
        except _REFUSALS as e:
            raise self._refusal(adapted, e) from e

    def trace(
        self,
        messages: Sequence[Message],
        trace: Trace,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool,
    ) -> Pattern | None:
        """Render messages that hold `SymbolicText`s. None: they could not be traced.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        adapted = self._with_arguments(self._adapt(messages))
        context = self._template.new_context(self._context(adapted, tools, generate))
        try:
            text = concat(self._template.root_render_func(context))
        except _REFUSALS as e:
            raise self._refusal(adapted, e) from e
        if trace.untraceable or trace.balance or not self._traceable:
            return None
        return Pattern(text.parts if isinstance(text, SymbolicText) else (text,), tuple(trace.conditions))

    def _with_arguments(self, messages: list[Message]) -> list[Message]:
        """The messages with the arguments of calls as this template takes them: as an object, or as JSON text."""
        if not any(m.get("tool_calls") for m in messages):
            return messages
        convert = _as_text if self._takes_text else _as_object
        return [
            {**m, "tool_calls": [convert(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
            for m in messages
        ]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes the arguments of calls right only if they are JSON text."""
        return not self._shows_call({"x": _MARK}) and self._shows_call(f'{{"x": "{_MARK}"}}')

    def _shows_call(self, arguments: Any) -> bool:
        """Whether the template shows a call's arguments, and not as Python or as JSON within JSON."""
        call = {"type": "function", "id": "abcdefgh0", "function": {"name": "f", "arguments": arguments}}
        conversation: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "tool_call_id": "abcdefgh0", "content": "r"},
        ]
        try:
            text = self._template.render(self._context(self._adapt(conversation), None, True))
        except _REFUSALS:
            return False
        return _MARK in text and f"'{_MARK}'" not in text and f'\\"{_MARK}' not in text

    def _context(self, messages: Sequence[Message], tools: Any, generate: bool) -> dict[str, Any]:
        return dict(messages=messages, tools=tools or None, add_generation_prompt=generate, **self._variables)

    def _refusal(self, messages: Sequence[Message], e: Exception) -> TemplateError:
        roles = ", ".join(str(m.get("role")) for m in messages)
        return TemplateError(f"{self._where}: its chat template refuses a conversation of roles ({roles}): {e}")


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return dict(call)
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or type(function.get("arguments")) is not str:
        return dict(call)
    try:
        value = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else dict(call)


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(concat)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call, noticing methods of ordinary strings that read symbolic arguments."""
        if isinstance(getattr(obj, "__self__", None), str) and not isinstance(obj.__self__, SymbolicText):
            mark_untraceable(args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def _untraced_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which may read a text without that being recorded."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mark_untraceable(args, kwargs)
        return function(*args, **kwargs)

    return wrapped


def _searches_in_literal(compare: nodes.Compare) -> bool:
    """Whether a comparison is `x in 'literal'`, which reads x without that being recorded."""
    return any(
        op.op in ("in", "notin") and isinstance(op.expr, nodes.Const) and isinstance(op.expr.value, str)
        for op in compare.ops
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: its body, in a scope."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
