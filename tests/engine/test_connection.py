"""The HTTP/1.1 client against servers whose responses a test gives byte by byte."""

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
from contextlib import asynccontextmanager, suppress

import pytest

from agentrl.engine.sglang.connection import Connection, request_deadlines
from agentrl.engine.sglang.http import HttpClient
from agentrl.errors import EngineFailure

BODY = b'{"a":[1,2,3]}'
VALUE = {"a": [1, 2, 3]}
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = CHUNKED + b"5\r\n" + BODY[:5] + b"\r\n8\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
EXTENDED = (
    CHUNKED
    + b"5;name=value\r\n"
    + BODY[:5]
    + b"\r\n008 ;x\r\n"
    + BODY[5:]
    + b"\r\n0;last\r\nTrailer: 1\r\nOther: 2\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + BODY


class Server:
    """Responds to each request with the next of `answers`: pieces written one by one, and 'close' or 'reset' where the connection ends."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.connections = 0
        self.requests = []

    async def handle(self, reader, writer):
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                self.requests.append(head + (await reader.readexactly(int(length)) if length else b""))
                for piece in self.answers.pop(0):
                    if piece == "close":
                        return await self.end(writer)
                    if piece == "reset":
                        await asyncio.sleep(0.02)  # until the client has read what came before
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return writer.transport.abort()
                    if piece == "wait":
                        await asyncio.sleep(0.1)
                        continue
                    if piece == "hold":
                        await reader.read()
                        return await self.end(writer)
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        return await self.end(writer)

    async def end(self, writer):
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def serving(*answers, tls=None, host="127.0.0.1"):
    server = Server(*answers)
    listener = await asyncio.start_server(server.handle, host, 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    client = HttpClient(f"{'https' if tls else 'http'}://{'localhost' if tls else host}:{port}")
    try:
        yield server, client
    finally:
        await client.close()
        listener.close()
        await listener.wait_closed()


def post(client, timeout_s=5.0):
    return client.post("/generate", {"x": 1}, timeout_s=timeout_s)


@pytest.mark.parametrize("answer", [WHOLE, CHUNKS, EXTENDED, CONTINUED])
async def test_a_response_cut_at_any_byte(answer):
    cuts = [[answer[:i], answer[i:]] for i in range(1, len(answer))]
    async with serving(*cuts, [bytes([b]) for b in answer]) as (server, client):
        for _ in range(len(cuts) + 1):
            assert await post(client) == VALUE
        assert server.connections == 1, "and the connection is kept"


@pytest.mark.parametrize("i", range(1, len(UNTIL_CLOSE), 7))
async def test_a_body_that_ends_with_the_connection(i):
    async with serving([UNTIL_CLOSE[:i], UNTIL_CLOSE[i:], "close"], [WHOLE]) as (server, client):
        assert await post(client) == VALUE
        assert await post(client) == VALUE
        assert server.connections == 2


async def test_the_bytes_of_a_request():
    async with serving([WHOLE], [WHOLE]) as (server, client):
        await post(client)
        await client.get("/health", timeout_s=5)
        first, second = server.requests
        assert first.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
        assert first.endswith(b'Content-Length: 7\r\n\r\n{"x":1}')
        assert second.startswith(b"GET /health HTTP/1.1\r\n")


async def test_responses_without_content_and_without_json():
    async with serving([b"HTTP/1.1 204 No Content\r\n\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]) as (
        server,
        client,
    ):
        assert await post(client) == ""
        assert await post(client) == "ok"
        assert server.connections == 1


@pytest.mark.parametrize("line", [b"Connection: close", b"connection:CLOSE"])
async def test_connection_close_ends_the_connection(line):
    async with serving([WHOLE.replace(b"OK\r\n", b"OK\r\n" + line + b"\r\n")], [WHOLE]) as (server, client):
        assert await post(client) == await post(client) == VALUE
        assert server.connections == 2


async def test_http_1_0_keeps_the_connection_only_if_requested():
    old = WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0")
    kept = old.replace(b"OK\r\n", b"OK\r\nConnection: keep-alive\r\n")
    async with serving([kept], [old], [WHOLE]) as (server, client):
        for _ in range(3):
            assert await post(client) == VALUE
        assert server.connections == 2


async def test_a_stale_kept_connection_is_replaced_once():
    async with serving([WHOLE], ["reset"], [WHOLE], ["reset"], ["reset"]) as (server, client):
        assert await post(client) == await post(client) == VALUE
        assert server.connections == 2
        with pytest.raises(EngineFailure, match="connection was lost"):
            await post(client)
        assert (server.connections, len(server.requests)) == (3, 5), "once, not twice"


async def test_a_connection_closed_while_idle_is_not_used():
    async with serving([WHOLE, "close"], [WHOLE]) as (server, client):
        assert await post(client) == VALUE
        await asyncio.sleep(0.05)
        assert await post(client) == VALUE
        assert server.connections == 2


HALVES = [
    WHOLE[:20],
    WHOLE[:-1],
    CHUNKS[:-6],
    CHUNKS[:-2],
    UNTIL_CLOSE.replace(BODY, b""),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
]


@pytest.mark.parametrize("half", HALVES)
async def test_half_a_response_and_a_reset_is_lost_and_not_sent_again(half):
    async with serving([WHOLE], [half, "reset"], [WHOLE]) as (server, client):
        assert await post(client) == VALUE
        with pytest.raises(EngineFailure) as e:
            await asyncio.wait_for(post(client), 5)
        assert e.value.cause == "engine: connection lost"
        assert await post(client) == VALUE
        assert (server.connections, len(server.requests)) == (2, 3)


@pytest.mark.parametrize("half", [WHOLE[:-1], CHUNKS[:-2], WHOLE[:30]])
async def test_half_a_response_and_an_end_is_lost(half):
    async with serving([half, "close"]) as (_, client):
        with pytest.raises(EngineFailure) as e:
            await asyncio.wait_for(post(client), 5)
        assert e.value.cause == "engine: connection lost"


NONSENSE = [
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.1 two hundred\r\n\r\n",
    b"HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x00",
    WHOLE.replace(b" 13", b" -13"),
    WHOLE.replace(b" 13", b" 1_3"),
    WHOLE.replace(b" 13", b" many"),
    CHUNKED + b"-2\r\nab\r\n",
    CHUNKED + b"0x5\r\nabcde\r\n",
    CHUNKED + b"\r\n",
    CHUNKED + b"xyz\r\n",
    CHUNKED + b"2\r\nabc\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * 100_000,
]


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_responses_that_are_not_http_fail_at_once(nonsense):
    async with serving([nonsense, "hold"], [WHOLE]) as (server, client):
        with pytest.raises(EngineFailure, match="is not HTTP") as e:
            await asyncio.wait_for(post(client), 5)
        assert e.value.cause == "engine: connection lost"
        assert await post(client) == VALUE
        assert server.connections == 2, "the connection is not used again"


async def test_an_unrequested_response_makes_the_connection_unusable():
    async with serving([WHOLE + WHOLE], [WHOLE]) as (server, client):
        assert await post(client) == await post(client) == VALUE
        assert server.connections == 2


class Wire(asyncio.Transport):
    def is_closing(self):
        return False

    def write(self, data): ...


async def test_an_unrequested_head_makes_the_connection_unusable():
    connection = Connection(request_deadlines())
    connection.connection_made(Wire())
    asked = asyncio.create_task(connection.request(b"x", 5.0))
    await asyncio.sleep(0)
    connection.data_received(WHOLE)
    connection.data_received(WHOLE[: -len(BODY)])  # before `ask` goes on
    assert (await asked).content == BODY
    assert not connection.usable


async def test_a_cancel_together_with_the_response_leaks_no_connection(monkeypatch):
    async with serving([WHOLE], [WHOLE]) as (server, client):
        complete = Connection._complete

        def complete_and_cancel(self):
            complete(self)
            task.cancel()

        monkeypatch.setattr(Connection, "_complete", complete_and_cancel)
        task = asyncio.create_task(post(client))
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert await post(client) == VALUE
        assert (server.connections, len(client._idle), len(client._busy)) == (2, 1, 0)


async def test_a_request_lost_late_is_not_sent_again(monkeypatch):
    """The server may still process it: SGLang sends nothing until a generation is complete."""
    monkeypatch.setattr("agentrl.engine.sglang.http.STALE_WITHIN_S", 0.05)
    async with serving([WHOLE], ["wait", "close"], [WHOLE]) as (server, client):
        await post(client)
        with pytest.raises(EngineFailure) as e:
            await post(client)
        assert e.value.cause == "engine: connection lost"
        assert len(server.requests) == 2


async def test_a_request_in_flight_at_close_is_not_sent_again():
    async with serving([WHOLE], ["hold"], [WHOLE]) as (server, client):
        await post(client)
        task = asyncio.create_task(post(client))
        while len(server.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await client.close()
        with pytest.raises(EngineFailure):
            await task
        assert len(server.requests) == 2


async def test_a_response_that_takes_too_long():
    async with serving([WHOLE[:-1], "hold"], [WHOLE]) as (server, client):
        with pytest.raises(EngineFailure) as e:
            await post(client, timeout_s=0.1)
        assert e.value.cause == "engine: timeout"
        assert await post(client) == VALUE
        assert server.connections == 2


async def test_a_cancelled_request_closes_its_connection():
    async with serving(["hold"], [WHOLE]) as (server, client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(client), 0.1)
        assert await post(client) == VALUE
        assert server.connections == 2


async def test_concurrent_requests_reuse_their_connections():
    async with serving(*[[WHOLE]] * 40) as (server, client):
        for _ in range(2):
            assert await asyncio.gather(*(post(client) for _ in range(20))) == [VALUE] * 20
        assert server.connections == 20


async def test_idle_connections_are_closed(monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.http.KEEP_ALIVE_S", 0.05)
    async with serving([WHOLE], [WHOLE]) as (server, client):
        await post(client)
        await asyncio.sleep(0.15)
        assert not client._idle
        await post(client)
        assert server.connections == 2


async def test_a_password_in_the_address():
    async with serving([WHOLE]) as (server, client):
        named = HttpClient(client.address.replace("//", "//ann:p%40ss@") + "/prefix/")
        assert await post(named) == VALUE
        await named.close()
        assert server.requests[0].startswith(b"POST /prefix/generate ")
        assert b"Authorization: Basic YW5uOnBAc3M=\r\n" in server.requests[0]


async def test_an_address_where_no_server_listens():
    async with serving() as (_, client):
        pass
    with pytest.raises(EngineFailure) as e:
        await post(client)
    assert e.value.cause == "engine: unreachable"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ftp://x:1", "http://"])
def test_invalid_addresses(address):
    with pytest.raises(ValueError, match="is not the address of a server"):
        HttpClient(address)


async def test_a_chunked_body_is_complete_with_its_last_byte_and_not_before():
    connection = Connection(request_deadlines())
    connection.connection_made(Wire())
    request = asyncio.create_task(connection.request(b"x", 5.0))
    for byte in EXTENDED:
        await asyncio.sleep(0)
        assert not request.done()
        connection.data_received(bytes([byte]))
    assert (await request).content == BODY
    assert connection.usable


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program, to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context, folder / "cert.pem"


async def test_https(certificate, monkeypatch):
    context, cert = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    half = len(CHUNKS) // 2
    async with serving([WHOLE], [CHUNKS[:half], CHUNKS[half:]], [UNTIL_CLOSE, "close"], [WHOLE], tls=context) as (
        server,
        client,
    ):
        for _ in range(4):
            assert await post(client) == VALUE
        assert server.connections == 2


async def test_https_with_an_unknown_certificate_is_refused(certificate):
    async with serving([WHOLE], tls=certificate[0]) as (server, client):
        with pytest.raises(EngineFailure, match="certificate verify failed") as e:
            await post(client)
        assert e.value.cause == "engine: unreachable"
        assert not server.requests
