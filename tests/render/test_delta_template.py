"""Scaffolds remember contents, up to a bound, and give the same ids with and without."""

import random

from template_models import tokenizer

from agentrl.render import delta_template as module
from agentrl.render.families import make_renderer


def test_remembered_contents_give_the_same_ids(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_CHARACTERS", 40)
    draw = random.Random(0)
    texts = ["yes", "no", "a\nb", " leading", "trailing ", "", "ünï <tool_call>", "x" * 60]
    renderer, fresh = (make_renderer(tokenizer("chatml"), "hermes") for _ in range(2))
    sampled = [5, renderer.end_id]
    for text in [*draw.choices(texts, k=200), "yes"]:
        messages = [{"role": "tool", "name": "look", "tool_call_id": "call_0", "content": text}]
        expected = fresh.delta(messages, sampled)
        for _, scaffold in fresh._proofs.values():
            scaffold._kept.clear()
        assert renderer.delta(messages, sampled) == expected
    for _, scaffold in renderer._proofs.values():
        assert sum(len(t) + 1 for key in scaffold._kept for t in key) <= 40
        assert scaffold._kept
