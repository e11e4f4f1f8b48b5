"""Why a file cannot be used, in words that say what to do."""

from __future__ import annotations

import errno

_REASONS = {
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.EACCES: "permission denied: this user may not open it; check its permissions",
    errno.EPERM: "permission denied: this user may not open it; check its permissions",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the path",
    errno.ENOSPC: "the disk is full; free some space, or name another place",
    errno.EDQUOT: "this user's disk quota is used up; free some space, or name another place",
    errno.EFBIG: "the limit on the size of files is too low; raise it (ulimit -f unlimited)",
    errno.EROFS: "the disk is read-only; name another place",
}


def reason_of(error: BaseException) -> str:
    """Why, without an error number, and what to do; the file is not named."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return _REASONS.get(error.errno or 0, error.strerror)
    return str(error)
