"""History policies and context management: valid segments, every sampled token trained once."""

import inspect
import random

import pytest
from conversations import NOW, conversation
from template_models import BY_NAME, MODELS, renderer

from agentrl.engine.base import Generation
from agentrl.errors import ContractError
from agentrl.render.context_policy import ContextView, DropOldTurns, Summarise, TruncateOldResults, check_rewrite
from agentrl.rollout.recorder import Recorder
from agentrl.train.sample import to_samples
from agentrl.types import FinishReason, Provenance, StopReason, Task, Trajectory

NAMES = [m.name for m in MODELS]


async def managed(policy, view):
    """The new conversation, or None if it stays as it is."""
    result = policy(view)
    return check_rewrite(await result if inspect.isawaitable(result) else result, view)


async def play(name, seed, policy=None, limit=10_000, **options):
    """What the runner does; returns the trajectory and what was sampled."""
    talk = conversation(BY_NAME[name], seed, middle=False)
    ours = renderer(name, now=NOW, **options, **talk.options)
    recorder, messages, sampled = Recorder(), [dict(m) for m in talk.first], []
    first = len(messages)
    recorder.open(ours.prompt(messages))
    for number, turn in enumerate(talk.turns):
        ids = (*ours.tokenizer.encode(turn.text), ours.tokenizer.added[turn.end])
        sampled += ids
        action = ours.parse(ids, FinishReason.STOP, 8, context=recorder.context())
        recorder.sampled(Generation(ids, (-0.5,) * len(ids), FinishReason.STOP), turn=number, temperature=1.0)
        delta = ours.delta(turn.observation, ids, history=messages, tools=())
        messages = [*messages, ours.message(action), *turn.observation]
        if delta.new_segment is None:
            recorder.extend(delta.pieces, turn=number)
        else:
            recorder.open(ours.prompt(messages), turn=number)
        if policy is not None:
            changed = await managed(
                policy, ContextView(messages=tuple(messages), first=first, tokens=recorder.length(), limit=limit)
            )
            if changed is not None:
                messages = changed
                recorder.open(ours.prompt(messages), turn=number)
    ids = (5, 6, ours.end_id)
    sampled += ids
    recorder.sampled(Generation(ids, (-0.5,) * 3, FinishReason.STOP), turn=len(talk.turns), temperature=1.0)
    task = Task("t", tuple(talk.first))
    return Trajectory("0-0", 0, 0, 0, task, "env", recorder.segments(), (), StopReason.TERMINATED), sampled


def trained(trajectory):
    """The tokens with mask 1, over all rows."""
    found = []
    for sample in to_samples(trajectory):
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        found += [t for t, m in zip(response, sample.loss_mask, strict=True) if m]
    return found


@pytest.mark.parametrize("policy", ["append", "rerender"])
@pytest.mark.parametrize("name", NAMES)
async def test_both_history_policies_train_each_sampled_token_once(name, policy):
    for seed in range(6):
        trajectory, sampled = await play(name, seed, history=policy)
        assert trained(trajectory) == sampled
        if policy == "append":
            assert len(trajectory.segments) == 1


@pytest.mark.parametrize("make", [
    lambda: DropOldTurns(keep=1, above=0.0), lambda: TruncateOldResults(keep=1, characters=5, above=0.0),
    lambda: Summarise(lambda old: f"{len(old)} messages before", keep=1, above=0.0),
])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
async def test_context_policies_train_each_sampled_token_once(name, make):
    opened = 0
    for seed in range(4):
        trajectory, sampled = await play(name, seed, make())
        assert trained(trajectory) == sampled
        opened += len(trajectory.segments) - 1
        for segment in trajectory.segments:
            assert segment.spans[0].provenance is Provenance.PROMPT
    assert opened > 0


def view(turns=4, share=0.9):
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
    rest = [
        m
        for i in range(turns)
        for m in ({"role": "assistant", "content": f"a{i}"}, {"role": "tool", "content": f"r{i}" * 50})
    ]
    return ContextView(messages=(*first, *rest), first=2, tokens=int(1000 * share), limit=1000)


async def test_drop_old_turns():
    kept = await managed(DropOldTurns(keep=2), view())
    assert [m["content"][:4] for m in kept] == ["s", "task", "a2", "r2r2", "a3", "r3r3"]
    assert await managed(DropOldTurns(keep=2), view(share=0.5)) is None
    assert await managed(DropOldTurns(keep=9), view()) is None


async def test_truncate_old_results():
    kept = await managed(TruncateOldResults(keep=1, characters=4), view())
    assert [m["content"] for m in kept if m["role"] == "tool"] == ["r0r0 …", "r1r1 …", "r2r2 …", "r3" * 50]


async def test_summarise_with_a_coroutine():
    async def write(old):
        return f"so far: {', '.join(m['content'] for m in old if m['role'] == 'assistant')}"

    kept = await managed(Summarise(write, keep=1), view())
    assert [m["content"][:30] for m in kept] == ["s", "task\n\nso far: a0, a1, a2", "a3", "r3" * 15]


@pytest.mark.parametrize(
    "result", [[], [{"content": "x"}], ["x"], [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]]
)
async def test_a_context_policy_that_breaks_its_contract(result):
    with pytest.raises(ContractError):
        await managed(lambda _: result, view())


@pytest.mark.parametrize("surplus", ["error", "ignore", "refuse"])
def test_surplus_policies(surplus):
    """Case 16."""
    ours = renderer("chatml", surplus=surplus)
    call = BY_NAME["chatml"].call
    action = ours.parse(ours.tokenizer.encode("\n".join(call("search", q) for q in "abc")), FinishReason.STOP, 2)
    assert len(action.calls) == (0 if surplus == "refuse" else 2)
    assert bool(action.errors) == (surplus != "ignore")


def test_a_shape_that_cannot_be_proven_is_counted():
    ours = renderer("mistral", raw_content=False, now=NOW.replace(year=2025))
    rng = random.Random(0)
    for _ in range(3):
        delta = ours.delta(
            [{"role": "user", "content": str(rng.random())}], (5, ours.end_id), tools=[{"type": "function"}]
        )
        assert delta.new_segment == "the template moves its list of tools"
    assert ours.new_segments == {"the template moves its list of tools": 3}
