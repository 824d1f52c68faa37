"""Pickles in a checkpoint that name anything but what torch and numpy write are refused before they are read."""

import io
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from agentrl.errors import StoreError  # noqa: E402
from agentrl.train.megatron.checkpoint_model import require_model, write_model  # noqa: E402
from agentrl.train.megatron.checkpoint_pickles import require_safe  # noqa: E402
from agentrl.train.megatron.model_config import ModelConfig, Rope  # noqa: E402

RECORDED = Path(__file__).parents[1] / "recorded" / "run" / "checkpoints" / "000002" / "trainer"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "trainer")
    return tmp_path / "trainer"


class Runs:
    """A pickle that writes a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def test_a_recorded_checkpoint_is_safe(folder):
    require_safe(folder)


def test_metadata_that_runs_code_is_not_read(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(StoreError, match=r"\.metadata holds a pickle that names .*open, which checkpoints do not hold"):
        require_safe(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_common_state_that_runs_code_is_not_read(folder, tmp_path, legacy):
    torch.save(Runs(tmp_path / "ran"), folder / "common.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(StoreError, match=r"common\.pt (holds a pickle that names|is not a file of torch\.save)"):
        require_safe(folder)
    assert not (tmp_path / "ran").exists()


def test_an_object_among_the_tensors_that_runs_code_is_not_read(folder, tmp_path):
    changed = metadata(folder)
    (index,) = (i for i in changed.storage_data if i.fqn.startswith("generators"))
    place = changed.storage_data[index]
    content = saved(Runs(tmp_path / "ran"))
    file = folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    (folder / ".metadata").write_bytes(pickle.dumps(changed))
    with pytest.raises(StoreError, match=r"object 'generators/.*' holds a pickle that names .*open"):
        require_safe(folder)
    assert not (tmp_path / "ran").exists()


LOAD = """
import sys
from pathlib import Path
from agentrl.errors import StoreError
from agentrl.train.megatron import cpu_shim
cpu_shim.install()
from agentrl.train.megatron import checkpoint
try:
    checkpoint.load(None, Path(sys.argv[1]))
except StoreError as e:
    print(e)
"""


@pytest.mark.slow
def test_the_trainer_reads_no_checkpoint_before_its_pickles_are_checked(folder, tmp_path):
    (folder / "common.pt").write_bytes(saved(Runs(tmp_path / "ran")))
    done = subprocess.run([sys.executable, "-c", LOAD, folder], capture_output=True, text=True, timeout=120)
    assert "common.pt holds a pickle that names" in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_path_out_of_the_checkpoint_is_refused(folder):
    changed = metadata(folder)
    next(iter(changed.storage_data.values())).relative_path = "../../x"
    (folder / ".metadata").write_bytes(pickle.dumps(changed))
    with pytest.raises(StoreError, match=r"refers to a file outside the checkpoint: '\.\./\.\./x'"):
        require_safe(folder)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_pickle_is_an_error(folder, name, share):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(StoreError, match=name):
        require_safe(folder)


def test_a_missing_or_short_file_of_tensors_is_named(folder):
    (file, *_) = sorted(folder.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=rf"{file.name} is too short: '.*' ends at byte \d+"):
        require_safe(folder)
    file.unlink()
    with pytest.raises(StoreError, match=rf"has no file {file.name}, which holds '"):
        require_safe(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    (tmp_path / ".metadata").touch()
    shape = {"hidden_size": 64, "num_layers": 2}
    model = ModelConfig(transformer=shape, vocab_size=97, max_positions=128, tied=True, rope=Rope(10000.0))
    require_model(tmp_path, model)  # an older checkpoint has no model.json
    write_model(tmp_path, model)
    require_model(tmp_path, model)
    wider = replace(model, transformer={**shape, "hidden_size": 128})
    with pytest.raises(StoreError, match="saved from another model: its hidden_size is 64, that of this model 128"):
        require_model(tmp_path, wider)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(StoreError, match=r"not a complete checkpoint of the trainer: it has no file \.metadata"):
        require_model(tmp_path, model)


def test_a_missing_metadata_file_is_an_error(folder):
    (folder / ".metadata").unlink()
    with pytest.raises(StoreError, match=r"\.metadata is damaged: FileNotFoundError"):
        require_safe(folder)
