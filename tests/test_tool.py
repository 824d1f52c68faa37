"""From a function to the schema that the policy sees, and from the policy's arguments to the function's."""

import enum
import functools
import gc
import weakref
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentrl.errors import ContractError
from agentrl.tool import Tool, ToolLimits, spec_of, tool, tools_of


@tool
def search(query: str, k: int = 3, site: Literal["web", "wiki"] = "wiki") -> list[str]:
    """Search for passages.

    Longer explanation.

    Args:
        query: what to look for
        k: how many passages,
            at most
    """
    return [query] * k


def test_schema_from_hints_and_docstring():
    assert spec_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for passages.\n\nLonger explanation.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "k": {"type": "integer", "default": 3, "description": "how many passages,\nat most"},
                    "site": {"type": "string", "enum": ["web", "wiki"], "default": "wiki"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_a_tool_stays_the_function_it_was():
    assert search("x", 2) == ["x", "x"]


def test_arguments_are_checked_coerced_and_completed():
    assert spec_of(search).arguments({"query": "x", "k": "2"}) == {"query": "x", "k": 2, "site": "wiki"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "query: Field required"),
        ({"query": "x", "q": 1}, "q: Extra inputs are not permitted"),
        ({"query": "x", "k": "many"}, "k: Input should be a valid integer"),
        ({"query": None}, "query: Input should be a valid string"),
        ({"query": "x", "site": "moon"}, "site: Input should be 'web' or 'wiki'"),
        ({f"q{i}": 1 for i in range(1000)}, "bad arguments for search"),
    ],
)
def test_bad_arguments_are_a_sentence_for_the_policy(arguments, complaint):
    with pytest.raises(ValueError, match="bad arguments for search") as caught:
        spec_of(search).arguments(arguments)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300


@given(
    st.dictionaries(
        st.text(max_size=5), st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5)
    )
)
def test_arguments_are_taken_or_refused_but_never_raise_anything_else(arguments):
    try:
        taken = spec_of(search).arguments(arguments)
    except ValueError:
        return
    assert set(taken) == {"query", "k", "site"}


def test_nested_models_annotations_and_enums():
    class Unit(enum.Enum):
        C = "celsius"

    class Place(BaseModel):
        name: str
        unit: Unit = Unit.C

    @tool
    def weather(place: Place, days: Annotated[int, Field(ge=1, le=7, description="ahead")] = 1):
        """Forecast."""

    spec = spec_of(weather)
    assert spec.parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert spec.parameters["properties"]["days"] == {
        "type": "integer", "minimum": 1, "maximum": 7, "default": 1, "description": "ahead",
    }  # fmt: skip
    assert spec.arguments({"place": {"name": "Oslo"}}) == {"place": Place(name="Oslo"), "days": 1}
    with pytest.raises(ValueError, match=r"place\.name: Field required; days"):
        spec.arguments({"place": {}, "days": 9})


def test_the_args_section_goes_before_the_hints_description():
    def forecast(
        days: Annotated[int, Field(description="of the hint")], place: Annotated[str, Field(description="where")]
    ):
        """Forecast.

        Args:
            days: days ahead
        """

    described = {k: p["description"] for k, p in spec_of(forecast).parameters["properties"].items()}
    assert described == {"days": "days ahead", "place": "where"}


def test_names_that_pydantic_keeps_for_itself():
    @tool
    def odd(json: str, model_config: int, copy: bool = False, _hidden: int = 0, self_: str = ""):
        """Odd."""

    spec = spec_of(odd)
    assert list(spec.parameters["properties"]) == ["json", "model_config", "copy", "_hidden", "self_"]
    assert spec.arguments({"json": "{}", "model_config": 1, "_hidden": 2}) == {
        "json": "{}", "model_config": 1, "copy": False, "_hidden": 2, "self_": "",
    }  # fmt: skip
    with pytest.raises(ValueError, match="model_config: Field required"):
        spec.arguments({"json": ""})


def test_a_default_is_never_shared():
    @tool
    def collect(items: list[int] = []):  # noqa: B006
        """Collect."""

    spec_of(collect).arguments({})["items"].append(1)
    assert spec_of(collect).arguments({}) == {"items": []}


def test_a_parameter_without_a_type_hint_accepts_any_value():
    @tool
    def anything(x):
        """Anything."""

    assert spec_of(anything).arguments({"x": [1, {}]}) == {"x": [1, {}]}


class Opaque:
    pass


def test_a_signature_without_schema_is_refused():
    def opaque(x: Opaque): ...
    def starred(*xs: int): ...
    def keywords(**xs: int): ...
    def positional(x: int, /): ...
    def unknown(x: "Nowhere"): ...  # noqa: F821

    for fn, why in [
        (opaque, "Opaque"),
        (starred, r"\*xs"),
        (keywords, r"\*\*xs"),
        (positional, "x: int"),
        (unknown, "Nowhere"),
    ]:
        with pytest.raises(ContractError, match=why):
            spec_of(fn)


@pytest.mark.parametrize("name", ["", "<lambda>", "two words", "x" * 65, "naïve"])
def test_a_name_the_policy_cannot_call(name):
    with pytest.raises(ContractError, match="name"):
        spec_of(tool(name=name)(lambda: None) if name else functools.partial(print))


def test_names_of_other_systems_tools():
    assert spec_of(tool(name="files.read-text")(lambda: None)).name == "files.read-text"


def test_limits():
    @tool(name="slow", timeout_s=5, max_concurrency=2)
    def fn():
        """Slow."""

    spec = spec_of(fn)
    assert (spec.name, spec.limits) == ("slow", ToolLimits(timeout_s=5, max_concurrency=2))
    with pytest.raises(TypeError, match="timout_s"):
        tool(timout_s=5)(fn)


class Base:
    @tool(timeout_s=7)
    def first(self, x: int) -> int:
        """First."""
        return x + 1

    @tool
    async def second(self) -> str:
        """Second."""
        return "second"

    def no_tool(self): ...


class Derived(Base):
    @tool
    def third(self):
        """Third."""

    def first(self, x: int, y: int = 0) -> int:
        """First, overridden."""
        return x + y

    @tool
    @staticmethod
    def fourth(x: int):
        """Fourth."""
        return x


class TestMethods:
    def test_found_in_order_and_bound(self):
        assert [s.name for s in tools_of(Base())] == ["first", "second"]
        assert tools_of(Base())[0].fn(x=1) == 2

    def test_an_overriding_method_stays_a_tool_with_its_limits(self):
        specs = {s.name: s for s in tools_of(Derived())}
        assert list(specs) == ["first", "second", "third", "fourth"]
        assert specs["first"].limits.timeout_s == 7
        assert specs["first"].description == "First, overridden."
        assert specs["first"].fn(x=1, y=5) == 6
        assert specs["fourth"].fn(x=3) == 3

    def test_a_tool_can_be_taken_away(self):
        class Fewer(Base):
            second = None

        assert [s.name for s in tools_of(Fewer())] == ["first"]

    def test_the_schema_is_built_once_and_the_instance_is_not_kept(self):
        one, two = Base(), Base()
        (a, _), (b, _) = tools_of(one), tools_of(two)
        assert a.parameters is b.parameters
        assert (a.fn.__self__, b.fn.__self__) == (one, two)
        gone = weakref.ref(one)
        del one, a, _
        gc.collect()
        assert gone() is None


class WebSearch(Tool):
    limits = ToolLimits(timeout_s=3)

    def call(self, query: str) -> str:
        """Search the web."""
        return f"{self.name}:{query}"


class Second(WebSearch):
    name = "other"
    limits = ToolLimits(timeout_s=4)


class TestToolClasses:
    def test_named_after_the_class(self):
        spec = spec_of(WebSearch())
        assert (spec.name, spec.limits.timeout_s, spec.description) == ("web_search", 3, "Search the web.")
        assert list(spec.parameters["properties"]) == ["query"]

    def test_subclasses_that_share_call_keep_their_own_name_and_limits(self):
        spec_of(WebSearch())
        spec = spec_of(Second())
        assert (spec.name, spec.limits.timeout_s, spec.fn(query="x")) == ("other", 4, "other:x")

    def test_without_call(self):
        with pytest.raises(ContractError, match="Tool has no method `call`"):
            spec_of(Tool())

    async def test_setup_and_close_need_not_be_defined(self):
        assert await WebSearch().setup(seed=1) is None
        assert await WebSearch().close() is None


def test_callable_objects_and_partials():
    class Adder:
        __hash__ = None

        def __call__(self, a: int, b: int = 1) -> int:
            """Add."""
            return a + b

    spec = spec_of(tool(name="add")(Adder()))
    assert spec.fn(**spec.arguments({"a": "1"})) == 2
    assert spec.parameters["properties"]["a"] == {"type": "integer"}
    spec = spec_of(tool(name="find")(functools.partial(search, k=1)))
    assert spec.fn(**spec.arguments({"query": "x"})) == ["x"]


@pytest.mark.parametrize(
    "limits",
    [
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "30"},
        {"timeout_s": None},
        {"retries": -1},
        {"retries": 1.5},
        {"max_concurrency": 0},
        {"max_result_bytes": -1},
        {"max_hung": 0},
        {"max_hung": True},
        {"parallel": 1},
    ],
    ids=repr,
)
def test_a_bad_limit_is_refused_where_it_is_declared(limits):
    with pytest.raises(ContractError, match=f"a tool's limits: {next(iter(limits))} must be"):

        @tool(**limits)
        def f(): ...
