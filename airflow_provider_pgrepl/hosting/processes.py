"""Processes known by a word that only they were started with: an id alone may by now be another's."""

from __future__ import annotations

import os
import signal

import psutil  # type: ignore[import-untyped]


def is_process(pid: int, token: str) -> bool:
    """Whether process `pid` runs, and has this token among its arguments."""
    try:
        return token in psutil.Process(pid).cmdline()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False


def ask_to_end(pid: int, token: str) -> None:
    """SIGTERM to that process, and to no other that may get its id meanwhile."""
    if not hasattr(os, "pidfd_open"):
        if is_process(pid, token):
            os.kill(pid, signal.SIGTERM)
        return
    try:
        handle = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return
    try:
        if is_process(pid, token):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
