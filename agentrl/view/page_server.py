"""The server: GET only, loopback only, a fixed list of static files, and answers in JSON.

Text of episodes is untrusted: it travels as JSON, the page puts it into text nodes, and the Content-Security-Policy allows no script but
the one file that ships with us. A page of another origin cannot read us by a name of its own that points here (DNS rebinding): a Host
header that is no loopback name is refused.
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
"""what is served, by its path"""
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
    """A static file of the package."""
    return (files("agentrl.view") / "static" / name).read_bytes()


def make_app(source: RunSource) -> web.Application:
    """The application over one run."""
    app = web.Application(middlewares=[_guard])

    def answer(make: Callable[[web.Request], Any]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            async with lock:  # the source is not for several threads
                value = await asyncio.to_thread(make, request)
            return web.Response(body=encode(value), content_type="application/json")

        return handle

    lock = asyncio.Lock()
    app.router.add_get("/api/state", answer(lambda r: source.state()))
    app.router.add_get("/api/run", answer(lambda r: source.overview()))
    app.router.add_get("/api/episodes", answer(lambda r: source.page(r.query)))
    app.router.add_get("/api/neighbours", answer(lambda r: source.neighbours(r.query.get("id", ""), r.query)))
    app.router.add_get("/api/episode", answer(lambda r: source.episode(r.query.get("id", ""))))
    for path, (name, kind) in STATIC.items():
        app.router.add_get(f"/{path}", _static(asset(name), kind))
    return app


def _static(body: bytes, kind: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return handle


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts; turn our errors into JSON; put the headers on everything."""
    response: web.StreamResponse
    if not is_loopback(request.headers.get("Host", "")):
        response = _problem(403, "this server answers to 127.0.0.1 and localhost only")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as e:
            response = _problem(e.status, e.reason)
        except StoreError as e:
            response = _problem(200, str(e))  # an answer: of another status a browser complains on its console
        except (AgentRLError, ValueError, KeyError) as e:
            response = _problem(500, f"{type(e).__name__}: {e}")
    response.headers.update(HEADERS)
    return response


def is_loopback(host: str) -> bool:
    """Is a Host header one of ours, with any port?"""
    name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", "")
    return name.lower() in LOOPBACK and (not port or port.isdecimal())


def _problem(status: int, text: str) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps({"error": text[:2000].encode(errors="replace").decode()}),
        content_type="application/json",
    )


async def start(source: RunSource, port: int) -> tuple[web.AppRunner, int]:
    """Listen on loopback; returns the runner (to clean up) and the port (0 asks for a free one).

    Raises:
        StoreError: the port is taken.
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
