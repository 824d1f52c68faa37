"""Retrievers and corpus files; the HTTP one against a local server."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from doubles import play
from retrieval_server import Handler, Server

from agentrl.core.timeout_pool import TimeoutPool
from agentrl.envs.factbook import Passage, expert_plan, passages, questions
from agentrl.envs.search_r1 import SearchR1
from agentrl.errors import DataError, InfraError
from agentrl.render import Renderer
from agentrl.tools.retrieval import BM25Retriever, DenseRetriever, HTTPRetriever, load_corpus, show, split_contents
from agentrl.types import StopReason

SMALL = [
    Passage("a", "Fruit", "apples and pears"),
    Passage("b", "Twin", "plums"),
    Passage("c", "Twin", "plums"),
    Passage("d", "Sea", "fish and salt water"),
]


@pytest.fixture(scope="module")
def factbook_bm25() -> BM25Retriever:
    return BM25Retriever(passages())


def test_bm25_finds_and_breaks_ties_by_the_order_of_the_corpus() -> None:
    retriever = BM25Retriever(SMALL)
    found = retriever.search(["plums", "salt water fish", "nothing of it", "", "?!"], 2)
    assert [[p.id for p in row] for row in found] == [["b", "c"], ["d"], [], [], []]
    assert [p.id for p in retriever.search(["twin plums"], 1)[0]] == ["b"]
    assert [p.id for p in retriever.search(["apples"], 99)[0]] == ["a"]
    assert retriever.search([], 3) == []


def test_bm25_answers_a_query_the_same_alone_and_among_others(factbook_bm25: BM25Retriever) -> None:
    queries = ["Stockholm capital name", "Sweden population total male", "airports"]
    assert factbook_bm25.search(queries, 3) == [factbook_bm25.search([q], 3)[0] for q in queries]


def test_the_expert_finds_most_answers(factbook_bm25: BM25Retriever) -> None:
    rows = questions("test", limit=120)
    found = factbook_bm25.search([expert_plan(row).queries[-1] for row in rows], 3)
    hits = [any(row["golden_answers"][0] in p.text for p in shown) for row, shown in zip(rows, found, strict=True)]
    assert sum(hits) / len(hits) > 0.9


def test_bm25_leaves_jax_alone(tmp_path: Path) -> None:
    """bm25s would start it, and JAX takes three quarters of a GPU when it starts."""
    for name in ("jax/__init__.py", "jax/lax.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    code = """
import sys
from agentrl.envs.factbook import Passage
from agentrl.tools.retrieval import BM25Retriever
found = BM25Retriever([Passage("1", "", "a river"), Passage("2", "", "a hill")]).search(["river"], 1)
print([p.id for p in found[0]], "jax" in sys.modules, "bm25s" in sys.modules)
import jax
BM25Retriever([Passage("1", "", "a river")])
assert sys.modules["jax"] is jax
"""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["['1']", "False", "True"]
    assert [p.name for p in tmp_path.glob("jax/*.ran")] == ["__init__.ran"], (
        "a user's own import works, bm25s made none"
    )


def test_show_is_one_line_each_and_cut() -> None:
    assert show(SMALL[:2], max_chars=9) == "- Fruit: ap\n- Twin: plu"
    assert show([Passage("x", "T", "two\nlines")]) == "- T: two lines"
    assert show([]) == ""


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DataError, match="corpus is empty"):
        BM25Retriever([])
    with pytest.raises(DataError, match="at least 1, found 0"):
        BM25Retriever(SMALL).search(["x"], 0)
    with pytest.raises(DataError, match="expected a URL"):
        HTTPRetriever("localhost:80")


# ------------------------------------------------------------------------------------------------------------------------ corpus files


def test_a_corpus_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('\ufeff{"id": 0, "contents": "\\"A title\\"\\nthe text"}\n\n{"id": "1", "contents": "no title"}\n')
    assert load_corpus(path) == [Passage("0", "A title", "the text"), Passage("1", "", "no title")]


def test_a_line_separator_within_a_text_does_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        json.dumps({"id": 0, "contents": '"T"\none\u2028two\x85three'}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert len(load_corpus(path)) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": 0, "contents": "x"}\nnot json\n', r"corpus.jsonl, line 2: not JSON"),
        ('{"id": 0}\n', r"corpus.jsonl, line 1: expected"),
        ("[1]\n", r"corpus.jsonl, line 1: expected"),
        ('{"id": 0, "contents": 5}\n', r"corpus.jsonl, line 1: expected"),
        ('{"id": 0, "contents": "x"}\n\n{"id": "0", "contents": "y"}\n', r"line 3: id '0' was already used on line 1"),
        ("\n", r"holds no passages"),
    ],
)
def test_a_bad_corpus_file_is_reported_with_its_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(lines)
    with pytest.raises(DataError, match=message):
        load_corpus(path)


def test_a_missing_corpus_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(tmp_path / "none.jsonl")


def test_a_title_with_quotes_and_a_text_of_many_lines() -> None:
    assert split_contents('"A "b" c"\nx\ny') == ('A "b" c', "x\ny")


# ------------------------------------------------------------------------------------------------------------------------------- HTTP


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


def _good(request: dict[str, Any]) -> web.Response:
    item = {"document": {"id": "7", "contents": '"Title"\ntext'}, "score": 1.5}
    return web.json_response({"result": [[item] * request["topk"] for _ in request["queries"]]})


def test_http_speaks_search_r1(server: Server) -> None:
    server.handler = _good
    retriever = HTTPRetriever(server.url)
    assert retriever.search(["q1", "q2"], 2) == [[Passage("7", "Title", "text")] * 2] * 2
    assert server.requests == [{"queries": ["q1", "q2"], "topk": 2, "return_scores": True}]
    assert retriever.search([], 2) == []
    retriever.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: web.Response(status=503), "503"),
        (lambda _: web.Response(text="oops"), "the retrieval server failed"),
        (lambda _: web.json_response({"results": []}), "expected"),
        (lambda _: web.json_response([1]), "expected"),
        (lambda _: web.json_response({"result": [[{"document": {"contents": None}}]]}), "expected"),
        (lambda _: web.json_response({"result": []}), "expected 1 lists of passages, found 0"),
    ],
)
def test_a_bad_answer_is_an_infrastructure_failure(server: Server, answer: Handler, message: str) -> None:
    server.handler = answer
    with pytest.raises(InfraError, match=message):
        HTTPRetriever(server.url).search(["q"], 1)


def test_a_slow_or_absent_server_is_an_infrastructure_failure(server: Server) -> None:
    server.handler = _good
    with pytest.raises(InfraError, match="ReadTimeout"):
        HTTPRetriever(server.url, timeout_s=0.2).search(["slow"], 1)
    with pytest.raises(InfraError, match="ConnectError"):
        HTTPRetriever("http://127.0.0.1:9/retrieve", timeout_s=1.0).search(["q"], 1)


async def test_a_server_that_hangs_is_not_the_policys_doing(tags: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all times a hundredth: the search fails before the tool's time is up, is tried again, and then fails the episode."""
    client, call = httpx.Client, TimeoutPool.call

    async def quick(self: TimeoutPool, *args: Any, timeout_s: float = 1.0, **kwargs: Any) -> Any:
        return await call(self, *args, timeout_s=timeout_s / 100, **kwargs)

    monkeypatch.setattr(httpx, "Client", lambda timeout: client(timeout=timeout / 100))
    monkeypatch.setattr(TimeoutPool, "call", quick)
    with socket.create_server(("127.0.0.1", 0)) as hung:  # connects, and never answers
        url = f"http://127.0.0.1:{hung.getsockname()[1]}/retrieve"
        env_args = {"retriever": "http", "url": url}
        t = await play(SearchR1, ["<search>x</search>", "<answer>y</answer>"], tags, env_args=env_args)
    assert (t.stop_reason, t.cause) == (StopReason.TOOL_FAILURE, "tool search: InfraError")


def test_dense_finds_by_meaning_and_embeds_a_corpus_once(tmp_path: Path) -> None:
    corpus = [
        Passage("0", "Rhone", "The river rises in a glacier of the Swiss Alps."),
        Passage("1", "Bank", "Interest rates are set by the monetary policy committee."),
        Passage("2", "Bread", "Flour, water, salt and yeast are kneaded and baked."),
    ]
    dense = DenseRetriever(corpus, cache=tmp_path)
    questions = ["Who decides how much it costs to borrow money?", "recipe for a loaf", "where does the stream begin"]
    assert [found[0].id for found in dense.search(questions, 1)] == ["1", "2", "0"]
    assert dense.search([], 1) == []
    (file,) = tmp_path.iterdir()
    vectors = np.load(file)
    np.save(file, vectors[[1, 0, 2]])  # what is on disk is what is searched
    again = DenseRetriever(corpus, cache=tmp_path)
    assert [found[0].id for found in again.search(questions[:1], 1)] == ["0"]
