"""A run folder of others can damage nothing: no path out of the folder, no link followed, no memory without bound."""

import dataclasses
import json
import resource
import subprocess
import sys

import orjson
import pytest
import zstandard
from doubles import trajectory

from agentrl.cli.view_command import decoder
from agentrl.core.message_images import Image, as_image
from agentrl.errors import StoreError
from agentrl.store import EpisodeWriter, Recording, from_record, read_episodes
from agentrl.store.blobs import ImageFolder, Outputs
from agentrl.store.episode_files import frames
from agentrl.view.episode_detail import episode_detail
from agentrl.view.html_export import html_of


def bomb(size):
    """A frame that becomes `size` bytes, and does not say so in its header."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    block = bytes(1 << 24)
    return b"".join(compressor.compress(block) for _ in range(size >> 24)) + compressor.flush()


READ = """
import re, sys
from pathlib import Path
from agentrl.errors import StoreError
from agentrl.store import Recording, read_episodes
for read in (lambda p: list(read_episodes(p)), Recording):
    try:
        read(Path(sys.argv[1]))
    except StoreError as e:
        print(e)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))  # ru_maxrss counts what the parent had
assert peak < 600 << 10, "it was read whole"
"""


def test_a_record_that_becomes_gigabytes_is_an_error(tmp_path):
    (tmp_path / "000000.jsonl.zst").write_bytes(bomb(768 << 20))
    assert (tmp_path / "000000.jsonl.zst").stat().st_size < 1 << 18
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == second
    assert "the record at byte 0 becomes more than 200 times larger when it is decompressed" in first


def test_a_tool_output_that_becomes_gigabytes_is_an_error(tmp_path):
    (tmp_path / f"{'a' * 64}.txt.zst").write_bytes(bomb(384 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="the tool output becomes more than 200 times larger"):
        Outputs(tmp_path).read("a" * 64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 450 << 10


def test_records_that_repeat_themselves_are_read(tmp_path):
    writer = EpisodeWriter(tmp_path)
    writer.write(dataclasses.replace(trajectory(), state={"text": "a" * (4 << 20)}))
    writer.write(trajectory(index=1))
    writer.close()
    assert [len(t.state.get("text", "")) for t in read_episodes(tmp_path)] == [4 << 20, 0]
    (tmp_path / "000000.index").unlink()
    assert [e.index for e in Recording(tmp_path).episodes] == [0, 1]
    assert (
        sum(f.length for f in frames(tmp_path / "000000.jsonl.zst")) == (tmp_path / "000000.jsonl.zst").stat().st_size
    )


def image(size=(4, 4)):
    from PIL import Image as Pil

    return as_image({"image": Pil.new("RGB", size)})


def recorded(tmp_path):
    """A recorded episode with an image, and its folder."""
    prompt = ({"role": "user", "content": [{"type": "image", "image": image()}]},)
    t = trajectory()
    writer = EpisodeWriter(tmp_path / "episodes")
    writer.write(dataclasses.replace(t, task=dataclasses.replace(t.task, prompt=prompt)))
    writer.close()
    recording = Recording(tmp_path / "episodes")
    return recording, recording.record(recording.episodes[0])


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "", "a" * 63, "A" * 64, "a" * 64 + "\n", None, 5])
def test_an_image_name_that_is_not_a_hash_is_refused(tmp_path, name):
    recording, record = recorded(tmp_path)
    record = json.loads(orjson.dumps(record))
    record["task"]["prompt"][0]["content"][0]["image"]["sha256"] = name
    with pytest.raises(StoreError, match="cannot be read"):
        from_record(record, recording.blobs)
    assert episode_detail(record, None, None, None, recording.images)["images"] == {}


def test_an_image_is_never_written_outside_its_folder(tmp_path):
    with pytest.raises(StoreError, match="is not a hash"):
        ImageFolder(tmp_path / "images").write([Image("../x", b"png")])
    assert not list(tmp_path.iterdir())


def test_a_linked_image_is_not_followed(tmp_path):
    recording, record = recorded(tmp_path)
    (file,) = recording.images.glob("*.png")
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret")
    file.unlink()
    file.symlink_to(secret)
    page = html_of(episode_detail(record, None, None, None, recording.images))
    assert "YSBzZWNyZXQ" not in page
    (shown,) = [p["image"] for p in from_record(record, recording.blobs).task.prompt[0]["content"]]
    with pytest.raises(StoreError, match="cannot be read"):
        _ = shown.png


def test_a_linked_output_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(zstandard.ZstdCompressor().compress(b"a secret"))
    (tmp_path / f"{'b' * 64}.txt.zst").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="cannot be read"):
        Outputs(tmp_path).read("b" * 64)


def test_nothing_is_downloaded_by_looking_at_a_run(tmp_path, monkeypatch):
    asked = []

    def download(name, *, local_files_only, **more):
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked.append((name, local_files_only))
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "config.toml").write_text('[model]\nhf_checkpoint = "someone/else"\n')
    (tmp_path / "episodes").mkdir()
    decode, note = decoder(tmp_path, None)
    assert (decode, asked) == (None, [("someone/else", True)])
    assert "the model someone/else is not on this machine; give --tokenizer someone/else" in note
