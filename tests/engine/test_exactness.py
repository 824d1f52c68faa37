"""What left for the engine is what the record holds: a token lost on the way is found out."""

import zlib

import numpy as np
import pytest
from doubles import FakeEngine, play
from echo import Echo
from sglang_double import Double, count_up

from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang import engine as sglang_engine
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.protocol import request_body
from agentrl.errors import EngineFailure
from agentrl.store import exactness_violations


class Short(FakeEngine):
    """Sends one token less than it was given."""

    async def generate(self, ids, sampling, **more):
        return await super().generate(ids[:-1], sampling, **more)


async def test_an_engine_that_sends_everything_is_exact(hermes):
    t = await play(Echo, FakeEngine(hermes, ["x"]), hermes, env_args={"ends": 2})
    assert len(t.turns) == 2
    assert exactness_violations([t]) == 0


async def test_a_token_less_to_the_engine_is_a_violation(hermes):
    engine = Short(hermes, ["x"])
    t = await play(Echo, engine, hermes, env_args={"ends": 2})
    lengths = [turn.context_length for turn in t.turns]
    assert [len(r.ids) for r in engine.requests] == [n - 1 for n in lengths]
    assert exactness_violations([t]) == 2


class Reads(Double):
    """A server that reads one token less than it was sent, and says so."""

    def _expanded(self, body):
        return super()._expanded(body)[:-1]


@pytest.fixture
async def served(request):
    """A server, and an engine that uses it."""
    server = await getattr(request, "param", Double)().start()
    engine = SGLangEngine(server.address, timeout_s=5)
    await engine.start()
    yield server, engine
    await engine.close()
    await server.stop()


@pytest.mark.parametrize("served", [Reads], indirect=True)
async def test_a_server_that_read_a_token_less_is_found_out(served):
    with pytest.raises(EngineFailure, match="read 2 context tokens, but was sent 3") as e:
        await served[1].generate([1, 2, 3], SamplingParams(5), session="a")
    assert e.value.cause == "engine: context differs"


async def test_over_http_too_the_checksum_is_of_the_ids_in_the_request(served, monkeypatch):
    server, engine = served
    whole = await engine.generate([1, 2, 3], SamplingParams(5), session="a")
    assert whole.context_crc == ids_checksum(server.bodies[-1]["input_ids"]) == ids_checksum([1, 2, 3])
    monkeypatch.setattr(sglang_engine, "request_body", lambda ids, *a, **k: request_body(ids[1:], *a, **k))
    monkeypatch.setattr(sglang_engine, "check_prompt", lambda *_, **__: None)
    short = await engine.generate([1, 2, 3], SamplingParams(5), session="a")
    assert short.context_crc == ids_checksum(server.bodies[-1]["input_ids"]) == ids_checksum([2, 3])


async def test_a_generation_in_parts_has_the_checksum_of_its_first_context(served):
    """The server stops at an end token that the request ignores, and is asked to continue."""
    server, engine = served
    server.eos, server.answer = (5,), lambda body: [4, 5] if body["input_ids"][-1] == 3 else count_up(body)
    g = await engine.generate([1, 2, 3], SamplingParams(5, ignore_eos=True, stop_token_ids=(99,)), session="a")
    assert g.ids == (4, 5, 6, 7, 8)
    assert [b["input_ids"] for b in server.bodies] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert g.context_crc == ids_checksum([1, 2, 3])


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 2**31 - 1], [-1, 5]])
def test_a_checksum_in_parts_is_that_of_the_whole(ids):
    whole = zlib.crc32(np.array(ids, "<i4").tobytes())
    assert ids_checksum(ids) == whole
    assert ids_checksum(ids[1:], ids_checksum(ids[:1])) == whole
