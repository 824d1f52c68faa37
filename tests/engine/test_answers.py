"""Nothing that an engine answers is believed unchecked: what is wrong is an EngineFailure with a cause, and no episode is scored or trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from doubles import EMBEDDED, FakeEngine, play
from echo import Echo
from engine_answers import GOOD, MISSING, Says, changed

from agentrl.engine.base import Generation, SamplingParams, Speculation
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.protocol import concatenate
from agentrl.engine.sglang.router import servers_at
from agentrl.errors import EngineFailure
from agentrl.train.sample import to_samples
from agentrl.types import FinishReason, StopReason

FIVE = SamplingParams(5)


@pytest.fixture
async def server():
    server = await Says().start()
    yield server
    await server.stop()


@pytest.fixture
async def engine(server):
    engine = SGLangEngine(server.address, timeout_s=5, model_dir=EMBEDDED)
    await engine.start()
    yield engine
    await engine.close()


async def test_the_good_answer_is_taken(server, engine):
    g = await engine.generate([1, 2, 3], FIVE, session="a")
    assert (g.ids, g.log_probs, g.matched_stop) == ((4, 5, 6), (-0.5, -0.25, 0.0), 6)


LARGE = 1 << 20
TRIPLES = "meta_info.output_token_logprobs"


def last_id(i):
    answer = changed("output_ids", [4, 5, i])
    answer["meta_info"]["output_token_logprobs"][2][1] = i
    return answer


WRONG = {
    "an id below 0": (last_id(-1), "engine: ids outside the vocabulary"),
    "the first id past the vocabulary": (last_id(2049), "engine: ids outside the vocabulary"),
    "an id of 40 bits": (last_id(1 << 40), "engine: ids outside the vocabulary"),
    "an id that is a float": (last_id(6.0), "engine: ids not integers"),
    "an id that is true": (last_id(True), "engine: ids not integers"),
    "tokens without ids": (
        {"output_ids": [], "meta_info": {**GOOD["meta_info"], "output_token_logprobs": [], "completion_tokens": 7}},
        "engine: completion_tokens differ",
    ),
    "ids without log-probs": (changed(TRIPLES, MISSING), "engine: ids and log-probs differ"),
    "other ids": (changed("output_ids", [4, 5, 7]), "engine: ids and log-probs differ"),
    "an id less": (changed("output_ids", [4, 5]), "engine: ids and log-probs differ"),
    "completion_tokens too many": (changed("meta_info.completion_tokens", 4), "engine: completion_tokens differ"),
    "no completion_tokens": (changed("meta_info.completion_tokens", MISSING), "engine: completion_tokens differ"),
    "completion_tokens as text": (changed("meta_info.completion_tokens", "3"), "engine: completion_tokens differ"),
    "no log-prob": (changed(f"{TRIPLES}.1.0", None), "engine: log-probs not finite"),
    "NaN as text": (changed(f"{TRIPLES}.1.0", "NaN"), "engine: log-probs not finite"),
    "a log-prob as text": (changed(f"{TRIPLES}.1.0", "-0.5"), "engine: log-probs not finite"),
    "a log-prob above 0": (changed(f"{TRIPLES}.1.0", 0.5), "engine: log-probs not finite"),
    "a pair that is a number": (changed(f"{TRIPLES}.1", 5), "engine: malformed answer"),
    "a pair of one": (changed(TRIPLES, [[-1.0], [-1.0], [-1.0]]), "engine: malformed answer"),
    "triples that are a text": (changed(TRIPLES, "abc"), "engine: malformed answer"),
    "output_ids that are a number": (changed("output_ids", 3), "engine: malformed answer"),
    "cached_tokens as text": (changed("meta_info.cached_tokens", "many"), "engine: malformed answer"),
    "drafts as text": (changed("meta_info.spec_verify_ct", "4"), "engine: malformed answer"),
    "matched is an object": (changed("meta_info.finish_reason.matched", {}), "engine: malformed answer"),
    "no weight version": (changed("meta_info.weight_version", MISSING), "engine: malformed answer"),
    "versions that are a number": (changed("meta_info.weight_versions", 5), "engine: malformed answer"),
    "another number of context tokens": (changed("meta_info.prompt_tokens", 2), "engine: context differs"),
    "no number of context tokens": (changed("meta_info.prompt_tokens", MISSING), "engine: context differs"),
    "an unknown finish reason": (changed("meta_info.finish_reason.type", "tired"), "engine: no finish reason"),
    "no meta_info": (changed("meta_info", MISSING), "engine: no finish reason"),
    "a list": ([1, 2], "engine: no finish reason"),
    "nothing": (None, "engine: no finish reason"),
}


@pytest.mark.parametrize(("answer", "cause"), WRONG.values(), ids=WRONG)
async def test_a_wrong_answer_is_an_engine_failure_with_its_cause(server, engine, answer, cause):
    server.said = answer
    with pytest.raises(EngineFailure) as e:
        await engine.generate([1, 2, 3], FIVE, session="a")
    assert e.value.cause == cause
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "names",
    [("spec_num_correct_drafts", "spec_num_proposed_drafts"), ("spec_accept_token_num", "spec_draft_token_num")],
)
async def test_the_counts_of_speculative_decoding_are_read_under_both_names(server, engine, names):
    assert (await engine.generate([1, 2, 3], FIVE, session="a")).speculation is None
    counts = dict(zip(("spec_verify_ct", *names), (4, 5, 12), strict=True))
    server.said = {**GOOD, "meta_info": {**GOOD["meta_info"], **counts}}
    generation = await engine.generate([1, 2, 3], FIVE, session="a")
    assert generation.speculation == Speculation(4, 5, 12)
    assert generation.counts() | {"cached_tokens": 0} == {
        "cached_tokens": 0,
        "spec_verify_steps": 4,
        "spec_accepted": 5,
        "spec_proposed": 12,
    }
    whole = concatenate([generation, replace(generation, speculation=None), generation])
    assert whole.speculation == Speculation(8, 10, 24)


DESCRIPTIONS = {
    "/server_info": [
        [],
        "down",
        5,
        None,
        {"version": 5},
        {"tp_size": "two"},
        {"context_length": [1]},
        {"device": {}},
        {"tp_size": 0.5},
        {"max_req_input_len": -1},
    ],
    "/openapi.json": [[], "down", 5, None, {}, {"paths": []}, {"paths": "all"}],
    "/model_info": [[], "down", 5, None, {}, {"weight_version": None}, {"weight_version": {"a": 1}}],
}


async def connected(engine):
    await engine.start()
    return await engine.health()


@pytest.mark.parametrize(("path", "answer"), [(p, a) for p, answers in DESCRIPTIONS.items() for a in answers])
async def test_a_malformed_description_of_a_server_is_an_engine_failure(server, path, answer):
    server.described = {path: answer}
    engine = SGLangEngine(server.address, timeout_s=5)
    try:
        with pytest.raises(EngineFailure, match="malformed answer") as e:
            await connected(engine)
        assert e.value.cause == "engine: malformed answer"
        assert path in str(e.value)
    finally:
        await engine.close()


@pytest.mark.parametrize("version", ["²", "١", "v3", "-1"])
async def test_a_weight_version_that_is_no_number_is_that_of_the_initial_weights(server, engine, version):
    server.weight_version = version
    assert (await engine.health()).policy_version == 0


def test_workers_of_a_router_that_are_no_objects_are_not_used(monkeypatch):
    import httpx

    said = httpx.Response(200, json={"workers": ["http://a:1"]})
    monkeypatch.setattr(httpx, "get", lambda *_, **__: said)
    assert servers_at(["http://router:1"]) == ("http://router:1",)


# -- engines of any kind -----------------------------------------------------------------------------------------------


class Ends(FakeEngine):
    """It answers well, but for one turn."""

    bad_turn = 0
    bad: object = None

    def answer(self, request, reply):
        good = super().answer(request, reply)
        if request.turn != self.bad_turn:
            return good
        return self.bad(good) if callable(self.bad) else self.bad


BAD = {
    "-1": (lambda g: replace(g, ids=(*g.ids[:-1], -1)), "engine: ids outside the vocabulary"),
    "33 bits": (lambda g: replace(g, ids=(*g.ids[:-1], 1 << 32)), "engine: ids outside the vocabulary"),
    "a text": (lambda g: replace(g, ids=(*g.ids[:-1], "x")), "engine: ids outside the vocabulary"),
    "a log-prob less": (lambda g: replace(g, log_probs=g.log_probs[1:]), "engine: ids and log-probs differ"),
    "no log-probs": (lambda g: replace(g, log_probs=()), "engine: ids and log-probs differ"),
    "NaN": (lambda g: replace(g, log_probs=(math.nan, *g.log_probs[1:])), "engine: log-probs not finite"),
    "above 0": (lambda g: replace(g, log_probs=(0.5, *g.log_probs[1:])), "engine: log-probs not finite"),
    "None": (lambda g: replace(g, log_probs=(None, *g.log_probs[1:])), "engine: log-probs not finite"),
    "nothing": (None, "engine: not a generation"),
    "a finish reason as text": (lambda g: replace(g, finish_reason="stop"), "engine: not a generation"),
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(("bad", "cause"), BAD.values(), ids=BAD)
async def test_a_wrong_generation_of_any_engine_is_never_scored(hermes, bad, cause, turn):
    engine = Ends(hermes, ["some words"])
    engine.bad_turn, engine.bad = turn, bad
    t = await play(Echo, engine, hermes, env_args={"ends": 2}, rewards=[])
    assert (t.stop_reason, t.cause) == (StopReason.ENGINE_FAILURE, cause)
    assert t.rewards == {}
    assert to_samples(t) == []


async def test_an_end_token_that_only_the_engine_knows_is_not_part_of_the_answer(hermes):
    added = hermes.tokenizer.added
    known = {*hermes.stop_token_ids, *hermes.ends.values()}
    name, end = next((n, i) for n, i in added.items() if i not in known)
    ids = (*hermes.tokenizer.encode("Paris"), end)
    for matched, text in ((end, "Paris"), (None, f"Paris{name}")):
        said = Generation(ids, (-1.0,) * len(ids), FinishReason.STOP, matched)
        t = await play(Echo, [said], hermes, env_args={"ends": 1})
        assert t.turns[0].action.text == text
        assert t.segments[0].ids[-len(ids) :] == list(ids), "the record keeps what was sampled"
