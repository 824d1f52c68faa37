"""The small examples: their environments keep the contract, their demonstrators know the format, and their recorded curves rise above the control."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import httpx
import pytest

from agentrl import Action
from agentrl.check.env_check import check_env
from agentrl.check.findings import Severity
from agentrl.config import build_config, read_toml
from agentrl.core.registry import load_file
from agentrl.env import make_env_class
from agentrl.envs.search_r1 import shared_retriever
from agentrl.store import read_records
from agentrl.tools.retrieval import HTTPRetriever

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/demonstrator.py"))
TicTacToe = load_file(ROOT / "examples/self_play/tictactoe.py").TicTacToe


def demonstrator(name):
    return load_file(ROOT / f"examples/{name}/demonstrator.py").write


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_environment_keeps_the_contract(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    env = build_config(read_toml(ROOT / f"examples/{name}/config.toml")).env
    report = await check_env(make_env_class(env.env), env.env_args, episodes=4)
    assert not [f for f in report.findings if f.severity is Severity.ERROR], str(report)


@pytest.mark.parametrize("name", [*EXAMPLES, "search_r1_http"])
def test_a_recorded_curve_rises_above_the_control(name):
    result = json.loads((ROOT / f"benchmarks/results/{name}_cpu.json").read_text())
    assert result["value"] > result["baseline"]["before"] + 0.05
    assert result["value"] > max(result["baseline"]["start_with_other_seeds"]) + 0.05
    assert (ROOT / f"benchmarks/results/{name}_cpu.png").is_file()


class TestTicTacToe:
    def game(self, *moves, opening=0):
        env = TicTacToe(opening)
        first = env.reset(None, seed=0, group_seed=0)
        return env, first, [env.step(Action(move)) for move in moves]

    def test_a_line_wins_for_its_side_only(self):
        env, first, results = self.game("1", "4", "2", "5", "3")
        assert (first.to, first.messages[0]["content"]) == ("X", "X: 1|2|3|4|5|6|7|8|9")
        assert [r.observation.to for r in results[:-1]] == ["O", "X", "O", "X"]
        assert (results[-1].rewards, results[-1].terminated, env.state()) == (
            {"X": 1.0, "O": -1.0},
            True,
            {"winner": "X"},
        )

    @pytest.mark.parametrize("move", ["1", "0", "10", "X", "", "one"])
    def test_a_move_that_is_not_free_costs_only_its_side(self, move):
        _, _, results = self.game("1", move)
        assert (results[-1].rewards, results[-1].terminated) == ({"O": -1.0}, True)

    def test_a_full_board_is_a_draw(self):
        env, _, results = self.game(*"152374689")
        assert [r.terminated for r in results] == [False] * 8 + [True]
        assert (results[-1].rewards, env.state()) == ({}, {"winner": ""})

    def test_the_opening_is_that_of_the_group(self):
        boards = {TicTacToe().reset(None, seed=s, group_seed=7).messages[0]["content"] for s in range(5)}
        assert len(boards) == 1
        assert boards.pop().count("O") == 1

    def test_the_demonstrator_moves_to_free_cells(self):
        moves = {demonstrator("self_play")("X: 1|X|O|4|5|6|7|8|X<|im_end|>\n", Random(i)) for i in range(99)}
        assert moves == set("145678")


def test_the_demonstrator_of_the_calculator_uses_it_and_copies_its_result():
    texts = {demonstrator("calculator")("3 * 47 = ?", Random(i)) for i in range(50)}
    assert "<calc> 3 * 47</calc>" in texts
    after = {demonstrator("calculator")("3 * 47 = ?<result>141</result>", Random(i)) for i in range(50)}
    assert "<answer> 141</answer>" in after


def test_the_demonstrator_of_frozen_lake_writes_moves():
    lake = {demonstrator("frozen_lake")("… Action: …\n\n14<|im_end|>", Random(i)) for i in range(50)}
    assert lake == {f"Action: {d}" for d in ("left", "down", "right", "up")}


def test_the_demonstrator_of_retool_forgets_the_modulus_in_half_of_its_calls_and_copies_what_is_printed():
    write = demonstrator("retool")
    texts = [write("What is 17**23 modulo 97?<|im_end|>", Random(i)) for i in range(99)]
    assert {"<code>17**23 % 97</code>", "<code>17**23</code>"} < set(texts)
    assert sum(text.startswith("<answer>") for text in texts) > 20
    assert write("What is 17**23 modulo 97?<interpreter>54\n</interpreter>", Random(0)) == "<answer> 54</answer>"


def test_the_demonstrator_of_reasoning_gym_names_the_three_people():
    prompt = (
        "<|im_start|>user\nAnn-Mai is fond of red. Bo can’t bear kites. Cy hikes. \nWho hikes? Reply only with a name."
    )
    names = {demonstrator("reasoning_gym")(prompt, Random(i)) for i in range(99)}
    assert {"Ann-Mai", "Bo", "Cy"} <= names


@pytest.mark.slow
def test_the_server_of_search_r1_http_answers_as_the_embedded_retriever():
    command = [sys.executable, str(ROOT / "examples/search_r1_http/server.py"), "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        assert url.endswith("/retrieve")
        queries = ["capital of France", "xyzzy"]
        remote, embedded = HTTPRetriever(url), shared_retriever("bm25", None, None)
        assert remote.search(queries, 2) == embedded.search(queries, 2)
        remote.close()
        assert httpx.post(url, json={"topk": 1}).status_code == 400
    finally:
        server.kill()
        server.wait()


def test_the_configuration_of_search_r1_http_takes_another_address():
    settings = read_toml(ROOT / "examples/search_r1_http/config.toml")
    args = build_config(settings, {"env_args": {"url": "http://h:1/retrieve"}}).env.env_args
    assert args == {"retriever": "http", "url": "http://h:1/retrieve"}


def test_the_demonstrations_of_search_r1_end_with_an_answer_to_what_was_found(tmp_path):
    command = [sys.executable, "examples/search_r1/warmup.py", "record", str(tmp_path), "--model"]
    command += ["agentrl/assets/search_r1_3m", "--episodes", "32"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    records = list(read_records(tmp_path / "part00"))
    answers = [record["turns"][-1]["action"]["text"] for record in records]
    assert len(records) == 32
    assert all(answer.startswith("<answer> ") for answer in answers)
    assert {answer == "<answer> unknown</answer>" for answer in answers} == {True, False}
