"""Routed experts in SGLang's answers: what is asked for, and what is refused."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from doubles import until
from sglang_double import Double

from agentrl.core.routed_experts import RouterShape
from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.launch_spec import LaunchSpec, command_line
from agentrl.errors import EngineFailure

ROUTER = RouterShape(layers=3, experts=8, topk=2, mixtures=(0, 2))
ASKED = SamplingParams(5, routed_experts_from=0)


def experts(start, stop):
    """Numbers that name their token."""
    chosen = np.zeros((stop - start, 3, 2), np.int32)
    chosen[:, 0] = np.arange(start, stop)[:, None] % 7 + np.arange(2)
    chosen[:, 2] = 7 - chosen[:, 0]
    return chosen


def with_remains(start, stop):
    """In a layer without experts the server's buffer holds what other requests left."""
    chosen = experts(start, stop)
    chosen[:, 1] = 9
    return chosen


@pytest.fixture
async def server():
    server = await Double(experts=experts).start()
    yield server
    await server.stop()


@pytest.fixture
async def engine(server):
    engine = SGLangEngine(server.address, router=ROUTER, timeout_s=5, generate_timeout_s=5)
    await engine.start()
    yield engine
    await engine.close()


async def test_what_is_in_layers_without_experts_is_not_recorded(engine, server):
    """Rows with equal experts would seem to differ."""
    server.experts = with_remains
    generation = await engine.generate([1, 2, 3], ASKED, session="a")
    assert np.array_equal(generation.routed_experts.array(), experts(0, 7))


async def test_a_generation_has_the_experts_from_the_position_that_is_asked_for(engine, server):
    first = await engine.generate([1, 2, 3], ASKED, session="a")
    later = await engine.generate([1, 2, 3], replace(ASKED, routed_experts_from=2), session="a")
    free = await engine.generate([1, 2, 3], SamplingParams(5), session="a")
    assert np.array_equal(first.routed_experts.array(), experts(0, 7))
    assert np.array_equal(later.routed_experts.array(), experts(2, 7))
    assert free.routed_experts is None
    fields = [(b.get("return_routed_experts"), b.get("routed_experts_start_len")) for b in server.bodies]
    assert fields == [(True, 0), (True, 2), (None, None)]


def shifted(start, stop):
    """The experts of one token more, as a server sends them that counts the last token too."""
    return experts(start, stop + 1)


def of_another_model(start, stop):
    return experts(start, stop) + 5


def never_written(start, stop):
    """The zeros of a buffer that the server's kernels do not fill."""
    return np.zeros((stop - start, 3, 2), np.int32)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (shifted, r"returned 48 routed experts, expected 7 tokens × 3 layers × 2"),
        (of_another_model, r"they go from 5 to 12, expected 0 to 7"),
        (never_written, r"token 0 has the experts \[0, 0\] in layer 0, one of them twice"),
        (lambda *_: np.zeros(3, np.int8), "malformed answer: routed_experts"),
    ],
)
async def test_experts_of_other_tokens_or_models_are_refused(engine, server, wrong, what):
    server.experts = wrong
    with pytest.raises(EngineFailure, match=what):
        await engine.generate([1, 2, 3], ASKED, session="a")


async def test_a_server_that_returns_none_is_refused_before_a_request(server):
    server.experts = None
    engine = SGLangEngine(server.address, router=ROUTER, timeout_s=5)
    with pytest.raises(EngineFailure, match="start it with --enable-return-routed-experts"):
        await engine.start()
    await engine.close()
    plain = SGLangEngine(server.address, timeout_s=5)
    await plain.start()
    await plain.close()


@pytest.mark.parametrize("reported", [True, False], ids=["with-experts", "without"])
async def test_the_parts_of_an_interrupted_generation_have_the_experts_of_all_tokens(engine, server, reported):
    """Also if the server returns none for the part that it aborted."""
    engine.keep_tokens(None)
    server.delay_s, server.sampled = 0.2, 2
    server.experts = experts if reported else None
    work = asyncio.ensure_future(engine.generate([1, 2, 3], ASKED, session="a"))
    await until(lambda: server.bodies)
    await engine.pause()
    server.experts = experts
    await engine.resume()
    generation = await work
    assert len(generation.ids) == 5
    assert np.array_equal(generation.routed_experts.array(), experts(0, 7))
    assert [b["routed_experts_start_len"] for b in server.bodies] == [0, 4 if reported else 0]


def test_servers_that_are_started_here_return_them_only_where_they_are_recorded(tmp_path):
    class Here:
        python = "python"

    spec = LaunchSpec(model=tmp_path, dtype="float32", context_length=64)
    for records in (True, False):
        words = command_line(replace(spec, routed_experts=records), Here(), 0, 1)
        assert ("--enable-return-routed-experts" in words) is records
