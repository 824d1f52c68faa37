"""A mock engine with the part of SGLang's native API that a client of `/generate` needs, on a bare asyncio protocol.

    python -m benchmarks.overhead.mock --turns 4 --latency-ms 50 [--port 0] [--drop 0.01]

Turn k (k = `<tool_response>` tokens in the context, of this vocabulary's id or of `--response-id`) is a tool call while k < turns - 1, else the
answer. Responses come after a fixed latency at any load. `--drop` is the share of requests whose connection is closed instead of answered,
alternately before the first byte and in the middle of the response. It prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

import orjson

from benchmarks.overhead.assets import Assets, load

try:
    import uvloop as loops
except ImportError:
    loops = asyncio

HEAD = b"HTTP/1.1 200 OK\r\ndate: Sat, 28 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_INFO = {
    "model_path": "mock", "tokenizer_path": "mock", "is_generation": True, "weight_version": "default", "version": "0.5.23",
    "device": "cuda", "tp_size": 1, "context_length": 131072, "model_type": "qwen2",
}  # fmt: skip


class Mock:
    """The script and the counts."""

    def __init__(
        self, assets: Assets, turns: int, latency_s: float, drop: float, response_id: int | None = None
    ) -> None:
        self.response_ids = {assets.response_id, response_id or assets.response_id}
        self.turns = turns
        self.latency_s = latency_s
        self.drop = drop
        self.random = random.Random(0)
        self.counts = dict.fromkeys(("requests", "in_flight", "max_in_flight", "dropped", "connections"), 0)
        self._tails = {
            k: _tail(assets.calls[(k + 1) % 10] if k < turns - 1 else assets.final, assets.end_id) for k in range(turns)
        }

    def generate(self, body: bytes) -> bytes:
        """The answer to /generate, as bytes."""
        request = orjson.loads(body)
        ids = request["input_ids"]
        k = sum(map(ids.count, self.response_ids))
        text, tail = self._tails[min(k, self.turns - 1)]
        rid = str(request.get("rid") or self.counts["requests"]).encode()
        scores = b""
        if "logprob_start_len" in request:  # of the prompt: a fleet looks whether the server works
            scores = b'"input_token_logprobs":%b,' % orjson.dumps([[-0.5, i, None] for i in ids])
        return b'{"text":%b,%b,%b"prompt_tokens":%d,"id":"%b"}}' % (text, tail, scores, len(ids), rid)

    def answer(self, path: str) -> dict[str, Any]:
        """What other paths say."""
        if path == "/stats":
            used = os.times()
            theirs = {"req": self.counts["requests"], "max_inflight": self.counts["max_in_flight"]}
            cpu_s = used.user + used.system
            return {**self.counts, "cpu_s": cpu_s, **theirs, "cpu": cpu_s, "by_path": {}, "bytes_in": 0}
        if path == "/reset":
            self.counts |= {"requests": 0, "max_in_flight": 0, "dropped": 0, "connections": 0}
        if path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            return _INFO
        if path == "/openapi.json":
            return {"paths": {"/generate": {}, "/begin_weight_update": {}}}
        return {"success": True}


def _tail(turn: dict[str, Any], end_id: int) -> tuple[bytes, bytes]:
    ids = turn["ids"]
    meta = {
        "finish_reason": {"type": "stop", "matched": end_id},
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
        "e2e_latency": 0.05,
        "output_token_logprobs": [[round(-0.01 - i % 97 / 40 - 0.0001234567, 10), t, None] for i, t in enumerate(ids)],
    }
    return orjson.dumps(turn["text"]), b'"output_ids":%b,"meta_info":%b' % (orjson.dumps(ids), orjson.dumps(meta)[:-1])


class Connection(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.buffer = bytearray()
        self.head = b""
        self.need = -1

    def connection_made(self, transport: Any) -> None:
        """A client."""
        self.transport = transport
        self.mock.counts["connections"] += 1

    def data_received(self, data: bytes) -> None:
        """Take requests out of what has come."""
        self.buffer += data
        while True:
            if self.need < 0:
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self.head = bytes(self.buffer[:end])
                low = self.head.lower()
                at = low.find(b"content-length:")
                self.need = int(low[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                del self.buffer[: end + 4]
            if len(self.buffer) < self.need:
                return
            body = bytes(self.buffer[: self.need])
            del self.buffer[: self.need]
            self.need = -1
            self.handle(self.head.split(b" ", 2)[1].split(b"?")[0].decode(), body)

    def handle(self, path: str, body: bytes) -> None:
        """Answer one request, /generate after the latency."""
        mock = self.mock
        if path != "/generate":
            self.send(orjson.dumps(mock.answer(path)))
            return
        counts = mock.counts
        counts["requests"] += 1
        counts["in_flight"] += 1
        counts["max_in_flight"] = max(counts["max_in_flight"], counts["in_flight"])
        content = mock.generate(body)
        asyncio.get_running_loop().call_later(mock.latency_s, self.finish, content)

    def finish(self, content: bytes) -> None:
        """The answer is due."""
        self.mock.counts["in_flight"] -= 1
        if self.mock.drop and self.mock.random.random() < self.mock.drop:
            self.mock.counts["dropped"] += 1
            if self.mock.counts["dropped"] % 2:
                self.transport.abort()
            else:
                self.transport.write((HEAD % len(content) + content)[: len(content) // 2])
                self.transport.close()
            return
        self.send(content)

    def send(self, content: bytes) -> None:
        """Write an answer, if somebody is there."""
        if not self.transport.is_closing():
            self.transport.write(HEAD % len(content) + content)


async def serve(mock: Mock, port: int) -> None:
    """Listen until killed."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(mock), "127.0.0.1", port, backlog=16384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--response-id", type=int)
    args = parser.parse_args()
    mock = Mock(load(), args.turns, args.latency_ms / 1000, args.drop, args.response_id)
    loops.run(serve(mock, args.port))


if __name__ == "__main__":
    main()
