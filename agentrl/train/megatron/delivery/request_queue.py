"""A bounded queue of HTTP requests to one SGLang server. A server's failure is a result, not an exception: other servers continue."""

from __future__ import annotations

import http.client
import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from agentrl.train.base import Receiver

DEPTH = 2
"""Requests sent to a server before it has answered the first of them."""


class RequestQueue:
    """Sends requests to one server in order, at most `DEPTH` ahead of its answers. After a failure it sends nothing more."""

    def __init__(self, receiver: Receiver, timeout_s: float) -> None:
        self.receiver, self.timeout_s = receiver, timeout_s
        self.failure = ""
        """message of the first failure; empty: no failure"""
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="delivery")
        self._pending: deque[tuple[Future[str], object]] = deque()

    def send(self, path: str, body: dict[str, Any], payload: object = None) -> None:
        """Send one request; `payload` is kept alive until it is answered."""
        while not self.failure and len(self._pending) >= DEPTH:
            self._receive(None)
        if not self.failure:
            self._pending.append((self._pool.submit(post, self.receiver.address + path, body, self.timeout_s), payload))

    @property
    def failed(self) -> bool:
        """Whether an answer so far reports a failure."""
        while self._pending and self._pending[0][0].done():
            self._receive(None)
        return bool(self.failure)

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for all answers, for at most `timeout_s` each."""
        while self._pending:
            self._receive(timeout_s)
        self._pool.shutdown(wait=False)

    def _receive(self, timeout_s: float | None) -> None:
        answer, _ = self._pending.popleft()
        try:
            self.failure = self.failure or answer.result(timeout_s)
        except TimeoutError:
            self.failure = self.failure or "it did not answer"


def post(url: str, body: dict[str, Any], timeout_s: float) -> str:
    """POST JSON. Returns an empty string if the server reports success, else what went wrong."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        result = json.loads(content) if answer.status < 500 else {}
    except (OSError, http.client.HTTPException, ValueError) as e:
        return f"{parts.path}: {type(e).__name__}: {e}"
    finally:
        connection.close()
    if answer.status == 200 and result.get("success", True):
        return ""
    return f"{parts.path} answered {answer.status}: {content.decode(errors='replace')[:300]}"
