"""Live equality with each family's own template over generated conversations, golden ids, and ids that are no tokenisation."""

import json
import random

import pytest
from conversations import NOW, conversation, hugging_face, play
from golden import FOLDER, golden_of
from template_models import BY_NAME, MODELS, renderer

from agentrl.engine.base import Generation
from agentrl.recorder import Recorder
from agentrl.types import FinishReason, Provenance

NAMES = [m.name for m in MODELS]
FAST, FULL = 100, 2000
WHOLE = ("chatml", "qwen3_coder", "kimi_k2", "mistral", "gemma3")
"""families whose template never rewrites what was said: the whole stream equals the template's rendering"""


def agrees(name: str, seed: int) -> None:
    model = BY_NAME[name]
    ours = renderer(name, now=NOW)
    talk = conversation(model, seed)
    played = play(ours, talk)
    for i, (turn, (ids, reason), before) in enumerate(zip(talk.turns, played.deltas, played.messages, strict=True)):
        assert reason is None, (name, seed, i, reason)
        whole = hugging_face(model, ours, [*before, *turn.observation], generate=True)
        mark = f"mark{seed}x{i}"
        assert mark in whole
        after = whole.rpartition(mark)[2]
        at, end = min((after.find(e), e) for e in ours.ends if e in after)
        theirs = ours.tokenizer.backend.encode(after[at + len(end) :], add_special_tokens=False).ids
        assert list(ids) == theirs, (name, seed, i, ours.tokenizer.decode(ids), after)
    if name in WHOLE:
        conversation_text = hugging_face(
            model, ours, [*played.messages[-1], *talk.turns[-1].observation], generate=True
        )
        assert played.ids == ours.tokenizer.backend.encode(conversation_text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
def test_the_delta_is_the_templates_own(name):
    for seed in range(FAST):
        agrees(name, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_delta_is_the_templates_own_in_full(name):
    for seed in range(FAST, FULL):
        agrees(name, seed)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_prompt_is_the_templates_own(name):
    model, ours = BY_NAME[name], renderer(name, now=NOW)
    for seed in range(FAST):
        first = conversation(model, seed).first
        ((kind, ids),) = ours.prompt(first)
        assert kind is Provenance.PROMPT
        theirs = ours.tokenizer.backend.encode(
            hugging_face(model, ours, first, generate=True), add_special_tokens=False
        ).ids
        assert list(ids) == theirs


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    """`python tests/render/golden.py` writes them anew."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert golden_of(name) == kept, (
        "python tests/render/golden.py writes the golden files anew; look at the difference first"
    )


@pytest.mark.parametrize("name", NAMES)
def test_ids_that_are_no_tokenisation_survive_twenty_turns(name):
    """Case 5."""
    ours = renderer(name)
    rng = random.Random(name)
    words = [i for i in range(1000) if i not in ours.tokenizer.added.values()]
    recorder = Recorder()
    messages = [{"role": "user", "content": "go"}]
    recorder.open(ours.prompt(messages))
    said, end = [], ours.end_id
    for turn in range(20):
        ids = (*(rng.choice(words) for _ in range(rng.randint(1, 30))), end)
        before = recorder.context()
        recorder.sampled(Generation(ids, (-1.0,) * len(ids), FinishReason.STOP), turn=turn, temperature=1.0)
        said.append(ids)
        delta = ours.delta([{"role": "user", "content": f"go on {turn}"}], ids, history=messages, tools=())
        assert delta.new_segment is None
        recorder.extend(delta.pieces, turn=turn)
        assert recorder.context()[: len(before) + len(ids)] == [*before, *ids]
        messages += [
            {"role": "assistant", "content": ours.tokenizer.decode(ids[:-1])},
            {"role": "user", "content": "go on"},
        ]
    (segment,) = recorder.segments()
    assert [s.ids for s in segment.spans if s.provenance is Provenance.SAMPLED] == said


@pytest.mark.parametrize("name", NAMES)
def test_where_content_is(name):
    """Content tokens say the content and nothing else; all others are the template's."""
    ours = renderer(name)
    message = {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0", "content": "Bordeaux lies on the Garonne"}
    history = [{"role": "user", "content": "q"}]
    end = ours.tokenizer.added[BY_NAME[name].call_end or BY_NAME[name].end]
    delta = ours.delta([message], (5, end), history=history)
    content = [ours.tokenizer.decode(ids) for kind, ids in delta.pieces if kind is Provenance.OBSERVATION]
    assert message["content"] in "".join(content)
    assert len("".join(content)) <= len(message["content"]) + 45  # names and ids of calls, quotes around JSON
    assert {kind for kind, _ in delta.pieces} <= {Provenance.OBSERVATION, Provenance.TEMPLATE, Provenance.FORCED}
