"""Action parsers: total, incremental, and every valid call found."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from utterances import WRITERS, utterances

from agentrl.render import FORMATS
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
    "\ud800", "\\ud800", "\x00", "\n", "NaN", "1e999",
)  # fmt: skip
soup = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=8)), max_size=10).map("".join)


def total(name, text, finish, max_calls=4):
    """What must hold for any text."""
    action = FORMATS[name].parse(text, finish, max_calls)
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


def check_any(name, text, finish, cuts):
    action = total(name, text, finish)
    parser = FORMATS[name].parser(4)
    places = sorted({min(c, len(text)) for c in cuts})
    for a, b in zip([0, *places], [*places, len(text)], strict=True):
        parser.feed(text[a:b])
    assert parser.finish(finish) == action


finishes = st.sampled_from((FinishReason.STOP, FinishReason.LENGTH))
cuts = st.lists(st.integers(0, 400), max_size=5)


@settings(max_examples=1_000)
@given(st.sampled_from(NAMES), soup, finishes, cuts)
def test_any_text_gives_an_action_however_it_is_fed(name, text, finish, cuts):
    check_any(name, text, finish, cuts)


@settings(max_examples=1_000)
@given(st.composite(mutated)(), finishes, cuts)
def test_any_mutation_gives_an_action_however_it_is_fed(mutation, finish, cuts):
    check_any(*mutation, finish, cuts)


@pytest.mark.full
@settings(max_examples=50_000)
@given(st.sampled_from(NAMES), soup, finishes, cuts)
def test_any_text_in_full(name, text, finish, cuts):
    check_any(name, text, finish, cuts)


@pytest.mark.full
@settings(max_examples=50_000)
@given(st.composite(mutated)(), finishes, cuts)
def test_any_mutation_in_full(mutation, finish, cuts):
    check_any(*mutation, finish, cuts)


@pytest.mark.parametrize("name", NAMES)
def test_every_valid_call_is_found(name):
    @settings(max_examples=100)
    @given(utterances(name))
    def check(utterance):
        text, expected = utterance
        action = total(name, text, FinishReason.STOP, 8)
        assert [(c.name, c.arguments) for c in action.calls] == expected
        assert not action.errors

    check()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("pythonic", "gpt_oss")])
def test_case_14_what_is_cut_by_length_is_no_fault_of_the_policys(name):
    text = WRITERS[name]([("search", {"query": "x y z"})])
    for at in range(1, len(text)):
        action = total(name, text[:at], FinishReason.LENGTH)
        assert not [e for e in action.errors if e.kind == "structure"]


JSON_FORMATS = {
    "hermes": "<tool_call>{}</tool_call>",
    "mistral": "[TOOL_CALLS][{}]",
    "llama3": "<|python_tag|>{}",
}


BROKEN = (
    '{"name": "f", "arguments": {"q": "a" b"}}',
    '{"name": "f", "arguments": {"q": ',
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f", "arguments": {"q": NaN}}',
    '{"name": "f", "arguments": {"q": "\\ud800"}}',
    '{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    "nonsense",
)
WRONG = (
    "5", "null", '"{\\"q\\": 1}"', "true", "[]", '{"name": "f"}', '{"name": "f", "arguments": 5}', '{"name": "f", "arguments": []}',
    '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}', '{"arguments": {}}',
)  # fmt: skip


@pytest.mark.parametrize("name", JSON_FORMATS)
class TestFaults:
    def read(self, name, body):
        return total(name, JSON_FORMATS[name].format(body), FinishReason.STOP)

    @pytest.mark.parametrize("body", BROKEN)
    def test_case_14_broken_json(self, name, body):
        action = self.read(name, body)
        assert not action.calls
        assert [e.kind for e in action.errors] == ["content"]

    @pytest.mark.parametrize("body", WRONG)
    def test_case_15_json_of_the_wrong_type(self, name, body):
        action = self.read(name, body)
        assert not action.calls
        assert [e.kind for e in action.errors] == ["content"]

    def test_raw_newlines_in_strings_are_accepted(self, name):
        assert self.read(name, '{"name": "f", "arguments": {"q": "a\nb"}}').calls[0].arguments == {"q": "a\nb"}

    def test_arguments_written_as_a_string(self, name):
        assert self.read(name, '{"name": "f", "arguments": "{\\"q\\": 1}"}').calls[0].arguments == {"q": 1}


@pytest.mark.parametrize("name", NAMES)
class TestSurplus:
    """Case 16."""

    def test_surplus_calls_are_errors_and_the_text_is_whole(self, name):
        calls = [("search", {"query": string.ascii_lowercase[i]}) for i in range(5)]
        text = WRITERS[name](calls)
        action = FORMATS[name].parse(text, FinishReason.STOP, 2)
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
