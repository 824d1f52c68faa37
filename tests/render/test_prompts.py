"""First contexts are kept for the members of a group: rendered once, never another conversation's, never many."""

import pytest
from template_models import renderer

from agentrl.render.accelerators.memo import Memo

TOOL = {"type": "function", "function": {"name": "search", "description": "Look.", "parameters": {"type": "object"}}}


@pytest.fixture
def ours(monkeypatch):
    """A renderer, and the conversations that it really rendered."""
    made = renderer("chatml")
    monkeypatch.setattr(made, "_prompts", Memo(256))
    rendered = []
    render = made._render_prompt
    monkeypatch.setattr(
        made, "_render_prompt", lambda messages, tools: rendered.append(list(messages)) or render(messages, tools)
    )
    return made, rendered


def ask(text):
    return [{"role": "user", "content": text}]


def test_the_members_of_a_group_share_one_rendering(ours):
    made, rendered = ours
    assert [made.prompt(ask("Who?"), [TOOL]) for _ in range(8)] == [made.prompt(ask("Who?"), [TOOL])] * 8
    assert len(rendered) == 1
    assert made.prompt(ask("Who?"), [TOOL]) == made._render_prompt(ask("Who?"), [TOOL])


def test_what_differs_is_rendered_again(ours):
    made, rendered = ours
    other = {**TOOL, "function": {**TOOL["function"], "name": "find"}}
    asked = [
        (ask("Who?"), [TOOL]),
        (ask("Who ?"), [TOOL]),
        (ask("Who?"), []),
        (ask("Who?"), [other]),
        (ask("Who?") * 2, []),
    ]
    found = [made.prompt(*a) for a in asked]
    assert len(rendered) == len(set(found)) == 5
    assert [made.prompt(*a) for a in asked] == found


def test_a_message_that_was_changed_is_not_what_it_was(ours):
    made, _ = ours
    messages = ask("Who?")
    before = made.prompt(messages)
    messages[0]["content"] = "Why?"
    assert made.prompt(messages) == made.prompt(ask("Why?")) != before


def test_no_more_than_some_are_kept(ours, monkeypatch):
    made, rendered = ours
    monkeypatch.setattr(made, "_prompts", Memo(3))
    for n in (0, 1, 2, 3, 4, 4, 3, 2, 0):
        made.prompt(ask(str(n)))
        assert made._prompts.size <= 3
    assert [m[0]["content"] for m in rendered] == ["0", "1", "2", "3", "4", "0"]


def test_what_is_no_json_is_rendered_each_time(ours):
    made, rendered = ours
    strange = [{"role": "user", "content": "Who?", "seen": {1, 2}}]
    assert made.prompt(strange) == made.prompt(strange) == made.prompt(ask("Who?"))
    assert len(rendered) == 3
