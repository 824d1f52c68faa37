"""The server of the page: its responses, and the requests that it refuses."""

import asyncio
import errno
import json
import resource
import socket
from contextlib import contextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer
from doubles import until
from viewruns import EVIL, WORDS, add_group, decode, make_run

from agentrl.core.machine_errors import report_machine_errors
from agentrl.errors import StoreError
from agentrl.store import Recording, encode
from agentrl.view.episode_detail import episode_detail, token_texts
from agentrl.view.html_export import html_of
from agentrl.view.page_server import is_loopback, make_app, start
from agentrl.view.run_source import RunSource


@pytest.fixture
def writer(tmp_path):
    made = make_run(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
async def client(writer, tmp_path):
    async with TestClient(TestServer(make_app(RunSource(tmp_path / "run", decode)))) as made:
        yield made


async def ask(client, path, **query):
    answer = await client.get(path, params=query)
    assert answer.status == 200, await answer.text()
    return await answer.json()


async def test_the_run(client):
    run = await ask(client, "/api/run")
    assert run["state"]["episodes"] == 12
    assert run["components"] == ["r"]
    assert len(run["metrics"]) == 6
    table = {(t["stop"], t["count"]) for t in run["table"]}
    assert table == {("terminated", 6), ("max_turns", 5), ("env_failure", 1)}


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"limit": "3"}, ["0-0", "1-0", "2-0"]),
        ({"offset": "10"}, ["10-0", "11-0"]),
        ({"stop": "env_failure"}, ["7-0"]),
        ({"step": "2"}, ["4-0", "5-0"]),
        ({"least": "0.4", "most": "0.9"}, ["9-0", "11-0"]),
        ({"sort": "score", "limit": "2"}, ["1-0", "3-0"]),
        ({"sort": "advantage", "desc": "1", "group": "1"}, ["2-0", "3-0"]),
        ({"sort": "rewards.r", "limit": "1"}, ["1-0"]),
        ({"q": "7-0"}, ["7-0"]),
        ({"q": "HACKED"}, ["7-0"]),
        ({"q": "nothing like it"}, []),
    ],
)
async def test_the_list_filters_sorts_and_pages(client, query, ids):
    answer = await ask(client, "/api/episodes", **query)
    assert [r["id"] for r in answer["rows"]] == ids


async def test_neighbours_follow_the_filtered_and_sorted_list(client):
    assert await ask(client, "/api/neighbours", id="4-0", stop="terminated") == ["2-0", "6-0"]
    assert await ask(client, "/api/neighbours", id="0-0") == [None, "1-0"]


async def test_an_episode_with_its_training_rows(client):
    e = await ask(client, "/api/episode", id="3-0")
    (s,) = e["segments"]
    assert "".join(s["text"]) == "".join(WORDS)
    assert s["mask"] == [0] * 5 + [1] * 3 + [0] * 3 + [1] * 3
    assert s["version"][5] == 2
    assert s["version"][11] == 3
    assert s["trainer_log_prob"][5] == -0.5
    assert s["trainer_log_prob"][0] is None
    (row,) = e["rows"]
    assert (row["number"], row["of"], row["rank"], row["micro_batch"], row["width"], row["padding"]) == (
        1,
        2,
        0,
        0,
        13,
        0,
    )
    assert e["advantage"] == -0.7071
    assert e["group"] == ["2-0", "3-0"]


async def test_it_follows_a_run_that_is_being_written(client, writer):
    before = await ask(client, "/api/state")
    add_group(writer, 6)
    import asyncio

    await asyncio.sleep(0.6)
    after = await ask(client, "/api/state")
    assert (before["episodes"], after["episodes"]) == (12, 14)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "",
        "127.0.0.1:80@evil",
        "[::1",
        "0.0.0.0",
    ],
)
async def test_foreign_hosts_are_refused(client, host):
    assert not is_loopback(host)
    if host:
        for path in ("/", "/api/run", "/app.js"):
            assert (await client.get(path, headers={"Host": host})).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8400", "localhost:1", "LOCALHOST", "[::1]:8400"])
def test_loopback_hosts_are_accepted(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "path",
    [
        "/../config.toml",
        "/..%2f..%2fetc/passwd",
        "/static/app.js",
        "/%2e%2e/app.js",
        "/app.js/../../server.py",
        "/config.toml",
        "/api/../config.toml",
    ],
)
async def test_nothing_but_the_listed_files_is_served(client, path):
    import yarl

    answer = await client.get(yarl.URL(path, encoded=True))
    assert answer.status == 404 or (answer.status == 200 and "javascript" in answer.headers["Content-Type"])
    assert "seed" not in await answer.text()


async def test_only_get_is_allowed_and_every_response_has_the_headers(client):
    assert (await client.post("/api/run")).status == 405
    for path in ("/", "/api/run", "/nothing", "/style.css"):
        headers = (await client.get(path)).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "query", "says"),
    [
        ("/api/episode", {"id": "../../etc/passwd"}, "no episode"),
        ("/api/episode", {}, "no episode"),
        ("/api/episodes", {"sort": "__class__"}, "cannot be sorted"),
        ("/api/episodes", {"step": "x"}, "must be a number"),
        ("/api/episodes", {"least": "x"}, "must be a number"),
        ("/api/episodes", {"offset": "-1"}, "must be a number"),
    ],
)
async def test_invalid_queries_are_errors_of_one_sentence(client, path, query, says):
    answer = await client.get(path, params=query)
    assert answer.status == 200
    assert says in (await answer.json())["error"]


async def test_it_listens_on_loopback_and_reports_a_port_in_use(tmp_path, writer):
    source = RunSource(tmp_path / "run")
    runner, port = await start(source, 0)
    assert runner.addresses[0][0] == "127.0.0.1"
    with pytest.raises(StoreError, match="cannot be used"):
        await start(source, port)
    await runner.cleanup()


async def test_a_run_that_is_deleted_while_it_is_shown_is_a_sentence_until_it_is_back(client, tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    run.rename(away)
    for path in ("/api/state", "/api/run", "/api/episodes", "/api/episode?id=2-0"):
        assert (await ask(client, path))["error"] == f"{run} is gone; was it deleted? Restore it, or stop this command"
    away.rename(run)
    assert (await ask(client, "/api/state"))["episodes"] == 12
    (file,) = (run / "episodes").glob("*.zst")
    file.unlink()
    error = (await ask(client, "/api/episode?id=2-0"))["error"]
    assert error.startswith(f"No such file or directory ({file}); ")
    assert error.endswith("was it deleted meanwhile?")


@contextmanager
def descriptors(limit):
    """At most so many of this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_free_descriptors_a_request_is_answered_with_a_sentence_and_the_next_is_served(client, tmp_path):
    await ask(client, "/api/state")  # the connection stays open
    with descriptors(3):
        error = (await ask(client, "/api/episode?id=2-0"))["error"]
    file = tmp_path / "run/episodes/000000.jsonl.zst"
    assert error == f"Too many open files ({file}); raise the limit on open files (ulimit -n)"
    assert (await ask(client, "/api/episode?id=2-0"))["segments"]


async def test_connections_that_cannot_be_accepted_are_one_sentence_and_served_later(client, capfd):
    loop, said = asyncio.get_running_loop(), []
    report_machine_errors(loop, said.append)
    request = b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.socket() as waiting, socket.socket() as leaves:
        waiting.setblocking(False)
        with descriptors(3):
            for each in (waiting, leaves):
                each.setblocking(False)
                await loop.sock_connect(each, (client.host, client.port))
                await loop.sock_sendall(each, request)
            await until(lambda: said)
            leaves.close()
        async with asyncio.timeout(10):
            assert (await loop.sock_recv(waiting, 1000)).startswith(b"HTTP/1.1 200 OK")
    reason = "socket.accept() out of system resource: Too many open files; raise the limit on open files (ulimit -n)"
    assert said == [reason]
    loop.call_exception_handler({"message": "another fault", "exception": OSError(errno.EPIPE, "odd")})
    assert said == [reason], "what is not the machine's is reported as before"


async def test_results_of_replay_and_rescore_are_shown(client, tmp_path):
    found = {
        "cause": "env",
        "what": "the observation",
        "turn": 0,
        "segment": 0,
        "token": 9,
        "then": "a",
        "today": "b",
        "episode_id": "1-0",
    }
    rows = [
        {"episode_id": "0-0", "partial": False, "divergence": None},
        {"episode_id": "1-0", "partial": False, "divergence": found},
    ]
    (tmp_path / "run" / "replay.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "run" / "rescore.json").write_text(json.dumps({"text": "score 1 2"}))
    run = await ask(client, "/api/run")
    assert run["replay"] == {"identical": 1, "env": 1}
    assert run["rescore"]["text"] == "score 1 2"
    assert [r["id"] for r in (await ask(client, "/api/episodes", replay="differs"))["rows"]] == ["1-0"]
    assert (await ask(client, "/api/episode", id="1-0"))["replay"]["cause"] == "env"
    assert (await ask(client, "/api/episode", id="0-0"))["replay"] is None


def test_token_texts_concatenate_to_the_text_also_for_characters_of_several_tokens(tokenizer):
    text = "naïve 🙂 東京 <|im_start|>user\n ok"
    ids = tokenizer.encode(text)
    made = token_texts(ids, tokenizer.decode)
    assert len(made) == len(ids)
    assert "".join(made) == text


# -- the single file ---------------------------------------------------------------------------------------------------


def test_the_export_holds_the_text_as_data_only(tmp_path, writer):
    recording = Recording(tmp_path / "run")
    detail = episode_detail(recording.record(recording.entry("0-0")), recording.step_of("0-0"), decode, 0.7071)
    page = html_of(detail)
    assert "<img" not in page
    assert page.count("<script") == 3
    assert page.count("</script>") == 3
    assert "http:" not in page.replace("http://www.w3.org", "")
    start = page.index('id="episode-data">') + len('id="episode-data">')
    data = page[start : page.index("</script>", start)]
    assert json.loads(data) == json.loads(encode(detail))
    assert EVIL in json.loads(data)["turns"][0]["action"]["results"][0]["content"]
