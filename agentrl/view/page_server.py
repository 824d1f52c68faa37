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

from agentrl.errors import AgentRLError, StoreError
from agentrl.store import encode
from agentrl.view.run_source import RunSource

STATIC = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "app.js": ("app.js", "text/javascript"),
    "tokens.js": ("tokens.js", "text/javascript"),
}
"""Static files: path to file name and content type."""
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


def make_app(source: RunSource) -> web.Application:
    app = web.Application(middlewares=[_guard])

    def as_json(read: Callable[[web.Request], Any]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            async with lock:  # a RunSource is not thread-safe
                value = await asyncio.to_thread(read, request)
            return web.Response(body=encode(value), content_type="application/json")

        return handle

    lock = asyncio.Lock()
    app.router.add_get("/api/state", as_json(lambda r: source.state()))
    app.router.add_get("/api/run", as_json(lambda r: source.overview()))
    app.router.add_get("/api/episodes", as_json(lambda r: source.page(r.query)))
    app.router.add_get("/api/neighbours", as_json(lambda r: source.neighbours(r.query.get("id", ""), r.query)))
    app.router.add_get("/api/episode", as_json(lambda r: source.episode(r.query.get("id", ""))))
    for path, (name, kind) in STATIC.items():
        app.router.add_get(f"/{path}", _static(asset(name), kind))
    return app


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


async def start(source: RunSource, port: int) -> tuple[web.AppRunner, int]:
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
