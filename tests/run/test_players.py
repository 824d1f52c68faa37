"""Who plays a role: `--player` and `--eval-player`, checked before a run, and a served model as a user."""

import asyncio
import json

import pytest
from aiohttp import web
from doubles import EMBEDDED
from joint_roles import Pair

from agentrl import Env
from agentrl.cli.flags import read_flags
from agentrl.cli.main import make_parser
from agentrl.config import build_config
from agentrl.config.mixture import env_shares
from agentrl.engine.base import SamplingParams
from agentrl.engine.chat_model import ChatModel
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import ConfigError, InfraError
from agentrl.run.players import FrozenModel, Players

ROLES = Pair.roles


def players(env=Pair, folder=EMBEDDED, **settings):
    return Players(build_config(settings), env, folder, lambda path: LocalEngine(path, threads=1))


class Server:
    """A chat server: answers with what `handler` returns for a request's JSON."""

    def __init__(self, handler, models=("tiny",)):
        self.handler, self.models, self.requests = handler, models, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _list(self, request):
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request):
        body = await request.json()
        self.requests.append((body, request.headers.get("Authorization")))
        answer = self.handler(body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


def says(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_a_served_model_answers_a_roles_conversation(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with Server(lambda body: says(f"read {len(body['messages'])}")) as server:
        model = ChatModel(server.url, temperature=0.5, max_tokens=7)
        await model.check("--player user")
        messages = [{"role": "system", "content": "You want tea."}, {"role": "user", "content": "Good morning."}]
        assert await model.reply(messages, seed=1 << 40) == "read 2"
        await model.close()
    ((body, key),) = server.requests
    assert body == {"model": "tiny", "messages": messages, "seed": 0, "temperature": 0.5, "max_tokens": 7}
    assert key == "Bearer secret"


@pytest.mark.parametrize(
    ("models", "name", "message"),
    [
        ((), "", "it serves 0 models; name one: http://.*/v1#NAME"),
        (("a", "b"), "", "it serves 2 models; name one"),
        (("a", "b"), "#c", "it serves no model 'c'; it serves a, b"),
    ],
)
async def test_the_model_is_named_where_there_are_several(models, name, message):
    async with Server(lambda body: says("x"), models) as server:
        with pytest.raises(ConfigError, match=message):
            await ChatModel(server.url + name).check("--player user")


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500),
        web.Response(status=429),
        web.Response(text="not JSON"),
        {"choices": []},
        {"error": "x"},
        says(None),
    ],
)
async def test_an_answer_without_text_is_a_failure_of_infrastructure(answer):
    async with Server(lambda body: answer) as server:
        model = ChatModel(f"{server.url}#tiny")
        with pytest.raises(InfraError, match=r"127\.0\.0\.1"):
            await model.reply([], seed=0)
        await model.close()


async def test_a_server_that_is_down_is_refused_before_the_run():
    made = players(players={"second": "http://127.0.0.1:9/v1"})
    with pytest.raises(ConfigError, match=r"--player http://127.0.0.1:9/v1: no answer from .*; start the server"):
        await made.check(ROLES)


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (Pair, {"players": {"secnd": "initial"}}, "Pair has the roles first, second; did you mean 'second'"),
        (Env, {"players": {"user": "initial"}}, "Env has no roles; leave it out"),
        (Pair, {"players": {"first": "initial", "second": "initial"}}, "the policy plays none of the roles of Pair"),
        (Pair, {"eval_players": {"first": "initial", "second": "initial"}}, "--eval-player: the policy plays none"),
    ],
)
async def test_players_that_do_not_fit_the_roles_are_refused(env, settings, message):
    with pytest.raises(ConfigError, match=message):
        await players(env, **settings).check(env.roles)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"players": {"second": "nowhere"}}, "no such folder; give policy, initial, a model folder"),
        ({"players": {"second": "json:JSONDecodeErrorr"}}, "json has no 'JSONDecodeErrorr'"),
        ({"players": {"second": "initial"}, "engine": "sglang"}, "give its address: --player second=http"),
    ],
)
def test_players_that_do_not_exist_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        players(**settings)


def test_a_model_of_another_tokenizer_is_refused(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    other = json.loads((EMBEDDED / "tokenizer.json").read_text())
    other["model"]["vocab"] = dict.fromkeys(other["model"]["vocab"], 0)
    (folder / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="its tokenizer is not that of the policy"):
        players(players={"second": str(folder)})


def test_the_settings_override_the_environments_players():
    def user(messages, *, seed):
        return "x"

    class Served(Pair):
        players = {"first": user}

    assert players(Served).training == {"first": user}
    assert players(Served, players={"first": "policy"}).training == {}
    both = players(Served, eval_players={"first": "policy", "second": "initial"})
    assert both.training == {"first": user}
    assert list(both.evaluation) == ["second"]


@pytest.mark.slow
async def test_a_frozen_model_is_loaded_once_and_samples_as_its_engine_does():
    made = players(players={"second": "initial"}, eval_players={"second": str(EMBEDDED)})
    frozen = made.training["second"]
    assert isinstance(frozen, FrozenModel)
    await frozen.release("a")
    sampling = SamplingParams(4, seed=3)
    first, again = await asyncio.gather(*(frozen.generate([1, 2, 3], sampling, session=s) for s in "ab"))
    assert first.ids == again.ids
    await made.close()


def test_flags():
    names = make_parser()[0].parse_known_args(["train", "--player", "a=initial", "--player", "b=http://h/v1#m"])[0]
    assert read_flags(names, [])["players"] == {"a": "initial", "b": "http://h/v1#m"}


def test_players_of_one_of_several_environments():
    with pytest.raises(ConfigError, match="--player does not say which of the environments it is for"):
        env_shares(build_config({"env": "a=1 b=1", "players": {"x": "initial"}}))
    own = {"b.players": {"x": "initial"}}
    _, b = env_shares(build_config({"env": "a=1 b=1", "env_settings": own}))
    assert b.config.env.players == {"x": "initial"}
