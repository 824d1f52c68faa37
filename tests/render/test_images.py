"""Images in prompts and observations, against transformers' own processor and a small random Qwen2.5-VL."""

import base64
import io

import numpy as np
import pytest
from template_models import Model, data_file, tokenizer

from agentrl.core.message_images import images_in
from agentrl.errors import ContractError, TemplateError
from agentrl.render import Tokenizer, make_renderer
from agentrl.render.images import Images
from agentrl.rollout.recorder import Recorder
from agentrl.types import Provenance

Image = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", exc_type=ImportError)
VL = Model("vl", "qwen2_5_vl", "")


@pytest.fixture(scope="module")
def processor():
    return pil.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)


@pytest.fixture(scope="module")
def renderer(processor):
    base = tokenizer("chatml")
    template = data_file("trl", "chat_templates", "qwen2_5_vl.jinja").read_text()
    t = Tokenizer(base.backend, chat_template=template, special=base.special)
    return make_renderer(t, images=Images(processor, t.added["<|image_pad|>"]))


def picture(width=100, height=60, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8).astype(np.uint8))


def user_message(text, *images):
    return {
        "role": "user",
        "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}],
    }


def theirs(renderer, processor, messages):
    """Ids as transformers' Qwen processors make them: render, expand the placeholder in the text, tokenise."""
    text = renderer._template.render(messages, tools=None, generate=True)
    images = [
        p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image"
    ]
    inputs = processor(images=images, return_tensors="np")
    for grid in inputs["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * int(grid.prod() // processor.merge_size**2), 1)
    text = text.replace("<|placeholder|>", "<|image_pad|>")
    return renderer.tokenizer.backend.encode(text, add_special_tokens=False).ids, inputs


def test_a_prompt_with_images(renderer, processor):
    messages = [
        user_message("What is this?", picture(), picture(30, 200, 1)),
        {"role": "assistant", "content": "A wall."},
        user_message("And this?", picture(50, 50, 2)),
    ]
    ((kind, ids),) = renderer.prompt(messages)
    expected, inputs = theirs(renderer, processor, messages)
    assert kind is Provenance.PROMPT
    assert list(ids) == expected
    carried = renderer.pixels(images_in(messages))
    np.testing.assert_array_equal(carried["pixel_values"], inputs["pixel_values"])
    np.testing.assert_array_equal(carried["image_grid_thw"], inputs["image_grid_thw"])


def test_an_observation_with_an_image(renderer, processor):
    first = [user_message("Look.", picture())]
    recorder = Recorder()
    recorder.open(renderer.prompt(first))
    answer = (*renderer.tokenizer.encode("A wall."), renderer.end_id)
    then = user_message("Closer, and <|image_pad|> is text.", picture(80, 80, 3))
    delta = renderer.delta([then], answer, history=first)
    assert delta.new_segment is None
    pad = renderer.tokenizer.added["<|image_pad|>"]
    assert {kind for kind, ids in delta.pieces if pad in ids} == {Provenance.OBSERVATION}
    ids = [i for _, part in delta.pieces for i in part]
    (placed,) = renderer.placed(delta.pieces, [then])
    assert ids.count(pad) == placed.tokens
    assert ids[placed.at : placed.at + placed.tokens] == [pad] * placed.tokens
    plain = user_message("Closer.", picture(80, 80, 3))
    stream = [
        *recorder.context(),
        *answer,
        *(i for _, part in renderer.delta([plain], answer, history=first).pieces for i in part),
    ]
    assert stream == theirs(renderer, processor, [*first, {"role": "assistant", "content": "A wall."}, plain])[0]


def test_images_come_as_pil_bytes_or_data_urls(renderer):
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [
        {"type": "image", "image": picture()},
        {"type": "image", "image": buffer.getvalue()},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    one, two, three = images_in([{"role": "user", "content": parts}])
    assert one == two == three
    assert one.size == (100, 60)
    assert one.open().tobytes() == picture().tobytes()
    for bad in ("/etc/passwd", "http://example.com/a.png", b"nonsense", "data:image/png;base64,%%", 5):
        with pytest.raises(ContractError):
            images_in([{"role": "user", "content": [{"type": "image", "image": bad}]}])


def test_a_model_without_a_processor(renderer):
    blind = make_renderer(renderer.tokenizer)
    with pytest.raises(TemplateError, match="no image processor"):
        blind.prompt([user_message("x", picture())])
