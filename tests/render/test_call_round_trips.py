"""What a call means survives its writing: by the model's own template, in every family, whatever its arguments and their types."""

import json
import time
from functools import cache
from typing import Any, Literal, Optional

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from template_models import BY_NAME, MODELS, renderer, template_source
from utterances import WRITERS, format_of

from agentrl.render import FORMATS
from agentrl.render.formats.text_values import decode_calls, decode_text
from agentrl.tool import spec_of
from agentrl.types import FinishReason

NAMES = [m.name for m in MODELS]
TEXT_VALUES = ("qwen3_coder", "glm4")
MARKS = (
    "<tool_call>", "</tool_call>", "</tool_call><tool_call>", "<think>", "</think>", "a <think>b</think> c", "<answer>x</answer>",
    "</function>", "</function>\n</tool_call>", "</parameter>", "<parameter=a>\n1\n</parameter>", "<arg_key>", "</arg_value>", "<arg_value>",
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<|python_tag|>", "; {", '"}}</tool_call>',
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "```", "```json\n{}\n```", "```tool_code\n", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|channel|>final", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>assistant", ")]", '"', "\\",
)  # fmt: skip


def parse(name, text, tools=()):
    """The action in a text, with arguments decoded by the schemas."""
    form = FORMATS[format_of(name)]
    action = form.parse(text, FinishReason.STOP, 8)
    return decode_calls(action, tools) if form.text_values else action


def calls_of(action):
    return [(c.name, c.arguments) for c in action.calls]


# -- marks inside strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in WRITERS if n not in ("search_r1", "glm47")])
def test_marks_inside_an_argument_end_nothing(name):
    for mark in MARKS:
        calls = [("echo", {"text": mark}), ("echo", {"text": f"x {mark} y", "z": "w"})]
        action = parse(name, WRITERS[name](calls))
        assert (calls_of(action), action.errors) == (calls, ()), mark


@pytest.mark.parametrize(
    "mark", ["</tool_call>", "a <think>b</think> c", "</think>", "<think>", "<|python_tag|>", "```tool_code\n"]
)
@pytest.mark.parametrize("before", ["", "<think>so</think>\n", "so</think>"])
@pytest.mark.parametrize(
    ("name", "text"), [("llama3", '{{"name": "echo", "parameters": {{"text": {}}}}}'), ("pythonic", "[echo(text={})]")]
)
def test_marks_inside_a_bare_call_end_nothing(name, text, before, mark):
    action = parse(name, before + text.format(json.dumps(mark)))
    assert calls_of(action) == [("echo", {"text": mark})]
    assert (action.answer, action.errors) == (None, ())


@pytest.mark.parametrize(("name", "value"), [
    ("qwen3_coder", "</parameter>\n</function>\n</tool_call> and on"), ("glm4", "</arg_value>\n</tool_call> and on"),
])  # fmt: skip
def test_a_value_that_the_format_cannot_hold_is_an_error_and_no_call(name, value):
    action = parse(name, WRITERS[name]([("echo", {"text": value}), ("echo", {"text": "x"})]))
    assert [e.kind for e in action.errors] == ["structure"]
    assert calls_of(action) == [("echo", {"text": "x"})]


@pytest.mark.parametrize("text", [
    "<tool_call><function=f><parameter=a>\n1</function></tool_call><tool_call><function=g><parameter=b>2</parameter></function></tool_call>",
    "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function><function=g><parameter=b>2</function></tool_call>",
])  # fmt: skip
def test_closing_marks_that_are_left_out_join_no_calls(text):
    assert [name for name, _ in calls_of(parse("qwen3_coder", text))] == ["f", "g"]


def test_a_thought_is_not_taken_from_an_argument():
    call = WRITERS["kimi_k2"]([("echo", {"text": "a <think>b</think> c"})])
    form = FORMATS["kimi_k2"]
    for before, thought in (("", None), ("<think>so</think>", "so")):
        message = form.structured_message(form.parse(before + call, FinishReason.STOP, 8))
        assert message.get("reasoning_content") == thought
    mistral = FORMATS["mistral"]
    action = mistral.parse("I look." + WRITERS["mistral"]([("echo", {"text": "a</think>b"})]), FinishReason.STOP, 8)
    assert mistral.structured_message(action)["content"] == "I look."


@pytest.mark.parametrize("unit", [
    "<tool_call>", '<tool_call>{"a": "', "<tool_call><function=f><parameter=a>", "</parameter>", "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "</arg_value>", "<|start|>a to=f<|message|>{", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "```tool_code\n", '{"name"</think>',
])  # fmt: skip
def test_reading_a_long_text_of_marks_takes_no_long_time(unit):
    """A reading that is quadratic in Python takes minutes for these."""
    started = time.process_time()
    for form in FORMATS.values():
        form.parse(unit * (30_000 // len(unit)), FinishReason.STOP, 8)
    assert time.process_time() - started < 5


# -- text to values ---------------------------------------------------------------------------------------------------------


class Place(BaseModel):
    name: str
    at: tuple[float, float] | None = None


def f(
    a_list: list[int] = [], text: str = "", maybe: Optional[str] = None, model: Place | None = None, a_set: set[str] = set(),  # noqa: B006, UP045
    pair: tuple[int, str] = (0, ""), nested: dict[str, list[Place]] = {}, one: Literal[1, 2] = 1, flag: bool = False, number: float = 0.0,  # noqa: B006
    union: int | str = 0, lists: list[int] | str = "", anything=None, count: int = 0, word: Literal["1", "null"] = "1",
):  # fmt: skip
    """Take everything."""


VALUES = [
    ("a_list", "[1, 2, 3]", [1, 2, 3]),
    ("a_list", "[1,2]", [1, 2]),
    ("a_list", "(1, 2)", [1, 2]),
    ("text", "[1, 2]", "[1, 2]"),
    ("text", "02134", "02134"),
    ("text", "null", "null"),
    ("text", "None", "None"),
    ("text", "true", "true"),
    ("text", '"x"', '"x"'),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("maybe", "nul", "nul"),
    ("maybe", "5", "5"),
    ("maybe", "[1]", "[1]"),
    ("model", '{"name": "Oslo", "at": [59.9, 10.7]}', Place(name="Oslo", at=(59.9, 10.7))),
    ("model", "null", None),
    ("model", "{'name': 'Oslo', 'at': None}", Place(name="Oslo")),
    ("a_set", '["a", "b", "a"]', {"a", "b"}),
    ("pair", '[1, "x"]', (1, "x")),
    ("nested", '{"a": [{"name": "x"}]}', {"a": [Place(name="x")]}),
    ("one", "2", 2),
    ("flag", "True", True),
    ("flag", "false", False),
    ("number", "1e3", 1000.0),
    ("number", "2", 2.0),
    ("count", "12345678901234567890123", 12345678901234567890123),
    ("count", " 7 ", 7),
    ("union", "5", 5),
    ("union", "05", "05"),
    ("union", "x", "x"),
    ("lists", "[1,2]", [1, 2]),
    ("lists", '["a"]', '["a"]'),
    ("lists", "[1, 2", "[1, 2"),
    ("anything", "[1, null]", [1, None]),
    ("anything", "word", "word"),
    ("anything", "1.50", "1.50"),
    ("anything", "1.5", 1.5),
    ("word", "1", "1"),
    ("word", "null", "null"),
]


@pytest.mark.parametrize("name", TEXT_VALUES)
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_text_becomes_what_the_tools_schema_says(name, key, text, value):
    spec = spec_of(f)
    (call,) = parse(name, WRITERS[name]([("f", {key: text})]), [spec.schema]).calls
    taken = spec.arguments(call.arguments)[key]
    assert (taken, type(taken)) == (value, type(value))


@pytest.mark.parametrize(("key", "text"), [
    ("a_list", "1, 2"), ("one", "3"), ("flag", "[]"), ("count", "true"), ("model", "[]"), ("count", "1e999"), ("a_list", "[" * 5000 + "]" * 5000),
    ("a_list", "{1, 2}"), ("a_list", '["\\ud800"]'),
])  # fmt: skip
def test_text_of_another_type_is_an_error_for_the_policy(key, text):
    spec = spec_of(f)
    (call,) = parse("glm4", WRITERS["glm4"]([("f", {key: text})]), [spec.schema]).calls
    with pytest.raises(ValueError, match=f"bad arguments for f: {key}"):
        spec.arguments(call.arguments)


def test_schemas_that_name_themselves_end():
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}}
    assert decode_text("[" * 50 + "]" * 50, loop) is not None
    assert decode_text("5", {"$ref": "#/nowhere"}) == 5
    assert decode_text("5", False) == decode_text("5", None) == "5"


@pytest.mark.parametrize(
    "parameters",
    [None, [], "x", {"properties": []}, {"properties": {"x": "y"}, "required": 5}, {"properties": {"x": {"anyOf": 1}}}],
)
def test_a_schema_that_is_none_raises_nothing(parameters):
    tool = {"type": "function", "function": {"name": "g", "parameters": parameters}}
    ((name, arguments),) = calls_of(parse("glm4", WRITERS["glm4"]([("g", {"x": "word"})]), [tool]))
    assert (name, arguments) == ("g", {"x": "word"})


def test_without_schemas_values_stay_text():
    text = WRITERS["glm4"]([("g", {"x": "[1]"})])
    assert calls_of(parse("glm4", text, [spec_of(f).schema])) == [("g", {"x": "[1]"})]


# -- parse(written(call)) is the call ---------------------------------------------------------------------------------------

_names = st.from_regex(r"[a-z][a-z0-9]{0,5}_", fullmatch=True)
_letters = st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"))
_texts = st.one_of(
    st.text(_letters, max_size=12),
    st.text("0123456789.-[]{}\"'\\ntrue", max_size=4),
    st.tuples(st.text(_letters, max_size=4), st.sampled_from(MARKS)).map("".join),
)
_floats = st.floats(-1e9, 1e9, allow_nan=False)
_LEAVES: tuple[tuple[Any, st.SearchStrategy[Any]], ...] = (
    ({"type": "string"}, _texts),
    ({"type": "integer"}, st.integers(-(10**20), 10**20)),
    ({"type": "number"}, _floats),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"enum": ["a", "b"], "type": "string"}, st.sampled_from(("a", "b"))),
    ({"enum": [1, 2]}, st.sampled_from((1, 2))),
    ({"const": True}, st.just(True)),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.none() | _texts),
    ({"type": ["integer", "string"]}, st.integers() | _texts),
)


@st.composite
def schemas(draw, depth=2):
    """(a JSON schema, values that it allows)."""
    kind = draw(st.integers(0, 4 if depth else 1))
    if kind <= 1:
        return draw(st.sampled_from(_LEAVES))
    parts = draw(st.lists(schemas(depth - 1), min_size=1, max_size=2))
    if kind == 2:
        return {"type": "array", "items": parts[0][0]}, st.lists(parts[0][1], max_size=2)
    if kind == 3:
        fixed = {"type": "array", "prefixItems": [s for s, _ in parts], "minItems": len(parts), "maxItems": len(parts)}
        return fixed, st.tuples(*(v for _, v in parts)).map(list)
    keys = draw(st.lists(_names, min_size=len(parts), max_size=len(parts), unique=True))
    properties = dict(zip(keys, parts, strict=True))
    schema = {"type": "object", "properties": {k: s for k, (s, _) in properties.items()}, "required": keys}
    return schema, st.fixed_dictionaries({k: v for k, (_, v) in properties.items()})


@st.composite
def tool_calls(draw):
    """(the schema of a tool, a call of it)."""
    name = draw(_names)
    parameters = draw(st.dictionaries(_names, schemas(), max_size=3))
    arguments = {k: draw(v) for k, (_, v) in parameters.items()}
    schema = {"type": "object", "properties": {k: s for k, (s, _) in parameters.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}, (name, arguments)


def written_by_template(name):
    """How transformers' rendering of the family's own template writes a call, without the end of the turn."""
    from transformers.utils import chat_template_utils

    model, ours = BY_NAME[name], renderer(name)
    compiled = chat_template_utils._compile_jinja_template(template_source(model))
    user = {"role": "user", "content": "q"}

    def render(messages, **more):
        return compiled.render(messages=messages, strftime_now=lambda _: "", **ours.tokenizer.special, **more)

    header = render([user], add_generation_prompt=True)

    def write(call):
        tool, arguments = call
        given = json.dumps(arguments, ensure_ascii=False) if name.startswith("deepseek") else arguments
        call_id = f"functions.{tool}:0" if "kimi" in name else "abcdefgh0"
        function = {"type": "function", "id": call_id, "function": {"name": tool, "arguments": given}}
        whole = render([user, {"role": "assistant", "content": "", "tool_calls": [function]}])
        start = next(len(h) for h in (header, header.removesuffix(ours.prefill)) if whole.startswith(h))
        text = whole[start:].rstrip("\n")
        return next((text.removesuffix(end) for end in (*ours.ends, "<|end|>") if text.endswith(end)), text)

    return write


@cache
def sampled_calls(examples):
    """Tools and calls of them, the same for all families."""
    pairs = []

    @settings(max_examples=examples, database=None, derandomize=True, phases=[Phase.generate], deadline=None)
    @given(tool_calls())
    def collect(pair):
        pairs.append(pair)

    collect()
    assert len(pairs) >= examples * 0.9
    return pairs


def misread_calls(name, write, examples):
    """(text, what was read) of calls that are not read as they were: errors, or texts that the format writes for two values."""
    form, misread = FORMATS[format_of(name)], []
    for tool, call in sampled_calls(examples):
        text = write(call)
        action = parse(name, text, [tool])
        if calls_of(action) != [call] or action.errors:
            misread.append((text, calls_of(action)))
            counted = action.errors or (form.text_values and _written_alike(write, action, call))
            assert counted, (text, calls_of(action), call, tool)
    return misread


def round_trips(name, write, examples):
    """At most 1 % of all calls are misread, each counted as an error or ambiguous by the format."""
    misread = misread_calls(name, write, examples)
    assert len(misread) <= examples / 100, misread[:5]


def _written_alike(write, action, call):
    """Whether what was read is another call that the template writes in the same way."""
    return len(action.calls) == 1 and write((action.calls[0].name, action.calls[0].arguments)) == write(call)


def json_writer(name):
    """`WRITERS`, with the values of text formats as JSON."""
    if name not in (*TEXT_VALUES, "glm47"):
        return lambda call: WRITERS[name]([call])
    return lambda call: WRITERS[name](
        [(call[0], {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in call[1].items()})]
    )


BY_TEMPLATE = [n for n in NAMES if n != "gemma3"]
"""families whose template writes calls"""
BY_HAND = [n for n in WRITERS if n not in ("search_r1", "glm47")]


@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_a_call_written_by_the_template_is_read_as_it_was(name):
    round_trips(renderer(name).format.name, written_by_template(name), 100)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_call_written_as_policies_do_is_read_as_it_was(name):
    round_trips(name, json_writer(name), 100)


@pytest.mark.full
@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_a_call_written_by_the_template_is_read_as_it_was_in_full(name):
    round_trips(renderer(name).format.name, written_by_template(name), 2_000)


@pytest.mark.full
@pytest.mark.parametrize("name", BY_HAND)
def test_a_call_written_as_policies_do_is_read_as_it_was_in_full(name):
    round_trips(name, json_writer(name), 2_000)
