"""`agentrl rollout`, `eval` and `train` from the command line to the run folder, on an engine that follows a script."""

import json
import re
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from doubles import OBSERVATION, trajectory
from retrieval_server import Server

from agentrl.cli.flags import read_given
from agentrl.cli.main import main, make_parser
from agentrl.core.program_name import command
from agentrl.core.registry import load_file
from agentrl.errors import WorkerError
from agentrl.render import Tokenizer
from agentrl.rollout.episode import EpisodeRunner
from agentrl.run.components import Components
from agentrl.run.resolve import resolve
from agentrl.run.training import TrainingRun
from agentrl.store import EpisodeWriter, Recording, read_episodes
from agentrl.store.run_folder import recorded_config
from agentrl.types import Status

EXAMPLE = Path(__file__).parents[2] / "examples/search_r1/your_data.toml"
NQ = {"id": "train_0", "question": "what is the capital of france", "golden_answers": ["Paris"], "data_source": "nq"}
HOTPOT = {
    "id": "dev_7",
    "question": "Which city lies on the Seine, Paris or Rome?",
    "golden_answers": ["Paris", "the city of Paris"],
    "data_source": "hotpotqa",
    "metadata": {"type": "comparison", "level": "medium"},
}


@pytest.fixture
def server():
    """A Search-R1 retrieval server that knows one passage."""
    running = Server()
    item = {"document": {"id": "3", "contents": '"Paris"\nParis is the capital of France.\nIt lies on the Seine.'}}
    running.handler = lambda asked: web.json_response({"result": [[item] for _ in asked["queries"]]})
    yield running
    running.stop()


def write_rows(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def summary(run):
    return orjson.loads((run / "summary.json").read_bytes())


# -- search_r1 on Search-R1's data and server ----------------------------------------------------------------------------


def test_search_r1_on_its_own_data_with_a_search_server(model, says, server, tmp_path):
    says(
        lambda asked: "<search> capital of France </search>" if asked.turn == 0 else f"<answer>{answer(asked)}</answer>"
    )

    def answer(asked):
        return "Rome" if asked.session.startswith("1-") else "paris."

    data = write_rows(tmp_path / "nq_hotpotqa.jsonl", NQ, HOTPOT)
    words = ["rollout", "--env", "search_r1", "--model", model, "--prompt-data", data, "--run", "run"]
    words += ["--env-arg", "retriever=http", "--env-arg", f"url={server.url}", "--env-arg", "passage_chars=2000"]
    words += ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--concurrency", "4"]
    assert main([*words, "--rollout-shuffle", "false", "--min-group-size", "1"]) == 0

    made = list(read_episodes(tmp_path / "run/episodes"))
    asked = [{"queries": ["capital of France"], "topk": 3, "return_scores": True}] * 4
    assert server.requests == [{"queries": ["ready"], "topk": 1, "return_scores": True}, *asked]
    assert {t.task.id: t.task.label for t in made} == {"train_0": ["Paris"], "dev_7": HOTPOT["golden_answers"]}
    assert [t.rewards["em"] for t in made] == [1.0, 0.0, 1.0, 1.0]
    assert [t.score for t in made] == [1.0, 0.0, 1.0, 1.0], "F1 is reported and weighs nothing"
    decode = Tokenizer.load(Path(model)).decode
    passage = "- Paris: Paris is the capital of France. It lies on the Seine."
    for t in made:
        (segment,) = t.segments
        assert f"</search>\n<information>{passage}</information>\n<answer>" in decode(segment.ids)
        assert [decode(s.ids) for s in segment.spans if s.provenance is OBSERVATION] == [passage]


@pytest.mark.parametrize("command", ["rollout", "eval", "train"])
def test_a_search_server_that_is_down_is_asked_before_the_run_begins(
    model, says, tmp_path, capsys, monkeypatch, command
):
    says(["<answer>Paris</answer>"])
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    data = write_rows(tmp_path / "nq.jsonl", NQ)
    words = [command, "--env", "search_r1", "--model", model, "--prompt-data", data, "--run", "run"]
    assert main([*words, "--env-arg", "retriever=http", "--env-arg", "url=http://127.0.0.1:9/retrieve"]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/retrieve: the retrieval server failed: ConnectError" in error
    assert "start the server" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["eval", "train"])
def test_the_examples_command_for_your_data_evaluates(model, says, server, tmp_path, monkeypatch, command):
    """The command in the file's head, word for word, but for the model and the server's address."""
    head = "".join(line[1:] for line in EXAMPLE.read_text().splitlines() if line.startswith("#   "))
    (found,) = re.findall(r"agentrl train (.*)", head.replace("\\", " "))
    words = found.split()
    words[words.index("--config") + 1] = str(EXAMPLE)
    words[words.index("--hf-checkpoint") + 1] = model
    write_rows(tmp_path / "nq_hotpotqa/train.jsonl", NQ)
    write_rows(tmp_path / "nq_hotpotqa/test.jsonl", HOTPOT, NQ)
    words += ["--env-arg", f"url={server.url}"]
    says(["<search> Seine </search>", "<answer>Paris</answer>"])
    if command == "train":
        sets = Components(resolve(read_given(*make_parser()[0].parse_known_args(["train", *words])))).tasks.evaluation()
        assert {name: [t.id for t in tasks] for name, tasks in sets.items()} == {"test": ["dev_7", "train_0"]}
        return
    assert main(["eval", *words, "--run", "run"]) == 0
    assert (summary(tmp_path / "run")["eval_questions"], summary(tmp_path / "run")["eval_em_last"]) == (2, 1.0)
    assert [r["queries"] for r in server.requests] == [["ready"], ["Seine"], ["Seine"]]


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_takes_prompt_data(model, says, tmp_path, capsys):
    says(["<answer>Paris</answer>"])
    data = write_rows(tmp_path / "nq.jsonl", NQ, HOTPOT)
    words = ["eval", "--model", model, "--n-samples-per-eval-prompt", "3", "--env", "search_r1"]
    assert main([*words, "--prompt-data", data, "--run", "whole"]) == 0
    assert "eval nq after 0 rollouts: reward 1.000" in capsys.readouterr().out
    found = summary(tmp_path / "whole")
    assert (found["eval_questions"], found["eval_episodes"], found["eval_em_last"]) == (2, 6, 1.0)
    assert main([*words, "--prompt-data", f"{data}@[1:]", "--run", "part"]) == 0
    assert summary(tmp_path / "part")["eval_questions"] == 1


def test_eval_without_a_question_is_refused(model, says, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from agentrl import Env, Task\n"
        "class Mine(Env):\n"
        "    @classmethod\n"
        "    def tasks(cls, split): return [Task('0', 'hello', 1)] if split == 'train' else []\n"
    )
    assert main(["eval", "--model", model, "--env", "mine.py"]) == 2
    assert "no tasks of the split 'test'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# -- train ---------------------------------------------------------------------------------------------------------------


def test_a_run_that_dies_before_its_first_checkpoint_is_begun_again_by_resume(model, says, capsys, monkeypatch):
    def dies(*_, **__):
        raise WorkerError("the trainer died")

    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    monkeypatch.setattr("agentrl.run.components.Components.trainer", dies)
    says(["<answer>Paris</answer>"])
    for words in (["--env", "search_r1", "--model", model, "--run", "run"], ["--resume", "run"]):
        assert main(["train", *words]) == 1
        said = capsys.readouterr()
        assert "the trainer died" in said.err
        writer = EpisodeWriter(Path("run/episodes"))
        writer.write(trajectory(), split="train")
        writer.close()
    assert "run has no checkpoint yet and starts from the beginning; recorded episodes dropped: 1" in said.out


def test_load_starts_a_run_in_a_folder_that_does_not_exist_and_then_continues_it(model, says, capsys, monkeypatch):
    def dies(*_, **__):
        raise WorkerError("the trainer died")

    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    monkeypatch.setattr("agentrl.run.components.Components.trainer", dies)
    says(["<answer>Paris</answer>"])
    words = ["train", "--env", "search_r1", "--model", model, "--lr", "0.5", "--load", "kept", "--save", "kept"]
    for continued in (False, True):
        assert main(words) == 1
        assert ("kept has no checkpoint yet and starts from the beginning" in capsys.readouterr().out) is continued
    assert main([*words, "--lr", "0.25"]) == 2
    assert "leave out --lr" in capsys.readouterr().err


def test_debug_rollout_only_plays_and_trains_nothing(model, says, capsys):
    says(["<answer>Paris</answer>"])
    words = ["--env", "search_r1", "--model", model, "--run", "run", "--num-rollout", "1", "--rollout-batch-size", "2"]
    linked = ["--debug-rollout-only", "--save-debug-rollout-data", "linked"]
    assert main(["train", *words, "--n-samples-per-prompt", "2", *linked]) == 0
    assert len(Recording("linked").episodes) == 4
    assert recorded_config(Path("linked")) == Path("run/config.toml").absolute()


@pytest.fixture
def no_sigint():
    """As for a job that a script has put into the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_terminated_training_run_says_how_it_goes_on(model, says, capsys, monkeypatch, no_sigint):
    stop(signal.SIGTERM, model, says, capsys, monkeypatch)


def test_an_interrupted_training_run_says_how_it_goes_on(model, says, capsys, monkeypatch):
    stop(signal.SIGINT, model, says, capsys, monkeypatch)


def stop(sign, model, says, capsys, monkeypatch):
    noticed, close = threading.Event(), TrainingRun.close

    def interrupted(*_, **__):
        signal.raise_signal(sign)
        assert noticed.wait(10)  # else the run may have gone on meanwhile

    def closes(job):
        noticed.set()
        return close(job)

    monkeypatch.setattr(TrainingRun, "close", closes)
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    monkeypatch.setattr("agentrl.run.components.Components.trainer", interrupted)
    says(["<answer>Paris</answer>"])
    ours = signal.default_int_handler if sign is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(sign, ours)  # a shell that starts tests in the background has them ignore SIGINT
    try:
        assert main(["train", "--env", "search_r1", "--model", model, "--run", "runs/mine"]) == 130
        assert signal.getsignal(sign) is ours
    finally:
        signal.signal(sign, before)
    said = capsys.readouterr()
    assert f"interrupted; to continue: {command('train', '--resume', 'runs/mine')}" in said.out
    assert said.err.endswith("agentrl train: interrupted\n")


def test_a_run_of_relative_paths_is_replayed_from_anywhere(model, says, tmp_path, monkeypatch, capsys):
    where = tmp_path / "where it began"
    (where / "data").mkdir(parents=True)
    (where / "my_env.py").write_text(
        "from agentrl import Env, StepResult\n"
        "class Mine(Env):\n"
        "    async def step(self, action):\n"
        "        return StepResult('', reward=float(action.text == 'x'), terminated=True)\n"
    )
    (where / "data/q.jsonl").write_text('{"id": "0", "prompt": "Say x.", "label": "x"}\n')
    (where / "model").symlink_to(model)
    monkeypatch.chdir(where)
    says(["x"])
    words = "--env my_env.py:Mine --model model --prompt-data data/q.jsonl@[0:1] --run run --num-rollout 1 --rollout-batch-size 1"
    assert main(["rollout", *words.split(), "--n-samples-per-prompt", "2"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["replay", str(where / "run"), "--workers", "1"]) == 0
    assert "2 episodes replayed: identical" in capsys.readouterr().out


# -- an environment is made before anything starts -----------------------------------------------------------------------

SHY = """
from agentrl import StepResult, Task, Tool, ToolEnv

made, closed = [], []

class Pen(Tool):
    def __init__(self):
        made.append("pen")

    async def close(self):
        closed.append("pen")

    def call(self, text: str) -> str:
        return text

class Shy(ToolEnv):
    tools = [Pen]
    shows_tools = True

    def __init__(self):
        made.append("env")
        if len(made) == 1 and FLAKY:
            raise ConnectionError("not yet")

    async def close(self):
        closed.append("env")

    @classmethod
    def tasks(cls, split):
        return [Task("0", "hello", 1)]
"""


@pytest.mark.parametrize("flaky", [False, True])
def test_the_environment_that_is_made_before_a_run_is_closed_and_may_fail(model, says, tmp_path, flaky):
    says(["x"])
    (tmp_path / "shy.py").write_text(f"FLAKY = {flaky}\n{SHY}")
    words = ["rollout", "--model", model, "--env", "shy.py", "--run", "run", "--num-rollout", "1"]
    assert main([*words, "--rollout-batch-size", "1", "--n-samples-per-prompt", "2"]) == 0
    module, whole = load_file(tmp_path / "shy.py"), 2 if flaky else 3
    assert Counter(module.made) == {"env": 3, "pen": whole}, "one of them before the two episodes"
    assert Counter(module.closed) == {"env": whole, "pen": whole}
    assert summary(tmp_path / "run")["failures"] == 0


# -- every attempt counts ------------------------------------------------------------------------------------------------


FLAKY = """
from agentrl import Env, StepResult, Task
from agentrl.errors import InfraError

class Flaky(Env):
    failed = 0

    @classmethod
    def tasks(cls, split): return [Task('0', 'hello', 1)]

    def step(self, action):
        if Flaky.failed < 2:
            Flaky.failed += 1
            raise InfraError('the database is away')
        return StepResult('good', reward=1.0, terminated=True)
"""


def test_exactness_is_checked_in_failed_attempts_too_and_the_causes_are_told(
    model, says, tmp_path, capsys, monkeypatch
):
    play = EpisodeRunner.run

    async def with_other_context(self, spec):
        """In attempts that fail the engine is made to have been sent something else."""
        t = await play(self, spec)
        turns = tuple(replace(u, context_crc=u.context_crc ^ 1) for u in t.turns)
        return replace(t, turns=turns) if t.status is Status.FAILED else t

    monkeypatch.setattr(EpisodeRunner, "run", with_other_context)
    says(["x"])
    (tmp_path / "flaky.py").write_text(FLAKY)
    words = ["rollout", "--model", model, "--env", "flaky.py", "--run", "run", "--concurrency", "1"]
    assert main([*words, "--num-rollout", "2", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2"]) == 0
    rows = [orjson.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    assert [(r["failures"], r["retried"], r["exactness_violations"]) for r in rows] == [(2, 2, 2), (0, 0, 0)]
    found = summary(tmp_path / "run")
    assert (found["exactness_violations"], found["episodes"], found["failures"]) == (2, 4, 2)
    assert len(list(read_episodes(tmp_path / "run/episodes"))) == 6, "failed attempts are recorded too"

    lines = capsys.readouterr().out.splitlines()
    first, second = (next(n for n, x in enumerate(lines) if x.startswith(f"rollout    {i}")) for i in (1, 2))
    assert "stop reason" in lines[first + 1]
    assert any("env_failure" in x and "database" not in x for x in lines[first:second])
    assert not lines[second + 1].strip(), "nothing to tell but that episodes terminated"
    assert any(c["stop_reason"] == "env_failure" and c["count"] == 2 for c in found["causes"])
