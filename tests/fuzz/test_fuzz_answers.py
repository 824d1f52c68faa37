"""Answers of engines, mutated: each is read exactly as it says, or is an EngineFailure with a cause."""

import copy
import json
import math
from random import Random

import pytest
from doubles import EMBEDDED
from engine_answers import GOOD, Says

from agentrl.engine.base import Generation, SamplingParams, check_generation
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.protocol import read_finish_reason, read_generation, sampled_tokens
from agentrl.errors import EngineFailure, Failure
from fuzz.mutations import FULL, QUICK, mutated

ROOM, VOCABULARY = 16, 32
VERSIONS = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
VERSIONED = {**GOOD, "text": "abc", "meta_info": {**GOOD["meta_info"], "weight_versions": VERSIONS}}
CASES = pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])


def read(answer):
    read_finish_reason(answer, "http://engine")
    sampled_tokens(answer, "http://engine")
    return check_generation(read_generation(answer, 0, "http://engine", VOCABULARY), ROOM)


@CASES
def test_an_answer_is_read_as_it_says_or_refused(cases):
    accepted, causes = 0, {}
    for seed in range(cases):
        answer = mutated(VERSIONED, Random(seed))
        before = copy.deepcopy(answer)
        try:
            generation = read(answer)
        except EngineFailure as e:
            causes[seed] = e.cause
            continue
        accepted += 1
        assert repr(answer) == repr(before), seed
        check(seed, answer, generation, VOCABULARY)
    assert accepted > cases // 20
    assert all(cause.startswith("engine: ") for cause in causes.values()), causes


@CASES
async def test_an_answer_over_http_is_read_as_it_says_or_is_a_failure(cases):
    server = await Says().start()
    engine = SGLangEngine(server.address, timeout_s=5, model_dir=EMBEDDED)
    await engine.start()
    accepted, causes = 0, set()
    for seed in range(cases):
        server.said = json.loads(json.dumps(mutated(GOOD, Random(seed))))
        try:
            generation = await engine.generate([1, 2, 3], SamplingParams(5), session="a")
        except Failure as e:
            causes.add(e.cause)
            continue
        accepted += 1
        check(seed, server.said, generation, engine.vocab_size)
        assert all(p <= 1e-3 for p in generation.log_probs), seed
    await engine.close()
    await server.stop()
    assert cases // 20 < accepted < cases
    assert len(causes) >= 6
    assert all(cause.startswith(("engine: ", "weight update")) for cause in causes), causes


def check(seed: int, answer: dict, generation: Generation, vocabulary: int) -> None:
    meta = answer["meta_info"]
    triples = meta.get("output_token_logprobs") or []
    assert list(generation.ids) == [t[1] for t in triples], seed
    assert list(generation.log_probs) == [t[0] for t in triples], seed
    assert answer.get("output_ids") in (None, list(generation.ids)), seed
    assert meta["completion_tokens"] == len(generation.ids), seed
    assert all(type(i) is int and 0 <= i < vocabulary for i in generation.ids), seed
    assert all(math.isfinite(p) for p in generation.log_probs), seed
    assert type(generation.policy_version) is int, seed
    assert sum(n for _, n in generation.versions) in (0, len(generation.ids)), seed
    assert all(type(n) is int and n > 0 for _, n in generation.versions), seed
