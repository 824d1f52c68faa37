"""A model folder and an engine that follows a script, for runs from the command line to the run folder."""

import json

import pytest
from doubles import FakeEngine


@pytest.fixture
def model(tokenizer_dir, tmp_path, monkeypatch):
    """A model folder without weights; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentrl.run.components.Components.require_weights", lambda self: None)
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 16384}))
    return str(tokenizer_dir)


@pytest.fixture
def says(monkeypatch):
    """Have the engine follow a script."""

    def follow(script):
        monkeypatch.setattr(
            "agentrl.run.components.Components.engine", lambda self, *_: FakeEngine(self.renderer, script)
        )

    return follow
