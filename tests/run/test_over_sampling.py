"""Over-sampling: the first groups to finish are trained on, the rest is stopped, given back and counted, and the length bias is printed."""

import functools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from test_async_training import Trainer, play, trained  # noqa: F401  play is a fixture

from agentrl.config import build_config
from agentrl.errors import ConfigError
from agentrl.run.group_player import PlayedGroup, StoppedGroups
from agentrl.run.over_sampling import OverSampling
from agentrl.run.train_only import train_only
from agentrl.store import read_records

SYNC = {"schedule": "sync", "async_buffer_size": None, "consumption_window": None, "use_tis": False}
OVER = SYNC | {"over_sampling_batch_size": 5}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_group_is_trained_on_or_given_back(play):  # noqa: F811
    folder, trainer, engine, lines = play(**OVER)
    records = list(read_records(folder / "episodes"))
    groups = {r["index"] // 2 for r in trained(folder)}
    assert len(groups) == 6 * 3 == len({i for step in trainer.fed for i, _ in step}) // 2
    rows = metrics(folder)
    assert [row["schedule/stopped_groups"] for row in rows] == [2] * 6
    assert {row["schedule/staleness_max"] for row in rows} == {0}
    ended = sum(r["split"] == "surplus" for r in records)
    assert ended + sum(row["schedule/stopped_episodes"] for row in rows) == 6 * 2 * 2, "every episode that was started"
    assert engine.policy_version == 6
    (line,) = [line for line in lines if line.startswith("over-sampling: 12 of 30 groups were stopped")]
    assert "% shorter than all that were started" in line
    assert any("biases training towards short episodes" in line for line in lines)
    assert any("(episode stopped)" in line and "over-sampling" in line for line in lines)


def test_train_only_on_the_record_gives_the_same_weights(play):  # noqa: F811
    folder, trainer, *_ = play(**OVER)
    job = functools.partial(replayed, folder)
    _, again, *_ = play("again", job=job, **OVER)
    assert again.fed == trainer.fed
    assert again.weights == trainer.weights != 0


def replayed(folder, config, echo):
    return train_only(config, folder, echo=echo)


def test_tasks_of_stopped_groups_are_played_again_first(play):  # noqa: F811
    folder, *_ = play(**OVER)
    played = Counter(r["task"]["id"] for r in trained(folder) if r["index"] % 2 == 0)
    assert sum(played.values()) == 18
    assert max(played.values()) == 1, "20 tasks, none twice although 12 groups were stopped"


def test_the_length_bias_is_a_lower_bound():
    """Four episodes of 10 tokens are taken. Four others had 30 tokens each when they were stopped, so the mean of all is at least 20."""
    attempts = tuple(SimpleNamespace(sampled_tokens=10) for _ in range(4))
    counts = OverSampling()
    taken = [PlayedGroup(group=None, attempts=attempts)]
    stopped = StoppedGroups(groups=1, dropped=1, unfinished=4, attempts=[])
    assert counts.add(taken, stopped, 4 * 10 + 4 * 30)["schedule/stopped_tokens"] == 120
    assert counts.bias == 0.5
    assert counts.line() == (
        "over-sampling: 1 of 2 groups were stopped, 1 of them not given back, with 75% of the sampled tokens; length bias: the episodes trained "
        "on are at least 50.0% shorter than all that were started"
    )


def test_a_run_that_crashed_continues(play, tmp_path):  # noqa: F811
    with pytest.raises(KeyboardInterrupt):
        play(trainer=Trainer(crash_after=4), **OVER)
    folder, *_, lines = play(resume=True, **OVER)
    assert Counter(r["step"] for r in trained(folder)) == dict.fromkeys(range(6), 6)
    assert any(line.startswith("over-sampling: 12 of 30 groups were stopped") for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"over_sampling_batch_size": 16}, "starts no more groups than --rollout-batch-size 16"),
        ({"over_sampling_batch_size": 32, "schedule": "async", "use_tis": True}, "drops no group"),
        ({"over_sampling_batch_size": 32, "rollout_function_path": "a.b"}, "leave out --over-sampling-batch-size"),
        ({"over_sampling_batch_size": 32, "engine": "sglang", "runner_processes": 2}, "leave out --runner-processes"),
        (
            {"dynamic_sampling_filter_path": "nonzero_std", "engine": "sglang", "runner_processes": 2},
            "leave out --runner-processes",
        ),
        ({"buffer_filter_path": "a.py:f"}, "has no effect without --over-sampling-batch-size"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config(settings)
