"""Splicing gives what rendering gives: every family, any content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_models import BY_NAME, MODELS, renderer

from agentrl.render.chat_template import ChatTemplate
from agentrl.render.delta_proof import HISTORY_KINDS
from agentrl.render.template_trace import Slot, SymbolicText, Trace

NAMES = [m.name for m in MODELS]
content = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        (
            "",
            " ",
            "\n a \n",
            "<tool_response>x</tool_response>",
            "x/nothink",
            "</think>",
            '"quoted"\\',
            "[INST]",
            "a<|im_end|>b",
        )
    ),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_filled_pattern_is_the_rendering(name):
    ours = renderer(name)

    @settings(max_examples=60)
    @given(st.lists(content, min_size=1, max_size=3), st.booleans(), st.sampled_from(HISTORY_KINDS))
    def check(contents, tools, kind):
        role = {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0"} if tools else {"role": "user"}
        messages = ours._family.adapt(
            [{**role, "content": c.replace("\ud800", "")} for c in contents][: 3 if tools else 1]
        )
        proof, delta_template, texts = ours._prove(messages, (kind,), (False,))
        assert proof.reason is None
        assert delta_template is not None
        if proof.pattern.holds(texts):
            assert proof.pattern.fill(texts) == ours._prover.render_tail(messages, kind, proof)
            if not any(ours.tokenizer.pattern.search(t) for t in texts):
                spliced = [i for _, ids in delta_template.pieces(texts) for i in ids]
                assert spliced == [i for _, ids in ours._render_delta(messages, kind, proof) for i in ids]

    check()


def trace(source, content="Content"):
    t = Trace()
    hole = SymbolicText.of(content, [Slot(0)], t)
    pattern = ChatTemplate(source, {}).trace([{"role": "user", "content": hole}], t, tools=None, generate=True)
    return None if pattern is None or pattern.leaks([content]) else pattern


def rendered(source, content):
    return ChatTemplate(source, {}).render([{"role": "user", "content": content}], tools=None, generate=True)


@pytest.mark.parametrize("source", [
    "{{ C ~ '!' }}", "{{ '%s!' | format(C) }}", "{% for c in C %}{{ c }}.{% endfor %}", "{{ [C] | join }}", "{{ messages | tojson }}",
    "{{ {C: 1} }}", "{{ C | upper | wordcount }}", "{{ C | replace('C', 'K') }}", "{{ 'abc'.replace('b', C) }}", "{{ 'a{}b'.format(C) }}",
    "{{ C in 'some Content' }}", "{{ C | title }}", "{{ C is lower }}", "{{ 'x'.join([C]) }}", "{{ C | truncate(3) }}",
])  # fmt: skip
def test_what_cannot_be_followed_is_not_spliced(source):
    source = source.replace("C", "messages[0].content", 1) if "C" in source else source
    pattern = trace(source)
    if pattern is not None:  # some can, after all: then it must be right
        for content in ("other", "two words", "", "Content", "abc", "some"):
            if pattern.holds([content]):
                assert pattern.fill([content]) == rendered(source, content)


@pytest.mark.parametrize("source", [
    "[{{ C | trim }}]", "{{ C.split('x')[-1] }}", "{% if C.startswith('a') %}a{% else %}b{% endif %}", "{{ C | tojson }}", "{{ C[:3] + '…' }}",
    "{% if C %}full{% else %}empty{% endif %}", "{% if C | length > 3 %}long{{ C }}{% endif %}", "{{ C.replace('a', 'b') }}",
    "{% if 'x' in C %}x{% endif %}{{ C }}", "{% if C == 'abc' %}same{% endif %}", "{% macro m(t) %}<{{ t }}>{% endmacro %}{{ m(C) }}",
    "{% set x %}{{ C }}{% endset %}{{ x }}.", "{% generation %}{{ C }}{% endgeneration %}", "{{ C.lstrip('\\n').rstrip() }}", "{{ C | upper }}",
])  # fmt: skip
@pytest.mark.parametrize("content", ["Content", "other", "", "x", " Cx x ", "Con\n", '"q"', "abc"])
def test_what_can_be_followed_is_exact(source, content):
    source = source.replace("C", "messages[0].content")
    pattern = trace(source)
    assert pattern is not None
    if pattern.holds([content]):
        assert pattern.fill([content]) == rendered(source, content)
    assert pattern.holds(["Content"])


def test_conditions_tell_another_path():
    pattern = trace("{% if messages[0].content.startswith('C') %}a{% else %}b{% endif %}")
    assert pattern.holds(["Cx"])
    assert not pattern.holds(["x"])


def test_families_are_told_by_their_templates():
    for model in MODELS:
        assert renderer(model.name).family == (model.family or model.name), BY_NAME[model.name]
