"""Who waits for whom: utilisation of each lane, a trace that holds every span, and the ceiling of asynchrony."""

import json

import pytest

from agentrl.run import timeline as module
from agentrl.run.timeline import Timeline, ceiling


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_overlapping_spans_are_busy_once_and_counted_at_once(clock, tmp_path):
    timeline = Timeline()
    outer, inner, trainer = (timeline.span(*names) for names in (("engine", "a"), ("engine", "b"), ("trainer", "r")))
    outer.__enter__()
    clock[0] = 102.0
    inner.__enter__()
    clock[0] = 104.0
    outer.__exit__(None, None, None)
    clock[0] = 106.0
    inner.__exit__(None, None, None)
    with trainer:
        clock[0] = 108.0
    assert timeline.lanes["engine"].busy_s == 6.0
    assert timeline.lanes["engine"].total_s == 8.0
    assert timeline.summary() == "of 8 s busy: engine 75% (mean 1.3 at once), trainer 25%"
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    spans = {(e["cat"], e["name"], e["ph"]): e["ts"] for e in events}
    assert spans["engine", "b", "b"] == 2_000_000
    assert spans["engine", "b", "e"] == 6_000_000
    assert spans["trainer", "r", "e"] == 8_000_000


def test_a_trace_has_a_bound_and_counts_what_it_leaves_out(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS", 4)
    timeline = Timeline()
    for name in "abcde":
        with timeline.span("engine", name):
            clock[0] += 1
    timeline.write(tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert (len(trace["traceEvents"]), trace["spansLeftOut"]) == (4, 3)
    assert timeline.lanes["engine"].busy_s == 5.0


def test_the_gain_of_asynchrony_is_at_most_one_by_the_trainers_share():
    assert "at most 4.0 x" in ceiling({"rollout_s": 75.0, "train_s": 20.0, "sync_s": 5.0})
    assert ceiling({"rollout_s": 75.0, "train_s": 0.0, "sync_s": 0.0}) == "nothing was trained"
