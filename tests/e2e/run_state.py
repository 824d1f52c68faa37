"""What equal runs have equal: metrics, episodes without what depends on the clock, and weights."""

import orjson

from agentrl.store import read_records


def episodes(run):
    """Every record, less what depends on the clock."""
    found = []
    for record in read_records(run / "episodes"):
        record.pop("timings")
        for turn in record["turns"]:
            turn.pop("timings")
            for result in turn["action"]["results"]:
                result.pop("duration_s")
        found.append(orjson.dumps(record))
    return found


def state(run):
    """Metrics, episodes and weights of a finished run."""
    weights = {f.name: f.read_bytes() for f in (run / "hf").glob("*.safetensors")}
    assert weights
    return (run / "metrics.jsonl").read_bytes(), episodes(run), weights


def equal(run, other):
    """Fail if two runs differ."""
    for mine, theirs in zip(state(run), state(other), strict=True):
        assert mine == theirs
