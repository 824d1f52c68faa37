"""Adapters of environments that others wrote, with the genuine packages: contract, replay, seeds, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from adapter_checks import refused, require_replays, require_same_at_any_concurrency, require_sound
from doubles import call, make_runner

from agentrl.cli.main import main
from agentrl.core.ports import free_port
from agentrl.env import make_env_class, task_tools, tasks_of
from agentrl.envs.adapters import base
from agentrl.errors import ConfigError, InfraError
from agentrl.types import EpisodeSpec, StopReason, Task, split_role_id

SERVERS = Path(sys.executable).parents[1] / "servers/bin"
TIME = f"{SERVERS / 'mcp-server-time'} --local-timezone UTC"
GIT = str(SERVERS / "mcp-server-git")
CONVERT = call("convert_time", source_timezone="Europe/Paris", time="12:00", target_timezone="Asia/Tokyo")


class TestGymnasium:
    @pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1"])
    async def test_the_same_seed_plays_the_same_episodes_at_any_concurrency(self, name, hermes):
        await require_same_at_any_concurrency(f"gymnasium:{name}", hermes, ["Action: 0", "Action: 1", "hmm"])

    @pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CliffWalking-v1", "CartPole-v1"])
    @pytest.mark.parametrize("act_by", ["text", "tool"])
    async def test_it_keeps_the_contract(self, name, act_by):
        await require_sound(f"gymnasium:{name}", {"act_by": act_by}, episodes=4)

    async def test_a_policy_that_knows_the_way_reaches_the_goal_and_replays(self, hermes):
        moves = [f"I go.\nAction: {m}" for m in "down down right right down right".split()]
        played = await require_replays("gymnasium:FrozenLake-v1", moves, hermes, {"is_slippery": False})
        assert (played.score, played.stop_reason) == (1.0, StopReason.TERMINATED)
        assert "[S]FFF" in hermes.tokenizer.decode(played.segments[0].spans[0].ids)

    async def test_calls_of_one_turn_are_played_in_order_until_the_end(self, hermes):
        moves = "".join(call("act", action=m) for m in "down down right right down right up".split())
        args = {"is_slippery": False, "act_by": "tool"}
        played = await require_replays("gymnasium:FrozenLake-v1", [moves], hermes, args)
        assert (played.score, len(played.turns)) == (1.0, 1)

    async def test_text_that_is_no_action_is_answered_and_changes_nothing(self, hermes):
        played = await require_replays("gymnasium:FrozenLake-v1", ["hmm", "7", "Action: left"], hermes)
        assert "expected one of left, down, right, up" in played.turns[0].observation.messages[0]["content"]
        assert "found '7'" in played.turns[1].observation.messages[0]["content"]
        assert played.turns[2].observation.messages[0]["content"].startswith("(Left)")

    def test_the_splits_have_no_seed_in_common_and_size_is_an_argument(self):
        env = make_env_class("gymnasium:FrozenLake-v1")
        seeds = [{t.metadata["seed"] for t in tasks_of(env, split, {"size": 50})} for split in ("train", "test")]
        assert [len(s) for s in seeds] == [50, 50]
        assert not seeds[0] & seeds[1]

    @pytest.mark.parametrize(
        ("name", "args", "what"),
        [
            ("gymnasium:", {}, "write, for example, --env gymnasium:FrozenLake-v1"),
            ("gymnasium:FrozenLake-v9", {}, "did you mean 'FrozenLake-v1'"),
            ("gymnasium:FrozenLake-v1", {"is_slipery": 1}, "did you mean 'is_slippery'"),
            ("gymnasium:FrozenLake-v1", {"act_by": "force"}, "act_by must be text or tool"),
            ("gymnasium:FrozenLake-v1", {"names": ["a"]}, "its actions are Discrete(4)"),
            ("gymnasium:FrozenLake-v1", {"map_name": "9x9"}, "cannot be made"),
        ],
    )
    def test_what_cannot_work_is_one_sentence(self, name, args, what):
        assert what in refused(name, args)

    def test_a_space_without_text_is_refused(self):
        import gymnasium
        import numpy as np

        class Pixels(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 3), np.uint8)
            action_space = gymnasium.spaces.Discrete(2)

        gymnasium.register("PixelsForTests-v0", Pixels)
        assert "its observation space Box(0, 255, (84, 84, 3), uint8) does not fit into text" in refused(
            "gymnasium:PixelsForTests-v0"
        )


class TestReasoningGym:
    DATA_SETS = (
        "chain_sum", "leg_counting", "word_sorting", "basic_arithmetic", "prime_factorization", "number_sorting",
        "letter_counting", "gcd", "base_conversion", "spell_backward",
    )  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DATA_SETS)
    async def test_ten_data_sets_keep_the_contract_and_replay(self, name, hermes):
        await require_sound(f"reasoning_gym:{name}", {"size": 4}, episodes=4)
        env = make_env_class(f"reasoning_gym:{name}")
        task = next(iter(tasks_of(env, "train", {"size": 4})))
        right = await require_replays(
            f"reasoning_gym:{name}", [f"<answer>{task.label}</answer>"], hermes, {"size": 4}, task
        )
        assert right.score == 1.0

    @pytest.mark.slow
    async def test_the_same_seed_plays_the_same_episodes_at_any_concurrency(self, hermes):
        says = [f"<answer>{n}</answer>" for n in range(1, 9)]
        await require_same_at_any_concurrency("reasoning_gym:gcd", hermes, says, {"size": 8})

    @pytest.mark.slow
    def test_the_configuration_is_given_as_arguments(self):
        env = make_env_class("reasoning_gym:chain_sum")
        tasks = list(tasks_of(env, "train", {"size": 20, "min_terms": 2, "max_terms": 2, "answer": "text"}))
        assert all(t.prompt.partition("problem:")[2].count(" + ") + t.prompt.count(" - ") == 1 for t in tasks)
        assert "did you mean 'max_terms'" in refused("reasoning_gym:chain_sum", {"max_term": 3})
        assert "max_terms must be >= min_terms" in refused("reasoning_gym:chain_sum", {"max_terms": 1})
        assert "did you mean 'chain_sum'" in refused("reasoning_gym:chain_sums")
        with pytest.raises(ConfigError, match="leave --prompt-data out"):
            env.check_task(Task("0", "1 + 1?", "2"))


class TestTextArena:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["GuessTheNumber-v0", "TicTacToe-v0"])
    async def test_the_same_seed_plays_the_same_episodes_at_any_concurrency(self, name, hermes):
        await require_same_at_any_concurrency(f"textarena:{name}", hermes, [f"[{n}]" for n in range(9)])

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["GuessTheNumber-v0", "TowerOfHanoi-v0", "Secretary-v0"])
    async def test_games_for_one_keep_the_contract_and_replay(self, name, hermes):
        await require_sound(f"textarena:{name}", episodes=4)
        await require_replays(f"textarena:{name}", ["[10]", "[A B]", "[accept]"], hermes)

    @pytest.mark.slow
    async def test_games_for_two_keep_the_contract_and_replay(self, hermes):
        moves = {"player_0": ["[4]", "[1]", "[7]"], "player_1": ["[4]", "[0]", "[2]"]}
        await require_sound("textarena:TicTacToe-v0", episodes=4)

        def script(request):
            return moves[split_role_id(request.session)[1]][request.turn]

        t = await require_replays("textarena:TicTacToe-v0", script, hermes)
        assert [turn.agent_id[-1] for turn in t.turns] == ["0", "1", "1", "0", "1", "0"], "[4] was taken"
        assert {role: t.of_role(role).score for role in t.roles} == {"player_0": 1.0, "player_1": -1.0}
        seen = {s.agent_id: hermes.tokenizer.decode(s.ids) for s in t.segments}
        assert "[player 0] [4]" in seen["player_1"]
        assert "You are Player 0" not in seen["player_1"]
        assert "[player 0]" not in seen["player_0"], "a player does not read its own moves again"

    @pytest.mark.slow
    def test_a_game_leaves_the_global_random_state_alone(self):
        import random

        env = make_env_class("textarena:GuessTheNumber-v0")()
        random.seed(5)
        before = random.getstate()
        env.reset(Task("0", ""), seed=0, group_seed=0)
        assert random.getstate() == before

    @pytest.mark.slow
    def test_a_number_of_players_that_does_not_fit_is_refused(self):
        assert "one player cannot play this game" in refused("textarena:ConnectFour-v0", {"players": 1})
        assert "3 players cannot play this game" in refused("textarena:ConnectFour-v0", {"players": 3})
        assert "no such game" in refused("textarena:ConnectFive-v0")


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """OpenEnv's own template, started as its documentation says; its address."""
    from openenv.cli.commands.init import init  # what `openenv init` runs, without loading its other commands

    folder = tmp_path_factory.mktemp("openenv")
    init("echo_env", str(folder))
    app = folder / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=16"))
    port = free_port()
    server = [sys.executable, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(server, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{address}/health").status_code == 200
            break
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < deadline
    yield address, process
    process.kill()
    process.wait()


class TestOpenEnv:
    @pytest.mark.slow
    async def test_its_own_server_keeps_the_contract_and_replays(self, echo, hermes):
        address, _ = echo
        await require_sound(f"openenv:{address}", episodes=4)
        await require_sound(f"openenv:{address}", {"act_by": "tool"}, episodes=4)
        played = await require_replays(
            f"openenv:{address}", ["hello", "a longer message"], hermes, {"prompt": "Write."}
        )
        assert "echoed_message: hello" in played.turns[0].observation.messages[0]["content"]
        assert played.turns[1].reward == pytest.approx(1.6)

    @pytest.mark.slow
    async def test_the_same_seed_plays_the_same_episodes_at_any_concurrency(self, echo, hermes):
        await require_same_at_any_concurrency(f"openenv:{echo[0]}", hermes, ["a", "bc", "def"], {"prompt": "Write."})

    @pytest.mark.slow
    async def test_a_server_that_dies_in_an_episode_is_infrastructure(self, echo, hermes):
        address, process = echo

        def kill(request):
            if request.turn == 1:
                process.kill()
                process.wait()
            return "hello"

        runner = make_runner(make_env_class(f"openenv:{address}"), kill, hermes)
        played = await runner.run(EpisodeSpec(Task("0", "Write."), 0, 0))
        assert (played.stop_reason, played.status.value) == (StopReason.ENV_FAILURE, "failed")
        assert f"the OpenEnv server {address} failed" in played.detail

    @pytest.mark.slow
    def test_a_server_that_is_down_is_refused_before_the_start(self):
        assert "does not answer" in refused("openenv:http://127.0.0.1:9")
        assert "expected the URL of a server" in refused("openenv:localhost")


def mcp_servers():
    """The MCP servers that this process started and that run. Children of other tests may be zombies, which have no command line."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "mcp-server" in " ".join(child.cmdline())]


class TestMcp:
    @pytest.fixture
    def time_env(self):
        return make_env_class(f"mcp:{TIME}")

    @pytest.mark.slow
    async def test_a_server_over_stdio_is_called_and_closed(self, time_env, hermes):
        played = await require_replays(f"mcp:{TIME}", [CONVERT, "done"], hermes, task=Task("0", "Convert."))
        assert json.loads(played.turns[0].action.results[0].content)["time_difference"] == "+8.0h"
        assert not mcp_servers()
        await require_sound(f"mcp:{TIME}", {"concurrency": 2}, episodes=1)

    @pytest.mark.slow
    async def test_the_contract_holds_for_a_second_server(self, tmp_path, hermes):
        repository = tmp_path / "repository"
        subprocess.run(["git", "init", "-q", str(repository)], check=True)  # noqa: ASYNC221
        args = {"allow": ["git_status", "git_log"], "concurrency": 4}
        name = f"mcp:{GIT} --repository {repository}"
        await require_sound(name, args, episodes=1)
        task = Task("0", "What is the status?")
        status = call("git_status", repo_path=str(repository))
        played = await require_replays(name, [status, "done"], hermes, args, task)
        assert "No commits yet" in played.turns[0].action.results[0].content
        await require_same_at_any_concurrency(name, hermes, [status, "done"], args, tasks=[task], concurrencies=(1, 2))

    @pytest.mark.slow
    async def test_a_tools_error_is_read_by_the_policy_and_a_dead_server_fails_the_episode(self, time_env, hermes):
        bad = call("convert_time", source_timezone="Mars/Base", time="12:00", target_timezone="Asia/Tokyo")

        def kill(request):
            if request.turn == 1:
                for server in mcp_servers():
                    server.kill()
            return bad if request.turn == 0 else CONVERT

        played = await make_runner(time_env, kill, hermes).run(EpisodeSpec(Task("0", "Convert."), 0, 0))
        assert played.turns[0].action.results[0].is_error
        assert "Invalid timezone" in played.turns[0].action.results[0].content
        assert (played.stop_reason, played.status.value) == (StopReason.TOOL_FAILURE, "failed")

    @pytest.mark.full
    async def test_a_server_over_http_is_called(self, tmp_path, hermes):
        command, *arguments = TIME.split()
        config = tmp_path / "mcp.json"
        config.write_text(json.dumps({"mcpServers": {"time": {"command": command, "args": arguments}}}))
        port = free_port()
        fastmcp = shutil.which("fastmcp", path=str(Path(sys.executable).parent))
        server = subprocess.Popen(  # noqa: ASYNC220
            [fastmcp, "run", str(config), "--transport", "http", "--port", str(port), "--no-banner", "-l", "ERROR"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            env = make_env_class(f"mcp:http://127.0.0.1:{port}/mcp")
            specs, deadline = [], time.monotonic() + 60
            while not specs:
                try:
                    specs = await asyncio.to_thread(task_tools, env(), None)
                except InfraError:
                    assert server.poll() is None
                    assert time.monotonic() < deadline
            played = await require_replays(env.name, [CONVERT, "done"], hermes, task=Task("0", "Convert."))
            assert "+8.0h" in played.turns[0].action.results[0].content
        finally:
            server.terminate()
            server.wait()

    @pytest.mark.slow
    def test_what_cannot_work_is_one_sentence(self):
        assert "No such file" in refused("mcp:/nonexistent/server")
        assert "does not answer" in refused("mcp:http://127.0.0.1:9/mcp")
        assert "have a tool 'get_current_time'" in refused(f"mcp:{TIME}", {"more": [f"{TIME} "]})
        assert "no server has the tool 'get_tim'" in refused(f"mcp:{TIME}", {"allow": ["get_tim"]})

    @pytest.mark.slow
    async def test_the_same_seed_plays_the_same_episodes_at_any_concurrency(self, hermes):
        tasks = [Task("0", "Convert.")]
        await require_same_at_any_concurrency(
            f"mcp:{TIME}", hermes, [CONVERT, "done"], tasks=tasks, concurrencies=(1, 2)
        )


class TestVerifiers:
    MARBLE = "verifiers:marble-v1"
    """a marble is to fall into a ring: a taskset that nobody here wrote; infinite, and its tasks hold a right answer"""

    @staticmethod
    def layout(pieces):
        return f"It bounces.\n```json\n{json.dumps(pieces)}\n```"

    @pytest.mark.slow
    async def test_a_taskset_of_others_keeps_the_contract_and_plays_the_same_at_any_concurrency(self, hermes):
        args = {"test_size": 1, "size": 16, "ring_half_width": 300.0}
        await require_sound(self.MARBLE, args, episodes=8)
        says = [self.layout([{"kind": kind, "x": 100, "y": -800, "rot": 2}]) for kind in ("bell", "drum", "spring")]
        await require_same_at_any_concurrency(self.MARBLE, hermes, says, args, concurrencies=(1, 8))

    @pytest.mark.slow
    async def test_its_right_and_wrong_answers_get_its_scores_and_replay(self, hermes):
        from marble_v1 import taskset as marble

        theirs = list(islice(marble.MarbleTaskset(marble.MarbleConfig(id="marble-v1", seed=3)), 3))[2]
        right = theirs.data.solution
        for pieces, scores in (
            (right, (1.0, 1.0, 1.0)),
            ([{**right[0], "x": -right[0]["x"] + 20}], None),
            ([{**right[0], "x": 7}], (0.0, 0.0, 0.0)),
        ):
            said = self.layout(pieces)
            played = await require_replays(self.MARBLE, [said], hermes, {"test_size": 2, "seed": 3})
            assert (played.task.id, played.task.prompt) == ("train-2", theirs.data.prompt)
            trace = SimpleNamespace(last_reply=said)
            expected = [await f(trace) for f in (theirs.scored, theirs.answered_legally, theirs.closeness)]
            metrics = played.turns[0].info["metrics"]
            assert [played.score, metrics["answered_legally"], metrics["closeness"]] == expected
            assert tuple(expected) == scores or (scores is None and expected[:2] == [0.0, 1.0])

    @pytest.mark.slow
    def test_tasks_are_generated_as_they_are_needed(self, monkeypatch):
        from marble_v1 import levels

        made = []
        generate = levels.generate
        monkeypatch.setattr(levels, "generate", lambda *a, **k: made.append(a) or generate(*a, **k))
        tasks = tasks_of(make_env_class(self.MARBLE), "train", {"test_size": 1, "seed": 500})
        assert [next(tasks).id, next(tasks).id] == ["train-1", "train-2"]
        assert 3 <= len(made) < 20

    @pytest.fixture
    def sums(self, monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        return "verifiers:sums_taskset"

    @pytest.mark.slow
    async def test_a_taskset_is_scored_by_its_rewards(self, sums, hermes):
        await require_sound(sums, {"test_size": 3}, episodes=4)
        played = await require_replays(sums, ["6"], hermes, {"test_size": 3})
        assert (played.task.id, played.score) == ("train-3", 2.0)
        assert len(list(tasks_of(make_env_class(sums), "train", {"test_size": 3, "digits": 2}))) == 97
        await require_same_at_any_concurrency(sums, hermes, ["2", "4", "6"], {"test_size": 3})

    @pytest.mark.slow
    def test_what_cannot_work_is_one_sentence(self, sums):
        assert "not found" in refused("verifiers:no_such_taskset")
        assert "its tasks have no rewards" in refused("verifiers:unscored_taskset")
        assert "need a runtime for setup" in refused("verifiers:unscored_taskset", {"sets_up": True})
        assert "is refused: RuntimeError: install the program" in refused(
            "verifiers:unscored_taskset", {"loads": False}
        )
        assert "is refused" in refused(sums, {"digit": 2})


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("textarena:Wordle-v0", "textarena", "textarena"),
        ("reasoning_gym:gcd", "reasoning_gym.factory", "reasoning-gym"),
        ("openenv:http://127.0.0.1:9", "openenv.core.generic_client", "openenv"),
        ("mcp:none", "mcp.client.client", "mcp"),
        ("verifiers:none", "verifiers.v1.utils.loaders", "verifiers"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, module, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    base._class_of.cache_clear()
    assert main(["check", "--env", name]) == 2
    assert f"pip install 'agentrl[{extra}]'" in capsys.readouterr().err


def test_naming_an_adapter_loads_only_its_own_package():
    code = (
        "import sys; from agentrl.env import make_env_class; make_env_class('gymnasium:FrozenLake-v1'); "
        "print({'textarena', 'reasoning_gym', 'openenv', 'mcp', 'verifiers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
