"""Work that a cancellation must not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any


async def complete_before_cancel(work: Coroutine[Any, Any, None]) -> None:
    """Wait until the work is done; a cancellation that arrives in between is raised afterwards."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        ended: asyncio.Future[None] = loop.create_future()
        task.add_done_callback(partial(_set_ended, ended))
        try:
            await ended
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled
    task.result()


def _set_ended(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():
        ended.set_result(None)
