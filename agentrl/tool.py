"""What users write: `@tool` functions and methods, and `Tool` for tools with state. How they are called is in rollout/tool_executor.py.

    @tool
    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first
            b: the second
        '''
        return a + b

The schema the policy sees comes from the type hints and the docstring; arguments are checked and coerced by it.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agentrl.errors import ContractError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__agentrl_tool__"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """How a tool may be used. Defaults suit a retriever."""

    timeout_s: float = 30.0
    """for one attempt"""
    max_concurrency: int = 64
    """calls at once, over all episodes"""
    retries: int = 1
    """further attempts after an infrastructure failure (never after an ordinary exception)"""
    max_result_bytes: int = 32_768
    """longer results are cut at a character boundary, before they are tokenised"""
    max_hung: int = 8
    """sync calls that may hang past their time limit before the tool fails at once"""


@dataclass(frozen=True)
class ToolSpec:
    """A callable with the schema that the policy sees and the limits it runs under."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments"""
    fn: Callable[..., Any]
    model: type[BaseModel]
    limits: ToolLimits = field(default_factory=ToolLimits)

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI-style function schema that chat templates take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check and coerce the arguments of a call.

        Raises:
            ValueError: a sentence that the policy can act on.
        """
        try:
            parsed = self.model.model_validate(dict(given))
        except ValidationError as e:
            problems = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'arguments'}: {p['msg']}" for p in e.errors()[:3])
            raise ValueError(f"bad arguments for {self.name}: {problems}") from e
        return {f.alias or name: getattr(parsed, name) for name, f in self.model.model_fields.items()}


class Tool:
    """A tool with state: one instance per episode. Override `call`, and `setup` and `close` where needed."""

    name: ClassVar[str] = ""
    """what the policy calls it; default: the class name in snake case"""
    limits: ClassVar[ToolLimits] = ToolLimits()

    async def setup(self, seed: int) -> None:
        """Called once before the first call."""

    async def close(self) -> None:
        """Called once, always."""

    call: Callable[..., Any]
    """the tool itself, sync or async; its signature and docstring make the schema"""


@overload
def tool(fn: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, **limits: Any) -> Callable[[F], F]: ...
def tool(fn: Any = None, /, *, name: str | None = None, **limits: Any) -> Any:
    """Make a function or an Env's method a tool. Keyword arguments are those of `ToolLimits`. The function stays callable as it was."""

    def mark(f: F) -> F:
        setattr(f, _MARK, (name or f.__name__, ToolLimits(**limits)))
        return f

    return mark(fn) if fn is not None else mark


def tools_of(obj: object) -> list[ToolSpec]:
    """The `@tool` methods of an object, in the order they are written (base classes first).

    A method that overrides one stays a tool without being marked again; set to None, it is a tool no more.
    """
    return [_spec(fn, *mark) for n, mark in _marks(type(obj)).items() if (fn := getattr(obj, n)) is not None]


def tool_names(cls: type) -> list[str]:
    """What the policy calls the tools that a class declares: those in `tools`, then its `@tool` methods."""
    listed = [_name_of(obj) for obj in getattr(cls, "tools", ())]
    return listed + [name for n, (name, _) in _marks(cls).items() if getattr(cls, n) is not None]


def _marks(cls: type) -> dict[str, tuple[str, ToolLimits]]:
    marks: dict[str, tuple[str, ToolLimits]] = {}
    for base in reversed(cls.__mro__):
        marks.update((n, getattr(f, _MARK)) for n, f in vars(base).items() if hasattr(f, _MARK))
    return marks


def _name_of(obj: Any) -> str:
    if isinstance(obj, Tool) or (inspect.isclass(obj) and issubclass(obj, Tool)):
        cls = obj if inspect.isclass(obj) else type(obj)
        return str(cls.name or _snake(cls.__name__))
    return str(getattr(obj, _MARK, (getattr(obj, "__name__", ""),))[0])


def spec_of(obj: Callable[..., Any] | Tool) -> ToolSpec:
    """The spec of a `@tool` function or bound method, a `Tool` instance, or a plain function.

    Raises:
        ContractError: no type hints that make a schema.
    """
    if isinstance(obj, Tool):
        if not callable(getattr(obj, "call", None)):
            raise ContractError(f"tool {type(obj).__name__} has no method `call`")
        return _spec(obj.call, _name_of(obj), obj.limits)
    return _spec(obj, _name_of(obj), getattr(obj, _MARK, (None, ToolLimits()))[1])


def _spec(fn: Callable[..., Any], name: str, limits: ToolLimits) -> ToolSpec:
    """Build (once per underlying function and name) the schema, then bind it to this callable."""
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"a tool's name is 1 to 64 letters, digits, '_', '-' or '.', found {name!r} for {fn!r:.80}; give @tool(name=...)"
        )
    build = _built if inspect.isroutine(fn) else _build
    return replace(build(getattr(fn, "__func__", fn), name, inspect.ismethod(fn)), fn=fn, limits=limits)


def _build(fn: Callable[..., Any], name: str, bound: bool) -> ToolSpec:
    doc = docstring_parser.parse(inspect.getdoc(fn) or "")
    about = {p.arg_name: p.description or "" for p in doc.params}
    try:
        hints = typing.get_type_hints(_hinted(fn), include_extras=True)
        fields: dict[str, Any] = {}
        for p in list(inspect.signature(fn).parameters.values())[bound:]:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
                raise ContractError(f"tool {name}: the policy calls it by parameter names; {str(p)!r} has none")
            # under names of our own, since pydantic forbids or shadows some ('_x', 'json', 'model_config')
            about_it = Field(
                ... if p.default is p.empty else p.default, alias=p.name, description=about.get(p.name) or None
            )
            fields[f"p{len(fields)}"] = (hints.get(p.name, Any), about_it)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except ContractError:
        raise
    except (PydanticUserError, NameError, TypeError, ValueError) as e:
        raise ContractError(f"tool {name}: its signature makes no JSON schema: {e}") from e
    schema.pop("title", None)
    for prop in schema.get("properties", {}).values():
        prop.pop("title", None)
    return ToolSpec(name, doc.description or "", schema, fn, model)


_built = lru_cache(maxsize=4096)(_build)


def _hinted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What carries the type hints of a callable: itself, or what a partial or an object with `__call__` calls."""
    if isinstance(fn, partial):
        return _hinted(fn.func)
    return fn if inspect.isroutine(fn) else type(fn).__call__


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))
