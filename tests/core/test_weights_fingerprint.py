"""The fingerprint of a folder of weights."""

import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors.numpy")
from agentrl.core.weights_fingerprint import fingerprint  # noqa: E402
from agentrl.errors import StoreError  # noqa: E402

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float16)


def write(folder, *files):
    folder.mkdir()
    for i, tensors in enumerate(files):
        safetensors.save_file(tensors, folder / f"{i}.safetensors", metadata={"format": "pt"})
    return fingerprint(folder)


def test_order_and_files_do_not_matter(tmp_path):
    one = write(tmp_path / "a", {"a": A, "b": B})
    assert one == write(tmp_path / "b", {"b": B}, {"a": A})
    assert len(one) == 32


@pytest.mark.parametrize(
    "other",
    [
        {"a": A + np.eye(2, 3, dtype=np.float32) * 1e-7, "b": B},
        {"a": A.reshape(3, 2), "b": B},
        {"a": A, "c": B},
        {"a": A},
        {"a": A.view(np.int32), "b": B},
    ],
    ids=["a bit", "shape", "name", "one less", "type"],
)
def test_any_difference_shows(tmp_path, other):
    assert write(tmp_path / "a", {"a": A, "b": B}) != write(tmp_path / "b", other)


def test_a_cut_file_is_refused(tmp_path):
    write(tmp_path / "a", {"a": A})
    file = tmp_path / "a" / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(StoreError, match="truncated"):
        fingerprint(tmp_path / "a")


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="holds no"):
        fingerprint(tmp_path)
