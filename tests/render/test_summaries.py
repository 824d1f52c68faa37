"""Summaries by the policy with every family's template: each context is rendered, sampled and trained once."""

import pytest
from conversations import NOW
from doubles import FakeGenerator, play
from template_models import BY_NAME, MODELS, renderer

from agentrl import ToolEnv, tool
from agentrl.render import SummariseByPolicy
from agentrl.store import exactness_violations
from agentrl.train.sample import to_samples
from agentrl.types import Provenance, StopReason

ASK = "SUM UP"


class Search(ToolEnv):
    """Searches with long results, then an answer."""

    context_policy = SummariseByPolicy(keep=1, above=0.0, max_tokens=40, instruction=ASK)
    shows_tools = True

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"{query}: the capital of France is Paris."


@pytest.mark.parametrize("name", [m.name for m in MODELS])
async def test_summaries_with_the_template_of_each_family(name):
    family, ours = BY_NAME[name], renderer(name, now=NOW)
    texts = []

    def answer(request):
        texts.append(ours.tokenizer.decode(list(request.ids)))
        if ASK in texts[-1]:
            return family.say(f"Note {request.turn}.")
        return family.call("search", f"q{request.turn}") if request.turn < 5 else family.say("Paris")

    t = await play(Search, FakeGenerator(ours, answer), ours, context_length=8192, max_turns=10)
    wrote = [u for u in t.turns if u.summary is not None]
    assert t.stop_reason is StopReason.TERMINATED, (t.stop_reason, t.detail)
    assert len(wrote) >= 2
    assert exactness_violations([t]) == 0
    for u in wrote:
        assert texts[u.index].count(ASK) == 1
        assert texts[u.index + 1].count(f"Note {u.index}.") == 1
        assert texts[u.index + 1].count("Note ") == 1
        assert ASK not in texts[u.index + 1]
    sampled = [i for s in t.segments for p in s.spans if p.provenance is Provenance.SAMPLED for i in p.ids]
    assert sum(s.trained_tokens for s in to_samples(t)) == len(sampled)
