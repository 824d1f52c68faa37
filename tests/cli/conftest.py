"""An empty working directory, and a model folder in it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import QWEN3, TEMPLATE

from agentrl.train.megatron.families import conversions
from agentrl.train.megatron.model_config import read_model_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(here):
    """A folder with a tokenizer, a config and a file of weights, enough for everything that is checked before the weights are read."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder = here / "model"
    folder.mkdir()
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(QWEN3))
    names = {name for made in conversions(read_model_config(folder)).values() for name in made.names}
    save_file({name: np.ones(8, np.float32) for name in names}, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
