"""The server of the page: GET only, loopback only, a fixed list of static files, and JSON responses.

The text of episodes is untrusted. It is sent as JSON, the page puts it into text nodes, and the Content-Security-Policy allows only the
scripts of this package. To prevent DNS rebinding, requests whose Host header is not a loopback name are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from agentrl.core.machine_errors import machine_sentence
from agentrl.errors import AgentRLError, StoreError
from agentrl.store import encode
from agentrl.view.run_list import RunList
from agentrl.view.run_source import RunSource

STATIC = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "app.js": ("app.js", "text/javascript"),
    "tokens.js": ("tokens.js", "text/javascript"),
}
"""Static files: path to file name and content type."""
RUNS_STATIC = {"": ("runs.html", "text/html"), "runs.js": ("runs.js", "text/javascript")}
"""those of the list of runs"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asset(name: str) -> bytes:
    """Return a static file of the package."""
    return (files("agentrl.view") / "static" / name).read_bytes()


def make_app(source: RunSource | RunList) -> web.Application:
    """The application of one run, or of a folder of runs: the list at `/`, each run at `/run/NAME/`."""
    app = web.Application(middlewares=[_guard])
    lock = asyncio.Lock()
    if isinstance(source, RunSource):
        _add_run(app, "", lambda _: source, lock)
        return app
    runs = source
    app.router.add_get("/api/runs", _json(lambda _: runs.overview(), lock))
    for path, (name, kind) in {**STATIC, **RUNS_STATIC}.items():
        app.router.add_get(f"/{path}", _static(asset(name), kind))
    _add_run(app, "/run/{run}", lambda request: runs.run(request.match_info["run"]), lock)
    return app


def _add_run(app: web.Application, prefix: str, find: Callable[[web.Request], RunSource], lock: asyncio.Lock) -> None:
    """Add the page of a run, whose addresses are relative."""
    readers: dict[str, Callable[[RunSource, web.Request], Any]] = {
        "state": lambda run, _: run.state(),
        "run": lambda run, _: run.overview(),
        "episodes": lambda run, r: run.page(r.query),
        "neighbours": lambda run, r: run.neighbours(r.query.get("id", ""), r.query),
        "episode": lambda run, r: run.episode(r.query.get("id", "")),
    }
    for name, read in readers.items():
        app.router.add_get(f"{prefix}/api/{name}", _json(lambda r, read=read: read(find(r), r), lock))  # type: ignore[misc]
    for path, (name, kind) in STATIC.items():
        body = asset(name)
        if prefix and not path:
            body = body.replace(b'<nav aria-label="pages">', b'<nav aria-label="pages"><a href="../../">All runs</a>')
        app.router.add_get(f"{prefix}/{path}", _static(body, kind))


def _json(read: Callable[[web.Request], Any], lock: asyncio.Lock) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        async with lock:  # a RunSource is not thread-safe
            value = await asyncio.to_thread(read, request)
        return web.Response(body=encode(value), content_type="application/json")

    return handle


def _static(body: bytes, kind: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return handle


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts, return errors as JSON, and set the headers of every response."""
    response: web.StreamResponse
    if not is_loopback(request.headers.get("Host", "")):
        response = _problem(403, "this server accepts requests to 127.0.0.1 and localhost only")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as e:
            response = _problem(e.status, e.reason)
        except StoreError as e:
            response = _problem(200, str(e))  # status 200: for any other, browsers write an error to the console
        except OSError as e:  # the server goes on
            sentence = machine_sentence(e)
            response = _problem(200 if sentence else 500, sentence or f"{type(e).__name__}: {e}")
        except (AgentRLError, ValueError, KeyError) as e:
            response = _problem(500, f"{type(e).__name__}: {e}")
    response.headers.update(HEADERS)
    return response


def is_loopback(host: str) -> bool:
    """True if a Host header names the loopback interface, with any port."""
    name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", "")
    return name.lower() in LOOPBACK and (not port or port.isdecimal())


def _problem(status: int, text: str) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps({"error": text[:2000].encode(errors="replace").decode()}),
        content_type="application/json",
    )


async def start(source: RunSource | RunList, port: int) -> tuple[web.AppRunner, int]:
    """Listen on loopback and return the runner, for cleanup, and the port. Port 0 takes a free one.

    Raises:
        StoreError: the port is in use.
    """
    runner = web.AppRunner(make_app(source), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    try:
        await site.start()
    except OSError as e:
        await runner.cleanup()
        raise StoreError(f"port {port} cannot be used: {e.strerror}; choose another with --port") from e
    return runner, int(runner.addresses[0][1])
