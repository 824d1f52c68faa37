"""Errors of the machine (a full disk, no free descriptor), also where a library raises another exception for them."""

from __future__ import annotations

import errno
import os
import re

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
