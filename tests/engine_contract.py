"""The contract of engines, as a class that the tests of each engine inherit.

The subclass gives a fixture `engine` (started, closed by the fixture), `context` (ids it can continue; it answers with at least
6 tokens when nothing stops it and end tokens are ignored), and `slow` (a started engine whose answer to `context` takes some
tenths of a second at max_new_tokens=LONG, so that requests can be caught in flight).
"""

import asyncio
import math
from pathlib import Path

import pytest

from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Engine, SamplingParams, WeightsManifest
from agentrl.errors import ConfigError, EngineAbort, EngineFailure
from agentrl.types import FinishReason

LONG = 300


def params(n: int = 6, **kw) -> SamplingParams:
    return SamplingParams(n, **{"ignore_eos": True, "seed": 5, **kw})


class EngineContract:
    deterministic = True

    @pytest.fixture
    def manifest(self, tmp_path: Path) -> WeightsManifest:
        """Weights that the engine accepts."""
        return WeightsManifest(tmp_path, "")

    async def test_it_is_an_engine(self, engine):
        assert isinstance(engine, Engine)
        info = await engine.health()
        assert info.name
        assert info.policy_version == 0
        assert info.context_length > 0
        assert info.deterministic is self.deterministic

    async def test_length_and_log_probs(self, engine, context):
        g = await engine.generate(context, params(), session="a")
        assert len(g.ids) == len(g.log_probs) == 6
        assert g.finish_reason is FinishReason.LENGTH
        assert g.matched_stop is None
        assert g.policy_version == 0
        assert all(isinstance(i, int) for i in g.ids)
        assert all(math.isfinite(p) and p <= 0 for p in g.log_probs)

    async def test_the_context_that_was_sent_is_summed(self, engine, context):
        for ids in (context, [*context, *context[:2]]):
            assert (await engine.generate(ids, params(2), session="a")).context_crc == ids_checksum(ids)

    async def test_one_token(self, engine, context):
        assert len((await engine.generate(context, params(1), session="a")).ids) == 1

    async def test_a_stop_token_is_part_of_the_generation(self, engine, context):
        whole = (await engine.generate(context, params(), session="a")).ids
        g = await engine.generate(context, params(stop_token_ids=(whole[2],)), session="b")
        assert g.ids == whole[: whole.index(whole[2]) + 1]
        assert g.finish_reason is FinishReason.STOP
        assert g.matched_stop == whole[2]

    async def test_a_stop_at_the_last_token_is_a_stop(self, engine, context):
        whole = (await engine.generate(context, params(1), session="a")).ids
        g = await engine.generate(context, params(1, stop_token_ids=whole), session="b")
        assert g.finish_reason is FinishReason.STOP

    async def test_empty_stop_string_is_refused(self, engine, context):
        with pytest.raises(ConfigError, match="empty stop"):
            await engine.generate(context, params(stop=("",)), session="a")

    @pytest.mark.parametrize(
        "bad", [{"n": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": 0}]
    )
    async def test_invalid_sampling_parameters_are_refused(self, engine, context, bad):
        with pytest.raises(ConfigError):
            await engine.generate(context, params(**bad), session="a")

    async def test_context_that_does_not_fit(self, engine, context):
        limit = (await engine.health()).context_length
        with pytest.raises(EngineFailure, match="context"):
            await engine.generate(context[:1] * limit, params(), session="a")
        with pytest.raises(EngineFailure, match="empty"):
            await engine.generate([], params(), session="a")

    async def test_never_past_the_context_length(self, engine, context):
        limit = (await engine.health()).context_length
        g = await engine.generate((context * limit)[: limit - 2], params(), session="a")
        assert len(g.ids) <= 2

    async def test_the_same_request_gives_the_same_generation(self, engine, context):
        first = await engine.generate(context, params(), session="a")
        again = await asyncio.gather(*(engine.generate(context, params(), session=f"b{i}") for i in range(5)))
        assert {(g.ids, g.log_probs) for g in again} == {(first.ids, first.log_probs)}

    async def test_the_next_turn_finds_its_prefix(self, engine, context):
        first = await engine.generate(context, params(), session="a")
        assert first.cached_tokens == 0
        second = await engine.generate([*context, *first.ids, *context[:3]], params(), session="a")
        assert len(context) <= second.cached_tokens < len(context) + 6 + 3
        await engine.release("a")
        assert (await engine.generate(context, params(), session="a")).cached_tokens == 0

    async def test_release_of_an_unknown_session_and_twice(self, engine, context):
        await engine.release("nobody")
        await engine.generate(context, params(), session="a")
        await engine.release("a")
        await engine.release("a")

    async def test_abort_one_session(self, slow, context):
        a, b = (asyncio.create_task(slow.generate(context, params(LONG), session=s)) for s in "ab")
        await asyncio.sleep(0.02)
        await slow.abort("a")
        with pytest.raises(EngineAbort):
            await a
        assert (await b).ids

    async def test_abort_all_then_continue(self, slow, context):
        tasks = [asyncio.create_task(slow.generate(context, params(LONG), session=s)) for s in "abc"]
        await asyncio.sleep(0.02)
        await slow.abort()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineAbort) for r in results)
        assert (await slow.generate(context, params(), session="a")).ids

    async def test_abort_of_nothing(self, engine):
        await engine.abort()
        await engine.abort("nobody")

    async def test_a_cancelled_request_leaves_the_engine_usable(self, slow, context):
        task = asyncio.create_task(slow.generate(context, params(LONG), session="a"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await slow.generate(context, params(), session="a")).ids

    async def test_pause_holds_generations_back(self, engine, context):
        expected = await engine.generate(context, params(), session="a")
        await engine.pause()
        task = asyncio.create_task(engine.generate(context, params(), session="b"))
        await asyncio.sleep(0.05)
        assert not task.done()
        await engine.resume()
        assert (await asyncio.wait_for(task, 30)).ids == expected.ids

    async def test_a_pause_in_flight_changes_no_generation(self, slow, context):
        expected = await slow.generate(context, params(LONG), session="a")
        task = asyncio.create_task(slow.generate(context, params(LONG), session="b"))
        await asyncio.sleep(0.02)
        await slow.pause()
        await asyncio.sleep(0.02)
        await slow.resume()
        got = await task
        assert (got.ids, got.log_probs) == (expected.ids, expected.log_probs)

    async def test_abort_while_paused(self, engine, context):
        await engine.pause()
        task = asyncio.create_task(engine.generate(context, params(), session="a"))
        await asyncio.sleep(0.02)
        await engine.abort("a")
        with pytest.raises(EngineAbort):
            await task
        await engine.resume()

    async def test_versions(self, engine, context, manifest):
        first = await engine.generate(context, params(), session="a")
        await engine.update_weights(manifest, 3)
        assert (await engine.health()).policy_version == 3
        g = await engine.generate([*context, *first.ids], params(), session="a")
        assert g.policy_version == 3
        assert g.cached_tokens == 0

    async def test_sleep_and_wake(self, engine, context):
        expected = await engine.generate(context, params(), session="a")
        await engine.sleep()
        with pytest.raises(EngineFailure, match="wake"):
            await engine.generate(context, params(), session="b")
        await engine.wake()
        assert (await engine.generate(context, params(), session="b")).ids == expected.ids

    async def test_close_twice_and_no_call_hangs_after_it(self, slow, context):
        task = asyncio.create_task(slow.generate(context, params(LONG), session="a"))
        await asyncio.sleep(0.02)
        await slow.close()
        await slow.close()
        with pytest.raises(EngineFailure):
            await task
        with pytest.raises(EngineFailure):
            await slow.generate(context, params(), session="b")
        with pytest.raises(EngineFailure):
            await slow.health()
