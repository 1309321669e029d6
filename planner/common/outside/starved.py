"""What the machine denies the process, in one line: memory, threads, files that may not be touched, and the limits behind it."""

from __future__ import annotations

import errno
import os
import resource

from penstock.planner.common.errors import UserError, causes
from penstock.planner.common.measures import show_bytes

_REFUSED = (
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}
    | {errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.ETXTBSY}
)  # fmt: skip
"""What no program does wrong: it is so with the file, or the file system."""
_MEMORY = ("allocate memory", "failed to map segment", "bad_alloc")
_THREADS = ("can't start new thread", "Resource temporarily unavailable")


def starved(error: BaseException) -> UserError | None:
    """The one line for an ``error`` that comes of too little memory, of too few threads, or of a file that the system refuses; None for any
    other."""
    for one in causes(error):
        text = str(one)
        if isinstance(one, MemoryError) or getattr(one, "errno", None) == errno.ENOMEM or any(words in text for words in _MEMORY):
            return UserError(f"memory ran out{_limit(resource.RLIMIT_AS)}; free some, or raise the limit (ulimit -v)")
        if getattr(one, "errno", None) == errno.EAGAIN or any(words in text for words in _THREADS):
            return UserError(
                f"no further thread or process could be started{_limit(resource.RLIMIT_NPROC)}; raise the limit (ulimit -u), or ulimit -v"
            )
        if isinstance(one, OSError) and one.errno in _REFUSED and one.filename is not None:
            return UserError(f"{os.fsdecode(one.filename)}: {one.strerror}; choose another place, or mend that")
    return None


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f" (the limit is {show_bytes(soft) if which == resource.RLIMIT_AS else soft})"
