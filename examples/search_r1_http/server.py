"""A Search-R1 retrieval server over the World Factbook: `POST /retrieve` with {"queries": [...], "topk": 3}.

    python examples/search_r1_http/server.py --port 8000

It prints its address once it answers. Other servers of this interface, such as Search-R1's own over Wikipedia, take its place.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agentrl.envs import factbook
from agentrl.tools.retrieval import BM25Retriever


def main() -> None:
    """Build the index and serve it until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    retriever = BM25Retriever(list(factbook.passages()))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                found = retriever.search(request["queries"], int(request.get("topk", 3)))
            except (KeyError, TypeError, ValueError) as e:
                self._answer(400, {"error": f"expected queries and topk: {e}"})
                return
            passages = [
                [{"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}} for p in passages]
                for passages in found
            ]
            self._answer(200, {"result": passages})

        def _answer(self, status: int, payload: dict[str, object]) -> None:
            body = json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no line for each request."""

    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/retrieve", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
