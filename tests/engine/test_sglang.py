"""The engine contract over a genuine SGLang server, and tests that need one. See sglang_server.py for where it runs."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_contract import LONG, EngineContract, params
from safetensors.torch import load_file, save_file
from sglang_server import Running, attached, available, running
from transformers import AutoModelForCausalLM

from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.errors import EngineAbort, EngineFailure
from agentrl.train.megatron.delivery.server_checksums import ServerLayout, server_checksums
from agentrl.types import FinishReason
from agentrl.weight_sync.disk import DiskSync

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu"),
    pytest.mark.asyncio(loop_scope="function"),
]


class Greedy(SGLangEngine):
    """SGLang's generations do not follow from the seed; at temperature 0 they are the same up to rounding."""

    async def generate(self, ids, sampling, *, session, images=()):
        return (
            await super().generate(ids, replace(sampling, temperature=0.0), session=session)
            if sampling.temperature == 1
            else (await super().generate(ids, sampling, session=session))
        )


def rounding(engine: SGLangEngine) -> float:
    """Tolerance in nats between log-probs of the same weights: fp32 on a CPU, bf16 on a GPU."""
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

    async def test_the_same_request_gives_the_same_generation(self, engine, context):
        first = await engine.generate(context, params(), session="a")
        for g in await asyncio.gather(*(engine.generate(context, params(), session=f"b{i}") for i in range(5))):
            assert len(g.ids) == len(first.ids)
            parts = next((n for n, (a, b) in enumerate(zip(g.ids, first.ids, strict=True)) if a != b), len(g.ids))
            until = parts + 1  # where rounding makes them part, both are as likely
            assert np.allclose(g.log_probs[:until], first.log_probs[:until], atol=2 * rounding(engine))

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
    async def test_a_pause_in_flight_changes_no_generation(self, slow, context, mode):
        task = asyncio.create_task(slow.generate(context, params(LONG), session="b"))
        await asyncio.sleep(0.1)
        await slow.pause(mode)
        await asyncio.sleep(0.1)
        assert not task.done()
        await slow.resume()
        got = await task
        assert len(got.ids) == LONG
        assert got.policy_version == 0

    async def test_a_pause_that_aborts_ends_requests_in_flight(self, slow, context):
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

    async def test_scores_equal_the_sampled_log_probs(self, engine, context):
        g = await engine.generate(context, params(16, temperature=0.99), session="a")
        scores = await engine.api.score([*context, *g.ids])
        assert len(scores) == len(context) + 15


class FolderTrainer:
    """The weights of a model folder. `export_weights` may alter one tensor, of which nothing else tells."""

    copies, dtype, altered = 1, "float32", ""

    def __init__(self, folder):
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tensors = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}

    def log_probs(self, rows):
        ids = torch.from_numpy(rows[0].tokens.astype(np.int64))
        with torch.no_grad():
            logits = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        return [np.array([0.0, *logits.gather(1, ids[1:, None])[:, 0].tolist()], np.float32)]

    def deliver(self, action, *, kind, ranks):
        assert action == "checksums"
        config = self.model.config
        heads = config.num_key_value_heads
        layout = ServerLayout(vocab_size=config.vocab_size, key_value_heads=heads, ranks=ranks)
        return [server_checksums(self.tensors.items(), layout, kind)]

    def export_weights(self, path):
        path.mkdir(parents=True)
        for file in self.folder.glob("*.json"):
            shutil.copy(file, path)
        altered = {self.altered: 1.5 * self.tensors[self.altered]} if self.altered else {}
        save_file(self.tensors | altered, path / "model.safetensors", metadata={"format": "pt"})
        return WeightsManifest(path, fingerprint(path))


@pytest.mark.parametrize("by", ["checksums", "log-probs"])
async def test_a_sync_with_one_altered_tensor_is_refused(server, tmp_path, by):
    async with attached(server) as engine:
        if engine.api.facts.device != "cpu":
            pytest.skip("compares float32, as servers on a CPU have it")
        assert engine.api.checksum_kind == ("sha256", 1)
        trainer = FolderTrainer(server.model)
        fleet = Fleet([Member(engine)], patience_s=1, start_timeout_s=1)
        sync = DiskSync(fleet, tmp_path)
        await fleet.start()
        if by == "log-probs":
            engine.api._facts = replace(engine.api.facts, checksums="")
        await sync.begin(trainer)
        await sync.sync(trainer, 1)
        assert sync.metrics()["sync/log_prob_diff_max"] < 1e-3
        trainer.altered = next(n for n in trainer.tensors if n.endswith("post_attention_layernorm.weight"))
        with pytest.raises(EngineFailure) as e:
            await sync.sync(trainer, 2)
        assert "engine: weights differ" in fleet.causes
        assert ("1 of" if by == "checksums" else "differ") in str(e.value)
        assert fleet.members[0].state != "ready"
        await fleet.close()
        sync.close()
    trainer.altered = ""
    async with attached(server) as engine:  # for the tests that follow
        await engine.update_weights(trainer.export_weights(tmp_path / "good"), 3)
