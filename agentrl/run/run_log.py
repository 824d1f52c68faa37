"""The log of a run: `run.log` in the run folder holds what the package's modules log and the messages that the user sees."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from agentrl.core.terminal_text import printable

Echo = Callable[[str], None]
"""shows a message to the user"""

logger = logging.getLogger(__name__)
_package = logging.getLogger("agentrl")


class RunLog:
    """While it is open, everything that the package logs from `level` up is appended to `run.log`."""

    def __init__(self, folder: Path, level: str, echo: Echo) -> None:
        self._echo, self._level = echo, level.upper()
        self._level_before = _package.level
        self._file = logging.FileHandler(folder / "run.log", encoding="utf-8", delay=True)
        self._file.setFormatter(_Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def echo(self, message: str) -> None:
        """Show a message to the user and log it."""
        self._echo(message)
        logger.info(message)

    def __enter__(self) -> Self:
        self._level_before = _package.level
        _package.setLevel(self._level)
        _package.addHandler(self._file)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            logger.error("the run failed", exc_info=error)
        _package.removeHandler(self._file)
        _package.setLevel(self._level_before)
        self._file.close()


class _Printable(logging.Formatter):
    """Makes control characters visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(super().format(record))


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Show the package's warnings on stderr; errors end the command, which prints them as one sentence."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.levelno < logging.ERROR)
    handler.setFormatter(_Printable("%(levelname)s: %(message)s"))
    _package.addHandler(handler)
    try:
        yield
    finally:
        _package.removeHandler(handler)
