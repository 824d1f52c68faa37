"""Delta templates keep the ids of contents, up to a bound, and give the same ids with and without the memo."""

import random

import pytest
from template_models import tokenizer

from agentrl.render import delta_template
from agentrl.render.accelerators.memo import Memo
from agentrl.render.families import make_renderer


def test_kept_contents_give_the_same_ids(monkeypatch):
    monkeypatch.setattr(delta_template, "MEMO_CHARACTERS", 40)
    draw = random.Random(0)
    texts = ["yes", "no", "a\nb", " leading", "trailing ", "", "ünï <tool_call>", "x" * 60]
    renderer, fresh = (make_renderer(tokenizer("chatml"), "hermes") for _ in range(2))
    monkeypatch.setattr(delta_template.DeltaTemplate, "pieces", recomputing(fresh, delta_template.DeltaTemplate.pieces))
    sampled = [5, renderer.end_id]
    for text in [*draw.choices(texts, k=200), "yes"]:
        messages = [{"role": "tool", "name": "look", "tool_call_id": "call_0", "content": text}]
        assert renderer.delta(messages, sampled) == fresh.delta(messages, sampled)
    ((_, template),) = renderer._proofs.values()
    assert 0 < template.memo.size <= 40
    ((_, unused),) = fresh._proofs.values()
    assert unused.memo.size == 0


def recomputing(fresh, pieces):
    """`pieces` that computes everything again for one renderer."""

    def patched(self, contents):
        return self.encode(contents) if any(self is t for _, t in fresh._proofs.values()) else pieces(self, contents)

    return patched


@pytest.mark.parametrize("limit", [0, 1, 3, 10])
def test_a_memo_forgets_the_oldest_entries_first(limit):
    memo: Memo[int, str] = Memo(limit)
    for key in range(6):
        memo.put(key, str(key))
        assert memo.size <= limit
    kept = [key for key in range(6) if memo.get(key) is not None]
    assert kept == list(range(6))[max(0, 6 - limit) :]
    memo.put(9, "too large", limit + 1)
    assert memo.get(9) is None
