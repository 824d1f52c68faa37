"""A Search-R1 retrieval server for tests."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Handler = Callable[[dict[str, Any]], web.Response]


class Server:
    """A retrieval server on a thread of its own; `handler` makes the answers."""

    handler: Handler

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post("/retrieve", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/retrieve"

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if self.requests[-1]["queries"] == ["slow"]:
            await asyncio.sleep(2)
        return self.handler(self.requests[-1])

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
