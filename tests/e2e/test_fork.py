"""`agentrl fork` on the local engine, from a run that `agentrl rollout` made: the original again, other seeds, other weights."""

import shutil

import pytest

from agentrl.cli.main import main
from agentrl.run.model_folder import model_folder
from agentrl.store import Recording, from_record

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SMALL = ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--tensorboard", "false"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("fork") / "run"
    assert main(["rollout", "--env", "search_r1", *SMALL, "--run", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second model of the same shape and vocabulary: every matrix somewhat shaken."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("model") / "other"
    shutil.copytree(model_folder("search_r1_3m"), folder)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    shaken = {
        n: w + 0.3 * w.std() * torch.randn(w.shape, generator=generator) if w.dim() > 1 else w
        for n, w in weights.items()
    }
    save_file(shaken, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def branches(run, number):
    recording = Recording(run / "forks" / f"0-0-t0-{number}")
    return [from_record(r) for r in recording.records()]


def log_probs(t):
    return [x for g in t.segments for s in g.spans for x in s.log_probs or ()]


def test_branches_on_the_local_engine_and_with_other_weights(run, other, capsys):
    recording = Recording(run)
    original = from_record(recording.record(recording.entry("0-0")))
    assert main(["fork", str(run), "0-0", "--turn", "0", "--branches", "2"]) == 0
    _, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "  identical  " in first
    same, _ = branches(run, 1)
    assert [s.ids for s in same.segments] == [s.ids for s in original.segments]
    assert log_probs(same) == log_probs(original)
    assert same.rewards == original.rewards

    assert main(["fork", str(run), "0-0", "--turn", "0", "--branches", "1", "--hf-checkpoint", str(other)]) == 0
    (changed,) = branches(run, 2)
    length = original.turns[0].context_length
    assert changed.segments[0].ids[:length] == original.segments[0].ids[:length]
    assert log_probs(changed)[0] != log_probs(original)[0], "other weights sampled it"
    _, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "identical" not in first
