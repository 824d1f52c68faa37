"""Metrics reach TensorBoard as scalars, and W&B, MLflow and trackio by their own functions."""

import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.config import build_config
from agentrl.errors import ConfigError
from agentrl.run.report import Report
from agentrl.run.trackers import require_trackers

ROWS = [{"step": 0, "reward": 0.5, "eval/test/pass@2": 0.25, "reward/<lambda>": 0.5}]
SECONDS = {"rollout_s": 1.0}


def config(*trackers, tensorboard=False):
    given = {"trackers": list(trackers), "tensorboard": tensorboard, "tracking_project": "mine"}
    return build_config({"env": "search_r1", "hf_checkpoint": "m"}, given)


class Service:
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def played(folder, settings):
    """A run that continues after one row and adds a rollout."""
    report = Report()
    report.open(folder, settings, ROWS)
    report.add_step(1, {"reward": 0.75, "train/rows": 1, "failures": 0}, SECONDS)
    report.close()


def test_tensorboard_gets_scalars_that_its_own_reader_finds(tmp_path):
    for _ in range(2):  # a resumed run writes them again, once
        played(tmp_path, config(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(0, 0.5), (1, 0.75)]
    assert events.Tags()["tensors"] == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_the_settings_and_every_row(tmp_path, monkeypatch, name):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)
    played(tmp_path / "run", config(name))
    (begin, _, given), first, second, end = service.calls
    assert (begin, given["project"], given["name"], end[0]) == ("init", "mine", "run", "finish")
    assert 'env = "search_r1"' in given["config"]["config_toml"]
    assert first[1] == ({"reward": 0.5, "eval/test/pass@2": 0.25, "reward/<lambda>": 0.5, "rollout": 0},)
    assert second[1][0]["rollout"] == 1


def test_mlflow_gets_the_settings_and_every_row(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    played(tmp_path / "run", config("mlflow"))
    names = [name for name, _, _ in service.calls]
    assert names == ["set_experiment", "start_run", "log_text", "log_metrics", "log_metrics", "end_run"]
    assert service.calls[3][1:] == (
        ({"reward": 0.5, "eval.test.pass_at_2": 0.25, "reward._lambda_": 0.5},),
        {"step": 0},
    )


def test_a_tracker_without_its_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"--trackers wandb needs the package wandb; run pip install agentrl\[wandb\]"
    ):
        require_trackers(config("wandb"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    require_trackers(config("wandb"))
