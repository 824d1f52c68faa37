"""The page over a folder of runs: a row for each with its last metrics and rewards, and one click to the run."""

import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from viewruns import EVIL, decode, make_run

from agentrl.view.page_server import make_app
from agentrl.view.run_list import RunList, run_folders
from agentrl.view.run_source import RunSource

LINES = [
    {"step": 0, "eval/test/reward": 0.25, "eval/test/em": 0.25},
    {"step": 0, "reward": 0.5, "reward/em": 0.5, "turns": 2.0, "failures": 1},
    {"step": 1, "reward": 0.75, "reward/em": 0.75, "turns": 3.0, "failures": 0},
]


@pytest.fixture
def folder(tmp_path):
    """Two runs, one with a hostile name, and folders that are none."""
    for name, env in (("one", "search_r1"), ("<b>two & é", EVIL)):
        make_run(tmp_path / name).close()
        (tmp_path / name / "config.toml").write_text(f"[env]\nenv = {json.dumps(env)}\n[rollout]\nnum_rollout = 40\n")
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "one/summary.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("x")
    return tmp_path


def runs_in(folder):
    return RunList(folder, lambda path: RunSource(path, decode))


@pytest.fixture
async def client(folder):
    async with TestClient(TestServer(make_app(runs_in(folder)))) as made:
        yield made


def test_runs_are_the_folders_with_settings_and_episodes(folder):
    assert [f.name for f in run_folders(folder)] == ["<b>two & é", "one"]
    assert run_folders(folder / "one") == []
    assert run_folders(folder / "notes") == run_folders(folder / "file.txt") == []


async def test_a_row_holds_the_last_metrics_and_rewards(client):
    answer = await (await client.get("/api/runs")).json()
    rows = {row["name"]: row for row in answer["runs"]}
    row = rows["one"]
    assert {k: row[k] for k in ("env", "rollouts", "planned", "first", "reward", "rewards", "evaluation", "turns", "failures", "finished")} == {
        "env": "search_r1", "rollouts": 2, "planned": 40, "first": 0.5, "reward": 0.75, "rewards": {"reward/em": 0.75},
        "evaluation": {"eval/test/reward": 0.25}, "turns": 3.0, "failures": 1, "finished": True,
    }  # fmt: skip
    assert not rows["<b>two & é"]["finished"]


async def test_a_folder_that_is_deleted_while_it_is_shown_is_a_sentence(client, folder):
    folder.rename(folder.with_name("away"))
    answer = await (await client.get("/api/runs")).json()
    assert answer["error"] == f"{folder} is gone; was it deleted? Restore it, or stop this command"


async def test_each_run_has_its_page_and_its_answers(client):
    page = await (await client.get("/run/one/")).text()
    assert '<a href="../../">All runs</a>' in page
    for asset in ("app.js", "tokens.js", "style.css"):
        assert (await client.get(f"/run/one/{asset}")).status == 200
    assert (await (await client.get("/run/one/api/run")).json())["state"]["episodes"] == 12
    other = await (await client.get("/run/%3Cb%3Etwo%20&%20%C3%A9/api/run")).json()
    assert other["name"] == "<b>two & é"


@pytest.mark.parametrize("name", ["none", "notes", "..", "%2e%2e", "one%2f..%2fone", "one/../../x"])
async def test_nothing_else_is_a_run(client, name):
    answer = await client.get(f"/run/{name}/api/run")
    assert answer.status == 404 or "holds no run" in (await answer.json())["error"]


async def test_a_run_that_begins_later_appears(client, folder):
    make_run(folder / "new").close()
    (folder / "new/config.toml").write_text("not toml")
    rows = (await (await client.get("/api/runs")).json())["runs"]
    assert "new" in {row["name"] for row in rows}
    assert next(row["problem"] for row in rows if row["name"] == "new")


async def test_the_list_of_episodes_holds_score_answer_and_label(client):
    rows = (await (await client.get("/run/one/api/episodes?limit=2")).json())["rows"]
    assert [(row["score"], row["answer"], row["label"]) for row in rows] == [
        (1.0, "yes", "Paris"),
        (0.0, "yes", "Paris"),
    ]
