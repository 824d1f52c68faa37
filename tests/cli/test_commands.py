"""The commands for recorded episodes: unreadable, truncated and unfinished input, and the kinds of export."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path

import pytest
import zstandard
from doubles import FakeEngine, groups_of
from processes import read_line
from replays import NoteTrainer, command, script

from agentrl.store import VERSION, EpisodeWriter, Recording, decode, encode, read_records, truncate

SHORT = ("--reward", f"{Path(__file__).parents[1] / 'lookup.py'}:short")


@pytest.fixture
def ready(lookup_run, tmp_path, tags, monkeypatch):
    """A recorded run, and command lines by name; engine and trainer are test doubles."""
    path, env = lookup_run
    reply = lambda r: script(dataclasses.replace(r, turn=1 + r.turn))  # noqa: E731
    monkeypatch.setattr("agentrl.run.components.Components.engine", lambda self, *_: FakeEngine(tags, reply))
    monkeypatch.setattr("agentrl.run.components.Components.trainer", lambda self, path, *, reference: NoteTrainer())
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    monkeypatch.setattr("agentrl.data.task_sets.TaskSets.training", lambda self: [task])
    task = groups_of(1, 1)[0][0].task
    new = tmp_path / "new"
    settings = ["--config", path / "config.toml", "--run", new / "run", "--tensorboard", "false", "--eval-interval", 0]
    words = {
        "replay": ["replay", path],
        "replay --out": ["replay", path, "--out", tmp_path / "found.jsonl"],
        "rescore": ["rescore", path, *SHORT],
        "fork": ["fork", path, "2-0", "--turn", 1, "--branches", 1, "--out", new / "fork"],
        "view": ["view", path, "--port", 0],
        "export --html": ["export", path, "2-0", "--html", new / "e.html"],
        "export --parquet": ["export", path, "--parquet", new / "e.parquet"],
        "export --hf-dataset": ["export", path, "--hf-dataset", new / "data"],
        "sft": ["sft", path, *settings[:-2]],
        "train --train-only": ["train", "--train-only", path, *settings],
    }
    new.mkdir()
    return path, env, words


ALL = (
    *("replay", "replay --out", "rescore", "fork", "view", "export --html", "export --parquet", "export --hf-dataset"),
    *("sft", "train --train-only"),
)


def contents(*folders):
    files = (p for f in folders for p in f.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {str(p): zlib.crc32(p.read_bytes()) for p in files}


def newer(path, env):
    """Give every record a later version."""
    (file,) = path.glob("episodes/*.zst")
    frames = [encode({**r, "version": VERSION + 1}) for r in read_records(path)]
    file.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, frames)))
    for index in path.glob("episodes/*.index"):
        index.unlink()


def damaged(path, env):
    (file,) = path.glob("episodes/*.zst")
    file.write_bytes(b"nonsense" * 9)
    for index in path.glob("episodes/*.index"):
        index.unlink()


def empty(path, env):
    for file in path.glob("episodes/*"):
        file.unlink()
    (path / "episodes").rmdir()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("damage", "message"),
    [(newer, "written by a newer agentrl"), (damaged, "the record at byte 0 is damaged"), (empty, "holds no episodes")],
)
async def test_an_unreadable_store_is_one_sentence_and_changes_nothing(ready, tmp_path, capsys, name, damage, message):
    path, env, words = ready
    damage(path, env)
    before = contents(tmp_path)
    assert await command(*words[name]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["replay", "rescore", "fork", "sft", "train --train-only"])
async def test_a_missing_environment(ready, tmp_path, capsys, name):
    _path, env, words = ready
    env.unlink()
    before = contents(tmp_path)
    given = [w for w in words[name] if not str(w).endswith(":short")]
    assert await command(*[w for w in given if w != "--reward"]) == 2
    error = capsys.readouterr().err
    assert "no such file" in error
    assert str(env) in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["rescore", "export --html", "export --parquet", "export --hf-dataset"])
async def test_commands_that_need_no_environment(ready, tmp_path, name):
    _path, env, words = ready
    if "export" in name:
        pytest.importorskip("pyarrow")
    env.unlink()
    assert await command(*words[name]) == 0


@pytest.mark.parametrize("name", ["replay", "fork", "export --html"])
async def test_a_missing_episode(ready, tmp_path, capsys, name):
    _path, _, words = ready
    before = contents(tmp_path)
    given = [w if w != "2-0" else "2-1" for w in words[name]] + (["2-1"] if name == "replay" else [])
    assert await command(*given) == 2
    error = capsys.readouterr().err
    assert "no episode '2-1'; did you mean" in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "RUN", "--no-such-flag"], "no-such-flag"),
        (["fork", "RUN", "2-0", "--turn", 9], "has turns 0 to 2"),
        (["fork", "RUN", "2-0", "--turn", 1, "--branches", 0], "--branches must be at least 1"),
        (["fork", "RUN", "2-0", "--turn", 1, "--observation", "@nowhere"], "cannot be read"),
        (["export", "RUN", "--html", "e.html"], "--html takes the id of one EPISODE"),
        (["export", "RUN", "2-0", "--parquet", "e"], "--parquet and --hf-dataset take none"),
        (["export", "RUN", "2-0", "--html", "e", "x"], "unexpected 'x'"),
        (["view", "RUN", "x"], "unexpected 'x'"),
        (["view", "RUN", "--port", 99999], "--port must be from 0 to 65535, found 99999"),
        (["view", "RUN", "--port", -1], "--port must be from 0 to 65535, found -1"),
        (["replay", "RUN", "--out", "no/such/file"], "--out no/such/file cannot be written: No such file or directory"),
        (["rescore", "RUN", *SHORT, "--out", "RUN/config.toml/x"], "config.toml/x cannot be created: Not a directory"),
        (["rescore", "RUN", *SHORT, "--split", "nosuch"], "no episodes of --split nosuch; the run has train"),
        (["view", "RUN", "--tokenizer", "nowhere"], "no such folder"),
        (["replay", "RUN/config.toml"], "the record at byte 0 is damaged"),
    ],
)
async def test_invalid_command_lines(ready, tmp_path, monkeypatch, capsys, words, message):
    path, _, _ = ready
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert await command(*(str(w).replace("RUN", str(path)) for w in words)) == 2
    assert message in capsys.readouterr().err
    assert contents(tmp_path) == before


async def test_replay_needs_the_settings_of_the_run(ready, tmp_path, capsys):
    path, _, words = ready
    (path / "config.toml").unlink()
    assert await command(*words["replay"]) == 2
    assert "no config.toml of a run in this folder or above it" in capsys.readouterr().err


# -- truncated or unfinished ----------------------------------------------------------------------------------------------

READ = tuple(n for n in ALL if n != "view")


@pytest.mark.parametrize("name", READ)
async def test_a_truncated_file_is_read_up_to_its_end(ready, capsys, name):
    path, _, words = ready
    if "export" in name:
        pytest.importorskip("pyarrow")
    (file,) = path.glob("episodes/*.zst")
    file.write_bytes(file.read_bytes()[:-5])
    assert await command(*words[name]) == 0
    out = capsys.readouterr().out
    assert "1 half-written episode skipped" in out
    if "replay" in name:
        assert "5 episodes replayed: identical" in out


@pytest.mark.parametrize("name", READ)
async def test_a_run_that_is_being_written_is_read_and_not_changed(ready, tmp_path, capsys, name):
    path, _, words = ready
    if "export" in name:
        pytest.importorskip("pyarrow")
    *_, last = read_records(path)
    truncate(path / "episodes", 0, Recording(path).episodes[-1].offset)
    writer = EpisodeWriter(path / "episodes")
    writer.append(last)
    before = contents(path)
    try:
        assert await command(*words[name]) == 0
    finally:
        writer.close()
    out = capsys.readouterr().out
    assert f"{path} is being written: 6 episodes so far" in out
    if name in ("replay", "rescore"):
        assert f"; {'replay.jsonl' if name == 'replay' else 'rescore.json'} is not changed" in out
    assert contents(path) == before
    if name == "replay --out":
        assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 6
    assert await command(*words["rescore"]) == 0
    assert "being written" not in capsys.readouterr().out
    assert (path / "rescore.json").exists()


def test_the_lock_of_a_writer_ends_with_the_writer(tmp_path):
    writer = EpisodeWriter(tmp_path)
    assert Recording(tmp_path).being_written
    del writer
    assert not Recording(tmp_path).being_written


# -- view ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_view_opens_answers_and_ends(ready, sign):
    path, _, _ = ready
    command_line = [sys.executable, "-m", "agentrl.cli", "view", str(path), "--port", "0"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        url = re.search(r"http://127\.0\.0\.1:\d+/", read_line(server)).group()
        with urllib.request.urlopen(url) as response:
            assert b"<title>agentrl</title>" in response.read()
        with urllib.request.urlopen(f"{url}api/run") as response:
            assert json.load(response)["state"]["episodes"] == 6
        with urllib.request.urlopen(f"{url}api/episode?id=2-0") as response:
            assert "".join(json.load(response)["segments"][0]["text"]).startswith("<|im_start|>user")
        server.send_signal(sign)
        assert server.wait(30) == 0
        assert server.stderr.read() == ""


# -- export ------------------------------------------------------------------------------------------------------------


async def test_export_writes_its_target_and_overwrites_nothing(ready, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    path, _, words = ready
    for name, target in (("--html", "e.html"), ("--parquet", "e.parquet"), ("--hf-dataset", "data")):
        assert await command(*words[f"export {name}"]) == 0
        assert f"{tmp_path / 'new' / target}: " in capsys.readouterr().out
        before = contents(tmp_path)
        assert await command(*words[f"export {name}"]) == 2
        assert "already exists" in capsys.readouterr().err
        assert contents(tmp_path) == before
    page = (tmp_path / "new" / "e.html").read_text()
    assert "capital Paris" in page or "capital Rome" in page
    tables = [pq.read_table(f).to_pylist() for f in sorted((tmp_path / "new").rglob("*.parquet"))]
    assert len(tables) == 2
    assert tables[0] == tables[1]
    records = list(read_records(path))
    assert [json.loads(r["record"])["episode_id"] for r in tables[0]] == [r["episode_id"] for r in records]
    assert encode(decode(tables[0][0]["record"].encode(), "")) == encode(records[0])


async def test_an_export_below_a_file_is_one_sentence(ready, tmp_path, capsys):
    path, *_ = ready
    (tmp_path / "file").touch()
    for target in (["--parquet"], ["--hf-dataset"]):
        assert await command("export", path, *target, tmp_path / "file" / "x") == 1
        err = capsys.readouterr().err
        assert err.startswith("agentrl export: Not a directory")
        assert "a part of the path is a file" in err


@pytest.mark.parametrize("out", ["file", "file/x"])
async def test_a_fork_into_a_file_is_refused_before_it_samples(ready, tmp_path, capsys, out):
    _, _, words = ready
    (tmp_path / "file").write_text("kept")
    before = contents(tmp_path)
    assert await command(*words["fork"][:-1], tmp_path / out) == 2
    err = capsys.readouterr().err
    assert err == f"agentrl fork: --out {tmp_path / out}: {tmp_path / 'file'} is a file; give a folder\n"
    assert contents(tmp_path) == before


async def test_an_export_that_fails_midway_leaves_nothing(ready, tmp_path, capsys):
    """The first record can be read, the last is damaged, and the index does not show it."""
    pytest.importorskip("pyarrow")
    path, _, words = ready
    (file,) = path.glob("episodes/*.zst")
    raw = file.read_bytes()
    last = Recording(path).episodes[-1]
    file.write_bytes(raw[: last.offset] + b"\0" * last.length)
    before = contents(tmp_path)
    for name in ("export --parquet", "export --hf-dataset"):
        assert await command(*words[name]) == 2
        assert "damaged" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert list((tmp_path / "new").iterdir()) == []
