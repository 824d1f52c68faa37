"""Random conversations are trained as transformers' rendering of the model's template writes them, in every family and thinking mode."""

import pytest
from conversations import NOW
from template_models import MODELS, data_file, renderer, template_source
from template_turns import Subject, compare, modes
from test_all_templates import REFUSED, tokenizer_of

from agentrl.render import make_renderer

QUICK, QUICK_TRL, FULL = 24, 6, 2000
FAMILIES = [(m.name, options) for m in MODELS for options in modes(template_source(m))]
TRL = [
    (path, options)
    for path in sorted(data_file("trl", "chat_templates", "").glob("*.jinja"))
    if not path.stem.endswith("_training") and path.stem not in REFUSED
    for options in modes(path.read_text(encoding="utf-8"))
]
NOT_WRITTEN = {"diffusion_gemma"}
"""templates that write many turns of their own without the header"""


def holds(subject, seeds):
    outcome = compare(subject, seeds)
    assert outcome.different == []
    assert outcome.refused_wrongly == []
    if subject.name not in NOT_WRITTEN:
        assert sum(outcome.refused.values()) <= 0.05 * len(seeds), outcome.refused


def family(name, options):
    return Subject(name, renderer(name, now=NOW, **options), options)


def of_trl(path, options):
    source = path.read_text(encoding="utf-8")
    return Subject(path.stem, make_renderer(tokenizer_of(source), where=path.stem, now=NOW, **options), options)


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
def test_trained_turns_are_the_templates(name, options):
    holds(family(name, options), range(QUICK))


@pytest.mark.parametrize(("path", "options"), TRL, ids=lambda value: getattr(value, "stem", str(value)))
def test_trained_turns_are_the_templates_of_trl(path, options):
    holds(of_trl(path, options), range(QUICK_TRL))


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
def test_trained_turns_are_the_templates_in_full(name, options):
    holds(family(name, options), range(QUICK, FULL))


def test_arguments_that_a_template_escapes_in_its_own_way_are_not_refused():
    """LFM2 writes Python literals; a quote and a tab in one text were taken for a text that is left out."""
    path = data_file("trl", "chat_templates", "lfm2_v2.jinja")
    ours = of_trl(path, {}).ours
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"x": "it's\ta\nline"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "it" in ours.tokenizer.decode(ours.encode_turn(turn))
