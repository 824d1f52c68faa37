"""A server of judgements for tests: Chat Completions at /v1/chat/completions, a reward model at /score."""

import asyncio
import json
import time

from aiohttp import web
from doubles import trajectory

from agentrl.types import Action, Turn


class RewardServer:
    """Counts requests, and answers as `handler(request)` says: (status, JSON value, headers)."""

    def __init__(self, handler):
        self.handler = handler
        self.requests, self.headers, self.times = [], [], []
        self.running = self.most = 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _answer(self, request):
        asked = await request.json()
        self.requests.append(asked)
        number = len(self.requests)
        self.headers.append(dict(request.headers))
        self.times.append(time.perf_counter())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        status, value, headers = self.handler(number, asked)
        self.running -= 1
        text = value if isinstance(value, str) else json.dumps(value)
        return web.Response(status=status, text=text, headers=headers)


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def episode(answer, *more, **fields):
    """An episode whose last turn answers; the turns before have the other texts."""
    texts = [*more, answer]
    turns = [Turn(i, 0, 2, Action(t, answer=t if i == len(more) else None)) for i, t in enumerate(texts)]
    return trajectory(turns=turns, **fields)
