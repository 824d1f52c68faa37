"""The engine contract over a genuine SGLang server, and what only it can show. See sglang_server.py for where it runs."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_contract import LONG, EngineContract, params
from sglang_server import Running, attached, available, running

from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.errors import EngineAbort
from agentrl.types import FinishReason

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu"),
    pytest.mark.asyncio(loop_scope="function"),
]


class Greedy(SGLangEngine):
    """SGLang promises no answer by seed; at temperature 0 it gives the same one, up to rounding."""

    async def generate(self, ids, sampling, *, session, images=()):
        return (
            await super().generate(ids, replace(sampling, temperature=0.0), session=session)
            if sampling.temperature == 1
            else (await super().generate(ids, sampling, session=session))
        )


def rounding(engine: SGLangEngine) -> float:
    """How far apart two answers of the same weights may be, in nat: fp32 on a CPU, bf16 on a GPU."""
    return 1e-4 if engine.api.facts.device == "cpu" else 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("sglang")) as server:
        yield server


class TestSGLang(EngineContract):
    deterministic = False

    @pytest.fixture
    def context(self):
        return [4, 8, 15, 16, 23, 42, 108]

    @pytest.fixture
    async def engine(self, server: Running):
        async with attached(server, Greedy) as engine:
            yield engine

    @pytest.fixture
    def slow(self, engine):
        return engine

    @pytest.fixture
    def manifest(self, server: Running):
        return WeightsManifest(server.model, fingerprint(server.model))

    async def test_the_same_question_has_the_same_answer(self, engine, context):
        first = await engine.generate(context, params(), session="a")
        for g in await asyncio.gather(*(engine.generate(context, params(), session=f"b{i}") for i in range(5))):
            assert np.allclose(g.log_probs, first.log_probs, atol=rounding(engine)) or g.ids != first.ids

    async def test_a_stop_at_the_last_token_is_a_stop(self, engine, context):
        whole = (
            await engine.generate(context, params(2), session="a")
        ).ids  # on a GPU the second token can differ by rounding
        g = await engine.generate(context, params(2, stop_token_ids=whole), session="b")
        assert g.finish_reason is FinishReason.STOP

    async def test_the_next_turn_finds_its_prefix(self, engine, context):
        first = await engine.generate(context, params(), session="a")
        assert first.cached_tokens == 0
        second = await engine.generate([*context, *first.ids, *context[:3]], params(), session="a")
        assert len(context) <= second.cached_tokens < len(context) + 6 + 3

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    async def test_pause_in_flight_changes_no_answer(self, slow, context, mode):
        task = asyncio.create_task(slow.generate(context, params(LONG), session="b"))
        await asyncio.sleep(0.1)
        await slow.pause(mode)
        await asyncio.sleep(0.1)
        assert not task.done()
        await slow.resume()
        got = await task
        assert len(got.ids) == LONG
        assert got.policy_version == 0

    async def test_a_pause_that_aborts_ends_what_is_in_flight(self, slow, context):
        task = asyncio.create_task(slow.generate(context, params(LONG), session="b"))
        await asyncio.sleep(0.3)
        await slow.pause("abort")
        with pytest.raises(EngineAbort):
            await asyncio.wait_for(task, 20)
        await slow.resume()
        assert len((await slow.generate(context, params(), session="c")).ids) == 6

    async def test_stop_strings_trim_nothing(self, engine, server, context):
        from agentrl.render import Tokenizer

        whole = await engine.generate(context, params(24, temperature=0.0), session="a")
        texts = [Tokenizer.load(server.model).decode([i]) for i in whole.ids]
        at = next((i for i, t in enumerate(texts[3:], 3) if t.strip() and "\ufffd" not in t), None)
        if at is None:
            pytest.skip("the model's answer has no plain text")
        g = await engine.generate(context, params(24, temperature=0.0, stop=(texts[at],)), session="b")
        first = next(i for i in range(len(whole.ids)) if texts[at] in "".join(texts[: i + 1]))
        assert g.ids == whole.ids[: first + 1]
        assert g.finish_reason is FinishReason.STOP
        assert g.matched_stop == texts[at]

    async def test_new_weights_while_requests_are_in_flight(self, engine, context, manifest):
        tasks = [asyncio.create_task(engine.generate(context, params(LONG), session=f"s{i}")) for i in range(4)]
        await asyncio.sleep(0.3)
        await engine.update_weights(manifest, 5)
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(answer, EngineAbort):
                assert answer.policy_version in (0, 5)
                assert len(answer.ids) == LONG
        assert (await engine.generate(context, params(), session="z")).policy_version == 5

    async def test_it_scores_what_it_samples(self, engine, context):
        g = await engine.generate(context, params(16, temperature=0.99), session="a")
        scores = await engine.api.score([*context, *g.ids])
        assert len(scores) == len(context) + 15
