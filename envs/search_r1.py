"""search_r1: answer a question by searching, over several turns (after Search-R1, Jin et al. 2025, arXiv:2503.09516).

The policy writes `<search>query</search>` and reads `<information>…</information>`, any number of times, then `<answer>…</answer>`; with
`--action-format hermes` it makes native tool calls instead. Without arguments it asks about the World Factbook and searches its 32,607
passages with BM25; a corpus, a retriever or a search server of your own is one argument away.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

from agentrl.env import ToolEnv
from agentrl.envs import factbook
from agentrl.errors import ConfigError, DataError
from agentrl.rewards.answers import em, f1
from agentrl.tool import tool
from agentrl.tools.retrieval import BM25Retriever, DenseRetriever, HTTPRetriever, Retriever, load_corpus, show
from agentrl.types import Message, Task

INSTRUCTIONS = (
    "Answer the question below. Think inside <think> and </think> before each step. To look something up write "
    "<search> your query </search>; the results then appear between <information> and </information>. Search as often as you need. "
    "When you know the answer write it, short and without explanation, as <answer> your answer </answer>.\nQuestion: "
)
_lock = threading.Lock()


@functools.cache
def _build(kind: str, corpus: str | None, url: str | None) -> Retriever:
    if kind == "http":
        if url is None:
            raise ConfigError("env search_r1: retriever 'http' needs url=http://HOST:PORT/retrieve")
        return HTTPRetriever(url)
    if kind not in ("bm25", "dense"):
        raise ConfigError(f"env search_r1: retriever must be 'bm25', 'dense' or 'http', found {kind!r}")
    passages = load_corpus(corpus) if corpus else list(factbook.passages())
    return BM25Retriever(passages) if kind == "bm25" else DenseRetriever(passages)


def shared_retriever(kind: str, corpus: str | None, url: str | None) -> Retriever:
    """One retriever per process and setting, built by whoever asks first."""
    with _lock:
        return _build(kind, corpus, url)


class SearchR1(ToolEnv):
    """Multi-turn question answering over a corpus.

    The Factbook's index is made by the first search (about a second), so that a replay of recorded results does not wait for it.
    """

    name = "search_r1"
    rewards = (em, f1)
    action_format = "search_r1"
    input_key = "question"
    label_key = "golden_answers"
    eval_score = "em"
    eval_groups = ("hops",)

    def __init__(
        self,
        retriever: str = "bm25",
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        passage_chars: int = 80,
        instructions: bool = False,
    ) -> None:
        """Args:
        retriever: bm25, dense (MiniLM vectors) or http (Search-R1's `/retrieve`).
        corpus: JSONL of {"id", "contents"}; None: the World Factbook.
        url: of the search server.
        topk: passages per search.
        passage_chars: each passage is cut to so many characters.
        instructions: tell the policy the format first; the embedded policy knows it, other models need it.
        """
        for name, number in (("topk", topk), ("passage_chars", passage_chars)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"search_r1: {name} must be a number from 1 up, found {number!r}")
        if not isinstance(instructions, bool):
            raise ConfigError(f"search_r1: instructions must be true or false, found {instructions!r}")
        if url is not None and retriever != "http":
            raise ConfigError(f"search_r1: a url is asked by retriever=http only, found retriever={retriever}")
        self._retriever = functools.partial(shared_retriever, retriever, corpus, url)
        if (retriever, corpus) != ("bm25", None):
            self._retriever()  # making it may take longer than a call of a tool may
        self.topk = topk
        self.passage_chars = passage_chars
        self.instructions = instructions

    def reset(self, task: Task, *, seed: int) -> list[Message]:
        """The question, after the instructions if they are wanted."""
        first, *rest = task.messages
        if not self.instructions:
            return [first, *rest]
        return [{**first, "content": INSTRUCTIONS + str(first["content"])}, *rest]

    @tool(retries=2, timeout_s=60)  # more than the retriever waits for a server to connect and to answer
    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to look for
        """
        (found,) = self._retriever().search([query], self.topk)
        return show(found, max_chars=self.passage_chars) or "nothing found"

    @classmethod
    def tasks(cls, split: str) -> Iterable[Task]:
        """Questions about the World Factbook; no country of the test split occurs in the train split."""
        for row in factbook.questions("test" if split == "test" else "train"):
            yield Task(row["id"], row["question"], row["golden_answers"], row["metadata"])

    @classmethod
    def check_task(cls, task: Task) -> None:
        """A label must be an answer or a list of accepted answers."""
        label: Any = task.label
        answers = [label] if isinstance(label, str) else label
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
            raise DataError(f"the label must be an answer or a list of accepted answers (strings), found {label!r:.80}")
