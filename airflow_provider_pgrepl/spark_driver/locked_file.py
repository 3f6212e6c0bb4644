"""A file that one process holds at a time, and that says who; the kernel lets go of it when that dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LockedFile:
    """An exclusive lock on a file. Held until `release`, or until all processes that inherited it ended."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def take(cls, path: Path, holder: str = "") -> LockedFile | None:
        """The lock, with `holder` written into the file; None while somebody has it."""
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
        """Let go of it here; who inherited it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def holder_of(path: Path) -> str:
    """Who holds it, or held it last, in their own words; empty when unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_held(path: Path) -> bool:
    """Whether somebody holds it at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
