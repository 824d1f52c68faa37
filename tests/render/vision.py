"""A small random Qwen2.5-VL with its processor and Qwen3-VL's template (which knows tools), and an engine over it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from template_models import data_file, tokenizer

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation
from agentrl.render import Tokenizer, make_renderer
from agentrl.render.images import Images
from agentrl.types import FinishReason

Pil = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", exc_type=ImportError)
torch = pytest.importorskip("torch")

PROCESSOR = pil.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)


def picture(width=100, height=60, seed=0):
    return Pil.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def make_tokenizer(template="qwen3_vl"):
    base = tokenizer("chatml")
    text = data_file("trl", "chat_templates", f"{template}.jinja").read_text()
    return Tokenizer(base.backend, chat_template=text, special=base.special)


def vision_renderer(**more):
    t = make_tokenizer()
    return make_renderer(t, images=Images(PROCESSOR, t.added["<|image_pad|>"]), **more)


def vision_model(pad):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 6200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}},
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        image_token_id=pad,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # else all tokens are about as likely, whatever stands before
    return model


def model_folder(path, renderer):
    """A folder as the hub has them, without weights."""
    path.mkdir(exist_ok=True)
    renderer.tokenizer.backend.save(str(path / "tokenizer.json"))
    template = {"chat_template": renderer.tokenizer.chat_template, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    if not (path / "config.json").exists():
        config = {"text_config": {"max_position_embeddings": 4096}, "vision_config": {}, "model_type": "qwen2_5_vl"}
        (path / "config.json").write_text(json.dumps(config))
    PROCESSOR.save_pretrained(path)
    return path


@torch.no_grad()
def log_probs(model, pad, ids, inputs, temperature=1.0):
    """[len(ids), vocabulary]; row t: of what follows token t."""
    types = torch.tensor([[int(i == pad) for i in ids]])
    more = {k: torch.from_numpy(v) for k, v in (inputs or {}).items()}
    logits = model(input_ids=torch.tensor([list(ids)]), mm_token_type_ids=types, **more).logits[0]
    return torch.log_softmax(logits.float() / temperature, -1)


class VisionEngine:
    """Says what a script says (a text for each turn), with the log-probs that the model gives it after the images that it is shown."""

    def __init__(self, renderer, model, texts):
        self.renderer, self.model, self.texts = renderer, model, texts
        self.turns: dict[str, int] = {}
        self.asked: list[tuple[list[int], tuple[PlacedImage, ...]]] = []

    async def generate(self, ids, sampling, *, session, images=()):
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.asked.append((list(ids), tuple(images)))
        sampled = (*self.renderer.tokenizer.encode(self.texts[turn]), self.renderer.end_id)
        whole = [*ids, *sampled]
        inputs = self.renderer.pixels([p.image for p in images])
        pad = self.renderer.images.placeholder_id
        found = log_probs(self.model, pad, whole, inputs, sampling.temperature)
        values = tuple(found[len(ids) - 1 + n, i].item() for n, i in enumerate(sampled))
        room = sampling.max_new_tokens
        reason = FinishReason.STOP if len(sampled) <= room else FinishReason.LENGTH
        return Generation(sampled[:room], values[:room], reason, policy_version=1)

    async def release(self, session): ...


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def processed(renderer, messages, tools, images):
    """Ids and pixel inputs as transformers' Qwen processors make them: render, expand the placeholders in the text, tokenise."""
    text = renderer._template.render(messages, tools=tools, generate=True)
    inputs = PROCESSOR(images=images, return_tensors="np")
    for grid in inputs["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * int(grid.prod() // PROCESSOR.merge_size**2), 1)
    text = text.replace("<|placeholder|>", "<|image_pad|>")
    return renderer.tokenizer.backend.encode(text, add_special_tokens=False).ids, inputs
