"""`agentrl convert` between Hugging Face folders and checkpoints of the trainer."""

import errno
import json
import os
from contextlib import nullcontext

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from models import make_model, make_rows
from test_megatron import read, start

from agentrl.cli.main import main
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.train.base import LossConfig
from agentrl.train.megatron import convert


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("reused_ranks")
def test_weights_are_bit_equal_in_both_directions(tmp_path, capsys):
    """Of a mixture of experts; the checkpoint of a run is in bf16, as its config.toml says."""
    model = make_model(tmp_path / "model", "glm4_moe", tied=False)
    assert main(["convert", str(model), str(tmp_path / "checkpoint")]) == 0
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "hf"), "--model", str(model)]) == 0
    assert fingerprint(tmp_path / "hf") == fingerprint(model)
    run = tmp_path / "run"
    (run / "episodes").mkdir(parents=True)
    (run / "config.toml").write_text(f'[model]\nhf_checkpoint = "{model}"\ndtype = "bfloat16"\n')
    with start(model, tmp_path, dtype="bfloat16") as trainer:
        trainer.step(make_rows(model, 3), LossConfig(), 1e-2)
        trainer.save(run / "checkpoints/000001/trainer")
        stepped = trainer.export_weights(tmp_path / "stepped").fingerprint
    assert main(["convert", str(run / "checkpoints/000001"), str(tmp_path / "trained")]) == 0
    assert fingerprint(tmp_path / "trained") == stepped
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert read(tmp_path / "trained")[bias].equal(read(model)[bias]), "the bias of a router stays in fp32"
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "trained")
    other = make_model(tmp_path / "other", "glm4_moe", tied=False, layers=3)
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "no"), "--model", str(other)]) == 2
    assert "was saved from another model: its moe_layer_freq is [0, 1]" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nothing", "new"], "nothing is neither a GGUF file, nor a Hugging Face folder"),
        (["hf", "new", "--model", "hf"], "--model belongs to a checkpoint"),
        (["hf", "hf"], "hf already exists"),
        (["hf", "new"], "model_type 'mamba' cannot be trained"),
        (["half", "new"], "found 'float16': give --dtype"),
        (["checkpoint", "new"], "no model is given"),
        (["x.gguf", "new", "--dtype", "float32"], "a GGUF file takes neither"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, words, what):
    monkeypatch.chdir(tmp_path)
    for name, config in {"hf": {"model_type": "mamba"}, "half": {"dtype": "float16"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/.metadata").touch()
    assert main(["convert", *words]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_model_does_not_appear_without_its_adapters(tmp_path, monkeypatch, capsys):
    class Trainer:
        def load(self, path):
            pass

        def export_weights(self, path):
            path.mkdir()
            (path / "model.safetensors").touch()

        def export_adapter(self, path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(convert, "_trainer", lambda *_: nullcontext(Trainer()))
    monkeypatch.setattr(convert, "read_adapters", lambda _: {"rank": 1, "alpha": 1.0, "targets": ["q_proj"]})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/.metadata").touch()
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "new"), "--model", str(model)]) == 1
    assert "agentrl convert: No space left on device" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
