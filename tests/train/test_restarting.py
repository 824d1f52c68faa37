"""A trainer whose ranks die, hang or raise continues from its last checkpoint, with the weights of one that was never disturbed."""

import functools
import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import NonFiniteError, WorkerError
from agentrl.train.base import LossConfig, Receiver, Row
from agentrl.train.restarting import RestartingTrainer

LOSS = LossConfig()


def rows_of(value: float) -> list[Row]:
    zeros = np.zeros(2, np.float32)
    return [
        Row(
            tokens=np.array([1, 2], np.int32),
            weights=np.array([0, value], np.float32),
            advantages=zeros,
            rollout_log_probs=zeros,
            temperature=zeros + 1,
        )
    ]


@dataclass
class Machine:
    """Starts ranks whose weights are one number, and lets chosen commands fail."""

    fails: dict[str, list[int]] = field(default_factory=dict)
    """the calls of each command that fail, counted over all ranks that were started; -1: all of them"""
    calls: dict[str, int] = field(default_factory=dict)
    adapters: list[str] = field(default_factory=list)
    """what was trained in each step, those that were taken again included"""
    drift: float = 0.0
    """how much the weights differ between two starts"""
    started: int = 0
    copies: int = 1

    def start(self):
        self.enter("start")
        self.started += 1
        return FakeRanks(self, 1.0 + self.drift * (self.started - 1))

    def enter(self, command: str) -> None:
        number = self.calls[command] = self.calls.get(command, 0) + 1
        if number in self.fails.get(command, ()) or -1 in self.fails.get(command, ()):
            raise WorkerError(f"{command}: rank 0 was killed by SIGKILL")


class FakeRanks:
    dtype, copies, stages, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = (
        "float32",
        1,
        1,
        64,
        None,
        1,
        True,
    )
    adapters = ()

    def __init__(self, machine: Machine, weights: float):
        self.machine, self.weights, self.loaded, self.closed = machine, weights, True, False
        self.copies = machine.copies

    def enter(self, command):
        if self.closed:
            raise WorkerError(f"{command}: the trainer's workers have been stopped")
        try:
            self.machine.enter(command)
        except WorkerError:
            self.closed = True
            raise

    def step(self, rows, loss, lr, *, profile=None, adapter="a"):
        self.enter("step")
        self.machine.adapters.append(adapter)
        if not np.isfinite(lr):
            raise NonFiniteError("not finite")
        self.weights = self.weights * 0.5 + float(rows[0].weights[1]) * lr
        return {"grad_norm": self.weights, "log_probs": []}

    def log_probs(self, rows, *, reference=False, trained_only=False):
        self.enter("log_probs")
        return [np.full(2, self.weights, np.float32)]

    def save(self, path):
        self.enter("save")
        path.mkdir()
        (path / "weights").write_text(repr(self.weights))

    def begin_save(self, path):
        path.mkdir()
        self.enter("begin_save")

        def finish():
            self.enter("finish_save")
            (path / "weights").write_text(repr(self.weights))

        return finish

    def load(self, path):
        self.enter("load")
        self.weights = float((path / "weights").read_text())

    def deliver(self, action, **arguments):
        self.enter(action)
        return [action]

    def offload(self):
        self.enter("offload")
        self.loaded = False

    def onload(self):
        self.loaded = True

    def free_mib(self):
        self.enter("free_mib")
        return 7

    def close(self):
        self.closed = True


def restarting(machine: Machine, tmp_path: Path, **options) -> RestartingTrainer:
    return RestartingTrainer(machine.start, tmp_path, backoff_s=0.0, **options)


def weights(trainer) -> float:
    return float(trainer.log_probs([])[0][0])


def trained(machine: Machine, tmp_path: Path) -> float:
    """Three steps, a checkpoint after the first."""
    tmp_path.mkdir()
    trainer = restarting(machine, tmp_path)
    trainer.step(rows_of(3.0), LOSS, 1.0)
    trainer.save(tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "checkpoint")
    trainer.restart_from(tmp_path / "checkpoint")
    trainer.step(rows_of(5.0), LOSS, 0.5)
    trainer.step(rows_of(7.0), LOSS, 0.25)
    found = weights(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize(
    "fails",
    [
        {"step": [1]},
        {"step": [2]},
        {"step": [3]},
        {"save": [1]},
        {"step": [3, 4, 5]},
        {"log_probs": [1]},
        {"step": [3], "load": [1]},
        {"step": [3], "start": [2, 3]},
    ],
)
def test_the_weights_are_those_of_a_run_without_failures(fails, tmp_path):
    machine = Machine(fails)
    assert trained(machine, tmp_path / "failing") == trained(Machine(), tmp_path / "whole")
    assert machine.started > 1


def test_a_failure_amid_the_repeated_steps_loses_none_of_them(tmp_path):
    """The fourth step fails, then the second while it is repeated; then the sixth, which repeats all five."""
    taken = []
    for fails in ({}, {"step": [4, 6, 12]}):
        machine = Machine(fails)
        trainer = restarting(machine, tmp_path)
        for number in range(1, 7):
            trainer.step(rows_of(number), LOSS, 0.1)
        taken.append(weights(trainer))
        assert machine.started == 1 + len(fails.get("step", ()))
        trainer.close()
    assert taken[0] == taken[1]


def test_repeated_steps_train_the_adapters_that_they_trained(tmp_path):
    machine = Machine({"step": [3]})
    trainer = restarting(machine, tmp_path)
    for name in ("red", "blue", "red"):
        trainer.step(rows_of(1.0), LOSS, 0.1, adapter=name)
    assert machine.adapters == ["red", "blue", "red", "blue", "red"]
    trainer.close()


def test_steps_before_a_checkpoint_are_not_repeated(tmp_path):
    machine = Machine({"log_probs": [1]})
    trained(machine, tmp_path / "run")
    assert machine.calls["step"] == 3 + 2, "the two since the checkpoint"
    assert machine.calls["load"] == 1


def test_a_command_that_always_fails_ends_the_run_after_a_few_restarts(tmp_path):
    machine = Machine({"step": [-1]})
    trainer = restarting(machine, tmp_path)
    with pytest.raises(
        WorkerError,
        match="started again 3 times for one command and failed each time; the last: step: rank 0 was killed",
    ):
        trainer.step(rows_of(1.0), LOSS, 1.0)
    assert machine.started == 4


def test_a_step_that_is_not_finite_is_not_repeated(tmp_path):
    machine = Machine({"log_probs": [1]})
    trainer = restarting(machine, tmp_path)
    with pytest.raises(NonFiniteError):
        trainer.step(rows_of(1.0), LOSS, float("nan"))
    assert weights(trainer) == 1.0


def test_repeated_steps_that_differ_are_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trainer = restarting(Machine({"log_probs": [1]}, drift=0.5), tmp_path)
    trainer.step(rows_of(2.0), LOSS, 1.0)
    weights(trainer)
    assert "the trainer is not deterministic" in caplog.text


def test_a_checkpoint_in_the_background_is_written_again(tmp_path):
    trainer = restarting(Machine({"finish_save": [1]}), tmp_path)
    trainer.step(rows_of(3.0), LOSS, 1.0)
    trainer.begin_save(tmp_path / "checkpoint")()
    assert float((tmp_path / "checkpoint/weights").read_text()) == weights(trainer) == 3.5


def test_a_restart_keeps_the_gpu_memory_free(tmp_path):
    trainer = restarting(Machine({"free_mib": [1], "export": []}), tmp_path)
    trainer.offload()
    assert trainer.free_mib() is None
    weights(trainer)
    assert not trainer._ranks.loaded
    trainer.onload()
    assert trainer._ranks.loaded


@pytest.mark.parametrize("action", ["open_group", "broadcast"])
def test_the_servers_of_a_group_fail_with_a_rank(action, tmp_path):
    trainer = restarting(Machine({action: [1]}), tmp_path)
    receivers = [Receiver("http://one", 1), Receiver("http://two", 1)]
    arguments = {"receivers": receivers} if action == "open_group" else {}
    if action == "broadcast":
        trainer.deliver("open_group", receivers=receivers)
    (report,) = trainer.deliver(action, **arguments)
    assert set(report.failed) == {"http://one", "http://two"}
    assert trainer.deliver("tensors") == ["tensors"]


def test_a_trainer_that_is_closed_is_not_started_again(tmp_path):
    machine = Machine()
    trainer = restarting(machine, tmp_path)
    trainer.close()
    with pytest.raises(WorkerError, match="stopped"):
        trainer.log_probs([])
    assert machine.started == 1


def test_ranks_that_start_on_fewer_machines_have_fewer_copies(tmp_path):
    machine = Machine(fails={"log_probs": [1]})
    trainer = RestartingTrainer(machine.start, tmp_path, backoff_s=0.0)
    assert trainer.copies == 1
    machine.copies = 2
    trainer.log_probs(rows_of(1.0))
    assert (trainer.restarts, trainer.copies) == (1, 2)
    trainer.close()


# -- genuine ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("signal_name", "ranks"), [("SIGKILL", 1), pytest.param("SIGSTOP", 2, marks=pytest.mark.full)])
def test_a_rank_that_dies_or_hangs_in_a_step_changes_no_bit(signal_name, ranks, tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core")

    from models import make_model, make_rows

    from agentrl.core.weights_fingerprint import fingerprint
    from agentrl.train.megatron.trainer import MegatronTrainer

    model = make_model(tmp_path / "model")
    rows = make_rows(model)

    def start(name):
        return lambda: MegatronTrainer(model, run_dir=tmp_path / name, threads=1, timeout_s=600.0, world_size=ranks)

    def train(trainer, disturb=lambda: None):
        for number in range(3):
            if number == 2:
                disturb()
            trainer.step(rows, LOSS, 0.01)
            if number == 0:
                trainer.save(tmp_path / trainer.name)
                trainer.restart_from(tmp_path / trainer.name)
        trainer.export_weights(tmp_path / f"{trainer.name}-hf")
        trainer.close()
        return fingerprint(tmp_path / f"{trainer.name}-hf")

    whole = RestartingTrainer(start("whole"), tmp_path)
    whole.name = "checkpoint-whole"
    expected = train(whole)
    hurt = RestartingTrainer(start("hurt"), tmp_path, backoff_s=0.0)
    hurt.name = "checkpoint-hurt"

    def disturb():
        pool = hurt._ranks.pool
        if signal_name == "SIGSTOP":
            hurt._ranks.timeout_s = (
                5.0  # of these ranks only: those that replace them have the time that a busy machine needs
            )
        kill = functools.partial(os.kill, pool.processes[-1].process.pid, getattr(signal, signal_name))
        pool.connections[-1] = Disturbed(pool.connections[-1], kill)

    assert train(hurt, disturb) == expected
    assert hurt.restarts == 1


class Disturbed:
    """A connection after whose first message something happens."""

    def __init__(self, connection, happens):
        self._connection, self._happens = connection, happens

    def send(self, message):
        self._connection.send(message)
        self._happens()

    def __getattr__(self, name):
        return getattr(self._connection, name)
