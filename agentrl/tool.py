"""`@tool` functions and methods, and `Tool` for tools with state. rollout/tool_executor.py calls them.

The policy sees a schema made of the type hints and the docstring; the arguments of its calls are validated with it.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agentrl.errors import ContractError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__agentrl_tool__"
Isolation = Literal["thread", "process"]
"""where user code runs: in a thread (async code: on the event loop) of the run's process, or in a separate process"""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The limits of a tool; the keyword arguments of `@tool`. The defaults suit a retriever.

    Example:
        >>> ToolLimits(timeout_s=5.0, retries=0).max_concurrency
        64
    """

    timeout_s: float = 30.0
    """time limit of one attempt, in seconds; when it expires, the policy reads an error"""
    max_concurrency: int = 64
    """concurrent calls, over all episodes"""
    max_per_second: float | None = None
    """calls and further attempts that start per second, over all episodes; None: no limit. The wait is not part of `timeout_s`"""
    retries: int = 1
    """further attempts after a failure of infrastructure (`InfraError`, connection errors, timeouts of clients, HTTP 5xx and other kinds, see
    `register_infra_error`); other exceptions are not retried"""
    max_result_bytes: int = 32_768
    """longer results are truncated at a character boundary"""
    max_hung: int = 8
    """sync calls that may hang past their time limit; once this many hang, further calls wait until one returns"""
    parallel: bool = False
    """True: calls of one turn may run at the same time; False: they run one after the other, in the order in which the policy wrote them"""
    isolation: Isolation = "thread"
    """'process': calls run in processes of their own, which end with a call that exceeds its time limit or crashes. A crash is an error that the
    policy reads, as an exception is. Functions, and methods of `Tool`; for a method of an environment set `Env.isolation`"""

    def __post_init__(self) -> None:
        check_limit("a tool's limits", "timeout_s", self.timeout_s)
        if self.max_per_second is not None:
            check_limit("a tool's limits", "max_per_second", self.max_per_second)
        for name, least in (("max_concurrency", 1), ("retries", 0), ("max_result_bytes", 0), ("max_hung", 1)):
            check_limit("a tool's limits", name, getattr(self, name), least=least)
        if not isinstance(self.parallel, bool):
            raise ContractError(f"a tool's limits: parallel must be True or False, found {self.parallel!r:.60}")
        check_isolation("a tool's limits", self.isolation)


def check_isolation(where: str, value: Any) -> None:
    """Check the choice of where user code runs.

    Raises:
        ContractError: it is neither 'thread' nor 'process'.
    """
    if value not in ("thread", "process"):
        raise ContractError(f"{where}: isolation must be 'thread' or 'process', found {value!r:.60}")


def check_limit(where: str, name: str, value: Any, *, least: int | None = None) -> None:
    """Check a limit: a positive finite number of seconds, or, with `least`, an integer of at least that.

    Raises:
        ContractError: it is something else.
    """
    if least is not None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ContractError(f"{where}: {name} must be an integer of at least {least}, found {value!r:.60}")
    elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ContractError(f"{where}: {name} must be a positive number of seconds, found {value!r:.60}")


class BadArgumentsError(ValueError):
    """Arguments of a call are missing, unknown or of the wrong type. The policy reads the message."""


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the policy sees it, with the function that its calls run and the limits of these calls.

    `Env.tool_specs` returns them. `spec_of` makes one of a `@tool` function; the constructor makes one of a JSON Schema that exists already,
    such as that of a tool on a server.

    Example:
        >>> schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        >>> weather = ToolSpec("weather", "The weather in a city.", schema, lambda city: f"sunny in {city}")
        >>> weather.arguments({"city": "Paris"})
        {'city': 'Paris'}
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments"""
    fn: Callable[..., Any] | None = None
    """the function that a call runs, with its arguments by name; None: no call is made, and `Env.step` reads the calls from `action.calls`"""
    model: type[BaseModel] | None = None
    """validates and converts the arguments; None: only their names are checked against `parameters`"""
    limits: ToolLimits = field(default_factory=ToolLimits)
    key: str = ""
    """tools of equal name and key share their limits over all episodes; empty: the function's module and name"""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(str(self.name)):
            raise ContractError(
                f"a tool's name must be 1 to 64 letters, digits, '_', '-' or '.'; found {self.name!r:.80}"
            )

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in OpenAI's format, as chat templates accept it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The validated and converted arguments of a call.

        Raises:
            BadArgumentsError: arguments are missing, unknown or of the wrong type; the message is written for the policy.
        """
        if self.model is None:
            return self._named_arguments(given)
        try:
            parsed = self.model.model_validate(dict(given))
        except ValidationError as e:
            problems = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'arguments'}: {p['msg']}" for p in e.errors()[:3])
            raise BadArgumentsError(f"bad arguments for {self.name}: {problems}") from e
        return {f.alias or name: getattr(parsed, name) for name, f in self.model.model_fields.items()}

    def _named_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        known = self.parameters.get("properties", {})
        problems = [f"{name}: Field required" for name in self.parameters.get("required", ()) if name not in given]
        if self.parameters.get("additionalProperties") is False:
            problems += [f"{name}: Extra inputs are not permitted" for name in given if name not in known]
        if problems:
            raise BadArgumentsError(f"bad arguments for {self.name}: {'; '.join(problems[:3])}")
        return dict(given)


class Tool:
    """A tool with state, listed in `Env.tools`. One instance is created per episode.

    Define `call`, and override `setup` and `close` where needed; each may be sync or async. The schema is made of the signature and the
    docstring of `call`.

    Example:
        >>> class Notebook(Tool):
        ...     def setup(self, seed):
        ...         self.lines = []
        ...
        ...     def call(self, line: str) -> str:
        ...         '''Write a line into the notebook and read all lines.
        ...
        ...         Args:
        ...             line: the text to write
        ...         '''
        ...         self.lines.append(line)
        ...         return " / ".join(self.lines)
        >>> from agentrl.tool import spec_of
        >>> spec_of(Notebook()).schema["function"]["name"]
        'notebook'
    """

    name: ClassVar[str] = ""
    """the name that the policy uses; empty: the class name in snake case"""
    limits: ClassVar[ToolLimits] = ToolLimits()
    parallel: ClassVar[bool] = False
    """True: calls of one turn may run at the same time; see `ToolLimits.parallel`"""
    isolation: ClassVar[Isolation] = "thread"
    """'process': each object is pickled into a separate process before `setup`; see `ToolLimits.isolation`. After a call that crashed or exceeded
    its time limit, the next one gets another process, in which `setup` runs again"""

    async def setup(self, seed: int) -> None:
        """Prepare the tool. Called once per episode, before the first call.

        Args:
            seed: seed for all random choices of the tool in this episode.
        """

    async def close(self) -> None:
        """Free resources. Called once per episode, also after a failure or a cancellation."""

    call: Callable[..., Any]
    """the function that the policy calls; what it returns becomes text (see `@tool`)"""


@overload
def tool(fn: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, **limits: Any) -> Callable[[F], F]: ...
def tool(fn: Any = None, /, *, name: str | None = None, **limits: Any) -> Any:
    """Decorator that makes a function, or a method of an Env, a tool.

    The function may be sync or async, and remains callable as before. What it returns becomes text: str unchanged, other values as JSON; an
    image, or a list of text and image parts, is passed to the model. An exception becomes an error message that the policy reads, except
    `InfraError` and other failures of infrastructure (see `register_infra_error`), which are retried and then fail the episode.

    Several calls of one turn run one after the other, in the order in which the policy wrote them, unless the tool is declared with
    `parallel=True`.

    Args:
        fn: the function. Its type hints and its docstring (summary and Args section) make the schema.
        name: the name that the policy uses; None: the function's name.
        **limits: fields of `ToolLimits`.

    Raises:
        ContractError: the name or the signature cannot be used for a tool; raised when the schema is made.

    Example:
        >>> @tool(timeout_s=5.0)
        ... def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first number
        ...         b: the second number
        ...     '''
        ...     return a + b
        >>> add(1, 2)
        3
        >>> from agentrl.tool import spec_of
        >>> spec_of(add).parameters["properties"]["a"]
        {'description': 'the first number', 'type': 'integer'}
    """

    def mark(f: F) -> F:
        setattr(f, _MARK, (name or f.__name__, ToolLimits(**limits)))
        return f

    return mark(fn) if fn is not None else mark


def tools_of(obj: object) -> list[ToolSpec]:
    """The `@tool` methods of an object, in the order of their definition (base classes first).

    A method that overrides a tool is a tool without the decorator. A subclass removes a tool by setting its name to None.
    """
    return [_spec(fn, *mark) for n, mark in _marks(type(obj)).items() if (fn := getattr(obj, n)) is not None]  # type: ignore[arg-type]  # a class is hashable


def tool_names(cls: type) -> list[str]:
    """The names of the tools that a class declares: those in `tools`, then its `@tool` methods."""
    listed = [_name_of(obj) for obj in getattr(cls, "tools", ())]
    return listed + [name for n, (name, _) in _marks(cls).items() if getattr(cls, n) is not None]


@lru_cache(maxsize=4096)
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


def declared_tools(schemas: Iterable[Mapping[str, Any]]) -> list[ToolSpec]:
    """The tools of schemas in OpenAI's format, `{"type": "function", "function": {"name", …}}`. They have no function.

    Raises:
        ContractError: a name cannot be used for a tool.
    """
    functions = [schema.get("function", schema) for schema in schemas]
    return [
        ToolSpec(
            f.get("name", ""), f.get("description") or "", f.get("parameters") or {"type": "object", "properties": {}}
        )
        for f in functions
    ]


def spec_of(obj: Callable[..., Any] | Tool) -> ToolSpec:
    """The spec of a `@tool` function or bound method, a `Tool` instance, or a plain function.

    Raises:
        ContractError: the name or the signature makes no schema.

    Example:
        >>> @tool
        ... def double(number: int) -> int:
        ...     '''Double a number.'''
        ...     return 2 * number
        >>> spec_of(double).schema["function"]["name"]
        'double'
    """
    if isinstance(obj, Tool):
        if not callable(getattr(obj, "call", None)):
            raise ContractError(f"tool {type(obj).__name__} has no method `call`; define call(self, ...)")
        isolation: Isolation = "process" if "process" in (obj.isolation, obj.limits.isolation) else obj.isolation
        limits = replace(obj.limits, parallel=obj.parallel or obj.limits.parallel, isolation=isolation)
        return _spec(obj.call, _name_of(obj), limits)
    return _spec(obj, _name_of(obj), getattr(obj, _MARK, (None, ToolLimits()))[1])


def _spec(fn: Callable[..., Any], name: str, limits: ToolLimits) -> ToolSpec:
    """The spec of a callable; schemas are cached by function and name."""
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"a tool's name must be 1 to 64 letters, digits, '_', '-' or '.'; "
            f"found {name!r} for {fn!r:.80}; give @tool(name=...)"
        )
    build = _built if inspect.isroutine(fn) else _build
    built = build(getattr(fn, "__func__", fn), name, inspect.ismethod(fn))
    return ToolSpec(name, built.description, built.parameters, fn, built.model, limits)


def _build(fn: Callable[..., Any], name: str, bound: bool) -> ToolSpec:
    doc = docstring_parser.parse(inspect.getdoc(fn) or "")
    about = {p.arg_name: p.description or "" for p in doc.params}
    try:
        hints = typing.get_type_hints(_hinted(fn), include_extras=True)
        fields: dict[str, Any] = {}
        for p in list(inspect.signature(fn).parameters.values())[bound:]:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
                raise ContractError(f"tool {name}: the policy passes arguments by name; parameter {str(p)!r} has none")
            # under generated names, since pydantic reserves some ('_x', 'json', 'model_config')
            given: dict[str, Any] = {"description": about[p.name]} if about.get(p.name) else {}  # else that of the hint
            field_info = Field(... if p.default is p.empty else p.default, alias=p.name, **given)
            fields[f"p{len(fields)}"] = (hints.get(p.name, Any), field_info)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except ContractError:
        raise
    except (PydanticUserError, NameError, TypeError, ValueError) as e:
        raise ContractError(f"tool {name}: its signature cannot be converted to a JSON schema: {e}") from e
    schema.pop("title", None)
    for prop in schema.get("properties", {}).values():
        prop.pop("title", None)
    return ToolSpec(name, doc.description or "", schema, fn, model)


_built = lru_cache(maxsize=4096)(_build)


def _hinted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that has the type hints of a callable: itself, a partial's function, or an object's `__call__`."""
    if isinstance(fn, partial):
        return _hinted(fn.func)
    return fn if inspect.isroutine(fn) else type(fn).__call__


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))
