"""Errors of the machine (a full disk, no free descriptor), also where a library raises another exception for them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable
from typing import Any

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.EIO: "is the disk full, or the quota or the limit on file sizes (ulimit -f) reached?",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.ENOENT: "it is needed until the command ends; was it deleted meanwhile?",
}
"""errors of the machine, and what the user can do about them"""
_CUT_SHORT = re.compile(r"inline_container.*unexpected pos")
"""what torch says when a file could not be written whole; it hides why"""
_ANYWHERE = tuple(number for number in ADVICE if number not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES))
"""errors that mean the same wherever they arise"""


def machine_sentence(error: BaseException) -> str | None:
    """What the machine lacks and what the user can do, in words; None: it is not an error of the machine."""
    if (found := machine_error(error)) is None or found.errno is None:
        return None
    place = f" ({found.filename})" if found.filename else ""
    return f"{found.strerror}{place}; {ADVICE[found.errno]}"


def report_machine_errors(loop: asyncio.AbstractEventLoop, report: Callable[[str], object]) -> None:
    """Report in a sentence, once each, what the machine lacks while a server accepts connections; the server goes on."""
    reported: set[str] = set()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        sentence = machine_sentence(error) if isinstance(error, OSError) else None
        if sentence is None:
            loop.default_exception_handler(context)
        elif sentence not in reported:
            reported.add(sentence)
            report(f"{context['message']}: {sentence}")

    loop.set_exception_handler(handle)


def machine_error(error: BaseException) -> OSError | None:
    """Return the error of the machine that an exception is, was raised from, or quotes, as those of torch do; None: there is none."""
    if isinstance(error, OSError) and error.errno in ADVICE:
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _ANYWHERE:
            return cause
        if _CUT_SHORT.search(str(cause)):
            return OSError(errno.EIO, "a file could not be written whole")
        for number in _ANYWHERE:
            if os.strerror(number) in str(cause):
                return OSError(number, os.strerror(number))
        cause = cause.__cause__ or cause.__context__
    return None
