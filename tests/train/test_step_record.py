"""Rows are rebuilt from the step record array by array."""

from types import SimpleNamespace

import numpy as np
import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory

from agentrl.errors import StoreError
from agentrl.store import EpisodeWriter, Recording, from_record
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows, step_record
from agentrl.view.episode_detail import episode_detail, trained_rows

TRAINER = SimpleNamespace(copies=1, micro_batch_tokens=64, micro_batch_rows=None, multiple=1, tree_packing=True)


def episodes():
    one = [
        span(PROMPT, (1, 2), -1),
        span(SAMPLED, (3, 4)),
        span(OBSERVATION, (5,)),
        span(SAMPLED, (6,), 1, temperature=0.7),
    ]
    two = [span(PROMPT, (1, 2, 3), -1), span(SAMPLED, (9, 8, 7), temperature=0.7)]
    return [trajectory([one, two], index=0, score=1.0), trajectory([two], index=1, score=0.25)]


def test_rows_from_the_record_are_the_rows_that_were_trained_on(tmp_path):
    made = [s for t in episodes() for s in to_samples(t)]
    rows = make_rows(made, {"0-0": 0.7071, "1-0": -1 / 3}, "sequence")
    for r in rows:
        trained = r.weights > 0
        object.__setattr__(r, "old_log_probs", np.where(trained, np.float32(-0.3), np.float32(0)))
    writer = EpisodeWriter(tmp_path)
    for t in episodes():
        writer.write(t, step=0)
    trainer = SimpleNamespace(copies=2, micro_batch_tokens=8, micro_batch_rows=None, multiple=1, tree_packing=True)
    writer.write_step(**step_record(rows, trainer, step=0, optimizer_step=1))
    writer.close()

    recording = Recording(tmp_path)
    record = recording.step_of("1-0")
    stored = {e.id: to_samples(from_record(recording.record(e))) for e in recording.episodes}
    again = rebuild_rows(record, lambda episode, segment: stored[episode][segment])
    assert [s for each in stored.values() for s in each] == made
    assert len(again) == len(rows) == 3
    for a, b in zip(again, rows, strict=True):
        assert a.source == b.source
        for name in ("tokens", "weights", "advantages", "rollout_log_probs", "temperature", "old_log_probs"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype
            assert x.tobytes() == y.tobytes(), name
    assert sorted(i for share in record["plan"] for part in share for i in part) == [0, 1, 2]
    assert recording.advantages == pytest.approx({"0-0": 0.7071, "1-0": -1 / 3})


def test_the_log_probs_of_a_single_step_are_kept_beside_the_rows(tmp_path):
    """They are what the trainer computed in the step, and no input of it: the rows come back without them."""
    made = [s for t in episodes() for s in to_samples(t)]
    rows = make_rows(made, {"0-0": 1.0, "1-0": -1.0})
    current = [np.where(r.weights > 0, np.float32(-0.1) * np.arange(len(r.tokens), dtype=np.float32), 0) for r in rows]
    writer = EpisodeWriter(tmp_path)
    for t in episodes():
        writer.write(t, step=0)
    writer.write_step(**step_record(rows, TRAINER, current, step=0))
    writer.close()
    recording = Recording(tmp_path)
    record = recording.step_of("0-0")
    for kept, row, values in zip(record["rows"], rows, current, strict=True):
        assert np.float32(kept["log_probs"]).tobytes() == values[row.weights > 0].tobytes()
    by_id = {t.episode_id: to_samples(t) for t in episodes()}
    assert all(r.old_log_probs is None for r in rebuild_rows(record, lambda e, n: by_id[e][n]))
    (segment, _) = episode_detail(recording.record(recording.entry("0-0")), record, None, 1.0)["segments"]
    assert segment["trainer_log_prob"] == [None, None, *map(pytest.approx, (-0.2, -0.3)), None, pytest.approx(-0.5)]


def test_a_sample_that_is_not_the_one_recorded_is_refused():
    (sample,) = to_samples(episodes()[1])
    record = step_record(make_rows([sample], {"1-0": 1.0}), TRAINER)
    other = to_samples(trajectory([[span(PROMPT, (1,), -1), span(SAMPLED, (2,))]], index=1))[0]
    with pytest.raises(StoreError, match="recorded 6 tokens, 3 of them trained; its episode has 2 and 1"):
        rebuild_rows(record, lambda *_: other)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("tree", [True, False])
def test_the_page_shows_the_size_of_the_micro_batches_that_the_trainer_computes(multiple, tree):
    batch = pytest.importorskip("agentrl.train.megatron.micro_batch", reason="needs torch")
    long = [span(PROMPT, range(20), -1), span(SAMPLED, range(13))]
    made = [s for t in [*episodes(), trajectory([long], index=2)] for s in to_samples(t)]
    rows = make_rows(made, {"0-0": 1.0, "1-0": -1.0, "2-0": 0.5})
    trainer = SimpleNamespace(
        copies=1, micro_batch_tokens=48, micro_batch_rows=None, multiple=multiple, tree_packing=tree
    )
    record = step_record(rows, trainer)
    widths = {}
    for n, part in enumerate(record["plan"][0]):
        options = {"trained_only": True, "tree": tree, "multiple": multiple}
        width = batch.collate([rows[i] for i in part], **options).inputs.shape[1]
        widths |= {(rows[i].source, n): width for i in part}
    shown = [(r, r["width"]) for t in ("0-0", "1-0", "2-0") for r in trained_rows(t, record)]
    assert {((r["episode_id"], r["segment_index"]), r["micro_batch"]): w for r, w in shown} == widths
    assert {r["padding"] for r, _ in shown} == {0}


def test_the_page_shows_rows_of_an_older_record_as_wide_as_they_were_padded():
    made = [s for t in episodes() for s in to_samples(t)]
    rows = make_rows(made, {"0-0": 1.0, "1-0": -1.0})
    record = step_record(rows, TRAINER) | {"multiple": 16, "plan": [[[0, 1, 2]]]}
    del record["sizes"], record["tree_packing"]
    shown = [r for t in ("0-0", "1-0") for r in trained_rows(t, record)]
    assert [(r["width"], r["padding"]) for r in shown] == [(16, 16 - (r["tokens"] - 1)) for r in shown]
