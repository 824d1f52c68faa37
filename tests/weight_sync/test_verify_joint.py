"""A sync is refused when one tensor of the engine is not the trainer's, whichever way the weights came."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from aiohttp import web
from doubles import EMBEDDED as MODEL
from doubles import until
from safetensors.numpy import load_file, save_file
from sglang_double import Double
from transformers import AutoModelForCausalLM

from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import SamplingParams, WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import UPDATE_ATTEMPTS, Fleet
from agentrl.engine.sglang.members import Member
from agentrl.errors import EngineFailure
from agentrl.run.evaluation_engine import EvaluationEngine
from agentrl.train.base import DeliveryReport
from agentrl.weight_sync.broadcast import BroadcastSync
from agentrl.weight_sync.colocated import ColocatedSync
from agentrl.weight_sync.disk import DiskSync
from agentrl.weight_sync.verify import LIMITS, compare, expected_weights, probe_ids

WAYS = {"disk": DiskSync, "colocated": partial(ColocatedSync, share_gpus=False), "split": BroadcastSync}
FIVE = SamplingParams(5)


def new_weights(version):
    return {name: np.full(8, n + version, np.float32) for n, name in enumerate("abc")}


def log_probs(tensors, ids):
    """Of ids[1:]; every tensor is in every one of them."""
    return [-1.0 - 0.01 * abs(float(sum(t[i % 8] for t in tensors.values()))) for i in ids[1:]]


def checksums(tensors):
    return {name: hashlib.sha256(t.tobytes()).hexdigest()[:16] for name, t in tensors.items()}


class Server(Double):
    """It holds weights: its log-probs and checksums are theirs. `altered` names a tensor that it spoils when weights come."""

    tensors = new_weights(0)
    altered = ""
    tells_checksums = True

    def take(self, tensors):
        self.tensors = {n: t + np.float32(n == self.altered) for n, t in tensors.items()}

    async def handle(self, request):
        if request.path == "/openapi.json":
            paths = ["/begin_weight_update", *(["/weights_checker"] if self.tells_checksums else [])]
            return web.json_response({"paths": {path: {} for path in paths}})
        return await super().handle(request)

    async def weights_checker(self, _, __):
        return web.json_response({"success": True, "ranks": [{"checksums": checksums(self.tensors)}]})

    async def update_weights_from_disk(self, request, body):
        self.take(load_file(f"{body['model_path']}/model.safetensors"))
        return await super().update_weights_from_disk(request, body)

    async def destroy_weights_update_group(self, _, __):
        return web.json_response({})

    async def _answer(self, body):
        answer = await super()._answer(body)
        if "logprob_start_len" not in body:
            return answer
        scores = [None, *log_probs(self.tensors, body["input_ids"])]
        meta = {"input_token_logprobs": [[s, i, None] for s, i in zip(scores, body["input_ids"], strict=True)]}
        return web.json_response({"output_ids": [], "meta_info": meta})


class Trainer:
    """Gives its weights to servers in each of the ways."""

    copies, stages, dtype, restarts = 1, 1, "float32", 0

    def __init__(self, servers):
        self.servers = {s.address: s for s in servers}
        self.tensors = new_weights(1)
        self.receivers, self.groups = [], 0

    def log_probs(self, rows, *, reference=False, trained_only=False):
        return [np.array([0.0, *log_probs(self.tensors, r.tokens.tolist())], np.float32) for r in rows]

    def export_weights(self, path):
        path.mkdir(parents=True)
        save_file(self.tensors, path / "model.safetensors")
        return WeightsManifest(path, fingerprint(path))

    def deliver(self, action, *, receivers=None, **_):
        if action == "checksums":
            return [checksums(self.tensors)]
        self.groups += action == "open_group"
        self.receivers = receivers or self.receivers
        if action != "open_group":
            for receiver in self.receivers:
                self.servers[receiver.address].take(self.tensors)
        return [DeliveryReport()]


@pytest.fixture(params=["checksums", "log-probs"])
async def servers(request):
    started = [await Server().start() for _ in range(2)]
    for s in started:
        s.tells_checksums = request.param == "checksums"
    yield started
    for s in started:
        await s.stop()


@pytest.fixture(params=sorted(WAYS))
def make_sync(request, tmp_path):
    """Makes the sync of a fleet."""
    made = []

    def make(fleet):
        made.append(WAYS[request.param](fleet, tmp_path))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


async def fleet_of(*servers, wait_s=0.6):
    members = [Member(SGLangEngine(s.address, timeout_s=5)) for s in servers]
    fleet = Fleet(members, patience_s=wait_s, start_timeout_s=wait_s)
    await fleet.start()
    return fleet


async def test_weights_that_arrive_as_they_are_pass(servers, make_sync):
    fleet, trainer = await fleet_of(*servers), Trainer(servers)
    sync = make_sync(fleet)
    await sync.begin(trainer)
    await sync.sync(trainer, 1)
    assert sync.metrics()["sync/log_prob_diff_max"] < 1e-6
    assert "verify_s" in sync.seconds
    assert {(await fleet.generate([1], FIVE, session=s)).policy_version for s in "ab"} == {1}
    assert [m.state for m in fleet.members] == ["ready", "ready"]
    await fleet.close()


async def test_a_group_is_formed_again_with_ranks_that_were_started_again(servers, tmp_path):
    fleet, trainer = await fleet_of(*servers), Trainer(servers)
    sync = WAYS["split"](fleet, tmp_path)
    await sync.begin(trainer)
    for version, restarts, groups in ((1, 0, 1), (2, 0, 1), (3, 1, 2), (4, 1, 2)):
        trainer.restarts = restarts
        await sync.sync(trainer, version)
        assert trainer.groups == groups
    await fleet.close()
    sync.close()


async def test_servers_of_evaluations_keep_their_weights_while_the_trainer_goes_on(servers, tmp_path):
    trainer = Trainer(servers)
    fleet = Fleet([Member(SGLangEngine(s.address, timeout_s=5)) for s in servers], patience_s=0.6, start_timeout_s=0.6)
    evaluations = EvaluationEngine(fleet, DiskSync(fleet, tmp_path))
    await evaluations.start(trainer)
    await evaluations.load(trainer, 7)
    before = {name: tensor.copy() for name, tensor in trainer.tensors.items()}
    trainer.tensors = new_weights(5)
    assert (await fleet.generate([1], FIVE, session="a")).policy_version == 7
    assert all(np.array_equal(s.tensors[name], before[name]) for s in servers for name in before)
    assert fleet.recovery is None, "the trainer's weights are not those of version 7 any more"
    await evaluations.close()


async def test_one_altered_tensor_is_refused(servers, make_sync):
    fleet, trainer = await fleet_of(servers[0]), Trainer(servers)
    sync = make_sync(fleet)
    await sync.begin(trainer)
    servers[0].altered = "b"
    with pytest.raises(EngineFailure) as e:
        await sync.sync(trainer, 1)
    assert ("1 of 3 parameters" if servers[0].tells_checksums else "log-probs at") in str(e.value)
    assert "engine: weights differ" in fleet.causes
    assert fleet.members[0].state != "ready"
    assert fleet.policy_version == 0
    await fleet.close()


@pytest.mark.parametrize("altered", "abc")
async def test_every_tensor_counts(servers, altered):
    fleet, trainer = await fleet_of(servers[0]), Trainer(servers)
    servers[0].altered = altered
    servers[0].take(trainer.tensors)
    failed, _ = await compare([fleet.members[0].engine], await expected_weights(trainer, fleet, [1, 2, 3]))
    assert [f.cause for f in failed.values()] == ["engine: weights differ"]
    servers[0].altered = ""
    servers[0].take(trainer.tensors)
    assert (await compare([fleet.members[0].engine], await expected_weights(trainer, fleet, [1, 2, 3])))[0] == {}
    await fleet.close()


async def test_a_lone_server_with_an_altered_tensor_is_tried_as_often_as_others(servers, tmp_path):
    fleet, trainer = await fleet_of(servers[0], wait_s=1.5), Trainer(servers)
    sync = DiskSync(fleet, tmp_path)
    await sync.begin(trainer)
    servers[0].altered = "b"
    try:
        with pytest.raises(EngineFailure, match="no engine accepted the weights of version 1"):
            await sync.sync(trainer, 1)
        assert servers[0].calls.count("/update_weights_from_disk") == UPDATE_ATTEMPTS
    finally:
        await fleet.close()
        sync.close()


async def test_of_two_servers_only_the_one_with_the_altered_tensor_is_out(servers, make_sync):
    fleet, trainer = await fleet_of(*servers), Trainer(servers)
    sync = make_sync(fleet)
    await sync.begin(trainer)
    servers[1].altered = "b"
    await sync.sync(trainer, 1)
    assert fleet.causes == {"engine: weights differ": 1}
    for s in "abcd":
        await fleet.generate([1], FIVE, session=s)
    assert [sum("rid" in body for body in s.bodies) for s in servers] == [4, 0]
    await fleet.close()


async def test_a_server_that_comes_back_is_verified_too(servers, make_sync):
    fleet, trainer = await fleet_of(*servers), Trainer(servers)
    sync = make_sync(fleet)
    await sync.begin(trainer)
    await sync.sync(trainer, 1)
    servers[0].altered, servers[0].weight_version = "c", "default"
    fleet.suspect(servers[0].address, EngineFailure("reset", "engine: connection lost"))
    taken = servers[0].calls.count("/update_weights_from_disk")
    await until(lambda: "differ" in fleet.members[0].reason or "not the trainer's" in fleet.members[0].reason)
    assert servers[0].calls.count("/update_weights_from_disk") > taken
    servers[0].altered = ""
    await until(lambda: fleet.members[0].state == "ready")
    assert checksums(servers[0].tensors) == checksums(trainer.tensors)
    await fleet.close()


async def test_a_folder_altered_on_the_way_never_reaches_a_server(servers, tmp_path):
    class Careless(Trainer):
        def export_weights(self, path):
            manifest = super().export_weights(path)
            save_file(self.tensors | {"b": self.tensors["b"] + 1}, path / "model.safetensors")
            return manifest

    fleet, trainer = await fleet_of(*servers), Careless(servers)
    sync = DiskSync(fleet, tmp_path)
    await sync.begin(trainer)
    with pytest.raises(EngineFailure, match="fingerprint") as e:
        await sync.sync(trainer, 1)
    assert e.value.cause == "weights fingerprint"
    assert not any("/update_weights_from_disk" in s.calls for s in servers)
    await fleet.close()
    sync.close()


async def test_a_dead_servers_sessions_are_dropped(servers):
    """They go elsewhere, and the server that comes back has room for new ones."""
    fleet = await fleet_of(*servers)
    for name in ("a0", "b0", "a1", "b1", "a2", "b2"):
        await fleet.generate([1], FIVE, session=name)
    first, second = fleet.members
    held = set(first.sessions)
    assert (len(held), len(second.sessions)) == (3, 3)
    fleet.suspect(servers[0].address, EngineFailure("reset", "engine: connection lost"))
    assert first.sessions == set()
    moved = sorted(held)[0]
    await fleet.generate([1], FIVE, session=moved)
    assert moved in second.sessions
    await until(lambda: first.state == "ready")
    before = [len(s.bodies) for s in servers]
    await fleet.generate([1], FIVE, session=moved)
    for n in range(3):
        await fleet.generate([1], FIVE, session=f"new{n}")
    assert [len(s.bodies) - n for s, n in zip(servers, before, strict=True)] == [3, 1]
    assert first.sessions == {"new0", "new1", "new2"}
    forgotten = sorted(held)[1]
    for n in range(2):
        await fleet.generate([1], FIVE, session=f"more{n}")
    await fleet.generate([1], FIVE, session=forgotten)
    assert forgotten in second.sessions, "it is placed again, on the server with the fewest sessions"
    await fleet.close()


# -- log-probs alone, of the embedded model ------------------------------------------------------------------------------

# embeddings, and what each layer has; one layer's tensor is lost at a time
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "up_proj", "down_proj", "post_attention_layernorm")
WHOLE = ("embed_tokens", "model.norm")


class Policy:
    """The embedded model as trainer and as engine at once; it gives no checksums."""

    copies, dtype, checksum_kind, address, state = 1, "float32", ("", 1), "here", "ready"

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.vocab_size, self.context_length = self.model.config.vocab_size, 4096
        self.engine, self.api, self.members = self, self, [self]

    async def greedy(self, ids, count):
        ids = list(ids)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-count:]

    async def score(self, ids, *, adapter=None):
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return logits.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    def log_probs(self, rows):
        return [np.array([0.0, *asyncio.run(self.score(r.tokens.tolist()))], np.float32) for r in rows]


@pytest.fixture(scope="module")
def policy():
    """With the probe of a sync; one thread, since a forward pass is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Policy()
    yield made, asyncio.run(probe_ids(made))
    torch.set_num_threads(threads)


@contextlib.contextmanager
def without(tensor):
    """The tensor is zeros in the block, as one that never arrived."""
    kept, tensor.data = tensor.data, torch.zeros_like(tensor)
    try:
        yield
    finally:
        tensor.data = kept


@pytest.mark.parametrize("name", [*NAMES, *WHOLE])
async def test_log_probs_alone_show_a_tensor_that_was_lost(policy, name):
    """In every layer, also with the limit of bfloat16."""
    both, probe = policy
    expected = await expected_weights(both, both, probe)
    loose = replace(expected, limit=LIMITS["bfloat16"])
    assert (await compare([both], expected))[0] == {}
    lost = [p for n, p in both.model.named_parameters() if name in n]
    assert len(lost) == (1 if name in WHOLE else both.model.config.num_hidden_layers)
    for tensor in lost:
        with without(tensor):
            assert set((await compare([both], loose))[0]) == {both.address}


async def test_the_same_weights_in_bfloat16_pass(policy):
    both, probe = policy
    expected = replace(await expected_weights(both, both, probe), limit=LIMITS["bfloat16"] / 2)
    kept = {n: p.data for n, p in both.model.named_parameters()}
    both.model.to(torch.bfloat16)
    try:
        failed, difference = await compare([both], expected)
    finally:
        for n, p in both.model.named_parameters():
            p.data = kept[n]
    assert failed == {}
    assert difference > 1e-3


def test_the_probe_has_several_different_tokens(policy):
    _, probe = policy
    assert len(probe) == 48
    assert len(set(probe)) >= 4
