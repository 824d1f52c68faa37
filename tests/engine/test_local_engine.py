"""The local engine: bits and log-probs, sessions, weights, failures."""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_contract import LONG, params
from local_models import KINDS, build, decode, full_log_probs, local, manifest_of

from agentrl.engine.base import SamplingParams, WeightsManifest
from agentrl.errors import EngineAbort, EngineFailure
from agentrl.types import FinishReason


async def test_loading_a_model_writes_nothing_to_stderr(models, capfd):
    from transformers.utils import logging

    engine = await local(models["qwen3"])
    await engine.close()
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled(), "for the user's own code it is as it was"


class TestLocalNumbers:
    """Bits and log-probs."""

    @staticmethod
    async def run(engine, tag: str, at_once: int, n: int = 64):
        """Two turns of `n` sessions with contexts of many lengths, with limited concurrency."""
        gate = asyncio.Semaphore(at_once)

        async def one(i: int):
            async with gate:
                p = params(3 + i % 9, temperature=(1.0, 0.7, 0.0)[i % 3], seed=i)
                context = [(i * 7 + 3 * j) % 128 for j in range(1 + (i * 37) % 280)]
                first = await engine.generate(context, p, session=f"{tag}{i}")
                longer = [*context, *first.ids, *[(i + j) % 128 for j in range((i * 13) % 150)]]
                second = await engine.generate(longer, p, session=f"{tag}{i}")
                await engine.release(f"{tag}{i}")
                return (context, first), (longer, second)

        return await asyncio.gather(*(one(i) for i in range(n)))

    @pytest.mark.parametrize("kind", KINDS)
    async def test_results_are_bit_exact_at_any_load_and_equal_a_full_forward(self, models, kind):
        engine = await local(models[kind])
        n = 64 if kind == "qwen3" else 16
        all_at_once = await self.run(engine, "a", n, n)
        assert await self.run(engine, "b", 7, n) == all_at_once
        assert await self.run(engine, "c", 1, n) == all_at_once
        assert engine.preemptions == 0
        await engine.close()
        for i in (*range(6), 13, 14, n - 1):
            for context, g in all_at_once[i]:
                temperature = (1.0, 0.7, 0.0)[i % 3]
                expected, logits = full_log_probs(models[kind], context, g.ids, temperature)
                assert max(abs(a - b) for a, b in zip(expected.tolist(), g.log_probs, strict=True)) < 1e-4
                if temperature == 0:
                    assert logits.argmax(-1).tolist() == list(g.ids)

    async def test_one_key_head(self, tmp_path):
        engine = await local(build(tmp_path, num_attention_heads=2, num_key_value_heads=1))
        assert await self.run(engine, "a", 20, 20) == await self.run(engine, "b", 1, 20)
        await engine.close()

    async def test_sliding_window(self, tmp_path):
        folder = build(tmp_path, "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)
        engine = await local(folder)
        turns = await self.run(engine, "a", 12, 12)
        assert await self.run(engine, "b", 1, 12) == turns
        await engine.close()
        for context, g in turns[4]:
            expected, _ = full_log_probs(folder, context, g.ids, 0.7)
            assert max(abs(a - b) for a, b in zip(expected.tolist(), g.log_probs, strict=True)) < 1e-4

    async def test_preemption_changes_no_bit(self, models):
        roomy, narrow = await local(models["qwen3"]), await local(models["qwen3"], max_running=3)
        expected = await self.run(roomy, "a", 20, 20)
        found = await self.run(narrow, "a", 20, 20)
        answers = [
            [[(g.ids, g.log_probs, g.finish_reason) for _, g in one] for one in run] for run in (found, expected)
        ]
        assert answers[0] == answers[1]
        turns = []
        for turn in (0, 1):
            turns.append(await asyncio.gather(*(self.ask(narrow, expected[i][turn][0], i) for i in range(8))))
        assert narrow.preemptions > 0
        assert [list(t) for t in turns] == [
            [(expected[i][turn][1].ids, expected[i][turn][1].log_probs) for i in range(8)] for turn in (0, 1)
        ]
        await roomy.close()
        await narrow.close()

    @staticmethod
    async def ask(engine, context, i):
        p = params(3 + i % 9, temperature=(1.0, 0.7, 0.0)[i % 3], seed=i)
        g = await engine.generate(context, p, session=f"s{i}")
        return g.ids, g.log_probs

    async def test_samples_follow_the_distribution(self, models):
        engine = await local(models["qwen3"])
        drawn = []
        for start in range(0, 1500, 60):
            some = range(start, start + 60)
            asks = [engine.generate([9, 9], params(1, seed=i, temperature=0.7), session=str(i)) for i in some]
            drawn += [g.ids[0] for g in await asyncio.gather(*asks)]
            await asyncio.gather(*(engine.release(str(i)) for i in some))
        await engine.close()
        _, logits = full_log_probs(models["qwen3"], [9, 9], [0], 0.7)
        probs = (logits[0] / 0.7).softmax(-1).tolist()
        likely = sorted(range(128), key=probs.__getitem__)[-5:]
        for token in likely:
            share = drawn.count(token) / len(drawn)
            assert abs(share - probs[token]) < 4 * (probs[token] * (1 - probs[token]) / len(drawn)) ** 0.5

    @pytest.mark.parametrize(("cut", "allowed"), [({"top_k": 2}, 2), ({"top_p": 1e-6}, 1)])
    async def test_top_k_and_top_p(self, models, cut, allowed):
        engine = await local(models["qwen3"])
        asks = [engine.generate([9, 9], params(1, seed=i, **cut), session=str(i)) for i in range(40)]
        got = await asyncio.gather(*asks)
        await engine.close()
        assert len({g.ids for g in got}) == allowed
        _, logits = full_log_probs(models["qwen3"], [9, 9], [0], 1.0)
        best = logits[0].argsort(descending=True)[:allowed].tolist()
        assert {g.ids[0] for g in got} == set(best)
        expected, _ = full_log_probs(models["qwen3"], [9, 9], got[0].ids, 1.0)
        assert abs(expected[0].item() - got[0].log_probs[0]) < 1e-4


class TestLocalSessions:
    @pytest.fixture
    async def engine(self, models):
        engine = await local(models["qwen3"], max_running=2)
        yield engine
        await engine.close()

    async def test_a_changed_prefix_is_computed_again(self, engine, models):
        context = list(range(3, 90))
        await engine.generate(context, params(), session="a")
        changed = [*context[:50], 7, 7, *context[52:], *context]
        g = await engine.generate(changed, params(), session="a")
        expected, _ = full_log_probs(models["qwen3"], changed, g.ids, 1.0)
        assert max(abs(a - b) for a, b in zip(expected.tolist(), g.log_probs, strict=True)) < 1e-4
        fresh = await engine.generate(changed, params(), session="b")
        assert (fresh.ids, fresh.log_probs) == (g.ids, g.log_probs)

    async def test_stop_strings(self, engine):
        whole = (await engine.generate([5, 6], params(8), session="a")).ids
        stop = decode(whole)[7:10]
        assert decode(whole).find(stop) == 7
        g = await engine.generate([5, 6], params(8, stop=(stop,)), session="b")
        assert (g.ids, g.finish_reason, g.matched_stop) == (whole[:4], FinishReason.STOP, stop)

    async def test_the_models_end_token_ends(self, models, tmp_path):
        whole = (await (first := await local(models["qwen3"])).generate([5, 6], params(8), session="a")).ids
        await first.close()
        folder = build(tmp_path, eos_token_id=[1, whole[3]])
        engine = await local(folder)
        g = await engine.generate([5, 6], SamplingParams(8, seed=5), session="a")
        assert (g.ids, g.matched_stop) == (whole[: whole.index(whole[3]) + 1], whole[3])
        await engine.close()

    async def test_a_session_waits_for_a_slot_and_gets_it(self, engine):
        a = await engine.generate([5, 6], params(), session="a")
        await engine.generate([5, 6], params(), session="b")
        c = await asyncio.wait_for(engine.generate([5, 6], params(), session="c"), 30)
        assert c.ids == a.ids
        assert engine.preemptions == 1

    async def test_requests_of_one_session_wait_for_each_other(self, engine):
        got = await asyncio.gather(*(engine.generate([5, 6, i], params(seed=i), session="a") for i in range(4)))
        alone = [await engine.generate([5, 6, i], params(seed=i), session=f"x{i}") for i in range(4)]
        assert [(g.ids, g.log_probs) for g in got] == [(g.ids, g.log_probs) for g in alone]

    async def test_release_in_flight(self, engine):
        task = asyncio.create_task(engine.generate([5, 6], params(LONG), session="a"))
        await asyncio.sleep(0.02)
        await engine.release("a")
        with pytest.raises(EngineAbort):
            await task
        assert engine._scheduler.pool.used == 0

    async def test_a_generation_after_an_abort_is_bit_exact(self, engine):
        expected = await engine.generate(list(range(120)), params(LONG), session="a")
        task = asyncio.create_task(engine.generate(list(range(120)), params(LONG), session="b"))
        await asyncio.sleep(0.03)
        await engine.abort("b")
        with pytest.raises(EngineAbort):
            await task
        again = await engine.generate(list(range(120)), params(LONG), session="b")
        assert (again.ids, again.log_probs) == (expected.ids, expected.log_probs)

    @pytest.mark.parametrize("ids", [[-1], [128], [5, 10**9]])
    async def test_ids_outside_the_vocabulary(self, engine, ids):
        with pytest.raises(EngineFailure, match="outside"):
            await engine.generate(ids, params(), session="a")

    async def test_no_sleep_while_busy(self, engine):
        task = asyncio.create_task(engine.generate([5, 6], params(LONG), session="a"))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineFailure, match="in flight"):
            await engine.sleep()
        assert (await task).ids


class TestLocalWeights:
    @pytest.fixture
    async def engine(self, models):
        engine = await local(models["qwen3"])
        yield engine
        await engine.close()

    async def test_new_weights_change_generations(self, engine, others):
        old = await engine.generate([5, 6], params(), session="a")
        await engine.update_weights(manifest_of(others), 1)
        new = await engine.generate([5, 6], params(), session="a")
        assert (new.policy_version, new.cached_tokens) == (1, 0)
        assert new.log_probs != old.log_probs
        expected, _ = full_log_probs(others, [5, 6], new.ids, 1.0)
        assert max(abs(a - b) for a, b in zip(expected.tolist(), new.log_probs, strict=True)) < 1e-4

    async def has_tokens(self, engine):
        """Wait until session a has sampled a token."""
        for _ in range(30_000):
            session = engine._scheduler._running.get("a")
            if session is not None and session.active.ids:
                return
            await asyncio.sleep(0.001)

    async def test_no_generation_mixes_versions(self, engine, others):
        task = asyncio.create_task(engine.generate([5, 6], params(LONG), session="a"))
        await self.has_tokens(engine)
        await engine.update_weights(manifest_of(others), 1)
        with pytest.raises(EngineAbort, match="weights"):
            await task

    async def interrupted(self, models, weights: Path, sampling: SamplingParams):
        """A generation that a weight update to version 1 interrupts."""
        engine = await local(models["qwen3"], keep_interrupted=True)
        task = asyncio.create_task(engine.generate([5, 6], sampling, session="a"))
        await self.has_tokens(engine)
        await engine.update_weights(manifest_of(weights), 1)
        generation = await task
        await engine.close()
        return generation

    async def test_an_interrupted_generation_continues_with_the_new_weights(self, models, others):
        g = await self.interrupted(models, others, params(LONG))
        (_, old), (_, new) = g.versions
        assert [v for v, _ in g.versions] == [0, 1]
        assert old + new == len(g.ids) == LONG
        for folder, part in ((models["qwen3"], slice(0, old)), (others, slice(old, None))):
            expected, _ = full_log_probs(folder, [5, 6], g.ids, 1.0)
            pairs = zip(expected.tolist()[part], g.log_probs[part], strict=True)
            assert max(abs(a - b) for a, b in pairs) < 1e-4, "log-probs are those of the token's own version"

    async def test_an_interruption_changes_no_token_if_the_weights_are_equal(self, models):
        engine = await local(models["qwen3"])
        whole = await engine.generate([5, 6], params(LONG), session="a")
        await engine.close()
        stop = decode(whole.ids[LONG - 4 : LONG - 1])
        g = await self.interrupted(models, models["qwen3"], params(LONG, stop=(stop,)))
        assert len(g.versions) == 2
        assert (g.ids, g.log_probs) == (whole.ids[: LONG - 1], whole.log_probs[: LONG - 1])
        assert g.matched_stop == stop

    async def test_a_request_without_tokens_starts_again(self, engine, others):
        await engine.pause()
        task = asyncio.create_task(engine.generate([5, 6], params(), session="a"))
        await asyncio.sleep(0.01)
        await engine.update_weights(manifest_of(others), 1)
        await engine.resume()
        assert (await task).policy_version == 1

    async def refused(self, engine, manifest: WeightsManifest, match: str):
        before = await engine.generate([5, 6], params(), session="a")
        with pytest.raises(EngineFailure, match=match):
            await engine.update_weights(manifest, 9)
        after = await engine.generate([5, 6], params(), session="b")
        assert (after.ids, after.log_probs, after.policy_version) == (before.ids, before.log_probs, 0)

    async def test_wrong_fingerprint(self, engine, others):
        await self.refused(engine, WeightsManifest(others, "0" * 32), "fingerprint")

    async def test_wrong_shapes(self, engine, tmp_path):
        await self.refused(engine, manifest_of(build(tmp_path, seed=1, intermediate_size=40)), "shape")

    async def test_wrong_names(self, engine, tmp_path):
        await self.refused(engine, manifest_of(build(tmp_path, seed=1, num_hidden_layers=1)), "missing")
        await self.refused(
            engine, manifest_of(build(tmp_path, seed=1, num_hidden_layers=3)), "not a tensor of this model"
        )

    async def test_weights_that_are_not_finite(self, engine, tmp_path, others):
        altered(others, tmp_path, "model.norm.weight", 3)
        await self.refused(engine, manifest_of(tmp_path), "model.norm.weight: holds values that are not finite")

    async def test_no_file_and_a_file_cut_short(self, engine, tmp_path, others):
        await self.refused(engine, WeightsManifest(tmp_path, ""), "cannot be read")
        file = others / "model.safetensors"
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-100])
        await self.refused(engine, WeightsManifest(tmp_path, manifest_of(others).fingerprint), "cannot be read")

    async def test_tied_embeddings(self, tmp_path):
        a, b = build(tmp_path / "a", tie_word_embeddings=True), build(tmp_path / "b", seed=1, tie_word_embeddings=True)
        engine = await local(a)
        await engine.update_weights(manifest_of(b), 1)
        g = await engine.generate([5, 6], params(), session="a")
        await engine.close()
        expected, _ = full_log_probs(b, [5, 6], g.ids, 1.0)
        assert max(abs(x - y) for x, y in zip(expected.tolist(), g.log_probs, strict=True)) < 1e-4


class TestLocalFaults:
    async def test_a_fault_in_the_thread_fails_all_requests(self, models):
        engine = await local(models["qwen3"])

        def broken(*args):
            raise ZeroDivisionError("a fault")

        engine._scheduler.model.forward = broken
        results = await asyncio.gather(
            *(engine.generate([5], params(), session=s) for s in "abc"), return_exceptions=True
        )
        assert all(isinstance(r, EngineFailure) and "ZeroDivisionError" in str(r) for r in results)
        for call in (engine.health(), engine.abort(), engine.generate([5], params(), session="d")):
            with pytest.raises(EngineFailure, match="a fault"):
                await call
        await engine.close()

    async def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(EngineFailure, match="could be loaded"):
            await local(tmp_path)

    async def test_a_model_whose_weights_are_not_finite(self, tmp_path, models):
        altered(models["qwen3"], tmp_path, "model.norm.weight", 3)
        with pytest.raises(EngineFailure, match=r"1 tensors hold values that are not finite: model\.norm\.weight"):
            await local(tmp_path)

    async def test_logits_that_are_not_finite_reach_no_other_session(self, models):
        engine = await local(models["qwen3"])
        context = list(range(5, 55))
        expected = await engine.generate(context, params(), session="a")
        pool = engine._scheduler.pool
        assert engine._scheduler._sessions["a"].blocks == [1]
        with torch.inference_mode():
            for keys, values in pool._layers.values():
                keys[1], values[1] = float("nan"), float("nan")
        with pytest.raises(EngineFailure, match=r"not finite \(log-prob nan\); all weights are finite"):
            await engine.generate([*context, *expected.ids, 7], params(), session="a")
        await engine.release("a")
        again = await engine.generate(context, params(), session="b")
        assert engine._scheduler._sessions["b"].blocks == [1], "the same block"
        assert (again.ids, again.log_probs) == (expected.ids, expected.log_probs)
        engine._scheduler.model.model.model.norm.weight.fill_(float("nan"))
        with pytest.raises(EngineFailure, match=r"weights that are not finite: model\.norm\.weight"):
            await engine.generate(context, params(), session="c")
        await engine.close()

    async def test_not_started(self, models):
        from agentrl.engine.local.engine import LocalEngine

        engine = LocalEngine(models["qwen3"])
        with pytest.raises(EngineFailure, match="start"):
            await engine.generate([5], params(), session="a")
        await engine.close()


def altered(model: Path, target: Path, name: str, index: int) -> None:
    """A copy of a model in which one number of one tensor is not finite."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors[name][index] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((model / "config.json").read_bytes())
