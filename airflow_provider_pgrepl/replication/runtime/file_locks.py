"""Locks on files, by which processes of a host exclude each other.

The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LockedFile:
    """An exclusive lock on a file.

    It is held until this process and all processes that inherited it have released it or ended.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def take(cls, path: Path, holder: str = "") -> LockedFile | None:
        """Take the lock and write `holder` into the file. Returns None if another process holds the lock."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        os.truncate(fd, 0)
        os.write(fd, holder.encode())
        return cls(path, fd)

    def release(self) -> None:
        """Release the lock in this process. A process that inherited it still holds it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def holder_of(path: Path) -> str:
    """Return the text that the last holder of a lock wrote into its file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
