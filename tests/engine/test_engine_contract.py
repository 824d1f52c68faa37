"""The engine contract over the scripted and the local engine, and the scripted engine's own properties."""

import asyncio

import pytest
from engine_contract import EngineContract, params
from local_models import decode, local, manifest_of

from agentrl.engine.base import SamplingParams
from agentrl.engine.sampling import StopFinder, uniform
from agentrl.engine.scripted import ScriptedEngine, random_policy
from agentrl.errors import ConfigError, EngineAbort, EngineFailure
from agentrl.types import FinishReason


def encode(text: str) -> list[int]:
    return [3 + ord(c) for c in text]


class TestScripted(EngineContract):
    @pytest.fixture
    def context(self):
        return [4, 8, 15, 16, 23, 42]

    @pytest.fixture
    def engine(self):
        return ScriptedEngine(random_policy(range(100), mean_length=10**9), decode=decode, context_length=400)

    @pytest.fixture
    def slow(self):
        return ScriptedEngine(random_policy(range(100), mean_length=10**9), context_length=400, delay_s=0.5)

    async def test_texts_in_order_and_recorded_requests(self):
        engine = ScriptedEngine(["ab", [7, 7]], encode=encode, end_id=2)
        g = await engine.generate([1], SamplingParams(9), session="a")
        assert g.ids == (*encode("ab"), 2)
        assert (g.finish_reason, g.matched_stop) == (FinishReason.STOP, 2)
        assert (await engine.generate([1, 5], SamplingParams(9), session="a")).ids == (7, 7, 2)
        assert (await engine.generate([1], SamplingParams(9), session="b")).ids == (*encode("ab"), 2)
        with pytest.raises(EngineFailure, match="2 answers"):
            await engine.generate([1], SamplingParams(9), session="a")
        assert [(a.session, a.number, a.ids) for a in engine.requests[:2]] == [("a", 0, (1,)), ("a", 1, (1, 5))]

    async def test_length_cuts_a_generation(self):
        g = await ScriptedEngine([[7, 8, 9]]).generate([1], SamplingParams(2), session="a")
        assert (g.ids, g.finish_reason) == ((7, 8), FinishReason.LENGTH)

    async def test_an_answer_without_an_end_stops(self):
        g = await ScriptedEngine([[7, 8]]).generate([1], SamplingParams(9), session="a")
        assert (g.ids, g.finish_reason, g.matched_stop) == ((7, 8), FinishReason.STOP, None)

    async def test_a_script_may_be_async_and_may_fail(self):
        async def script(ask):
            await asyncio.sleep(0)
            if ask.number == 0:
                raise EngineAbort("on purpose")
            raise KeyError("a bug")

        engine = ScriptedEngine(script)
        with pytest.raises(EngineAbort, match="on purpose"):
            await engine.generate([1], SamplingParams(2), session="a")
        with pytest.raises(EngineFailure, match="the script raised KeyError"):
            await engine.generate([1], SamplingParams(2), session="a")

    async def test_an_interrupted_generation_has_tokens_of_both_versions(self, manifest):
        policy = random_policy(range(100), mean_length=10**9)
        engine = ScriptedEngine(policy, delay_s=0.2, keep_interrupted=True)
        task = asyncio.create_task(engine.generate([1], params(100), session="a"))
        await asyncio.sleep(0.1)
        await engine.update_weights(manifest, 3)
        g = await task
        assert [v for v, _ in g.versions] == [0, 3]
        assert sum(n for _, n in g.versions) == len(g.ids) == 100
        plain = await ScriptedEngine(policy).generate([1], params(100), session="a")
        assert g.ids == plain.ids

    async def test_demonstrations_are_marked(self):
        g = await ScriptedEngine([[7]], demonstration=True).generate([1], SamplingParams(2), session="a")
        assert g.demonstration

    async def test_random_policy_depends_on_the_seed_only(self):
        engine = ScriptedEngine(random_policy(range(50), end_id=2))
        a = await engine.generate([1, 2, 3], SamplingParams(40, seed=1), session="a")
        b = await engine.generate([9], SamplingParams(40, seed=1), session="b")
        c = await engine.generate([9], SamplingParams(40, seed=2), session="c")
        assert a.ids == b.ids != c.ids

    async def test_text_without_encode_and_stops_without_decode(self):
        with pytest.raises(ConfigError, match="encode"):
            await ScriptedEngine(["ab"]).generate([1], SamplingParams(2), session="a")
        with pytest.raises(ConfigError, match="decode"):
            await ScriptedEngine([[1]]).generate([1], SamplingParams(2, stop=("x",)), session="a")


class TestStopFinder:
    def find(self, ids, *stop):
        finder = StopFinder(stop, decode)
        return next(((n, s) for n in range(1, len(ids) + 1) if (s := finder.find(ids[:n])) is not None), None)

    def test_a_stop_string_that_begins_and_ends_inside_tokens(self):
        assert decode([1, 2, 3]) == "ba.ca.da."
        assert self.find([1, 2, 3, 4], ".ca.d") == (3, ".ca.d")

    def test_the_stop_string_that_ends_first_wins_and_of_several_the_longest(self):
        assert self.find([1, 2, 3], "ca.", "a.c", "ba.c") == (2, "ba.c")

    def test_a_stop_string_after_the_window_moved(self):
        ids = [5] * 500 + [1, 2, 3]
        assert self.find(ids, "ba.ca.da.") == (503, "ba.ca.da.")

    def test_long_stop_strings(self):
        ids = [i % 600 for i in range(400)]
        stop = decode(ids)[300:900]
        assert self.find(ids, stop) == (300, stop)

    def test_none(self):
        assert self.find([1, 2, 3], "zz") is None
        assert self.find([1, 2, 3]) is None


def test_uniforms():
    values = [uniform(seed, position) for seed in (0, 1, 2**63, -1) for position in range(500)]
    assert len(set(values)) == len(values)
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03


class TestLocal(EngineContract):
    @pytest.fixture
    def context(self):
        return [4, 8, 15, 16, 23, 42] * 3

    @pytest.fixture
    async def engine(self, models):
        engine = await local(models["qwen3"], context_length=400)
        yield engine
        await engine.close()

    @pytest.fixture
    def slow(self, engine):
        return engine

    @pytest.fixture
    def manifest(self, others):
        return manifest_of(others)
