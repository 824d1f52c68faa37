"""Several adapters in one trainer: each is trained as it is alone, bit for bit, and saved, loaded and exported by its name."""

import json

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from models import make_model, make_rows
from test_lora import CP2, RANK, SP, TP2, make_adapter
from test_megatron import PP2, start

from agentrl.cli.main import main
from agentrl.config import LoraSettings
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.errors import ConfigError, InvariantError, StoreError
from agentrl.train.base import LossConfig
from agentrl.train.megatron.lora import resolve
from agentrl.train.megatron.model_config import read_model_config

BOTH = {"red": "a", "blue": "b"}
LRS = (1e-2, 5e-3)


def trained(trainer, rows, name=None):
    """The log-probs before a step, and its gradient norm, loss and log-probs, for each learning rate."""
    of = {} if name is None else {"adapter": name}
    for lr in LRS:
        before = [p.tobytes() for p in trainer.log_probs(rows, **of)]
        metrics = trainer.step(rows, LossConfig(), lr, **of)
        yield before, metrics["grad_norm"], metrics["loss"], [p.tobytes() for p in metrics["log_probs"]]


def alone(model, folder, rows, lora, options):
    """What an adapter does that is trained by itself, and its files."""
    with start(model, folder, lora=lora, **options) as trainer:
        steps = list(trained(trainer, rows))
        trainer.export_adapter(folder / "adapter")
        return steps, fingerprint(folder / "adapter"), trainer.export_weights(folder / "hf").fingerprint


LAYOUTS = [
    pytest.param({}, 1, {"tree_packing": False, "dropout": 0.3}, id="one-rank-dropout"),
    pytest.param({}, 1, {"dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.full),
    pytest.param({**TP2, **SP}, 2, {}, id="TP2-SP", marks=pytest.mark.full),
    pytest.param(PP2, 2, {}, id="PP2", marks=pytest.mark.full),
    pytest.param({}, 2, {}, id="DP2", marks=pytest.mark.full),
    pytest.param({}, 2, {"dtype": "bfloat16"}, id="DP2-bfloat16", marks=pytest.mark.full),
    pytest.param(CP2, 2, {}, id="CP2", marks=pytest.mark.full),
]


@pytest.mark.usefixtures("reused_ranks")
@pytest.mark.slow
@pytest.mark.parametrize(("settings", "world", "options"), LAYOUTS)
def test_adapters_trained_in_turn_are_those_trained_alone(tmp_path, settings, world, options):
    """Bit for bit, in every layout; and a checkpoint between their steps changes nothing."""
    options = {"megatron": settings, "world_size": world, "micro_batch_tokens": 64, **options}
    dropout = options.pop("dropout", 0.0)
    model = make_model(tmp_path / "model")
    rows = {"a": make_rows(model, 5), "b": make_rows(model, 6, shared=0.5)}
    one = LoraSettings(lora_rank=RANK, lora_dropout=dropout)
    several = LoraSettings(lora_rank=RANK, lora_dropout=dropout, lora_adapters=BOTH)
    want = {name: alone(model, tmp_path / name, rows[name], one, options) for name in "ab"}
    assert want["a"] != want["b"]
    with start(model, tmp_path / "both", lora=several, **options) as trainer:
        assert trainer.adapters == ("a", "b")
        turns = {name: trained(trainer, rows[name], name) for name in "ab"}
        first = {name: next(turns[name]) for name in "ba"}
        trainer.save(tmp_path / "checkpoint")
        second = {name: next(turns[name]) for name in "ab"}
        for name in "ab":
            trainer.export_adapter(tmp_path / f"both-{name}", adapter=name)
            merged = trainer.export_weights(tmp_path / f"merged-{name}", adapter=name)
            got = [first[name], second[name]], fingerprint(tmp_path / f"both-{name}"), merged.fingerprint
            assert got == want[name], name
        with pytest.raises(InvariantError, match="has the adapters a, b; found None"):
            trainer.step(rows["a"], LossConfig(), 1e-2)
    with start(model, tmp_path / "resumed", lora=several, **{**options, "seed": 5}) as trainer:
        trainer.load(tmp_path / "checkpoint")
        for name in "ba":
            *_, last = trained_from(trainer, rows[name], name)
            assert last == second[name], name
    if world == 1 and not dropout:
        check_one_of_several_is_a_checkpoint(tmp_path, model, one, options)


def trained_from(trainer, rows, name):
    before = [p.tobytes() for p in trainer.log_probs(rows, adapter=name)]
    metrics = trainer.step(rows, LossConfig(), LRS[1], adapter=name)
    yield before, metrics["grad_norm"], metrics["loss"], [p.tobytes() for p in metrics["log_probs"]]


def check_one_of_several_is_a_checkpoint(tmp_path, model, lora, options):
    """A checkpoint of one adapter of several opens where there is one, and converts."""
    place = tmp_path / "checkpoint/adapters/a"
    with start(model, tmp_path / "one", lora=lora, **options) as trainer:
        trainer.load(place)
        merged = trainer.export_weights(tmp_path / "opened").fingerprint
        with pytest.raises(StoreError, match="is not a complete checkpoint"):
            trainer.load(tmp_path / "checkpoint")
    words = [str(place), str(tmp_path / "hf"), "--model", str(model), "--dtype", options.get("dtype", "float32")]
    assert main(["convert", *words]) == 0
    assert fingerprint(tmp_path / "hf") == merged


@pytest.mark.usefixtures("reused_ranks")
@pytest.mark.full
def test_each_starts_from_its_own_folder(tmp_path):
    model = make_model(tmp_path / "model")
    for name in "ab":
        make_adapter(tmp_path / "start" / name, model)
    first, second = tmp_path / "start/a", tmp_path / "start/b"
    with start(model, tmp_path / "x", lora=LoraSettings(lora_adapter_path=str(first))) as trainer:
        trainer.step(make_rows(model), LossConfig(), 1e-2)
        trainer.export_adapter(tmp_path / "moved")
    (tmp_path / "moved/adapter_model.safetensors").replace(second / "adapter_model.safetensors")
    assert fingerprint(first) != fingerprint(second)
    lora = LoraSettings(lora_adapter_path=str(tmp_path / "start"), lora_adapters=BOTH)
    with start(model, tmp_path / "y", lora=lora) as trainer:
        for name in "ba":
            trainer.export_adapter(tmp_path / f"again-{name}", adapter=name)
            assert fingerprint(tmp_path / f"again-{name}") == fingerprint(tmp_path / "start" / name)


def test_adapters_of_different_forms_are_refused(tmp_path):
    model = make_model(tmp_path / "model")
    for name in "ab":
        make_adapter(tmp_path / "start" / name, model)
    file = tmp_path / "start/b/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1}))
    settings = LoraSettings(lora_adapter_path=str(tmp_path / "start"), lora_adapters=BOTH)
    with pytest.raises(ConfigError, match="share one form, but the alpha of a is 6 and that of b 1"):
        resolve(settings, model, read_model_config(model), {}, tree_packing=False)
