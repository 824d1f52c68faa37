"""The SGLang engine and the fleet against a scripted HTTP server."""

import asyncio
import json
from pathlib import Path

import pytest
from doubles import until, weights
from engine_contract import EngineContract
from sglang_double import Double, count_up

from agentrl.core.message_images import PlacedImage, as_image
from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import SamplingParams, WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.protocol import ServerFacts, warn_if_untested
from agentrl.errors import ConfigError, EngineAbort, EngineFailure
from agentrl.types import FinishReason

Pil = pytest.importorskip("PIL.Image")
MODEL = Path(__file__).parents[2] / "agentrl/assets/search_r1_3m"
FIVE = SamplingParams(5)


def facts(*, memory_saver):
    return ServerFacts(
        version="0.5.23",
        device="cuda",
        tp_size=1,
        brackets=True,
        checksums="",
        memory_saver=memory_saver,
        routed_experts=False,
        lora=False,
        deterministic=False,
        context_length=256,
    )


@pytest.fixture
async def engine(double):
    engine = SGLangEngine(double.address, timeout_s=5, generate_timeout_s=5)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def manifest(tmp_path):
    return weights(tmp_path / "w")


async def test_the_request_and_the_generation(engine, double):
    sampling = SamplingParams(5, temperature=0.7, top_p=0.9, stop=("</search>",), stop_token_ids=(3,), ignore_eos=True)
    g = await engine.generate([1, 2], sampling, session="a")
    assert (g.ids, g.log_probs, g.finish_reason) == ((3, 4, 5, 6, 7), (-0.5,) * 5, FinishReason.LENGTH)
    body = double.bodies[0]
    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"] is True
    asked = body["sampling_params"]
    assert asked["no_stop_trim"] is True
    assert asked["skip_special_tokens"] is False
    assert (asked["temperature"], asked["stop"], asked["stop_token_ids"]) == (0.7, ["</search>"], [3])
    assert "sampling_seed" not in asked


async def test_images_are_sent_beside_the_ids_with_one_placeholder_each(double, engine):
    images = [as_image({"image": Pil.new("RGB", (9, n), "red")}) for n in (4, 5)]
    ids = [1, 77, 77, 77, 2, 77, 77, 3]
    placed = [PlacedImage(images[0], 1, 3), PlacedImage(images[1], 5, 2)]
    double.image_tokens = (3, 2)
    g = await engine.generate(ids, FIVE, session="a", images=placed)
    assert g.ids == (4, 5, 6, 7, 8)
    body = double.bodies[0]
    assert body["input_ids"] == [1, 77, 2, 77, 3]
    assert [as_image({"image_url": u}) for u in body["image_data"]] == images
    assert body["sampling_params"]["max_new_tokens"] == 5
    double.image_tokens = (3, 3)  # a server whose processor is set otherwise
    with pytest.raises(EngineFailure, match="read 9 tokens with images, the renderer gave 8") as e:
        await engine.generate(ids, FIVE, session="a", images=placed)
    assert e.value.cause == "engine: image expansion differs"
    await engine.generate(ids, FIVE, session="a")
    assert "image_data" not in double.bodies[-1]


async def test_max_new_tokens_is_what_the_context_leaves(engine, double):
    await engine.generate([1] * 250, SamplingParams(100), session="a")
    assert double.bodies[0]["sampling_params"]["max_new_tokens"] == 6


async def test_a_request_on_a_stale_connection_is_sent_again_once(engine, double):
    await engine.generate([1], FIVE, session="a")
    double.faults = ["close"]
    assert (await engine.generate([1], FIVE, session="a")).ids
    double.faults = ["close", "close"]
    with pytest.raises(EngineFailure) as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: connection lost"


@pytest.mark.parametrize(("given", "model", "least"), [(None, 512, 256), (None, 128, 128), (64, 128, 64)])
async def test_the_context_length_is_the_smallest_known(double, tmp_path, given, model, least):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": model}))
    engine = SGLangEngine(double.address, model_dir=tmp_path, context_length=given)
    await engine.start()
    (tmp_path / "config.json").unlink()  # read once
    assert (engine.context_length, engine.vocab_size) == (least, 50)
    assert (await engine.health()).context_length == least
    await engine.close()


async def test_a_request_on_a_new_connection_is_not_sent_again(double):
    double.faults = ["close"]
    engine = SGLangEngine(double.address)
    engine.api._facts = facts(memory_saver=False)
    with pytest.raises(EngineFailure):
        await engine.generate([1], FIVE, session="a")
    assert len(double.bodies) == 1
    await engine.close()


async def test_a_request_reset_during_the_response_is_not_sent_again(engine, double):
    await engine.generate([1], FIVE, session="a")
    double.faults = ["reset"]
    with pytest.raises(EngineFailure) as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: connection lost"
    assert len(double.bodies) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_error_statuses_are_failures_and_never_sent_again(engine, double, status):
    double.faults = [status]
    with pytest.raises(EngineFailure, match="by the script") as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == f"engine: HTTP {status}"
    assert len(double.bodies) == 1


async def test_ids_and_log_probs_must_belong_together(engine, double, monkeypatch):
    async def wrong(_, body):
        from aiohttp import web

        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 7, None]],
            "weight_version": "default",
            "prompt_tokens": 1,
        }
        return web.json_response({"output_ids": [8], "meta_info": meta})

    monkeypatch.setattr(double, "generate", wrong)
    with pytest.raises(EngineFailure, match="ids of output_token_logprobs"):
        await engine.generate([1], FIVE, session="a")


async def test_a_response_of_other_weights_is_a_failure(engine, double):
    double.weight_version = "4"
    with pytest.raises(EngineFailure, match="restarted") as e:
        await engine.generate([1], FIVE, session="a")
    assert e.value.cause == "engine: old weights"


async def test_paused_engines_receive_no_requests(engine, double):
    await engine.pause()
    task = asyncio.create_task(engine.generate([1], FIVE, session="a"))
    await asyncio.sleep(0.05)
    assert not double.bodies
    await engine.resume()
    assert (await task).ids


async def test_requests_without_tokens_start_again_with_new_weights(engine, double, manifest):
    double.delay_s = 60
    task = asyncio.create_task(engine.generate([1], FIVE, session="a"))
    await until(lambda: double.bodies)
    await engine.update_weights(manifest, 3)
    double.delay_s = 0
    g = await task
    assert g.policy_version == 3
    assert len(double.bodies) == 2


async def interrupted(engine, double, manifest, sampled: int, sampling=FIVE):
    """A generation that a weight update to version 3 interrupts after some tokens."""
    double.delay_s, double.sampled = 60, sampled
    task = asyncio.create_task(engine.generate([1], sampling, session="a"))
    await until(lambda: double.bodies)
    await engine.pause()
    await engine.update_weights(manifest, 3)
    double.delay_s = 0
    await engine.resume()
    return await task


async def test_an_interrupted_generation_keeps_its_tokens_under_one_budget(engine, double, manifest):
    engine.keep_tokens(None)
    g = await interrupted(engine, double, manifest, sampled=2)
    assert (g.ids, g.finish_reason) == ((2, 3, 4, 5, 6), FinishReason.LENGTH)
    assert g.versions == ((0, 2), (3, 3))
    assert len(g.log_probs) == 5
    first, second = double.bodies
    assert second["input_ids"] == [*first["input_ids"], 2, 3]
    assert second["sampling_params"]["max_new_tokens"] == 3
    assert g.context_crc == ids_checksum([1])


async def test_without_being_told_to_keep_them_an_interrupted_generation_is_aborted(engine, double, manifest):
    with pytest.raises(EngineAbort, match="in flight"):
        await interrupted(engine, double, manifest, sampled=2)


@pytest.mark.parametrize("stop", ["3.4", "2.3.4"])
async def test_a_stop_string_that_an_interruption_divides_ends_the_generation(engine, double, manifest, stop):
    engine.keep_tokens(lambda ids: "".join(f"{i}." for i in ids))
    g = await interrupted(engine, double, manifest, 2, SamplingParams(5, stop=(stop,)))
    assert (g.ids, g.finish_reason, g.matched_stop) == ((2, 3, 4), FinishReason.STOP, stop)
    assert g.versions == ((0, 2), (3, 1))


async def test_a_stop_string_cannot_be_divided_where_nothing_decodes(engine, double, manifest):
    engine.keep_tokens(None)
    with pytest.raises(EngineAbort, match="in flight"):
        await interrupted(engine, double, manifest, 2, SamplingParams(5, stop=("3.4",)))


async def test_spans_of_versions_that_the_server_reports_are_kept(engine, double):
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    double.weight_version, double.spans, engine.policy_version = "4", spans, 4
    g = await engine.generate([1], FIVE, session="a")
    assert g.versions == ((0, 2), (4, 3))


async def test_abort_takes_effect_at_once(engine, double):
    double.delay_s = 60
    tasks = [asyncio.create_task(engine.generate([1], FIVE, session=s)) for s in "ab"]
    await until(lambda: len(double.bodies) == 2)
    await engine.abort("a")
    with pytest.raises(EngineAbort):
        await tasks[0]
    assert not tasks[1].done()
    tasks[1].cancel()


@pytest.mark.parametrize(("version", "brackets"), [("0.5.17", False), ("0.5.23", True)])
async def test_brackets_follow_the_version(version, brackets):
    double = await Double(version=version).start()
    engine = SGLangEngine(double.address)
    await engine.start()
    await engine.begin_weights(bracket=True)
    await engine.end_weights(2)
    assert ("/begin_weight_update" in double.calls) is brackets
    assert ("/end_weight_update" in double.calls) is brackets
    assert double.weight_version == "2"
    await engine.close()
    await double.stop()


async def test_an_untested_version_warns():
    double = await Double(version="0.5.11").start()
    engine = SGLangEngine(double.address)
    warn_if_untested.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"0\.5\.11 was not tested"):
        await engine.start()
    await engine.close()
    await double.stop()


@pytest.mark.parametrize("version", ["0.4.1", "0.5.9.post1"])
async def test_a_server_of_a_version_that_is_too_old_is_refused(version):
    double = await Double(version=version).start()
    engine = SGLangEngine(double.address)
    with pytest.raises(ConfigError, match=rf"the server at {double.address} has SGLang {version}.*needs 0\.5\.10"):
        await engine.start()
    await engine.close()
    await double.stop()


async def test_weights_that_do_not_fit_never_reach_the_server(engine, double, manifest):
    with pytest.raises(EngineFailure, match="fingerprint"):
        await engine.update_weights(WeightsManifest(manifest.path, "0" * 32), 3)
    assert "/update_weights_from_disk" not in double.calls
    assert (await engine.generate([1], FIVE, session="a")).policy_version == 0


# -- the fleet -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def doubles():
    servers = [await Double(delay_s=0.01).start() for _ in range(2)]
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def fleet(doubles):
    fleet = Fleet([Member(SGLangEngine(d.address, timeout_s=5)) for d in doubles], patience_s=10, start_timeout_s=10)
    await fleet.start()
    yield fleet
    await fleet.close()


async def ask(fleet, session="a"):
    return await fleet.generate([1], FIVE, session=session)


async def test_sessions_stick_and_spread(fleet, doubles):
    for _ in range(3):
        await asyncio.gather(*(ask(fleet, s) for s in "abcd"))
    assert [len(d.bodies) for d in doubles] == [6, 6]
    for s in "abcd":
        await fleet.release(s)
    assert not any(m.sessions for m in fleet.members)


async def test_503_for_a_while_fails_one_request_and_then_waits(doubles):
    fleet = Fleet([Member(SGLangEngine(doubles[0].address, timeout_s=5))], patience_s=10, start_timeout_s=10)
    await fleet.start()
    doubles[0].refuse = dict.fromkeys(["/generate", "/model_info", "/server_info"], 503)
    with pytest.raises(EngineFailure) as e:
        await ask(fleet)
    assert e.value.cause == "engine: HTTP 503"
    waiting = asyncio.create_task(ask(fleet))
    await asyncio.sleep(1)
    assert not waiting.done()
    doubles[0].refuse = {}
    assert (await waiting).ids
    assert fleet.causes == {"engine: HTTP 503": 1}
    await fleet.close()


async def test_a_4xx_takes_no_server_out(fleet, doubles):
    doubles[0].faults = [400]
    doubles[1].faults = [400]
    for s in "ab":
        with pytest.raises(EngineFailure):
            await ask(fleet, s)
    assert [m.state for m in fleet.members] == ["ready", "ready"]


async def test_a_server_that_came_back_with_old_weights_receives_the_current_ones(fleet, doubles, manifest):
    await fleet.update_weights(manifest, 2)

    async def recovery(engine):
        await engine.update_weights(manifest, fleet.policy_version)
        return True

    fleet.recovery = recovery
    doubles[0].weight_version = "default"
    answers = await asyncio.gather(*(ask(fleet, s) for s in "abcd"), return_exceptions=True)
    failed = [a for a in answers if isinstance(a, EngineFailure)]
    assert {f.cause for f in failed} == {"engine: old weights"}
    assert fleet.causes == {"engine: old weights": 1}
    await until(lambda: all(m.state == "ready" for m in fleet.members))
    assert doubles[0].weight_version == "2"
    assert {(await ask(fleet, s)).policy_version for s in "abcd"} == {2}


async def test_a_server_that_fails_an_update_is_discarded_and_the_others_continue(fleet, doubles, manifest):
    doubles[0].refuse = {"/update_weights_from_disk": 500}
    await fleet.update_weights(manifest, 1)
    assert fleet.members[0].state == "down"
    assert fleet.members[0].weights_unknown
    assert {(await ask(fleet, s)).policy_version for s in "abcd"} == {1}
    assert fleet.causes == {"engine: HTTP 500": 1}


async def test_an_update_that_no_server_accepts_is_an_error_and_ends(fleet, doubles, manifest):
    for d in doubles:
        d.refuse = {"/update_weights_from_disk": 500}
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailure, match="no engine"):
            await fleet.update_weights(manifest, 1)


async def test_refused_weights_leave_all_members_as_they_were(fleet, manifest):
    with pytest.raises(EngineFailure) as e:
        await fleet.update_weights(WeightsManifest(manifest.path, "0" * 32), 1)
    assert e.value.cause == "weights fingerprint"
    assert [m.state for m in fleet.members] == ["ready", "ready"]
    assert (await ask(fleet)).policy_version == 0


async def test_pause_and_resume_are_idempotent(fleet):
    await fleet.pause()
    await fleet.pause()
    task = asyncio.create_task(ask(fleet))
    await asyncio.sleep(0.05)
    assert not task.done()
    await fleet.resume()
    await fleet.resume()
    assert (await task).ids


async def test_an_ignored_end_token_while_others_apply(engine, double):
    """SGLang ignores either all stop tokens or none, so a request is continued after the model's end token."""

    def stop_at_50_and_60(body):
        ids = []
        for i in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            ids.append(body["input_ids"][-1] + i)
            if ids[-1] in (50, 60):
                break
        return ids

    double.answer, double.eos = stop_at_50_and_60, (50, 60)
    g = await engine.generate([45], SamplingParams(40, ignore_eos=True, stop_token_ids=(60,)), session="a")
    assert g.ids == tuple(range(46, 61))
    assert (g.finish_reason, g.matched_stop) == (FinishReason.STOP, 60)
    assert [len(b["input_ids"]) for b in double.bodies] == [1, 6]
    g = await engine.generate([45], SamplingParams(5, ignore_eos=True, stop_token_ids=(60,)), session="a")
    assert (g.ids, g.finish_reason, g.matched_stop) == ((46, 47, 48, 49, 50), FinishReason.LENGTH, None)


async def test_memory_is_released_and_resumed_by_tags(double, monkeypatch):
    asked = []

    async def note(request, body):
        from aiohttp import web

        asked.append((request.path, body["tags"]))
        return web.json_response({})

    monkeypatch.setattr(double, "release_memory_occupation", note, raising=False)
    monkeypatch.setattr(double, "resume_memory_occupation", note, raising=False)
    engine = SGLangEngine(double.address)
    await engine.start()
    engine.api._facts = facts(memory_saver=True)
    await engine.wake()
    assert asked == []
    await engine.sleep(("kv_cache", "weights"))
    with pytest.raises(EngineFailure, match="wake"):
        await engine.generate([1], FIVE, session="a")
    await engine.wake(("weights",), ready=False)
    with pytest.raises(EngineFailure, match="wake"):
        await engine.generate([1], FIVE, session="a")
    await engine.wake(("kv_cache",))
    await engine.wake(("kv_cache",))
    assert (await engine.generate([1], FIVE, session="a")).ids
    assert asked == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]
    await engine.close()


# -- the contract, over fleets of scripted servers ------------------------------------------------------------------------


def until_stopped(body):
    """The ids of `count_up` up to the first requested stop token."""
    stops = body["sampling_params"].get("stop_token_ids", ())
    ids = count_up(body)
    at = next((n for n, i in enumerate(ids) if i in stops), None)
    return ids if at is None else ids[: at + 1]


class TestFleet(EngineContract):
    deterministic = False

    @pytest.fixture
    def context(self):
        return [4, 8, 15, 16, 23, 42]

    @pytest.fixture
    async def servers(self):
        servers = [await Double(answer=until_stopped, cached=0).start() for _ in range(2)]
        yield servers
        for server in servers:
            await server.stop()

    @pytest.fixture
    async def engine(self, servers):
        fleet = Fleet([Member(SGLangEngine(s.address, timeout_s=5)) for s in servers])
        await fleet.start()
        yield fleet
        await fleet.close()

    @pytest.fixture
    def slow(self, engine, servers):
        for server in servers:
            server.delay_s = 0.5
        return engine

    @pytest.fixture
    def manifest(self, whole_manifest):
        return whole_manifest

    async def test_the_next_turn_finds_its_prefix(self):
        pytest.skip("scripted servers have no cache")


@pytest.fixture
def whole_manifest(manifest):
    return manifest
