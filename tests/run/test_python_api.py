"""Runs started from Python: the same code as the command line, in the running loop, with Python objects for environment and rewards."""

import ast
import asyncio
import functools
import inspect
import itertools
import json
import os
import pydoc
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from replays import NoteTrainer, command

from agentrl import Env, Settings, StepResult, Task, run_evaluation, run_rollouts, run_sft, run_training
from agentrl.config import FIELDS, read_toml
from agentrl.config.describe import setting
from agentrl.core.registry import was_object
from agentrl.env import ENVS, make_env_class
from agentrl.errors import AgentRLError, ConfigError, ContractError
from agentrl.store import read_episodes
from agentrl.store.run_folder import RunFolder

THIS = str(Path(__file__).resolve())
SMALL = {
    "rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "tensorboard": False, "eval_interval": 0
}  # fmt: skip


class Toy(Env):
    """Importable by name: it is at the top level of a file."""

    def __init__(self, word="Say"):
        self.word = word

    def reset(self, task, *, seed):
        return f"{self.word} {task.prompt}."

    def step(self, action):
        return StepResult(terminated=True)

    def state(self):
        return {"word": self.word}

    @classmethod
    def tasks(cls, split):
        return [Task(str(n), str(n), n) for n in range(2)]


def length(trajectory):
    return float(len(trajectory.turns[-1].action.text))


async def kept(config):
    """A configured job that only returns what it is given."""
    return config


@pytest.fixture(autouse=True)
def trainer(monkeypatch):
    made = NoteTrainer()
    monkeypatch.setattr("agentrl.run.components.Components.trainer", lambda self, path, *, reference: made)
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    return made


def local_env():
    class Hidden(Toy):
        rewards = (length,)

    return Hidden


def words_of(run):
    return {t.state["word"] for t in read_episodes(run / "episodes")}


async def test_a_class_and_a_function_play_and_their_names_are_recorded(model, says, tmp_path):
    says(["a", "bb"])
    run = await run_rollouts(Settings(env=Toy, reward=length, model=model, run=tmp_path / "run", **SMALL))
    recorded = read_toml(run / "config.toml")
    assert recorded["env"] == f"{THIS}:Toy"
    assert recorded["reward"] == [f"{THIS}:length"]
    assert {t.rewards["length"] for t in read_episodes(run / "episodes")} <= {1.0, 2.0}
    assert len(list(read_episodes(run / "episodes"))) == 4


async def test_the_command_line_makes_the_same_run(model, says, tmp_path):
    says(lambda asked: f"a {asked.session}")
    run = await run_rollouts(Settings(env=Toy, reward=length, model=model, run=tmp_path / "python", **SMALL))
    small = [w for n, v in SMALL.items() for w in (f"--{n.replace('_', '-')}", str(v).lower())]
    words = ["--env", f"{__file__}:Toy", "--reward", f"{__file__}:length", "--model", model, *small]
    assert await command("rollout", *words, "--run", tmp_path / "shell") == 0
    assert read_toml(run / "config.toml") | {"run": ""} == read_toml(tmp_path / "shell/config.toml") | {"run": ""}
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "shell/metrics.jsonl").read_bytes()
    assert await command("replay", run) == 0


@pytest.mark.parametrize(
    "make", [lambda: Toy("Write"), functools.partial(Toy, word="Write")], ids=["function", "partial"]
)
async def test_a_function_makes_the_instance_of_each_episode(model, says, tmp_path, make):
    says(["a"])
    run = await run_rollouts(Settings(env=make, reward=length, model=model, run=tmp_path / "run", **SMALL))
    assert words_of(run) == {"Write"}
    recorded = read_toml(run / "config.toml")
    by_name = isinstance(make, functools.partial)
    assert recorded["env_args"] == ({"word": "Write"} if by_name else {})
    assert recorded["env"] == (f"{THIS}:Toy" if by_name else "python-object:Toy")


async def test_objects_that_no_file_has_are_recorded_as_such_and_later_commands_say_what_is_needed(
    model, says, tmp_path, capsys, monkeypatch
):
    says(["a"])
    settings = Settings(
        env=local_env(), reward=[lambda trajectory: length(trajectory)], model=model, run=tmp_path / "run", **SMALL
    )
    run = await run_training(settings)
    recorded = read_toml(run / "config.toml")
    assert recorded["env"] == "python-object:Hidden"
    assert recorded["reward"] == ["python-object:<lambda>"]
    monkeypatch.setattr(ENVS, "_known", {k: v for k, v in ENVS._known.items() if not was_object(k)})  # another process
    for words in (["replay", run], ["train", "--resume", run]):
        capsys.readouterr()
        assert await command(*words) == 2
        error = capsys.readouterr().err
        assert "give --env FILE.py:Hidden" in error
        assert "agentrl.Settings(env=Hidden)" in error
        assert error.count("\n") == 1
    assert await command("rescore", run, "--env", f"{__file__}:Toy", "--reward", f"{__file__}:length") == 0


async def test_settings_of_the_environment_file_lie_below_those_that_are_given(model, monkeypatch):
    monkeypatch.setattr("agentrl.run.rollouts.rollout_only", lambda config, *, echo: kept(config))
    from agentrl.envs.search_r1 import SearchR1

    config = await run_rollouts(Settings(env=SearchR1, model=model))
    named = await run_rollouts(Settings(env="search_r1", model=model, max_turns=8))
    assert config.env.env == "agentrl.envs.search_r1:SearchR1"
    assert config.rollout == named.rollout
    assert config.env.max_turns != 8  # the environment recommends another number than the default
    assert named.env.max_turns == 8  # given, although it is the default


async def test_a_run_is_resumed_with_its_objects(model, monkeypatch, says, tmp_path):
    says(["a"])
    monkeypatch.setattr(
        "agentrl.run.training.train", lambda config, *, resume, echo: kept((config, resume)), raising=True
    )
    hidden = local_env()
    run = tmp_path / "run"
    settings = Settings(env=hidden, model=model, run=run, **SMALL)
    config, _ = await run_training(settings)
    RunFolder.create(config, "0", resumable=True).close()
    resumed, folder = await run_training(Settings(env=hidden, num_rollout=5), resume=str(run))
    assert folder == run
    assert resumed.rollout.num_rollout == 5
    assert resumed.env == config.env
    with pytest.raises(ConfigError, match=r"^resume continues with the run's own settings; leave out --lr"):
        await run_training(Settings(env=hidden, lr=1.0), resume=run)
    by_name, _ = await run_training(Settings(env=Toy), resume=run)  # it has moved into a file meanwhile
    assert by_name.env.env.endswith(":Toy")
    recorded = run / "config.toml"
    recorded.write_text(recorded.read_text().replace("python-object:Hidden", "search_r1"))
    with pytest.raises(ConfigError, match="leave out --env"):
        await run_training(Settings(env=Toy), resume=run)


async def test_evaluation_returns_its_metrics_and_sft_and_recorded_take_text_paths(model, says, trainer, tmp_path):
    lengths = itertools.count(1)
    says(lambda asked: "a" * next(lengths))
    base = {"env": Toy, "reward": length, "model": model, "tensorboard": False}
    metrics = await run_evaluation(Settings(**base, run=tmp_path / "eval"))
    assert metrics["episodes"] == 2
    assert metrics["length"] == metrics["reward"] > 0
    run = await run_rollouts(Settings(**base | SMALL, run="played"))
    trained = await run_training(Settings(run="trained"), recorded="played")
    assert read_toml(trained / "config.toml")["env"] == read_toml(run / "config.toml")["env"]
    tuned = await run_sft("played", Settings(run="tuned"))
    assert (tuned / "hf").is_dir()
    assert len(trainer.fed) == 2
    with pytest.raises(ConfigError, match="exclude each other"):
        await run_training(resume="trained", recorded="played")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_rollot": 3}, ConfigError, "unknown setting 'num_rollot'; did you mean 'num_rollout'"),
        ({"lr": -1.0}, ConfigError, "--lr must be at least 0, found -1.0"),
        ({"lr": -1.0, "num_rollot": 3}, ConfigError, "(?s)num_rollot.*--lr"),
        ({"model": "a", "hf_checkpoint": "b"}, ConfigError, "model and hf_checkpoint are one setting"),
        ({"env": Toy(), "model": "m"}, ContractError, "give the class, or a function that makes an instance"),
        ({"env": 3, "model": "m"}, ContractError, "expected an Env class, a function that makes an instance, or a name, found 3"),
        ({"env": int, "model": "m"}, ContractError, "expected a subclass of agentrl.Env, found <class 'int'>"),
        ({"env": lambda: 3, "model": "m"}, ContractError, "must return an instance of agentrl.Env, found 3"),
        ({"env": Toy, "reward": [3], "model": "m"}, ContractError, "expected a function, a @reward or a name, found 3"),
        ({"env": Toy, "env_args": {"word": object()}, "model": "m"}, ConfigError, "give a function that makes the instance"),
        ({"reward": length, "model": "m"}, ConfigError, "no environment is given"),
        ({"env": local_env(), "runner_processes": 2, "engine": "sglang", "model": "m"}, ConfigError, "python-object:Hidden is not"),
    ],
)  # fmt: skip
async def test_what_cannot_be_taken_is_refused_in_one_sentence_before_anything_starts(
    tmp_path, monkeypatch, given, error, text
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        await run_rollouts(Settings(**given))
    assert not list(tmp_path.iterdir())


def test_help_explains_every_setting():
    shown = pydoc.render_doc(Settings, renderer=pydoc.plaintext)
    for name in FIELDS:
        summary = (setting(name).description or "").split("\n\n")[0]
        assert f"- `{name}` (" in shown
        assert " ".join(summary.split()) in shown


def test_every_setting_is_an_attribute_and_a_parameter():
    settings = Settings(lora_rank=8)
    assert settings.lora_rank == 8
    assert not [name for name in FIELDS if not hasattr(settings, name)]
    assert {*FIELDS} <= {*inspect.signature(Settings).parameters}


@pytest.mark.full
def test_a_type_checker_knows_the_settings(tmp_path):
    code = "from agentrl import Settings\nSettings(lr=1e-4, model='m', env='e')\nSettings(lr='much')\nSettings(num_rollot=3)\n"
    (tmp_path / "script.py").write_text(code)
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(tmp_path / "script.py"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if "script.py" in line and " error:" in line]
    assert len(errors) == 2, done.stdout
    assert 'Argument "lr"' in errors[0]
    assert "num_rollot" in errors[1]


def test_an_imported_file_does_not_start_a_run(tmp_path):
    (tmp_path / "script.py").write_text(
        "import asyncio\nfrom agentrl import Env, Settings, run_rollouts\n"
        "class My(Env): ...\nasyncio.run(run_rollouts(Settings(env=My, model='m')))\n"
    )
    with pytest.raises(AgentRLError, match=r"script\.py starts a run when it is imported; put that under `if __name__"):
        make_env_class(str(tmp_path / "script.py"))


async def kernel(cells):
    """Run cells one by one in the running loop, in one namespace, as the kernel of a notebook does."""
    main = types.ModuleType("__main__")  # without a file
    sys.modules["__main__"] = main
    for cell in cells:
        code = compile(textwrap.dedent(cell), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        waits = eval(code, main.__dict__)
        if waits is not None:
            await waits
    return main


CELLS = [
    """
    from agentrl import Env, Settings, StepResult, Task, run_rollouts, run_training

    class Guess(Env):
        def step(self, action): return StepResult(terminated=True)

        @classmethod
        def tasks(cls, split): return [Task(str(n), f"Say {n}.", n) for n in range(4)]

    def length(trajectory): return float(len(trajectory.turns[-1].action.text))

    small = dict(env=Guess, reward=length, model="search_r1_3m", rollout_batch_size=2, n_samples_per_prompt=2, tensorboard=False,
                 rollout_max_response_len=4, eval_interval=0)
    """,
    "run = await run_rollouts(Settings(**small, num_rollout=1, run='played'), echo=lambda line: None)",
]


async def test_a_notebook_plays_episodes_in_its_own_loop_with_a_class_of_a_cell(model, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    says(lambda asked: "a")
    namespace = await kernel(CELLS)
    assert len(list(read_episodes(namespace.run / "episodes"))) == 4
    recorded = read_toml(namespace.run / "config.toml")
    assert (recorded["env"], recorded["reward"]) == ("python-object:Guess", ["python-object:length"])


@pytest.mark.full
def test_a_notebook_trains_resumes_and_gets_the_weights_of_one_whole_run(tmp_path):
    train = "await run_training(Settings(**small, num_rollout={}, save_interval=1, run='{}'), echo=lambda line: None)"
    cells = [
        CELLS[0],
        train.format(2, "whole"),
        train.format(1, "part"),
        "await run_training(Settings(env=Guess, reward=length, num_rollout=2), resume='part', echo=lambda line: None)",
    ]
    folders = [str(Path(__file__).parent), *sys.path]
    code = f"import asyncio, sys; sys.path[:0] = {folders!r}; from test_python_api import kernel; asyncio.run(kernel({cells!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    whole, part = (tmp_path / name for name in ("whole", "part"))
    weights = [p.relative_to(whole) for p in (whole / "hf").glob("*.safetensors")]
    assert weights
    for name in weights:
        assert (whole / name).read_bytes() == (part / name).read_bytes()
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    resumed = [json.loads(line) for line in (part / "metrics.jsonl").read_text().splitlines()]
    assert [r for r in rows if "train/loss" in r] == [r for r in resumed if "train/loss" in r]


@pytest.mark.full
def test_a_genuine_notebook_kernel_plays_and_trains_in_its_running_loop(tmp_path):
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'agentrl[notebook]'")
    from jupyter_client.manager import start_new_kernel

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120, cwd=str(tmp_path), env=env)
    train = "await run_training(Settings(**small, num_rollout=1, run='trained'), echo=lambda line: None)"
    try:
        replies = [
            client.execute_interactive(textwrap.dedent(cell), timeout=300, output_hook=lambda message: None)["content"]
            for cell in (*CELLS, train, "await run_rollouts(Settings(**small, lr=-1.0))")
        ]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert [reply["status"] for reply in replies] == ["ok", "ok", "ok", "error"], replies
    assert "--lr must be at least 0, found -1.0" in replies[-1]["evalue"]
    for run in ("played", "trained"):
        assert len(list(read_episodes(tmp_path / run / "episodes"))) == 4
        assert read_toml(tmp_path / run / "config.toml")["env"] == "python-object:Guess"
    assert list((tmp_path / "trained/hf").glob("*.safetensors"))


async def test_a_cancelled_run_closes_and_can_be_resumed(model, says, tmp_path):
    playing = asyncio.Event()

    class Slow(Toy):
        async def step(self, action):
            playing.set()
            await asyncio.Event().wait()

    says(["a"])
    job = asyncio.create_task(
        run_training(Settings(env=Slow, reward=length, model=model, run=tmp_path / "run", **SMALL))
    )
    await playing.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    run = await run_training(Settings(env=type("Slow", (Toy,), {}), reward=length), resume=tmp_path / "run")
    assert len(list(read_episodes(run / "episodes"))) == 4
