"""Random access to a recording: the index, truncated records, following a writer, versions, and step records."""

import json

import pytest
import zstandard
from doubles import trajectory

from agentrl.errors import StoreError
from agentrl.store import (
    VERSION,
    EpisodeWriter,
    Recording,
    all_records,
    encode,
    extra_fields,
    from_record,
    read_records,
    to_record,
    truncate,
)
from agentrl.types import StopReason


def write(folder, indices, **extra):
    writer = EpisodeWriter(folder)
    for i in indices:
        writer.write(
            trajectory(index=i, group=i // 2, score=i / 4, reason=list(StopReason)[i % 3]), step=i // 4, **extra
        )
    writer.close()


def ids(recording):
    return [e.id for e in recording.episodes]


def test_the_index_agrees_with_the_records(tmp_path):
    write(tmp_path, range(8), split="train", config="abc")
    with_index = Recording(tmp_path)
    for file in tmp_path.glob("*.index"):
        file.unlink()
    without = Recording(tmp_path)
    assert with_index.episodes == without.episodes
    e = with_index.entry("5-0")
    assert (e.group, e.step, e.score, e.stop, e.split, e.config) == (2, 1, 1.25, "max_turns", "train", "abc")
    assert from_record(with_index.record(e)) == trajectory(index=5, group=2, score=1.25, reason=StopReason.MAX_TURNS)


def test_a_record_read_and_written_again_is_byte_equal(tmp_path):
    write(tmp_path, range(6), split="train", note={"a": [1.5, "ü", None]})
    for record in all_records(tmp_path):
        line = encode(record)
        assert encode(to_record(from_record(json.loads(line)), **extra_fields(record))) == line


@pytest.mark.parametrize("lost", [1, 9, 60])
def test_a_half_written_record_is_skipped_with_a_count(tmp_path, lost):
    write(tmp_path, range(3))
    (file,) = tmp_path.glob("*.zst")
    file.write_bytes(file.read_bytes()[:-lost])
    write(tmp_path, [7])
    recording, cut = Recording(tmp_path), []
    assert (ids(recording), recording.truncated) == (["0-0", "1-0", "7-0"], 1)
    assert [r["index"] for r in read_records(tmp_path, cut.append)] == [0, 1, 7]
    assert cut == [file]


@pytest.mark.parametrize("harm", [b"", b"garbage\n", b'{"at": 5, "length": 3}\n', b'{"at": 0, "length": 99999999}\n'])
def test_an_invalid_index_is_ignored(tmp_path, harm):
    write(tmp_path, range(4))
    (index,) = tmp_path.glob("*.index")
    index.write_bytes(harm)
    assert ids(Recording(tmp_path)) == ["0-0", "1-0", "2-0", "3-0"]


def test_a_recording_follows_its_writer_over_rotations(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.store.episode_files.ROTATE_BYTES", 1500)
    writer = EpisodeWriter(tmp_path)
    writer.write(trajectory(index=0))
    recording = Recording(tmp_path)
    for i in range(1, 12):
        writer.write(trajectory(index=i))
        assert recording.refresh() == 1
    writer.close()
    assert recording.refresh() == 0
    assert len(list(tmp_path.glob("*.zst"))) > 2
    assert ids(recording) == [f"{i}-0" for i in range(12)]
    assert [r["index"] for r in recording.records()] == list(range(12))


def test_a_record_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    write(tmp_path, range(2))
    (file,) = tmp_path.glob("*.zst")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    recording = Recording(tmp_path)
    assert (ids(recording), recording.truncated) == (["0-0"], 1)
    file.write_bytes(whole)
    assert recording.refresh() == 1
    assert (ids(recording), recording.truncated) == (["0-0", "1-0"], 0)


def test_truncate_truncates_the_index(tmp_path):
    writer = EpisodeWriter(tmp_path)
    positions = []
    for i in range(6):
        positions.append(writer.position())
        writer.write(trajectory(index=i))
    writer.close()
    truncate(tmp_path, *positions[3])
    write(tmp_path, [9])
    assert ids(Recording(tmp_path)) == ["0-0", "1-0", "2-0", "9-0"]


def test_version_1_is_read(tmp_path):
    old = {k: v for k, v in to_record(trajectory(index=4), step=2).items() if k != "kind"} | {"version": 1}
    (tmp_path / "000000.jsonl.zst").write_bytes(zstandard.compress(encode(old)))
    recording = Recording(tmp_path)
    assert ids(recording) == ["4-0"]
    assert from_record(recording.record(recording.episodes[0])) == trajectory(index=4)


def test_a_newer_version_is_refused(tmp_path):
    new = {**to_record(trajectory()), "version": VERSION + 1}
    (tmp_path / "000000.jsonl.zst").write_bytes(zstandard.compress(encode(new)))
    with pytest.raises(StoreError, match=f"newer agentrl.*version {VERSION + 1}"):
        Recording(tmp_path)


def test_step_records_are_separate_from_episodes(tmp_path):
    writer = EpisodeWriter(tmp_path)
    writer.write(trajectory(index=0), step=0)
    writer.write_step(step=0, optimizer_step=1, rows=[{"episode_id": "0-0", "segment_index": 0, "advantage": -0.5}])
    writer.close()
    assert [r["index"] for r in read_records(tmp_path)] == [0]
    recording = Recording(tmp_path)
    assert recording.advantages == {"0-0": -0.5}
    assert recording.step_of("0-0")["optimizer_step"] == 1
    assert recording.step_of("nobody") is None


def test_an_unknown_episode_is_an_error_with_a_suggestion(tmp_path):
    write(tmp_path, range(3))
    with pytest.raises(StoreError, match=r"no episode '22-0'.*did you mean '2-0'"):
        Recording(tmp_path).entry("22-0")


def test_a_run_folder_a_folder_and_a_file_open_alike(tmp_path):
    write(tmp_path / "episodes", range(3))
    for path in (tmp_path, str(tmp_path), tmp_path / "episodes", tmp_path / "episodes" / "000000.jsonl.zst"):
        assert len(Recording(path).episodes) == 3
    with pytest.raises(StoreError, match="no episodes at"):
        Recording(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="holds no episodes"):
        Recording(tmp_path / "empty")
