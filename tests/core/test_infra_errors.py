"""Failures of infrastructure are told from errors of the policy by kind, over the client libraries, and users can add kinds."""

import asyncio
import errno
import http.client
import io
import socket
import ssl
import subprocess
import urllib.error
from types import SimpleNamespace

import aiohttp
import anyio
import grpc
import httpx
import pytest
import requests
import urllib3

from agentrl.core import infra_errors
from agentrl.core.infra_errors import is_infra_error, register_infra_error
from agentrl.errors import ContractError, InfraError

REQUEST = httpx.Request("GET", "http://index/")


def of_module(module, name, base=Exception, **attributes):
    """An exception of a library that is not installed here."""
    error = type(name, (base,), {"__module__": module})("x")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


def http_error(kind, status):
    match kind:
        case "urllib":
            return urllib.error.HTTPError("http://index/", status, "x", {}, io.BytesIO())
        case "requests":
            response = requests.Response()
            response.status_code = status
            return requests.HTTPError("x", response=response)
        case "httpx":
            return httpx.HTTPStatusError("x", request=REQUEST, response=httpx.Response(status))
        case "aiohttp":
            return aiohttp.ClientResponseError(SimpleNamespace(real_url="http://index/"), (), status=status)
        case "openai":
            return of_module("openai", "APIStatusError", status_code=status)
        case "google":
            return of_module("google.genai.errors", "APIError", code=status)
        case "botocore":
            return of_module(
                "botocore.exceptions", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": status}}
            )
    raise AssertionError(kind)


LIBRARIES = ["urllib", "requests", "httpx", "aiohttp", "openai", "google", "botocore"]


class RpcError(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code


def chained(outer, inner):
    outer.__cause__ = inner
    return outer


INFRA = [
    InfraError("index is loading"),
    ConnectionRefusedError(111, "refused"),
    BrokenPipeError(),
    TimeoutError("timed out"),
    socket.gaierror(-2, "Name or service not known"),
    ssl.SSLError("handshake"),
    OSError(errno.ENETUNREACH, "unreachable"),
    OSError(errno.EMFILE, "too many open files"),
    http.client.IncompleteRead(b""),
    http.client.RemoteDisconnected(),
    asyncio.IncompleteReadError(b"", 3),
    urllib.error.URLError(TimeoutError("timed out")),
    urllib.error.URLError(socket.gaierror(-2, "Name or service not known")),
    urllib.error.URLError(ConnectionRefusedError()),
    requests.ConnectionError(),
    requests.ConnectTimeout(),
    requests.ReadTimeout(),
    requests.exceptions.ChunkedEncodingError(),
    urllib3.exceptions.ReadTimeoutError(None, "", ""),
    urllib3.exceptions.MaxRetryError(None, "", urllib3.exceptions.NewConnectionError(None, "")),
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout(""),
    httpx.ReadTimeout(""),
    httpx.PoolTimeout(""),
    httpx.ReadError(""),
    httpx.RemoteProtocolError("server disconnected"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ServerTimeoutError(),
    aiohttp.ConnectionTimeoutError(),
    aiohttp.ClientPayloadError(),
    anyio.ClosedResourceError(),
    anyio.BrokenResourceError(),
    RpcError(grpc.StatusCode.UNAVAILABLE),
    RpcError(grpc.StatusCode.DEADLINE_EXCEEDED),
    of_module("websockets.exceptions", "ConnectionClosed"),
    of_module("openai", "APIConnectionError"),
    of_module("anthropic._exceptions", "APITimeoutError"),
    of_module("redis.exceptions", "ConnectionError"),
    of_module("redis.exceptions", "TimeoutError"),
    chained(RuntimeError("the search failed"), httpx.ConnectError("refused")),
    chained(RuntimeError("tried 3 times"), chained(OSError("x"), http_error("httpx", 503))),
    ExceptionGroup("tasks", [ValueError("x"), httpx.ConnectError("refused")]),
]
POLICY = [
    ValueError("x"),
    KeyError("x"),
    OSError(errno.ENOENT, "no such file"),
    FileNotFoundError(),
    PermissionError(),
    ZeroDivisionError(),
    subprocess.TimeoutExpired("python", 5.0),
    httpx.InvalidURL("policy wrote it"),
    httpx.UnsupportedProtocol("gopher"),
    requests.exceptions.InvalidSchema("gopher"),
    aiohttp.InvalidURL("x"),
    urllib.error.URLError("unknown url type: gopher"),
    RpcError(grpc.StatusCode.INVALID_ARGUMENT),
    of_module("playwright._impl._errors", "TimeoutError"),
    of_module("sqlite3", "OperationalError"),
    chained(ValueError("no such host: the policy wrote it"), httpx.ConnectError("refused")),
    chained(KeyError("x"), ConnectionError()),
    ExceptionGroup("tasks", [ValueError("x")]),
    of_module("game", "MoveError", code=503),
    of_module("game", "MoveError", status_code=True),
]


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    monkeypatch.setattr(infra_errors, "_rules", [])


@pytest.mark.parametrize("error", INFRA, ids=lambda e: f"{type(e).__module__}.{type(e).__name__}")
def test_failures_of_infrastructure(error):
    assert is_infra_error(error)


@pytest.mark.parametrize("error", POLICY, ids=lambda e: f"{type(e).__module__}.{type(e).__name__}")
def test_errors_of_the_policy(error):
    assert not is_infra_error(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_http_statuses(library):
    statuses = [200, 301, 400, 401, 404, 408, 422, 429, 500, 502, 503, 504, 599, 600]
    infra = [s for s in statuses if is_infra_error(http_error(library, s))]
    assert infra == [408, 429, 500, 502, 503, 504, 599]


def test_a_cycle_of_causes_ends():
    a, b = RuntimeError("a"), RuntimeError("b")
    a.__cause__, b.__cause__ = b, a
    assert not is_infra_error(a)


def test_a_property_that_raises_is_no_attribute():
    class OddError(Exception):
        @property
        def response(self):
            raise RuntimeError("odd")

        reason = status_code = code = response

    assert not is_infra_error(OddError())


class TestUsersRules:
    def test_a_class_and_its_subclasses(self):
        register_infra_error(ArithmeticError)
        assert is_infra_error(ZeroDivisionError())
        assert not is_infra_error(ValueError())

    @pytest.mark.parametrize("name", ["MoveError", "game.MoveError", "game.errors.MoveError"])
    def test_a_name_and_the_subclasses_of_what_it_names(self, name):
        base = type(of_module("game.errors", "MoveError"))
        register_infra_error(name)
        assert is_infra_error(of_module("mine", "OtherError", base))
        assert not is_infra_error(of_module("game.errors", "LostError"))

    def test_a_function_that_may_leave_the_decision(self):
        register_infra_error(lambda e: "loading" in str(e) or None)
        assert is_infra_error(ValueError("index is loading"))
        assert not is_infra_error(ValueError("x"))
        assert is_infra_error(ConnectionError("x"))

    def test_a_later_rule_comes_first_and_takes_a_built_in_kind_back(self):
        register_infra_error(TimeoutError, infra=False)
        assert not is_infra_error(TimeoutError())
        assert is_infra_error(ConnectionError())
        register_infra_error("TimeoutError")
        assert is_infra_error(TimeoutError())

    @pytest.mark.parametrize("base", [ValueError, ConnectionError])
    @pytest.mark.parametrize("infra", [True, False])
    def test_a_class_attribute(self, base, infra):
        assert is_infra_error(type("Mine", (base,), {"is_infra_error": infra})()) is infra

    @pytest.mark.parametrize("rule", [5, "", None, int])
    def test_a_rule_of_another_kind_is_refused(self, rule):
        with pytest.raises(ContractError, match="expected an exception class"):
            register_infra_error(rule)

    def test_a_rule_that_raises_is_named(self):
        register_infra_error(lambda e: e.nothing)
        with pytest.raises(ContractError, match="register_infra_error raised AttributeError"):
            is_infra_error(ValueError())
