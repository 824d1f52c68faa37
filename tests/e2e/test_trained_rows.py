"""The rows rebuilt from the record of a training run equal those that the trainer was given, array by array; so do its log-probs."""

import asyncio
import dataclasses

import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.store import Recording, from_record
from agentrl.train.base import Row
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows
from agentrl.view.episode_detail import trained_rows

pytest.importorskip("megatron.core", reason="needs megatron-core")

WORDS = ["--env", "search_r1", "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
WORDS += ["--eval-interval", "0", "--lr", "1e-4", "--tensorboard", "false", "--concurrency", "16"]


@pytest.fixture
def noted(monkeypatch):
    """(rows as given, metrics as returned) of every optimizer step."""
    from agentrl.train.megatron.trainer import MegatronTrainer

    found = []
    step = MegatronTrainer.step

    def noting(self, rows, loss, lr):
        given = [dataclasses.replace(r, **{n: getattr(r, n).copy() for n in arrays(r)}) for r in rows]
        metrics = step(self, rows, loss, lr)
        found.append((given, dict(metrics)))
        return metrics

    monkeypatch.setattr(MegatronTrainer, "step", noting)
    return found


def arrays(row):
    return [f.name for f in dataclasses.fields(Row) if isinstance(getattr(row, f.name), np.ndarray)]


@pytest.mark.slow
@pytest.mark.usefixtures("reused_ranks")
@pytest.mark.parametrize("words", [[], ["--num-steps-per-rollout", "2", "--use-kl-loss", "--kl-loss-coef", "0.01"]])
async def test_rows_rebuilt_from_the_record_are_those_that_were_trained_on(tmp_path, noted, words):
    run = tmp_path / "run"
    assert await asyncio.to_thread(main, ["train", *WORDS, *words, "--run", str(run)]) == 0
    recording = Recording(run)
    samples = {e.id: to_samples(from_record(recording.record(e))) for e in recording.episodes}
    assert len(samples) == 32
    assert len(recording.steps) == len(noted) >= 2
    for entry, (given, metrics) in zip(recording.steps, noted, strict=True):
        record = recording.record(entry)
        again = rebuild_rows(record, lambda episode, segment: samples[episode][segment])
        assert [r.source for r in again] == [r.source for r in given]
        for a, b in zip(again, given, strict=True):
            assert arrays(a) == arrays(b)
            for name in arrays(b):
                x, y = getattr(a, name), getattr(b, name)
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
        check_log_probs(record, given, metrics, optional=bool(words))
        assert record["multiple"] == 1
        assert all(r["width"] >= r["tokens"] - 1 for row in given for r in trained_rows(row.source[0], record))


def check_log_probs(record, given, metrics, optional):
    """Those of the step itself where the loss took its own; else what the loss was given is among the rows' arrays, compared above."""
    assert [set(r) & {"log_probs", "old_log_probs", "ref_log_probs"} for r in record["rows"]] == (
        [{"old_log_probs", "ref_log_probs"} if optional else {"log_probs"}] * len(given)
    )
    for stored, row, computed in zip(record["rows"], given, metrics["log_probs"], strict=True):
        trained = np.flatnonzero(row.weights)
        assert len(trained) > 0
        values = np.asarray(stored["old_log_probs" if optional else "log_probs"], np.float32)
        expected = (row.old_log_probs if optional else computed)[trained]
        assert values.tobytes() == expected.tobytes()
        assert np.abs(values - row.rollout_log_probs[trained]).max() < 0.01, "engine and trainer agree"
