"""One episode through runner, renderer, environment and rewards: its tokens, lengths and seeds."""

import pytest
from doubles import PARIS, SAMPLED, FakeGenerator, log_prob, make_runner, play
from echo import Echo, Search, is_paris, text

from agentrl.engine.base import Generation
from agentrl.render import Tokenizer, make_renderer
from agentrl.store import exactness_violations
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, FinishReason, Provenance, Status, StopReason, Task


@pytest.fixture(autouse=True)
def _fresh():
    Echo.made = []


# -- the tokens ------------------------------------------------------------------------------------------------------


async def test_new_turns_are_appended_to_exactly_what_was_sampled(hermes):
    t = await play(Echo, ["one", "two"], hermes, env_args={"ends": 2})
    assert text(t, hermes.tokenizer) == [
        (
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
        )
    ]
    (sample,) = to_samples(t, decode=hermes.tokenizer.decode)
    trained = [tok for tok, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert hermes.tokenizer.decode(trained) == "one<|im_end|>two<|im_end|>"
    assert (t.stop_reason, t.status, t.score) == (StopReason.TERMINATED, Status.COMPLETED, 0.5)
    assert [turn.state_key for turn in t.turns] == ["1", "2"]


async def test_inline_observations_stay_in_the_same_turn(tags):
    t = await play(Search, ["<search>capital</search>", "<answer>Paris</answer>"], tags, rewards=[is_paris])
    assert text(t, tags.tokenizer)[0].partition("assistant\n")[2] == (
        "<search>capital</search>\n<information>about capital</information>\n<answer>Paris</answer>"
    )
    assert (t.answer, t.score, t.turns[0].matched_stop) == ("Paris", 1.0, None)


async def test_case_5_ids_that_are_not_canonical_survive_many_turns(hermes):
    letters = [i for c in "the capital" for i in hermes.tokenizer.encode(c)]
    assert letters != hermes.tokenizer.encode("the capital")
    engine = FakeGenerator(hermes, [[*letters, hermes.end_id]])
    t = await play(Echo, engine, hermes, env_args={"ends": 6})
    sampled = [s for s in t.segments[0].spans if s.provenance is SAMPLED]
    assert [s.ids for s in sampled] == [(*letters, hermes.end_id)] * 6
    assert [s.log_probs for s in sampled] == [tuple(log_prob(i, k) for k, i in enumerate(sampled[0].ids))] * 6
    for turn, request in zip(t.turns, engine.requests, strict=True):
        assert t.segments[turn.segment].ids[: turn.context_length] == list(request.ids)
    assert exactness_violations([t]) == 0
    assert len(t.segments) == 1


async def test_case_7_no_negative_delta_and_masks_as_long_as_the_response(hermes, tags):
    for renderer in (hermes, tags):
        for observation in ("", " ", "x", "x" * 500):
            t = await play(Echo, ["<search>a</search>"], renderer, env_args={"observation": observation}, max_turns=3)
            (sample,) = to_samples(t)
            assert len(sample.loss_mask) == sample.response_length
            assert sum(sample.loss_mask) == t.sampled_tokens
            assert sample.tokens[: len(sample.tokens) - sample.response_length] == list(t.segments[0].spans[0].ids)


async def test_case_10_an_end_token_that_was_not_sampled_is_never_trained(hermes):
    words = tuple(hermes.tokenizer.encode("one"))
    stopped = Generation(words, tuple(log_prob(t, i) for i, t in enumerate(words)), FinishReason.STOP, "one", 3)
    t = await play(Echo, [stopped, "two"], hermes, env_args={"ends": 2})
    forced = [s for s in t.segments[0].spans if s.provenance is Provenance.FORCED]
    assert [s.ids for s in forced] == [(hermes.end_id,)]
    (sample,) = to_samples(t)
    trained = [tok for tok, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert hermes.tokenizer.decode(trained) == "onetwo<|im_end|>"


async def test_case_12_end_tokens_inside_an_episode_stay_although_they_are_the_pad_token(hermes):
    t = await play(Echo, ["a"], hermes, env_args={"ends": 3})
    (sample,) = to_samples(t)
    ends = [
        m
        for tok, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if tok == hermes.end_id
    ]
    assert ends == [1, 0, 1, 0, 1]  # the policy's are trained, those of the observations are not


async def test_ids_sampled_past_the_stop_string_are_kept(tags):
    reply = [*tags.tokenizer.encode("<search>capital</search>"), *tags.tokenizer.encode(" is")]
    t = await play(Search, [reply, "<answer>Paris</answer>"], tags)
    assert t.segments[0].spans[1].ids == tuple(reply)
    assert t.turns[0].action.calls[0].arguments == {"query": "capital"}


async def test_a_template_that_cannot_be_proven_opens_a_segment(tokenizer):
    # what stands between turns depends on how many there were
    strange = tokenizer.chat_template.replace("{{ m['role'] }}", "{{ m['role'] }} {{ loop.index }}")
    renderer = make_renderer(Tokenizer(tokenizer.backend, chat_template=strange), "hermes")
    t = await play(Echo, ["one", "two"], renderer, env_args={"ends": 2})
    assert [g.agent_id for g in t.segments] == ["policy", "policy"]
    assert "new_segment" in t.turns[0].info
    assert [s.trained_tokens for s in to_samples(t)] == [len(g.spans[1].ids) for g in t.segments]
    assert sum(s.trained_tokens for s in to_samples(t)) == t.sampled_tokens
    assert exactness_violations([t]) == 0


async def test_a_new_segment_is_cut_to_fit_like_any_observation(tokenizer):
    strange = tokenizer.chat_template.replace("{{ m['role'] }}", "{{ m['role'] }} {{ loop.index }}")
    renderer = make_renderer(Tokenizer(tokenizer.backend, chat_template=strange), "hermes")
    for limits in ({"context_length": 200}, {"max_response_tokens": 150}):
        engine = FakeGenerator(renderer, ["one"])
        t = await play(Echo, engine, renderer, env_args={"observation": "word " * 500}, max_turns=2, **limits)
        assert (t.status, len(t.segments), len(t.turns)) == (Status.TRUNCATED, 2, 2)  # one token more has room
        assert t.turns[0].observation_cut_tokens > 0
        assert all(len(r.ids) + r.sampling.max_new_tokens <= limits.get("context_length", 999) for r in engine.requests)
        assert t.turns[0].observation.messages[0]["content"] in renderer.tokenizer.decode(t.segments[1].ids)
        assert exactness_violations([t]) == 0


async def test_temperature_and_versions_are_recorded(hermes):
    t = await play(Echo, ["one"], hermes, env_args={"ends": 1}, temperature=0.7)
    (sample,) = to_samples(t)
    assert (sample.temperature, sample.weight_versions) == (0.7, ["3"])


# -- lengths ---------------------------------------------------------------------------------------------------------


async def test_case_19_an_observation_that_does_not_fit_is_cut_and_no_request_is_over_the_limit(hermes):
    engine = FakeGenerator(hermes, ["one " * 20])
    first = await play(Echo, engine, hermes, env_args={"ends": 1})
    length = len(first.segments[0])
    for room in range(30):
        engine = FakeGenerator(hermes, ["one " * 20])
        t = await play(
            Echo,
            engine,
            hermes,
            env_args={"observation": "word " * 40},
            context_length=length + room,
            max_response_tokens=10_000,
        )
        for r in engine.requests:
            assert r.sampling.max_new_tokens >= 1
            assert len(r.ids) + r.sampling.max_new_tokens <= length + room
        assert len(t.segments[0]) <= length + room
        assert (t.stop_reason, t.status) == (StopReason.CONTEXT_FULL, Status.TRUNCATED)
        if len(t.turns) == 2:
            assert t.turns[0].observation_cut_tokens > 0
        assert to_samples(t)
    assert len(t.turns) == 2, "with 30 tokens of room the cut observation fits"


async def test_case_20_an_observation_larger_than_everything_is_cut_at_a_character(hermes):
    t = await play(Echo, ["one"], hermes, env_args={"observation": "🙂" * 3000}, context_length=300, max_turns=2)
    turn = t.turns[0]
    kept = turn.observation.messages[0]["content"]
    assert kept == "🙂" * len(kept)
    assert turn.observation_cut_tokens > 0
    assert len(t.segments[0]) <= 300
    assert exactness_violations([t]) == 0


async def test_case_21_a_prompt_longer_than_the_context_is_not_sent_to_the_engine(hermes):
    engine = FakeGenerator(hermes, ["never"])
    t = await play(Echo, engine, hermes, context_length=10)
    assert (t.stop_reason, engine.requests, t.turns) == (StopReason.CONTEXT_FULL, [], ())
    assert t.detail == f"the first prompt takes {len(t.segments[0])} tokens and leaves no room in a context of 10"
    assert to_samples(t) == []
    assert Echo.made[0].closed == 1


@pytest.mark.parametrize("first", [True, False])
async def test_case_21_an_empty_generation_is_an_invalid_action(hermes, first):
    empty = Generation((), (), FinishReason.STOP)
    t = await play(Echo, [empty, "one"] if first else ["one", empty, "two"], hermes, env_args={"ends": 3})
    assert t.stop_reason is StopReason.TERMINATED
    assert [turn.action.valid for turn in t.turns] == ([False, True, True] if first else [True, False, True])
    assert exactness_violations([t]) == 0
    assert sum(s.trained_tokens for s in to_samples(t)) == t.sampled_tokens


async def test_case_19_an_observation_is_cut_at_the_exact_token(hermes):
    """Context 8192, 8180 of them used, an observation of 40 tokens."""
    short = len((await play(Echo, ["x"], hermes, env_args={"ends": 1})).segments[0])
    engine = FakeGenerator(hermes, [[65] * (8180 - short + 1) + [hermes.end_id]])
    t = await play(
        Echo,
        engine,
        hermes,
        env_args={"observation": "".join(chr(945 + i) for i in range(20))},  # two bytes each, no merges
        context_length=8192,
        max_response_tokens=100_000,
    )
    assert len([i for s in t.segments[0].spans[:2] for i in s.ids]) == 8180
    assert all(1 <= r.sampling.max_new_tokens <= 8192 - len(r.ids) for r in engine.requests)
    assert (t.stop_reason, len(t.turns)) == (StopReason.CONTEXT_FULL, 2)
    assert t.turns[0].observation_cut_tokens > 0
    assert len(t.segments[0]) == 8192, "the cut observation leaves room for one token"
    assert to_samples(t)[0].trained_tokens == t.sampled_tokens


# -- seeds -----------------------------------------------------------------------------------------------------------


async def test_seeds_follow_the_place_not_the_time(hermes):
    async def seeds(index=0, attempt=0, run=0):
        runner = make_runner(Echo, ["x"], hermes, seed=run, max_turns=3)
        t = await runner.run(EpisodeSpec(PARIS, 0, index, attempt))
        return [turn.seed for turn in t.turns]

    first = await seeds()
    assert first == await seeds()
    others = [await seeds(index=1), await seeds(attempt=1), await seeds(run=1)]
    assert len({s for found in (first, *others) for s in found}) == 12, "every one of them differs"


async def test_the_environment_has_a_separate_seed_per_episode(hermes):
    seen = []

    class Seeded(Echo):
        async def reset(self, task, *, seed):
            seen.append(seed)
            return "go"

    runner = make_runner(Seeded, ["x"], hermes, max_turns=1)
    for index, attempt in ((0, 0), (0, 0), (1, 0), (0, 1)):
        await runner.run(EpisodeSpec(PARIS, 0, index, attempt))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


async def test_members_of_a_group_cannot_change_each_others_task(hermes):
    class Rude(Echo):
        async def reset(self, task, *, seed):
            task.messages[0]["content"] = "changed"
            return task.messages

    task = Task("x", ({"role": "user", "content": "as it was"},))
    await play(Rude, ["x"], hermes, task=task, max_turns=1)
    assert task.prompt[0]["content"] == "as it was"
