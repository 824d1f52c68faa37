"""Models that cannot be rendered are refused before the first episode, by name."""

import dataclasses
import re

import pytest
import tokenizers
from template_models import MODELS, PATTERN, tokenizer, vocabulary
from tokenizers import AddedToken, Regex, pre_tokenizers

from agentrl.errors import TemplateError, UnknownNameError
from agentrl.render import Tokenizer, make_renderer

CHATML = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('who is ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model(template, special=("<|im_start|>", "<|im_end|>")):
    backend = tokenizers.Tokenizer(vocabulary(6000).model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = vocabulary(6000).decoder
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return Tokenizer(backend, chat_template=template)


@pytest.mark.parametrize(("template", "message"), [
    (None, "has no chat template; add one"),
    ("", "has no chat template; add one"),
    ("{% if %}", "does not compile"),
    ("{{ raise_exception('no') }}", "refuses a conversation of roles .user, assistant.*: no"),
    ("{{ messages[0].content.nothing.nothing }}", "refuses a conversation"),
    ("{{ 1 / 0 }}", "refuses a conversation"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "leaves the assistant's text out"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "does not end an assistant turn with a special token"),
])  # fmt: skip
def test_templates(template, message):
    with pytest.raises(TemplateError, match=message):
        make_renderer(model(template), where="models/tiny")


@pytest.mark.parametrize("there", ["<|im_start|>", "<|im_end|>"])
def test_a_tokenizer_without_the_templates_tokens(there):
    (missing,) = {"<|im_start|>", "<|im_end|>"} - {there}
    with pytest.raises(TemplateError, match=re.escape(f"writes {missing}, which its tokenizer does not know")):
        make_renderer(model(CHATML, special=(there,)))


def test_markers_that_are_text_are_the_business_of_a_template_of_no_known_family():
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert make_renderer(model(template, special=("</s>",))).end_id


def test_a_role_that_the_template_does_not_know():
    renderer = make_renderer(model(CHATML))
    with pytest.raises(TemplateError, match=r"role 'tool' cannot follow.*who is tool"):
        renderer.check()
    renderer.check(("user", "assistant"))
    with pytest.raises(TemplateError, match="who is system"):
        renderer.check(("system",))
    delta = renderer.delta([{"role": "tool", "content": "x"}], (5, renderer.end_id))
    assert "who is tool" in delta.new_segment
    assert renderer.new_segments == {delta.new_segment: 1}


def test_every_family_takes_tools():
    for name in ("chatml", "gemma3", "mistral", "gpt_oss", "deepseek"):
        make_renderer(tokenizer(name)).check()


def test_families_whose_template_shows_no_tools():
    """The others' schemas are in the prompt."""
    left_out = {m.name for m in MODELS if not make_renderer(tokenizer(m.name)).shows_tools}
    assert left_out == {"gemma3", "deepseek", "deepseek_v31"}


def test_an_unknown_format():
    with pytest.raises(UnknownNameError, match="hermes"):
        make_renderer(model(CHATML), "herms")


def test_a_generic_template_is_proven_all_the_same():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    renderer = make_renderer(model(template, special=("[/end]", "[user]", "[assistant]", "[tool]")))
    assert renderer.family == "generic"
    delta = renderer.delta([{"role": "tool", "content": "x [/end]"}], (5, renderer.end_id))
    assert renderer.tokenizer.decode([i for _, ids in delta.pieces for i in ids]) == "[tool]x [/end][/end][assistant]"


def test_a_template_whose_text_between_turns_depends_on_the_history_is_not_proven():
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ loop.index }}\n")
    renderer = make_renderer(model(template))
    delta = renderer.delta([{"role": "user", "content": "x"}], (5, renderer.end_id))
    assert delta == dataclasses.replace(
        delta, pieces=(), new_segment="the template's text between turns depends on the history"
    )
