"""Answers of engines, mutated: each is read exactly as it says, or is an EngineFailure with a cause."""

import copy
import math
from random import Random

import pytest

from agentrl.engine.base import Generation, check_generation
from agentrl.engine.sglang.protocol import read_finish_reason, read_generation, sampled_tokens
from agentrl.errors import EngineFailure
from fuzz.mutations import FULL, QUICK, mutated

ROOM, VOCABULARY = 16, 32
GOOD = {
    "text": "abc",
    "output_ids": [4, 5, 6],
    "meta_info": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "default",
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
        "finish_reason": {"type": "stop", "matched": 6},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None], [0.0, 6, None]],
    },
}


def read(answer):
    read_finish_reason(answer, "http://engine")
    sampled_tokens(answer, "http://engine")
    return check_generation(read_generation(answer, 0, "http://engine", VOCABULARY), ROOM)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_an_answer_is_read_as_it_says_or_refused(cases):
    accepted, causes = 0, {}
    for seed in range(cases):
        answer = mutated(GOOD, Random(seed))
        before = copy.deepcopy(answer)
        try:
            generation = read(answer)
        except EngineFailure as e:
            causes[seed] = e.cause
            continue
        accepted += 1
        assert repr(answer) == repr(before), seed
        check(seed, answer, generation)
    assert accepted > cases // 20
    assert all(cause.startswith("engine: ") for cause in causes.values()), causes


def check(seed: int, answer: dict, generation: Generation) -> None:
    meta = answer["meta_info"]
    triples = meta.get("output_token_logprobs") or []
    assert list(generation.ids) == [t[1] for t in triples], seed
    assert list(generation.log_probs) == [t[0] for t in triples], seed
    assert answer.get("output_ids") in (None, list(generation.ids)), seed
    assert meta["completion_tokens"] == len(generation.ids), seed
    assert all(type(i) is int and 0 <= i < VOCABULARY for i in generation.ids), seed
    assert all(math.isfinite(p) for p in generation.log_probs), seed
    assert type(generation.policy_version) is int, seed
    assert sum(n for _, n in generation.versions) in (0, len(generation.ids)), seed
    assert all(type(n) is int and n > 0 for _, n in generation.versions), seed
