"""Damaged run folders: each file truncated, flipped, removed, swapped. What is read is what was written, or there is one sentence."""

import hashlib
import shutil
from pathlib import Path
from random import Random

import orjson
import pytest

from agentrl.config import build_config
from agentrl.config.load import read_toml
from agentrl.errors import AgentRLError
from agentrl.store import checkpoints as checkpoint_files
from agentrl.store import encode, read_episodes, to_record
from agentrl.store.checkpoints import checkpoints, read_state, verified_state
from agentrl.view.run_source import RunSource
from fuzz.mutations import FULL, QUICK, damaged

RUN = Path(__file__).parents[1] / "recorded/run"
FILES = sorted(f.relative_to(RUN) for f in RUN.rglob("*") if f.is_file())


def looked_at(run):
    """Everything that is read without a model: episodes, overview, each episode's details, the newest checkpoint."""
    seen = {}
    attempts = {
        "episodes": lambda: [hashlib.sha256(encode(to_record(t))).hexdigest() for t in read_episodes(run / "episodes")],
        "page": lambda: _page(run),
        "checkpoint": lambda: [verified_state(run, c) for c in checkpoints(run)],
        "config": lambda: repr(build_config(base=read_toml(run / "config.toml"))),
    }
    for name, attempt in attempts.items():
        try:
            seen[name] = attempt()
        except AgentRLError as e:
            text = str(e)
            assert text, name
            assert "Traceback" not in text, name
            seen[name] = None
    return seen


def _page(run):
    source = RunSource(run)
    source.overview()
    return [
        (e.id, hashlib.sha256(repr(source.episode(e.id)["score"]).encode()).hexdigest())
        for e in source.recording.episodes
    ]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """The recorded run, whose checkpoint is older than checksums, with those that today's code writes."""
    run = tmp_path_factory.mktemp("sealed") / "run"
    shutil.copytree(RUN, run)
    checkpoint = run / "checkpoints/000002"
    state = read_state(checkpoint) | {"files": checkpoint_files._files(checkpoint)}
    for name in ("metrics", "timings"):
        state[f"{name}_checksum"] = checkpoint_files._checksum(run / f"{name}.jsonl", state.get(f"{name}_bytes", 0))
    state["checksum"] = checkpoint_files._state_checksum(state)
    (checkpoint / "state.json").write_bytes(orjson.dumps(state))
    return run


@pytest.fixture(scope="module")
def whole(sealed):
    return looked_at(sealed)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_a_damaged_run_folder_is_read_right_or_refused(tmp_path, sealed, whole, cases):
    for seed in range(cases):
        random = Random(seed)
        run = tmp_path / "run"
        shutil.copytree(sealed, run)
        name = FILES[seed % len(FILES)]
        other = (sealed / random.choice(FILES)).read_bytes()
        if random.random() < 0.15:
            (run / name).unlink()
        else:
            (run / name).write_bytes(damaged((sealed / name).read_bytes(), random, other))
        seen = looked_at(run)
        shutil.rmtree(run)
        if seen["episodes"] is not None:
            assert set(seen["episodes"]) <= set(whole["episodes"]), (seed, name)
        if seen["page"] is not None:
            assert set(seen["page"]) <= set(whole["page"]), (seed, name)
        if seen["checkpoint"] is not None and str(name).startswith("checkpoints") and whole["checkpoint"] is not None:
            assert seen["checkpoint"] == whole["checkpoint"] or seen["checkpoint"] == [], (seed, name)
