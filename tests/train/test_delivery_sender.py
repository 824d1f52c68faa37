"""Deliveries that cannot complete end: a group that nobody joins, a broadcast that nobody receives, a server that refuses."""

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from agentrl.train.base import Receiver

SENDER = """
import sys, time, torch
from agentrl.train.megatron.delivery.broadcast_group import BroadcastError, BroadcastGroup
port, joined = int(sys.argv[1]), sys.argv[2] == "joined"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
started = time.monotonic()
after = lambda seconds: lambda: time.monotonic() - started > seconds
try:
    failed = (lambda: False) if joined else after(1.0)
    group = BroadcastGroup(name="g", port=port, world=2, backend="gloo", timeout_s=60.0, failed=failed)
    started = time.monotonic()
    group.broadcast(torch.zeros(1 << 27, dtype=torch.uint8), failed=after(1.0), timeout_s=60.0)
except BroadcastError as e:
    print(f"lost after {time.monotonic() - started:.1f} s: {e}", flush=True)
import os
os._exit(0)
"""
RECEIVER = """
import datetime, sys, time, torch
c10d = torch.distributed.distributed_c10d
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
store = torch.distributed.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False)
c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), c10d.PrefixStore("g", store), group_name="g", timeout=datetime.timedelta(seconds=60))
time.sleep(60)
"""


def run(*args: str, seconds: float = 200.0) -> str:
    done = subprocess.run([sys.executable, "-c", SENDER, *args], capture_output=True, text=True, timeout=seconds)
    assert not done.stderr or "Traceback" not in done.stderr, done.stderr
    return done.stdout


def free_port() -> str:
    from agentrl.core.ports import free_port

    return str(free_port())


@pytest.mark.slow
def test_a_group_that_nobody_joins():
    out = run(free_port(), "alone")
    assert "did not join" in out


@pytest.mark.slow
def test_a_broadcast_that_nobody_receives():
    port = free_port()
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, port])
    try:
        out = run(port, "joined")
    finally:
        receiver.kill()
        receiver.wait()
    assert "a receiver refused" in out
    assert float(out.split()[2]) < 10


class Refuses(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b'{"success": false, "message": "no session"}')

    def log_message(self, *_):
        pass


def test_a_request_queue_stops_at_the_first_refusal_and_its_waits_are_bounded():
    from agentrl.train.megatron.delivery.request_queue import RequestQueue, post

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    queue = RequestQueue(Receiver(address, 1), 5.0)
    for _ in range(4):
        queue.send("/update_weights_from_tensor", {})
    queue.finish()
    assert "answered 400" in queue.failure
    assert "no session" in queue.failure
    server.shutdown()
    server.server_close()
    started = time.monotonic()
    assert "refused" in post(address + "/x", {}, 5.0).lower()
    assert time.monotonic() - started < 5
