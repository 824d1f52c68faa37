"""Images end to end: through environment, tools, runner, record, replay, page and Sample, over a small random Qwen2.5-VL."""

import asyncio
import dataclasses
import json
import pickle

import numpy as np
import pytest
from doubles import PARIS, make_runner
from vision import VisionEngine, call, log_probs, model_folder, picture, processed, vision_model, vision_renderer

from agentrl import Env, StepResult, ToolEnv, tool
from agentrl.config import build_config
from agentrl.core.message_images import images_in
from agentrl.errors import ConfigError, StoreError, TemplateError
from agentrl.gateway.driver import GatewayDriver
from agentrl.render import make_renderer
from agentrl.render.images import Images, images_of_model
from agentrl.render.token_report import token_report
from agentrl.replay.replayer import replay_group
from agentrl.rollout.process_pool import RemoteRunner
from agentrl.run.components import Components
from agentrl.run.training import train
from agentrl.store import EpisodeWriter, Recording, exactness_violations, from_record, read_episodes, to_record
from agentrl.store.episode_record import encode
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Observation, Provenance, StopReason, Task
from agentrl.view.episode_detail import episode_detail
from agentrl.view.html_export import html_of

MAP = Task(
    "map",
    ({"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "Where is this?"}]},),
    "Rome",
)
TEXTS = (call("zoom", level=2), call("zoom", level=3), "It is <|vision_start|> Rome.")

SHOWN = [picture(), picture(80, 80, 2), picture(80, 80, 3), picture(30, 200, 9)]
"""what the model has seen at the end"""


class Map(ToolEnv):
    """A map to look at more closely."""

    @tool
    def zoom(self, level: int) -> list:
        """Look closer."""
        text = {"type": "text", "text": f"Level {level}, <|image_pad|> and all:"}
        return [text, {"type": "image", "image": picture(80, 80, level)}, {"type": "text", "text": "no more"}]

    async def step(self, action):
        result = await super().step(action)
        if action.calls and action.calls[0].arguments["level"] == 3:
            messages = [
                *Observation.of(result.observation).messages,
                {"role": "user", "content": [{"type": "image", "image": picture(30, 200, 9)}]},
            ]
            return dataclasses.replace(result, observation=messages)
        return result


@pytest.fixture(scope="module")
def renderer():
    return vision_renderer()


@pytest.fixture(scope="module")
def model(renderer):
    return vision_model(renderer.images.placeholder_id)


async def play(renderer, engine, env=Map, task=MAP, **more):
    runner = make_runner(env, engine, renderer, **more)
    try:
        return await runner.run(EpisodeSpec(task, 0, 0))
    finally:
        runner.close()


@pytest.fixture
async def played(renderer, model):
    engine = VisionEngine(renderer, model, TEXTS)
    return engine, await play(renderer, engine, temperature=0.7)


async def test_the_engine_sees_every_image_where_its_tokens_are(renderer, played):
    """Also where a text looks like a placeholder."""
    engine, t = played
    assert t.stop_reason is StopReason.TERMINATED, t.cause
    assert len(t.segments) == 1
    pad = renderer.images.placeholder_id
    for (ids, placed), images in zip(engine.asked, (SHOWN[:1], SHOWN[:2], SHOWN), strict=True):
        assert [p.image.open().tobytes() for p in placed] == [i.tobytes() for i in images]
        assert ids.count(pad) == sum(p.tokens for p in placed)
        assert all(set(ids[p.at : p.at + p.tokens]) == {pad} and ids[p.at - 1] != pad for p in placed)


async def test_ids_and_pixels_are_the_processors_own(renderer, model):
    class Plain(Map):
        @tool
        def zoom(self, level: int) -> list:
            """Look closer."""
            return [{"type": "text", "text": f"Level {level}"}, {"type": "image", "image": picture(80, 80, level)}]

    engine = VisionEngine(renderer, model, (*TEXTS[:2], "Rome."))
    t = await play(renderer, engine, env=Plain)
    messages = [*MAP.prompt]
    for text, turn in zip(TEXTS[:2], t.turns, strict=False):
        messages += [{"role": "assistant", "content": text}, *turn.observation.messages]
    ids, inputs = processed(renderer, messages, [s.schema for s in Plain().tool_specs()], SHOWN)
    assert engine.asked[2][0] == ids
    (sample,) = to_samples(t, pixels=renderer.pixels)
    assert sample.tokens[: len(ids)] == ids
    np.testing.assert_array_equal(sample.multimodal_train_inputs["pixel_values"], inputs["pixel_values"])
    np.testing.assert_array_equal(sample.multimodal_train_inputs["image_grid_thw"], inputs["image_grid_thw"])


async def test_image_tokens_are_never_trained_and_the_sample_alone_gives_the_log_probs(renderer, model, played):
    _, t = played
    (sample,) = to_samples(t, pixels=renderer.pixels)
    pad = renderer.images.placeholder_id
    start = len(sample.tokens) - sample.response_length
    kinds = [Provenance(v) for v, n in sample.provenance for _ in range(n)]
    assert pad in sample.tokens[:start]
    response = list(zip(sample.tokens[start:], sample.loss_mask, kinds, strict=True))
    assert {(m, k) for i, m, k in response if i == pad} == {(0, Provenance.OBSERVATION)}
    found = log_probs(model, pad, sample.tokens, sample.multimodal_train_inputs, sample.temperature)
    theirs = [found[start + n - 1, i].item() for n, (i, m, _) in enumerate(response) if m]
    ours = [lp for lp, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m]
    assert len(ours) == t.sampled_tokens > 20
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    blind = log_probs(model, pad, [0 if i == pad else i for i in sample.tokens], None, sample.temperature)
    unseen = [blind[start + n - 1, i].item() for n, (i, m, _) in enumerate(response) if m]
    assert np.abs(np.subtract(ours, unseen)).max() > 1e-2  # the images matter
    (row,) = make_rows([sample], {t.episode_id: 1.0})
    assert row.images == t.segments[0].images
    assert [row.tokens[p.at : p.at + p.tokens].tolist() for p in row.images] == [[pad] * p.tokens for p in row.images]


async def test_the_record_keeps_each_image_once_and_replays(renderer, played, tmp_path):
    _, t = played
    writer = EpisodeWriter(tmp_path / "episodes")
    writer.write(t, step=0, split="train")
    writer.write(dataclasses.replace(t, episode_id="1-0", index=1), step=0, split="train")
    writer.close()
    files = sorted((tmp_path / "episodes" / "images").iterdir())
    assert [f.suffix for f in files] == [".png"] * 4
    again = next(iter(read_episodes(tmp_path)))
    assert encode(to_record(again)) == encode(to_record(t))
    (a,), (b,) = to_samples(t, pixels=renderer.pixels), to_samples(again, pixels=renderer.pixels)
    assert a.multimodal_train_inputs.keys() == b.multimodal_train_inputs.keys()
    for name, values in a.multimodal_train_inputs.items():
        assert values.tobytes() == b.multimodal_train_inputs[name].tobytes()
    runner = make_runner(Map, [], renderer, temperature=0.7)
    (outcome,) = await replay_group(runner, [again])
    assert outcome.divergence is None, outcome.divergence
    runner = dataclasses.replace(runner, env_class=Other, make_env=Other)
    (outcome,) = await replay_group(runner, [again])
    assert (outcome.divergence.cause, outcome.divergence.turn) == ("env", 1)
    runner.close()


class Other(Map):
    """Shows another picture in turn 1."""

    async def step(self, action):
        result = await super().step(action)
        messages = Observation.of(result.observation).messages
        if len(messages) < 2:
            return result
        other = {"role": "user", "content": [{"type": "image", "image": picture(30, 200, 10)}]}
        return dataclasses.replace(result, observation=[messages[0], other])


Other.name = "Map"


async def test_the_page_and_the_export_hold_the_images(played, tmp_path):
    _, t = played
    writer = EpisodeWriter(tmp_path)
    writer.write(t)
    writer.close()
    recording = Recording(tmp_path)
    record = recording.record(recording.entry("0-0"))
    detail = episode_detail(record, None, None, None, recording.images)
    assert len(detail["images"]) == 4
    assert all(u.startswith("data:image/png;base64,") for u in detail["images"].values())
    page = html_of(detail)
    assert all(url in page for url in detail["images"].values())
    (gone, *_) = sorted(recording.images.iterdir())
    gone.unlink()
    detail = episode_detail(record, None, None, None, recording.images)
    assert detail["images"][gone.stem] is None
    missing = next(
        p.image for p in from_record(record, recording.blobs).segments[0].images if p.image.sha256 == gone.stem
    )
    with pytest.raises(StoreError, match="cannot be read"):
        missing.open()


class Show(Env):
    """One picture after another, until the context is full."""

    async def step(self, action):
        parts = [{"type": "image", "image": picture(112, 112)}, {"type": "text", "text": "and this? " * 40}]
        return StepResult([{"role": "user", "content": parts}])


async def test_a_long_text_beside_an_image_is_cut_and_the_image_stays(renderer, model):
    engine = VisionEngine(renderer, model, ["A wall."] * 9)
    t = await play(renderer, engine, env=Show, max_response_tokens=90)
    assert t.turns[0].observation_cut_tokens > 0
    (image, text) = t.turns[0].observation.messages[0]["content"]
    assert image["type"] == "image"
    assert "and this? " * 40 != text["text"] == ("and this? " * 40)[: len(text["text"])]
    assert t.stop_reason is StopReason.MAX_TOKENS


async def test_a_sampled_placeholder_ends_the_episode(renderer, model):
    engine = VisionEngine(renderer, model, ["A wall."])
    pad = renderer.images.placeholder_id

    async def odd(ids, sampling, *, session, images=()):
        from agentrl.engine.base import Generation
        from agentrl.types import FinishReason

        return Generation((5, pad, renderer.end_id), (-1.0,) * 3, FinishReason.STOP)

    engine.generate = odd
    t = await play(renderer, engine, env=Show)
    assert t.stop_reason is StopReason.INVALID_ACTION_LIMIT
    assert len(t.turns) == 1


async def test_a_text_model_says_that_it_takes_no_images(tags, hermes):
    with pytest.raises(TemplateError, match="no image processor"):
        await play(hermes, ["hello"], env=Show, task=MAP)
    with pytest.raises(TemplateError, match="cannot hold images"):
        await play(tags, ["<answer>x</answer>"] * 3, env=Show, task=PARIS)


async def test_a_runner_process_and_its_controller_record_the_same(renderer, played):
    _, t = played

    class Process:
        pending = ()

        async def request(self, kind, payload):
            self.spec = pickle.loads(payload)
            return pickle.loads(pickle.dumps(t))

    process = Process()
    made = await RemoteRunner([process], None).run(EpisodeSpec(MAP, 0, 0))
    assert images_in(process.spec.task.messages) == images_in(MAP.prompt)
    assert encode(to_record(made)) == encode(to_record(t))


def test_tokens_shows_where_images_stand(renderer, tmp_path):
    folder = model_folder(tmp_path / "model", renderer)
    parts = [{"type": "image", "image": images_in(MAP.prompt)[0].url}, {"type": "text", "text": "Where?"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Rome."}]
    shown = token_report(folder, conversation)
    n = renderer.images.token_count(images_in(MAP.prompt)[0])
    assert shown.count("<|image_pad|>") >= 1
    assert f"<|vision_start|>{'<|image_pad|>' * n}"[:40] in shown


def test_a_processor_of_another_shape_is_no_hindrance_until_an_image_comes(renderer, tmp_path):
    folder = model_folder(tmp_path / "model", renderer)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    images = images_of_model(folder, renderer.tokenizer.added)
    other = make_renderer(renderer.tokenizer, images=images)
    assert other.prompt([{"role": "user", "content": "hello"}])
    with pytest.raises(TemplateError, match="only image processors like Qwen-VL's are supported"):
        other.prompt(MAP.prompt)


def test_training_refuses_a_model_of_images_that_it_cannot_build_before_anything_starts(renderer, tmp_path):
    folder = model_folder(tmp_path / "model", renderer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl"}))
    (tmp_path / "env.py").write_text("from agentrl import ToolEnv\nclass Look(ToolEnv):\n    rewards = []\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "hello", "label": "x"}) + "\n")
    settings = {"hf_checkpoint": str(folder), "run": str(tmp_path / "run")}
    settings |= {"env": str(tmp_path / "env.py"), "prompt_data": str(tmp_path / "data.jsonl")}
    config = build_config(settings)
    parts = Components(config)
    assert isinstance(parts.renderer.images, Images)
    assert parts.renderer.images.token_count(images_in(MAP.prompt)[0]) == renderer.images.token_count(
        images_in(MAP.prompt)[0]
    )
    with pytest.raises(ConfigError, match=r"'qwen3_vl' cannot be trained: .*DeepStack"):
        asyncio.run(train(config))
    assert not (tmp_path / "run").exists()


async def test_an_agent_at_the_gateway_sends_images_that_are_recorded_trained_around_and_replayed(
    renderer, model, tmp_path
):
    from gateway_agents import agent_class, message_of, result, user

    def part(image):
        url = images_in([{"role": "user", "content": [{"type": "image", "image": image}]}])[0].url
        return {"type": "image_url", "image_url": {"url": url}}

    tools = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]

    async def agent(client):
        messages = [user([part(SHOWN[0]), {"type": "text", "text": "Where is this?"}])]
        answer = await client.chat(messages, tools=tools)
        content = [{"type": "text", "text": "closer <|image_pad|>"}, part(SHOWN[1])]
        messages += [message_of(answer), result(answer["tool_calls"][0], content)]
        messages.append(message_of(await client.chat(messages, tools=tools)))
        status, refused = await client.post(
            "/v1/messages",
            {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "document"}]}]},
        )
        assert (status, "type 'document'" in refused["error"]["message"]) == (400, True)

    env = agent_class(agent)
    driver = GatewayDriver(env)
    runner = make_runner(env, VisionEngine(renderer, model, [TEXTS[0], TEXTS[2]]), renderer, driver=driver)
    t = await runner.run(EpisodeSpec(MAP, 0, 0))
    assert (t.stop_reason, len(t.segments), len(t.turns)) == (StopReason.TERMINATED, 1, 2)
    assert [p.image for p in t.segments[0].images] == images_in(
        [{"role": "user", "content": [{"type": "image", "image": i} for i in SHOWN[:2]]}]
    )
    assert exactness_violations([t]) == 0
    writer = EpisodeWriter(tmp_path)
    writer.write(t, step=0, split="train")
    writer.close()
    (outcome,) = await replay_group(runner, list(read_episodes(tmp_path)))
    await driver.close()
    assert outcome.divergence is None, outcome.divergence
