"""Live equality with each family's own template over generated conversations, golden ids, and ids that are no tokenisation."""

import json
import random
from collections import Counter

import jinja2
import pytest
from conversations import NOW, conversation, hugging_face, play
from golden import FOLDER, golden_of
from template_models import BY_NAME, MODELS, renderer

from agentrl.engine.base import Generation
from agentrl.rollout.recorder import Recorder
from agentrl.types import FinishReason, Provenance

NAMES = [m.name for m in MODELS]
FAST, FULL = 100, 2000
WHOLE = ("chatml", "qwen3_coder", "kimi_k2", "mistral", "gemma3")
"""families whose template never rewrites what was said: the whole stream equals the template's rendering"""


QWEN = ("chatml", "qwen3")
"""families whose vocabulary is here in whole"""
LEFT_OUT = "the template leaves content out"
IN_THE_MIDDLE = {
    "deepseek": LEFT_OUT, "deepseek_v31": LEFT_OUT, "gpt_oss": LEFT_OUT, "glm4": LEFT_OUT, "qwen3_5": "must be at the beginning",
    "mistral": "must come first",
}  # fmt: skip
"""why a system message in the middle opens a segment, where it does (for GLM, which has no end token, where it comes first)"""


def why(name, turn, tools):
    """Why a new segment must open after this turn; None: it need not."""
    roles = [m["role"] for m in turn.observation]
    if name in IN_THE_MIDDLE and "system" in (roles[:1] if name == "glm4" else roles):
        return IN_THE_MIDDLE[name]
    return "moves its list of tools" if name == "mistral" and tools and not turn.calls else None


def agrees(name: str, seed: int, size: int | None = 6000) -> None:
    """The first prompt, every delta and every new segment are what the family's template renders of the same conversation."""
    model = BY_NAME[name]
    talk = conversation(model, seed)
    ours = renderer(name, size, now=NOW, **talk.options)
    counted = ours.new_segments.copy()

    def theirs(messages):
        return hugging_face(model, ours, messages, generate=True, tools=talk.tools)

    def ids_of(text):
        return ours.tokenizer.backend.encode(text, add_special_tokens=False).ids

    played = play(ours, talk)
    assert played.pieces[0] == (Provenance.PROMPT, tuple(ids_of(theirs(talk.first)))), (name, seed)
    rerendered = (ids for kind, ids in played.pieces[1:] if kind is Provenance.PROMPT)
    for i, (turn, (ids, reason), before) in enumerate(zip(talk.turns, played.deltas, played.messages, strict=False)):
        expected, last = why(name, turn, talk.tools), i == len(played.deltas) - 1
        where = (name, seed, i, talk.options, reason)
        assert expected in reason if expected else reason is None, where
        if expected is None:
            check_delta(ours, theirs, turn, before, ids, ids_of, where)
        elif played.refused and last:
            with pytest.raises(jinja2.TemplateError):
                theirs([*before, *turn.observation])
        else:
            assert next(rerendered) == tuple(ids_of(theirs([*before, *turn.observation]))), where
    assert played.refused or len(played.deltas) == len(talk.turns)
    assert ours.new_segments - counted == Counter(reason for _, reason in played.deltas if reason is not None)
    if name in WHOLE and not played.refused:
        n = len(played.deltas)
        assert played.segment == ids_of(theirs([*played.messages[-1], *talk.turns[n - 1].observation])), (name, seed)


def check_delta(ours, theirs, turn, before, ids, ids_of, where):
    """What follows the end of the policy's turn. A turn that only thought gets a word to be found by; without it the end is the same."""
    *history, said = before
    whole = theirs([*before, *turn.observation])
    mark, shown = turn.mark or "Here5c1d", whole
    if not turn.mark:
        shown = theirs([*history, {**said, "content": said["content"] + mark}, *turn.observation])
    assert mark in shown, where
    after = shown.rpartition(mark)[2]
    at, end = min((after.find(e), e) for e in ours.ends if e in after)
    assert list(ids) == ids_of(after[at + len(end) :]), (where, ours.tokenizer.decode(ids), after)
    assert whole.endswith(after[at:]), where


@pytest.mark.parametrize("name", NAMES)
def test_the_template_says_the_same(name):
    for seed in range(FAST):
        agrees(name, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_template_says_the_same_in_full(name):
    for seed in range(FAST, FULL):
        agrees(name, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", QWEN)
def test_the_template_says_the_same_with_the_real_vocabulary(name):
    assert renderer(name, None).tokenizer.is_fast
    for seed in range(FULL):
        agrees(name, seed, None)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    """`python tests/render/golden.py` writes them again."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert golden_of(name) == kept, (
        "python tests/render/golden.py writes the golden files again; look at the difference first"
    )


def survive(name: str, seed: int) -> None:
    """Case 5: twenty turns of ids that are not the tokenisation of their text, tools' results and users' messages between them."""
    ours, rng = renderer(name), random.Random(f"{name}-{seed}")
    model, added = BY_NAME[name], ours.tokenizer.added
    words = [i for i in range(1000) if i not in added.values()]
    recorder = Recorder()
    messages = [{"role": "user", "content": "go"}]
    recorder.open(ours.prompt(messages))
    said = []
    for turn in range(20):
        body = [rng.choice(words) for _ in range(rng.randint(2, 30))]
        while ours.tokenizer.encode(ours.tokenizer.decode(body)) == body:
            body.append(rng.choice(words))
        result = rng.random() < 0.5
        ids = (*body, added[(result and model.call_end) or model.end])
        before = recorder.context()
        recorder.sampled(Generation(ids, (-1.0,) * len(ids), FinishReason.STOP), turn=turn, temperature=1.0)
        said.append(ids)
        call = {"name": "search", "tool_call_id": "abcdefgh0"} if result else {}
        observation = {"role": "tool" if result else "user", "content": f"go on {turn}", **call}
        delta = ours.delta([observation], ids, history=messages, tools=())
        assert delta.new_segment is None, (name, seed, turn)
        recorder.extend(delta.pieces, turn=turn)
        assert recorder.context()[: len(before) + len(ids)] == [*before, *ids]
        messages += [{"role": "assistant", "content": ours.tokenizer.decode(body)}, observation]
    (segment,) = recorder.segments()
    assert [s.ids for s in segment.spans if s.provenance is Provenance.SAMPLED] == said


@pytest.mark.parametrize("name", NAMES)
def test_ids_that_are_no_tokenisation_survive_twenty_turns(name):
    for seed in range(3):
        survive(name, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_ids_that_are_no_tokenisation_survive_in_full(name):
    for seed in range(3, 20):
        survive(name, seed)


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
