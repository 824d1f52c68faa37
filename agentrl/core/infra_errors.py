"""Which exceptions are failures of infrastructure, and which are the policy's own errors.

An infrastructure error is retried and then fails the episode, which is not scored. Any other exception of a tool becomes text that the policy
reads. In this order:

1. rules that users registered with `register_infra_error`, the latest first;
2. a class attribute `is_infra_error = True` or `False` on the exception;
3. `InfraError`, and the kinds of error below: lost or refused connections, timeouts of clients, DNS, HTTP 408, 429 and 5xx, gRPC's UNAVAILABLE
   and its like, exhausted file descriptors. Classes are compared by name along the MRO, so no client library is imported;
4. an exception that holds an infrastructure error as its `reason`, or was raised `from` one, unless it is a ValueError, TypeError or LookupError:
   those say that the arguments were wrong. A group of exceptions counts if one of them does.
"""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from typing import Any

from agentrl.errors import ContractError, InfraError, describe

_ANY_PACKAGE = frozenset(
    """
    APIConnectionError APITimeoutError BrokenResourceError ClientConnectionError ClosedResourceError ConnectError ConnectTimeout
    ConnectTimeoutError ConnectionClosed ConnectionError ConnectionFailure ConnectionTimeout EndpointConnectionError InfraError NetworkError
    NewConnectionError PoolTimeout ProxyConnectionError ProxyError ReadTimeout ReadTimeoutError RemoteProtocolError ServerDisconnectedError
    ServerTimeoutError ServiceUnavailable TransportTimeout WebSocketConnectionClosedException WebSocketTimeoutException WriteTimeout
    """.split()
)
"""names of classes that mean the same in every library"""
_OF_PACKAGE = frozenset(
    """
    aiohttp.ClientPayloadError anthropic.APIConnectionError anyio.EndOfStream asyncio.IncompleteReadError asyncpg.ConnectionDoesNotExistError
    botocore.HTTPClientError builtins.ConnectionError builtins.TimeoutError http.BadStatusLine http.IncompleteRead
    httpcore.TimeoutException httpx.TimeoutException psycopg.OperationalError psycopg2.OperationalError pymongo.AutoReconnect
    redis.TimeoutError requests.ChunkedEncodingError requests.Timeout socket.gaierror socket.herror ssl.SSLError trio.EndOfStream
    urllib3.ProtocolError urllib3.TimeoutError websockets.InvalidMessage
    """.split()
)
"""top-level package and class, where the class name alone says too little"""
_ERRNO = frozenset(
    getattr(errno, name)
    for name in "ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ETIMEDOUT ENFILE EMFILE ENOBUFS EADDRNOTAVAIL ENOSPC".split()
    if hasattr(errno, name)
)
_GRPC = frozenset("UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED".split())
_STATUS_OF_CODE = frozenset(("urllib.HTTPError", "google.GoogleAPICallError", "google.APIError"))
"""classes whose `code` is an HTTP status"""
_ARGUMENTS = (ValueError, TypeError, LookupError)
_MAX_DEPTH = 8

Rule = type[BaseException] | str | Callable[[BaseException], bool | None]
_rules: list[tuple[Rule, bool]] = []


def register_infra_error(rule: Rule, *, infra: bool = True) -> None:
    """Register a kind of exception as a failure of infrastructure, or as an error of the policy.

    A later rule takes precedence over an earlier one, and each over the built-in kinds. Call it where the environment is defined, so that it
    holds in every process.

    Args:
        rule: an exception class (its subclasses included); the name of one, 'package.Class' or 'Class', so that its library need not be imported;
            or a function of the exception that returns True, False, or None where it does not decide.
        infra: False: the policy reads such an exception as the tool's error. Ignored for a function.

    Raises:
        ContractError: `rule` is none of these.

    Example:
        >>> class IndexIsLoading(Exception):
        ...     pass
        >>> register_infra_error(IndexIsLoading)
        >>> register_infra_error("playwright.TimeoutError", infra=False)
        >>> is_infra_error(IndexIsLoading())
        True
    """
    given: Any = rule
    accepted = issubclass(given, BaseException) if inspect.isclass(given) else callable(given) or isinstance(given, str)
    if not accepted or not given:
        raise ContractError(
            f"register_infra_error: expected an exception class, its name or a function, found {given!r:.80}"
        )
    _rules.append((rule, infra))


def is_infra_error(error: BaseException) -> bool:
    """True for a failure of infrastructure that the policy did not cause; see the module's docstring."""
    return _is_infra(error, 0)


def _is_infra(error: BaseException, depth: int) -> bool:
    names = _names(type(error))
    for rule, infra in reversed(_rules):
        answer = _applies(rule, infra, error, names)
        if answer is not None:
            return answer
    declared = getattr(type(error), "is_infra_error", None)
    if isinstance(declared, bool):
        return declared
    if _of_known_kind(error, names):
        return True
    if depth >= _MAX_DEPTH:
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(_is_infra(e, depth + 1) for e in error.exceptions)
    reason = _attribute(error, "reason")
    inner = [reason] if isinstance(reason, BaseException) else []
    if error.__cause__ is not None and not isinstance(error, _ARGUMENTS):
        inner.append(error.__cause__)
    return any(_is_infra(e, depth + 1) for e in inner)


def _names(kind: type) -> set[str]:
    """'package.Class' and 'Class' for the classes of an exception."""
    classes = kind.__mro__[:-1]
    return {c.__name__ for c in classes} | {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in classes}


def _applies(rule: Rule, infra: bool, error: BaseException, names: set[str]) -> bool | None:
    if isinstance(rule, str):
        package, _, name = rule.rpartition(".")
        return infra if (f"{package.partition('.')[0]}.{name}" if package else name) in names else None
    if isinstance(rule, type):
        return infra if isinstance(error, rule) else None
    try:
        answer = rule(error)
    except Exception as e:
        raise ContractError(
            f"a rule given to register_infra_error raised {describe(e)}; let it return True, False or None"
        ) from e
    return None if answer is None else bool(answer)


def _of_known_kind(error: BaseException, names: set[str]) -> bool:
    if isinstance(error, (InfraError, ConnectionError)) or names & _OF_PACKAGE or names & _ANY_PACKAGE:
        return True
    if isinstance(error, OSError) and error.errno in _ERRNO:
        return True
    status = _http_status(error, names)
    return (status is not None and (status in (408, 429) or 500 <= status < 600)) or _grpc_code(error, names) in _GRPC


def _http_status(error: BaseException, names: set[str]) -> int | None:
    """The HTTP status that an exception carries, by the attributes that client libraries use."""
    response = _attribute(error, "response")
    candidates: list[Any] = [_attribute(o, a) for o in (error, response) for a in ("status_code", "status")]
    if isinstance(response, dict):  # botocore
        metadata = response.get("ResponseMetadata")
        candidates.append(metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None)
    if names & _STATUS_OF_CODE:
        candidates.append(_attribute(error, "code"))
    return next((int(c) for c in candidates if isinstance(c, int) and not isinstance(c, bool)), None)


def _attribute(obj: object, name: str) -> Any:
    """The attribute; None if there is none, or if reading it raises."""
    try:
        return getattr(obj, name, None)
    except Exception:  # noqa: BLE001  a property of a client library, or of user code
        return None


def _grpc_code(error: BaseException, names: set[str]) -> str | None:
    code = _attribute(error, "code") if "grpc.RpcError" in names else None
    return str(getattr(code(), "name", "")) if callable(code) else None
