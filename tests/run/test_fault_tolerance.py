"""`--use-fault-tolerance`: ranks that die change nothing in a run, and the run itself is started again after a crash."""

import os
import sys
from collections import Counter

import numpy as np
import pytest
from test_async_training import Trainer, play, trained  # noqa: F401  play is a fixture

from agentrl.cli import train_command
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.errors import NonFiniteError, WorkerError
from agentrl.run import training
from agentrl.run.components import Components
from agentrl.run.train_only import train_only
from agentrl.train.megatron import trainer as megatron
from agentrl.train.restarting import RestartingTrainer

SYNC = {"schedule": "sync", "async_buffer_size": None, "consumption_window": None, "use_tis": False}


class Mortal(Trainer):
    """Dies in the steps with these numbers, counted over all ranks of a class that were started."""

    dtype, stages = "float32", 1
    count, deaths, loaded = 0, (), ()

    def __init_subclass__(cls):
        cls.count, cls.loaded = 0, ()

    def step(self, rows, loss, lr):
        cls = type(self)
        cls.count += 1
        if cls.count in cls.deaths:
            raise WorkerError("step: rank 0 was killed by SIGKILL")
        norm = float(np.concatenate([r.advantages for r in rows]).sum())
        return {**super().step(rows, loss, lr), "grad_norm": norm}

    def load(self, path):
        super().load(path)
        type(self).loaded = (*type(self).loaded, f"{path.parent.name}/{path.name}")

    def begin_save(self, path):
        self.save(path)
        return lambda: None


@pytest.mark.parametrize("settings", [SYNC, SYNC | {"async_save": True}, {}], ids=["sync", "async-save", "async"])
def test_ranks_that_die_change_nothing_in_a_run(play, tmp_path, settings):  # noqa: F811
    class Ranks(Mortal):
        deaths = (2, 6)  # the second step, and after the checkpoint of 3 rollouts the fifth

    trainer = RestartingTrainer(Ranks, tmp_path / "journal", backoff_s=0.0)
    folder, *_ = play(trainer=trainer, **settings)
    assert trainer.restarts == 2
    assert Ranks.loaded == ("000003/trainer",), "the first time there was no checkpoint"
    records = trained(folder)
    assert sorted(r["index"] for r in records) == list(range(36)), "every episode once"
    assert Counter(r["step"] for r in records) == dict.fromkeys(range(6), 6)
    weights = float((folder / "hf/weights").read_text())
    _, again, *_ = play("again", trainer=Mortal(), job=lambda config, echo: train_only(config, folder, echo=echo))
    assert again.weights == weights != 0
    if settings:  # a synchronous run does not depend on time
        whole, *_ = play("whole", trainer=Mortal(), **settings)
        assert float((whole / "hf/weights").read_text()) == weights
        assert (whole / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert '"trainer_restarts":2' in (folder / "timings.jsonl").read_text().replace("2.0", "2")


def test_without_the_setting_a_rank_that_dies_ends_the_run(play):  # noqa: F811
    class Ranks(Mortal):
        deaths = (2,)

    with pytest.raises(WorkerError, match="SIGKILL"):
        play(trainer=Ranks(), **SYNC)


@pytest.mark.parametrize("given", [False, True])
def test_the_setting_decides_whether_dead_ranks_are_started_again(tmp_path, monkeypatch, given):
    monkeypatch.setattr(megatron, "MegatronTrainer", lambda *_, **options: Mortal())
    components = Components(
        build_config({"env": "search_r1", "hf_checkpoint": "search_r1_3m", "use_fault_tolerance": given})
    )
    trainer = components.trainer(tmp_path, reference=False)
    components.close()
    assert isinstance(trainer, RestartingTrainer) == given


# -- the command line ----------------------------------------------------------------------------------------------------


def test_the_command_supervises_its_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(train_command, "supervise", lambda *arguments: calls.append(arguments) or 7)
    words = ["train", "--env", "search_r1", "--run", str(tmp_path / "run"), "--log-level", "warning"]
    assert main([*words, "--use-fault-tolerance"]) == 7
    ((first, resume, _),) = calls
    assert first[:3] == [sys.executable, "-m", "agentrl.cli"]
    assert first[3:9] == words[:6]
    assert resume(tmp_path)[3:] == ["train", "--resume", str(tmp_path), "--log-level", "warning"]
    assert not (tmp_path / "run").exists(), "the child creates it"


def test_a_supervised_run_reports_its_folder_and_final_errors(tmp_path, monkeypatch):
    async def fails(config, *, resume, echo, on_folder):
        on_folder(tmp_path / "run")
        raise NonFiniteError("the loss")

    monkeypatch.setattr(training, "train", fails)
    monkeypatch.setattr("agentrl.run.supervisor.exit_with_parent", lambda parent: None)
    reader, writer = os.pipe()
    monkeypatch.setenv("AGENTRL_SUPERVISOR_FD", str(writer))
    assert main(["train", "--env", "search_r1", "--use-fault-tolerance"]) == 1
    os.close(writer)
    with os.fdopen(reader, "rb") as reports:
        assert reports.read().splitlines() == [b"folder " + bytes(tmp_path / "run"), b"final"]


def test_wrong_settings_are_refused_without_a_child(monkeypatch):
    monkeypatch.setattr(train_command, "supervise", lambda *_: pytest.fail("supervised"))
    assert main(["train", "--env", "nowhere", "--use-fault-tolerance"]) == 2
