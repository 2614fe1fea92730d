"""One-line error for a full or read-only disk."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
)  # only if the error names a file


def full(error: OSError) -> str | None:
    if error.errno not in FULL and not (error.filename and error.errno in CLOSED):
        return None
    where = f" {error.filename}" if error.filename else ""
    return f"cannot write{where}: {error.strerror}; make room or give another --out"
