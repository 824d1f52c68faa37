"""Where a run's metrics are sent besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow and trackio, behind one interface.

Each package is imported when it is asked for. A tracker gets every line of metrics once, in order.
"""

from __future__ import annotations

import importlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agentrl.config import Config
from agentrl.errors import ConfigError

Metrics = Mapping[str, float]
_NOT_MLFLOWS = re.compile(r"[^\w.: -]")


class Tracker(Protocol):
    """Receives the metrics of one run."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of a rollout, or those of an evaluation after `step` rollouts."""

    def close(self) -> None:
        """Write what is buffered and end the run."""


class TensorBoardTracker:
    """Events in the run folder, as scalars."""

    def __init__(self, folder: Path) -> None:
        """Begin new events in `folder`; what it held is removed."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker.log`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class RunTracker:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, module: Any, config: Config, folder: Path) -> None:
        """Begin a run with the name of the run folder."""
        self._module = module
        module.init(project=config.run.tracking_project, name=folder.name, config={"config_toml": config.to_toml()})

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker.log`. The number of rollouts is a metric, since evaluations and rollouts share it."""
        self._module.log({**metrics, "rollout": step})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._module.finish()


class MlflowTracker:
    """MLflow, at the address of MLFLOW_TRACKING_URI."""

    def __init__(self, module: Any, config: Config, folder: Path) -> None:
        """Begin a run with the name of the run folder."""
        self._module = module
        module.set_experiment(config.run.tracking_project)
        module.start_run(run_name=folder.name)
        module.log_text(config.to_toml(), "config.toml")

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker.log`. In MLflow's folders `reward` and `reward/em` exclude each other: names have dots, and `_` for odd characters."""
        named = {_NOT_MLFLOWS.sub("_", n.replace("/", ".").replace("@", "_at_")): value for n, value in metrics.items()}
        self._module.log_metrics(named, step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._module.end_run()


_MAKERS: Mapping[str, Callable[[Any, Config, Path], Tracker]] = {
    "wandb": RunTracker,
    "trackio": RunTracker,
    "mlflow": MlflowTracker,
}


def require_trackers(config: Config) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        ConfigError: one is missing.
    """
    for name in config.run.trackers:
        _module(name)


def open_trackers(folder: Path, config: Config) -> list[Tracker]:
    """The trackers of the settings, begun."""
    trackers: list[Tracker] = [TensorBoardTracker(folder / "tensorboard")] if config.run.tensorboard else []
    return trackers + [_MAKERS[name](_module(name), config, folder) for name in config.run.trackers]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(f"--trackers {name} needs the package {name}; run pip install agentrl[{name}]") from e
