"""A whole GRPO run of search_r1 with a budget that forces summaries: trained, resumed, replayed, and its rows rebuilt from the record."""

import asyncio
import json
import shutil

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from agentrl.cli.main import main
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.store import Recording, from_record
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows

WORDS = ["--env", "search_r1", "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
WORDS += ["--eval-interval", "0", "--lr", "1e-4", "--tensorboard", "false", "--actor-num-gpus-per-node", "1"]
WORDS += ["--max-turns", "6", "--context-policy", "summarise", "--context-policy-arg", "keep=1"]
for argument in ("above=0.25", "max_tokens=16", "instruction=Sum up."):
    WORDS += ["--context-policy-arg", argument]

pytestmark = pytest.mark.full


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_with_summaries_trains_resumes_and_replays(tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    assert await asyncio.to_thread(main, ["train", *WORDS, "--save-interval", "2", "--run", str(run)]) == 0
    rows = metrics_of(run)
    assert all(row["summaries"] > 0 and row["exactness_violations"] == 0 for row in rows)
    differences = [row["train/rollout_log_prob_diff_max"] for row in rows if row["train/rows"]]
    assert differences, "something was trained"
    assert max(differences) < 1e-3
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "000003")
    assert await asyncio.to_thread(main, ["train", "--resume", str(again)]) == 0
    assert metrics_of(again) == rows
    assert fingerprint(again / "hf") == fingerprint(run / "hf")
    assert await asyncio.to_thread(main, ["replay", str(run)]) == 0
    assert await asyncio.to_thread(main, ["rescore", str(run)]) == 0
    check_rows(Recording(run))


def check_rows(recording):
    """The tokens of each summary have a weight in one row, that of the segment in which they were sampled."""
    episodes = {e.id: from_record(recording.record(e)) for e in recording.episodes}
    samples = {name: to_samples(t) for name, t in episodes.items()}
    of_summaries = 0
    for entry in recording.steps:
        for row in rebuild_rows(recording.record(entry), lambda episode, segment: samples[episode][segment]):
            t = episodes[row.source[0]]
            for turn in t.turns:
                if turn.summary is None or turn.segment != row.source[1]:
                    continue
                end = turn.context_length + sum(
                    len(s.ids) for s in t.segments[turn.segment].spans if s.turn == turn.index and s.log_probs
                )
                weights = row.weights[-(len(t.segments[turn.segment]) - turn.context_length) :]
                assert len(t.segments[turn.segment]) == end, "a summary ends its segment"
                assert (weights > 0).all()
                of_summaries += len(weights)
    assert of_summaries
