"""Models of images in the trainer: log-probs, gradients and weights against transformers, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_log_probs
from safetensors.torch import save_file
from test_megatron import EVERYTHING, PP2, TP2, check_family, read, start
from vision_models import (
    IMAGES,
    PAD,
    VIDEO,
    Pil,
    Seeing,
    bare_row,
    by_vision_file_name,
    image_rows,
    make_vision_model,
    picture,
    vision_model,
)

from agentrl.config import LoraSettings, build_config
from agentrl.core.message_images import Image, PlacedImage, as_image
from agentrl.errors import ConfigError, DataError, InvariantError, StoreError
from agentrl.run.image_models import check_image_engine, check_image_model
from agentrl.train.megatron import micro_batch
from agentrl.train.megatron.convert import write_checkpoint, write_hugging_face
from agentrl.train.megatron.families.base import Vision
from agentrl.train.megatron.hf_weights import HuggingFaceWeights
from agentrl.train.megatron.image_layout import check_images, positions_of
from agentrl.train.megatron.megatron_settings import check_trainer
from agentrl.train.megatron.micro_batch import ImagePlan, collate
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.vision_tower import load_vision_tower
from agentrl.train.rows import make_rows
from agentrl.train.sample import Sample

ranks = pytest.mark.usefixtures("reused_ranks")
SP = {"sequence_parallel": True}
FULL = pytest.mark.full


def check(model, folder, settings, world, **options):
    """Log-probs, gradients of the text tower and a round trip of all weights."""
    hf, rows = vision_model(model), image_rows(model)
    reference = Seeing(hf, rows)
    more = {"micro_batch_tokens": 96, "reference": True, **options}
    with start(model, folder, megatron=settings, world_size=world, **more) as trainer:
        own = trainer.log_probs(rows)
        with torch.no_grad():
            want = [hf_log_probs(reference, row).numpy() for row in rows]
        for a, b in zip(own, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)
        for a, b in zip(own, trainer.log_probs(rows, reference=True), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)

        def gradients():
            text = {n: p.grad for n, p in hf.named_parameters() if not n.startswith("model.visual.")}
            return by_vision_file_name(text)

        original = check_family(trainer, model, reference, rows, folder, gradients)
        before = {n for n, t in original.items() if n.startswith("visual.")}
        trainer.step(rows, EVERYTHING, lr=1e-2)
        trainer.export_weights(folder / "trained")
        trained = read(folder / "trained")
        same = {n for n, t in trained.items() if torch.equal(t, original[n])}
        assert same == before, "the text tower is trained, the vision tower is not"
        assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(own, trainer.log_probs(rows), strict=True))


LAYOUTS = [
    pytest.param("qwen2_5_vl", {}, 1, {}, id="tree"),
    pytest.param("qwen2_vl", {}, 1, {"tree_packing": False}, id="qwen2_vl-no-tree", marks=FULL),
    pytest.param("qwen2_5_vl", {**TP2, **SP}, 2, {}, id="TP2-SP", marks=FULL),
    pytest.param("qwen2_vl", TP2, 2, {}, id="qwen2_vl-TP2", marks=FULL),
    pytest.param("qwen2_5_vl", PP2, 2, {"tied": True}, id="PP2-tied", marks=FULL),
    pytest.param("qwen2_5_vl", {"context_parallel_size": 2}, 2, {}, id="CP2", marks=FULL),
    pytest.param("qwen2_5_vl", {}, 2, {"micro_batch_tokens": 1}, id="DP2-single-rows", marks=FULL),
]


@ranks
@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "world", "options"), LAYOUTS)
def test_a_layout_equals_transformers(tmp_path, family, settings, world, options):
    tied = options.pop("tied", False)
    check(make_vision_model(tmp_path / "model", family, tied=tied), tmp_path, settings, world, **options)


# -- without ranks ---------------------------------------------------------------------------------------------------


A, B = picture(0), picture(1)
INVERTED = as_image({"image": Pil.fromarray(255 - np.asarray(A.open()))})
VISION = Vision(PAD, VIDEO, "visual.")


@pytest.mark.parametrize("parts", [[1, 2, A, 3, B, 4, 5], [A, 1, 2], [1, 2, 3], [7, B, 8, INVERTED, 9]])
def test_positions_are_those_of_transformers(parts, tmp_path_factory):
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    row = bare_row(parts)
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    inputs = IMAGES.pixels([p.image for p in row.images]) or {"image_grid_thw": np.zeros((0, 3), np.int64)}
    ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
    expected, _ = model.get_rope_index(
        ids, (ids == PAD).int(), image_grid_thw=torch.from_numpy(inputs["image_grid_thw"])
    )
    assert positions_of(row, IMAGES.grid).tolist() == expected[:, 0].tolist()


def test_rows_share_a_prefix_only_where_their_images_are_equal():
    rows = [bare_row([5, A, 6, 7]), bare_row([5, INVERTED, 6, 7]), bare_row([5, A, 6, 8])]
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist()
    size = IMAGES.token_count(A)
    batch = collate(rows, trained_only=True, grid=IMAGES.grid)
    assert batch.inputs.shape[1] == 1 + 2 * (size + 1), (
        "the first token is shared by all, the image and the next one by two"
    )
    assert set(batch.images.images) == {A, INVERTED}
    assert sorted(batch.images.source.tolist()) == [-1] * 3 + list(range(2 * size))
    assert batch.positions.shape == (3, batch.inputs.shape[1])
    first = batch.inputs[0].tolist()
    assert all(source < 0 or first[i] == PAD for i, source in enumerate(batch.images.source.tolist()))
    apart = collate(rows, trained_only=True, grid=IMAGES.grid, tree=False)
    assert apart.inputs.shape[1] == 3 * (size + 2)
    plain = [replace(row, images=()) for row in rows]
    assert collate(plain, trained_only=True, grid=IMAGES.grid).images is None


def test_context_parallel_ranks_and_padding_have_the_sources_of_their_own_tokens():
    rows = [bare_row([5, A, 6, 7, 8])]
    whole = collate(rows, trained_only=True, grid=IMAGES.grid, multiple=4)
    parts = [collate(rows, trained_only=True, grid=IMAGES.grid, multiple=4, context=(r, 2)) for r in range(2)]
    assert sorted(torch.cat([p.images.source for p in parts]).tolist()) == sorted(whole.images.source.tolist())
    assert whole.images.source.tolist()[-2:] == [-1, -1]
    for part in parts:
        assert torch.equal(part.images.source >= 0, part.inputs[0] == PAD)


def test_images_that_rows_share_by_a_collision_of_hashes_are_refused(monkeypatch):
    rows = [bare_row([5, A, 6]), bare_row([5, INVERTED, 7])]
    monkeypatch.setattr(micro_batch, "prefix_keys", lambda rows: [row.tokens for row in rows])
    with pytest.raises(InvariantError, match="shares tokens with another, whose images differ"):
        collate(rows, trained_only=True, grid=IMAGES.grid)


def test_tokens_of_an_image_are_never_trained_and_images_follow_one_another():
    row = bare_row([5, A, 6, 7])
    weights = row.weights.copy()
    weights[2] = 1
    with pytest.raises(InvariantError, match="tokens of an image are never trained"):
        replace(row, weights=weights)
    with pytest.raises(InvariantError, match="an image has the tokens 1 to"):
        replace(row, images=(*row.images, *row.images))


def with_tokens(row, **places):
    tokens = row.tokens.copy()
    for at, token in places.items():
        tokens[int(at[1:])] = token
    return replace(row, tokens=tokens)


@pytest.mark.parametrize(
    ("row", "vision", "what"),
    [
        (bare_row([5, A, 6]), None, "it has an image, but the model is a text model"),
        (
            replace(bare_row([5, A, 6]), images=()),
            VISION,
            "token 1: the token 90 stands for an image, but none was recorded",
        ),
        (bare_row([5, VIDEO, 6]), VISION, "stands for a video, which cannot be trained"),
        (
            with_tokens(bare_row([5, A, 6]), t2=7),
            VISION,
            r"needs 6 placeholders \(token 90\).* 5 of 6 recorded tokens are",
        ),
        (replace(bare_row([5, A, 6]), images=(PlacedImage(B, 1, 6),)), VISION, "needs 1 placeholders"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_a_rank_gets_them(row, vision, what):
    with pytest.raises(DataError, match=what):
        check_images([bare_row([1, 2]), row], vision, vision and IMAGES.grid)


def test_a_placeholder_that_the_policy_sampled_is_text():
    sampled = np.array([False, True, False])
    check_images([bare_row([5, PAD, 6], sampled=sampled)], VISION, IMAGES.grid)


def test_a_changed_file_and_a_missing_one_are_refused_where_rows_are_made(tmp_path):
    tokens = [5, *[PAD] * IMAGES.token_count(INVERTED), 6, 7]

    def sample(image, places):
        more = {"loss_mask": [1, 1], "response_length": 2, "multimodal_inputs": {"images": [image]}}
        return Sample(tokens=tokens, episode_id="3-0", image_places=places, **more)

    file = tmp_path / f"{INVERTED.sha256}.png"
    placed = sample(Image(INVERTED.sha256, file), [(1, IMAGES.token_count(INVERTED))])
    with pytest.raises(StoreError, match=r"episode 3-0, segment 0: the image .* cannot be read"):
        make_rows([placed], {"3-0": 1.0})
    file.write_bytes(A.png)
    with pytest.raises(StoreError, match="not the image that the episode refers to"):
        make_rows([placed], {"3-0": 1.0})
    file.write_bytes(b"nothing")
    with pytest.raises(StoreError, match="not the image that the episode refers to"):
        make_rows([placed], {"3-0": 1.0})
    file.write_bytes(INVERTED.png)
    (row,) = make_rows([placed], {"3-0": 1.0})
    file.unlink()
    assert (row.images[0].image, row.images[0].image.png) == (INVERTED, INVERTED.png)
    with pytest.raises(InvariantError, match="image_places has 0 entries for 1 images"):
        sample(INVERTED, [])


def config_of(folder, **changes):
    """A folder's config.json with other values; None removes a key."""
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


def test_config_files_of_the_hub_have_the_text_towers_keys_beside_the_others(tmp_path):
    nested = read_model_config(make_vision_model(tmp_path, tied=True))
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **values, **flat}))
    assert read_model_config(tmp_path) == nested
    assert nested.tied
    assert nested.rope.sections == (1, 1, 2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vision_config": None}, "no key vision_config"),
        ({"image_token_id": None}, "no key image_token_id"),
        ({"model_type": "qwen3_vl"}, "'qwen3_vl' cannot be trained: .*DeepStack"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tmp_path, changes, what):
    with pytest.raises(ConfigError, match=what):
        read_model_config(config_of(make_vision_model(tmp_path), **changes))


def test_sections_that_do_not_cover_a_head_are_refused(tmp_path):
    folder = make_vision_model(tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text["rope_parameters"]["mrope_section"] = [1, 1, 1]
    with pytest.raises(ConfigError, match=r"mrope_section \[1, 1, 1\] must add up to half of the 8 channels"):
        read_model_config(config_of(folder, text_config=text))


def test_what_is_not_supported_with_images_is_refused_before_a_rank_starts(tmp_path):
    folder = make_vision_model(tmp_path / "model")
    check_trainer(folder, {}, None, 0)
    with pytest.raises(ConfigError, match="a critic of a model of images is not supported"):
        check_trainer(folder, {}, None, 0, critic=True)
    with pytest.raises(ConfigError, match="--true-on-policy-mode for a model of images is not supported"):
        start(folder, tmp_path, true_on_policy=True, tree_packing=False)
    with pytest.raises(ConfigError, match=r"adapters on a model of images .* are not supported"):
        start(folder, tmp_path, lora=LoraSettings(lora_rank=2))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"no preprocessor_config\.json"):
        check_trainer(folder, {}, None, 0)


def test_a_folder_without_its_vision_tower_is_refused_and_so_is_an_incomplete_one(tmp_path):
    folder = make_vision_model(tmp_path)
    tensors = read(folder)
    lost = "visual.blocks.0.attn.qkv.weight"
    save_file({n: t for n, t in tensors.items() if n != lost}, folder / "model.safetensors")
    with pytest.raises(
        DataError, match=r"the tensors visual\.… are not those of its config\.json: .*blocks\.0\.attn\.qkv\.weight"
    ):
        load_vision_tower(read_model_config(folder), HuggingFaceWeights(folder), torch.float32)
    save_file({n: t for n, t in tensors.items() if not n.startswith("visual.")}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"no tensors visual\.…, the vision tower"):
        check_trainer(folder, {}, None, 0)


def test_features_of_recent_images_are_kept_and_do_not_depend_on_other_images(tmp_path, monkeypatch):
    folder = make_vision_model(tmp_path)
    tower = load_vision_tower(read_model_config(folder), HuggingFaceWeights(folder), torch.float32)
    plan = ImagePlan(images=(A, B, INVERTED), source=torch.zeros(1, dtype=torch.int64))
    features = tower.with_features(plan).features
    expected = vision_model(folder).model.visual
    pixels = {k: torch.from_numpy(v) for k, v in IMAGES.pixels([A, B, INVERTED]).items()}
    with torch.no_grad():
        joint = expected(pixels["pixel_values"], grid_thw=pixels["image_grid_thw"]).pooler_output
    torch.testing.assert_close(features, joint, atol=1e-5, rtol=1e-4)
    assert not features.requires_grad
    monkeypatch.setattr(tower, "module", None)
    assert torch.equal(
        tower.with_features(replace(plan, images=(B, A))).features[1:], features[: IMAGES.token_count(A)]
    )
    tower.forget(IMAGES.token_count(INVERTED))
    with pytest.raises(AttributeError):
        tower.with_features(replace(plan, images=(INVERTED, B)))


def test_engines_and_teachers_that_see_no_images_are_refused_before_the_start(tmp_path):
    folder = make_vision_model(tmp_path)

    def config(**more):
        return build_config({"hf_checkpoint": str(folder), **more})

    with pytest.raises(
        ConfigError, match=r"the local engine runs text models only .* use --engine sglang, or --train-only"
    ):
        check_image_engine(config(), folder)
    check_image_engine(config(engine="sglang"), folder)
    check_image_model(config(), folder)
    with pytest.raises(ConfigError, match="--opd-teacher is not shown images"):
        check_image_model(config(opd_teacher=[str(folder)]), folder)
    with pytest.raises(ConfigError, match="--true-on-policy-mode for a model of images is not supported"):
        check_image_model(config(true_on_policy_mode=True), folder)


@ranks
@pytest.mark.full
@pytest.mark.slow
def test_a_model_is_converted_to_a_checkpoint_and_back_bit_equal(tmp_path):
    """The checkpoint holds the text tower; the vision tower comes from the model's folder."""
    folder = make_vision_model(tmp_path / "model")
    write_checkpoint(folder, tmp_path / "checkpoint", "float32")
    write_hugging_face(tmp_path / "checkpoint", folder, tmp_path / "hf", "float32")
    original, converted = read(folder), read(tmp_path / "hf")
    assert original.keys() == converted.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in converted.items())
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()
