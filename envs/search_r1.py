"""search_r1: answer a question by searching, over several turns (after Search-R1, Jin et al. 2025, arXiv:2503.09516).

The policy writes `<search>query</search>` and reads `<information>…</information>`, any number of times, then `<answer>…</answer>`. With
`--action-format hermes` it makes native tool calls instead. By default the questions are about the World Factbook, and BM25 searches its
32,607 passages. Arguments select another corpus, retriever or search server.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

from agentrl.env import ToolEnv
from agentrl.envs import factbook
from agentrl.errors import ConfigError, DataError, InfraError
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
            raise ConfigError("search_r1: retriever 'http' needs url=http://HOST:PORT/retrieve")
        return HTTPRetriever(url)
    if kind not in ("bm25", "dense"):
        raise ConfigError(f"search_r1: retriever must be 'bm25', 'dense' or 'http', found {kind!r}")
    passages = load_corpus(corpus) if corpus else list(factbook.passages())
    return BM25Retriever(passages) if kind == "bm25" else DenseRetriever(passages)


def shared_retriever(kind: str, corpus: str | None, url: str | None) -> Retriever:
    """Return the retriever of this process for these arguments, built by the first call."""
    with _lock:
        return _build(kind, corpus, url)


class SearchR1(ToolEnv):
    """Multi-turn question answering over a corpus.

    The first search builds the Factbook's index, which takes about a second, so a replay of recorded results does not build it.
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
        """Create the environment.

        Args:
            retriever: bm25, dense (MiniLM vectors) or http (Search-R1's `/retrieve`).
            corpus: JSONL file of {"id", "contents"}; None: the World Factbook.
            url: address of the search server, for `retriever="http"`.
            topk: passages per search.
            passage_chars: maximum characters of a passage that the policy reads.
            instructions: describe the format before the question; the embedded policy knows it, other models need it.
        """
        for name, number in (("topk", topk), ("passage_chars", passage_chars)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"search_r1: {name} must be an integer of at least 1, found {number!r}")
        if not isinstance(instructions, bool):
            raise ConfigError(f"search_r1: instructions must be true or false, found {instructions!r}")
        if url is not None and retriever != "http":
            raise ConfigError(
                f"search_r1: url is used only with retriever=http, found retriever={retriever}; remove url"
            )
        self._retriever = functools.partial(shared_retriever, retriever, corpus, url)
        if (retriever, corpus) != ("bm25", None):
            self._retriever()  # here, because building it may take longer than a tool call may take
        self._url = url
        self.topk = topk
        self.passage_chars = passage_chars
        self.instructions = instructions

    def check_ready(self) -> None:
        """Ask a search server once.

        Raises:
            ConfigError: it does not answer.
        """
        if self._url is not None:
            try:
                self._retriever().search(["ready"], 1)
            except InfraError as e:
                raise ConfigError(f"search_r1: {e}; start the server, or correct --env-arg url=ADDRESS") from e

    def reset(self, task: Task, *, seed: int) -> list[Message]:
        """Return the question, preceded by the instructions if `instructions` is set."""
        first, *rest = task.messages
        if not self.instructions:
            return [first, *rest]
        return [{**first, "content": INSTRUCTIONS + str(first["content"])}, *rest]

    @tool(retries=2, timeout_s=60)  # longer than the retriever waits for a server to connect and respond
    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to look for
        """
        (passages,) = self._retriever().search([query], self.topk)
        return show(passages, max_chars=self.passage_chars) or "nothing found"

    @classmethod
    def tasks(cls, split: str) -> Iterable[Task]:
        """Yield questions about the World Factbook. No country of the test split occurs in the train split."""
        for row in factbook.questions("test" if split == "test" else "train"):
            yield Task(row["id"], row["question"], row["golden_answers"], row["metadata"])

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Require a label that is an answer or a list of accepted answers."""
        label: Any = task.label
        answers = [label] if isinstance(label, str) else label
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
            raise DataError(f"the label must be an answer or a list of accepted answers (strings), found {label!r:.80}")
