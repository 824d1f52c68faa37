"""Action parsers: they accept any text, and find every valid call."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from utterances import WRITERS, format_of, utterances

from agentrl.render import FORMATS
from agentrl.render.formats import block_format
from agentrl.types import Action, FinishReason, ParseError, ToolCall

NAMES = sorted(WRITERS)
MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<function=f>",
    "</function>", "<parameter=q>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "```json\n", "\n```", "```tool_code\n", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0", "<|channel|>analysis", "<|channel|>commentary to=functions.f",
    "<|channel|>final", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "{", "}", "[", "]", '"', "\\",
    '{"name": "f", "arguments": {"q": "x"}}', '{"name": "f"', '"arguments"', ":", ",", ";", "null", "5", "[]", "f(x=1)",
    "\ud800", "\\ud800", "\x00", "\n", "NaN", "1e999", "[f(", ")]", "x=", "{1, 2}", "b'x'", "1j", "**", "...", "(1,)", "f'{x}'",
)  # fmt: skip
soup = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=8)), max_size=10).map("".join)


def total(name, text, finish, max_calls=4):
    """What must hold for any text."""
    action = FORMATS[format_of(name)].parse(text, finish, max_calls)
    assert isinstance(action, Action)
    assert action.text == text
    assert len(action.calls) <= max_calls
    assert all(isinstance(c, ToolCall) and c.name and isinstance(c.arguments, dict) for c in action.calls)
    assert all(
        isinstance(e, ParseError) and e.kind in ("structure", "content", "surplus") and e.message for e in action.errors
    )
    for call in action.calls:
        json.dumps([call.name, call.arguments, call.id], ensure_ascii=False).encode()  # no lone surrogate gets through
    return action


def mutated(draw):
    """A well-formed utterance with a few characters changed, dropped, doubled or cut off."""
    name = draw(st.sampled_from(NAMES))
    text = draw(utterances(name))[0]
    for _ in range(draw(st.integers(0, 3))):
        if text:
            at = draw(st.integers(0, len(text) - 1))
            end = min(len(text), at + draw(st.integers(0, 6)))
            text = draw(
                st.sampled_from(
                    (text[:at] + text[end:], text[:end] + text[at:], text[:at], text[:at] + draw(soup) + text[at:])
                )
            )
    return name, text


def check_any(name, text, finish, limit):
    """Any text gives an action and its messages. A lower limit of calls changes nothing but which of them are surplus."""
    form = FORMATS[format_of(name)]
    action = total(name, text, finish)
    assert form.message(action) == {"role": "assistant", "content": text}
    assert isinstance(form.structured_message(action)["content"], str)
    limited = total(name, text, finish, limit)
    assert limited.calls == action.calls[:limit]
    assert [e for e in limited.errors if e.kind != "surplus"] == [e for e in action.errors if e.kind != "surplus"]


finishes = st.sampled_from((FinishReason.STOP, FinishReason.LENGTH))
limits = st.integers(0, 4)


@examples(200)
@given(st.sampled_from(NAMES), soup, finishes, limits)
def test_any_text_gives_an_action_whatever_the_limit(name, text, finish, limit):
    check_any(name, text, finish, limit)


@examples(200)
@given(st.composite(mutated)(), finishes, limits)
def test_any_mutation_gives_an_action_whatever_the_limit(mutation, finish, limit):
    check_any(*mutation, finish, limit)


@pytest.mark.full
@settings(max_examples=50_000)
@given(st.sampled_from(NAMES), soup, finishes, limits)
def test_any_text_in_full(name, text, finish, limit):
    check_any(name, text, finish, limit)


@pytest.mark.full
@settings(max_examples=50_000)
@given(st.composite(mutated)(), finishes, limits)
def test_any_mutation_in_full(mutation, finish, limit):
    check_any(*mutation, finish, limit)


def every_valid_call_is_found(name, examples):
    @settings(max_examples=examples)
    @given(utterances(name), st.integers(1, 400))
    def check(utterance, at):
        text, expected = utterance
        action = total(name, text, FinishReason.STOP, 8)
        assert [(c.name, c.arguments) for c in action.calls] == expected
        assert not action.errors
        cut = total(name, text[:at], FinishReason.LENGTH, 8)
        assert cut.calls == action.calls[: len(cut.calls)] or "</think>" in text[at:]

    check()


@pytest.mark.parametrize("name", NAMES)
def test_every_valid_call_is_found(name):
    every_valid_call_is_found(name, 60)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_valid_call_is_found_in_full(name):
    every_valid_call_is_found(name, 2_000)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("pythonic", "gpt_oss")])
def test_case_14_what_is_cut_by_length_is_no_fault_of_the_policys(name):
    text = WRITERS[name]([("search", {"query": "x y z"})])
    for at in range(1, len(text)):
        action = total(name, text[:at], FinishReason.LENGTH)
        assert not [e for e in action.errors if e.kind == "structure"]


CALLS = {
    "hermes": "<tool_call>{}</tool_call>",
    "mistral": "[TOOL_CALLS][{}]",
    "llama3": "<|python_tag|>{}",
}
"""formats in which a call is one JSON object"""
ARGUMENTS = {
    "hermes": '<tool_call>{"name": "f", "arguments": @}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": @}]',
    "mistral named": "[TOOL_CALLS]f[ARGS]@",
    "llama3": '<|python_tag|>{"name": "f", "parameters": @}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>@<|tool_call_end|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n@\n```<｜tool▁call▁end｜>",
    "deepseek_v3 plain": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>@<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>@",
}
"""all formats in which the arguments are JSON"""
BROKEN = (
    '{"q": "a" b"}', '{"q": ', '{"q": "x', "{'q': 1}", '{"q": NaN}', '{"q": 1e999}', '{"q": "\\ud800"}', '{"\\udfff": 1}',
    '{"q": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}", '{"q": ' + "[" * 100_000, "nonsense", "{q: 1}", '{"q": "\\x"}',
)  # fmt: skip
WRONG = ("5", "null", "true", "[]", '"text"', '"[]"', '"5"', "1.5", '[{"q": 1}]')
WRONG_CALLS = (
    "5", "null", '"{\\"q\\": 1}"', "true", "[]", '{"name": "f"}', '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}',
    '{"arguments": {}}', '{"name": null, "arguments": {}}', '{"name": ["f"], "arguments": {}}', '{"function": "f"}', "{}",
)  # fmt: skip
KINDS = {
    "hermes": (("structure", "<tool_call>{}"), ("structure", '<tool_call>{"name": "f", <tool_call>'), ("content", "<tool_call></tool_call>")),
    "qwen3_coder": (
        ("structure", "<tool_call>f</tool_call>"), ("structure", "<tool_call><function=f></tool_call>"), ("structure", "<tool_call></tool_call>"),
        ("structure", "<tool_call><function=f></function>"), ("structure", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("content", "<tool_call><function=></function></tool_call>"),
        ("content", "<tool_call><function=f><parameter=q>\ud800</parameter></function></tool_call>"),
    ),
    "glm4": (
        ("structure", "<tool_call>f"), ("structure", "<tool_call>f<arg_key>q</arg_key></tool_call>"),
        ("structure", "<tool_call>f<arg_key>q</arg_key><arg_value>x</tool_call>"), ("content", "<tool_call></tool_call>"),
        ("content", "<tool_call>\n<arg_key>q</arg_key><arg_value>x</arg_value></tool_call>"),
        ("content", "<tool_call>f<arg_key>q</arg_key><arg_value>\ud800</arg_value></tool_call>"),
    ),
    "deepseek_v3": (
        ("structure", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"), ("structure", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
        ("content", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("content", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>"),
    ),
    "kimi_k2": (
        ("structure", "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("structure", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>"),
        ("structure", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
        ("structure", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ),
    "mistral": (("structure", "[TOOL_CALLS][]"), ("content", "[TOOL_CALLS]"), ("content", "[TOOL_CALLS][ARGS]{}"), ("content", "[TOOL_CALLS][5]")),
    "llama3": (("structure", "<|python_tag|>"), ("content", "<|python_tag|>f(x=1)"), ("content", '{"name": "f", "parameters": 5}')),
    "gpt_oss": (
        ("structure", "<|channel|>commentary to=functions.f"), ("structure", "<|channel|>final<|message|>x<|end|><|start|>assistant<|channel|>final"),
        ("content", "<|channel|>commentary to=functions.f<|message|>"),
    ),
    "pythonic": (
        ("structure", "[f(1)]"), ("structure", "[f(**{'x': 1})]"), ("structure", "[f(x=)]"),
        ("structure", "```tool_code\nf(\n```"), ("structure", "```tool_code\nx = 5\n```"), ("structure", "```tool_code\n[]\n```"),
        ("structure", "[f(x=" + "[" * 5000 + "]" * 5000 + ")]"), ("structure", "[f(x='\ud800')]"), ("content", "[f(x='\\ud800')]"),
        ("content", "[f(x=g())]"), ("content", "[f(x={1, 2})]"), ("content", "[f(x=b'a')]"), ("content", "[f(x=1j)]"), ("content", "[f(x=...)]"),
        ("content", "[f(x={(1, 2): 3})]"), ("content", "[f(x=1e999)]"), ("content", "[f(x=nan)]"),
    ),
    "search_r1": (("structure", "<search>x"), ("structure", "x</search>"), ("structure", ""), ("content", "<search> </search>")),
}  # fmt: skip
"""what is wrong with the markup, and what with a call, in each format"""
FAULTS = [
    pytest.param(name, *fault, id=f"{name}-{i}") for name, faults in KINDS.items() for i, fault in enumerate(faults)
]


def kinds_of(action):
    return [e.kind for e in action.errors]


@pytest.mark.parametrize("name", ARGUMENTS)
class TestArguments:
    def read(self, name, arguments):
        return total(name.split()[0], ARGUMENTS[name].replace("@", arguments), FinishReason.STOP)

    @pytest.mark.parametrize("arguments", BROKEN)
    def test_case_14_broken_json(self, name, arguments):
        action = self.read(name, arguments)
        assert not action.calls
        assert set(kinds_of(action)) == {"content"}

    @pytest.mark.parametrize("arguments", WRONG)
    def test_case_15_json_of_the_wrong_type(self, name, arguments):
        action = self.read(name, arguments)
        assert not action.calls
        assert kinds_of(action) == ["content"]

    @pytest.mark.parametrize(("arguments", "meant"), [
        ('{"q": "a\nb"}', {"q": "a\nb"}), ('{"q": "a\tb"}', {"q": "a\tb"}), ('"{\\"q\\": 1}"', {"q": 1}), ("{}", {}),
        ('{"q": "\\ud83d\\ude42"}', {"q": "🙂"}), ('{"q": {"r": [1, null]}}', {"q": {"r": [1, None]}}), (' {"q" : "x"} ', {"q": "x"}),
    ])  # fmt: skip
    def test_what_is_accepted(self, name, arguments, meant):
        """Raw newlines in strings, arguments written as a string, spaces."""
        action = self.read(name, arguments)
        assert [c.arguments for c in action.calls] == [meant]
        assert not action.errors


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("body", WRONG_CALLS)
def test_case_15_a_call_that_is_none(name, body):
    action = total(name, CALLS[name].format(body), FinishReason.STOP)
    assert not action.calls
    assert kinds_of(action) == ["content"]


@pytest.mark.parametrize(("name", "kind", "text"), FAULTS)
def test_cases_14_and_15_faults_of_markup_and_of_calls(name, kind, text):
    action = total(name, text, FinishReason.STOP)
    assert not action.calls
    assert set(kinds_of(action)) == {kind}


def test_python_that_is_too_much_for_its_parser():
    for text in (
        "[f(x=" + "-" * 90_000 + "1)]",
        "[f(x=" + "(" * 5000 + ")]",
        f"[f(x={'9' * 5000})]",
        "[f(x=1)" + " " * 100_001 + "]",
    ):
        action = total("pythonic", text, FinishReason.STOP)
        assert not action.calls
        assert action.errors


def test_many_unclosed_blocks():
    action = total("hermes", "<tool_call>" * 3000 + "</tool_call>", FinishReason.STOP)
    assert not action.calls
    assert len(action.errors) == 3000


def test_python_values_become_jsons():
    action = total("pythonic", "[f(x=(1, (2,)), y={1: 2, None: 3, 'z': [()]}, z=-1.5)]", FinishReason.STOP)
    assert action.calls[0].arguments == {"x": [1, [2]], "y": {"1": 2, "null": 3, "z": [[]]}, "z": -1.5}


@pytest.mark.parametrize("name", NAMES)
class TestSurplus:
    """Case 16."""

    def test_surplus_calls_are_errors_and_the_text_is_whole(self, name):
        calls = [("search", {"query": string.ascii_lowercase[i]}) for i in range(5)]
        text = WRITERS[name](calls)
        action = FORMATS[format_of(name)].parse(text, FinishReason.STOP, 2)
        assert [(c.name, c.arguments) for c in action.calls] == calls[:2]
        assert [e.kind for e in action.errors] == ["surplus"] * 3
        assert action.text == text
        assert len({c.id for c in action.calls}) == 2


def test_half_of_a_surrogate_pair_is_no_argument_anywhere():
    for name, text in (
        ("search_r1", "<search>\ud800</search>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "\\ud800"}]'),
        ("glm4", "<tool_call>f\n<arg_key>q</arg_key><arg_value>\ud800</arg_value></tool_call>"),
    ):
        action = total(name, text, FinishReason.STOP)
        assert not action.calls
        assert [e.kind for e in action.errors] == ["content"]


def test_structure_and_content_are_told_apart():
    read = FORMATS["hermes"].parse
    assert [e.kind for e in read("<tool_call>{}", FinishReason.STOP, 8).errors] == ["structure"]
    assert [e.kind for e in read("<tool_call>{}</tool_call>", FinishReason.STOP, 8).errors] == ["content"]
    two = read('<tool_call>{"name": "a" <tool_call>{"name": "f", "arguments": {}}</tool_call>', FinishReason.STOP, 8)
    assert [e.kind for e in two.errors] == ["structure"]
    assert [c.name for c in two.calls] == ["f"]


@given(st.sampled_from(NAMES), soup, st.sampled_from(FinishReason))
@settings(max_examples=400, deadline=None)
def test_a_turns_message_is_the_same_whether_its_text_was_just_parsed_or_not(name, text, finish):
    fmt = FORMATS[format_of(name)]
    block_format._SCANNED.__init__(block_format._SCANNED.limit)
    action = Action(text, finish_reason=finish)
    alone = fmt.structured_message(action)
    fmt.parse(text, finish, 4)
    assert fmt.structured_message(action) == alone
