"""Processes known by a word that only they were started with: an id alone may by now be another's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from airflow_provider_pgrepl.spark_driver import supervisor


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


def supervised_folders() -> Iterator[Path]:
    """Yield the folders that supervisors of this host name among their arguments. Any process can name any
    folder there: only what lies in the folder says whether one of ours runs."""
    program = Path(supervisor.__file__).name
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if "--folder" in words and any(Path(word).name == program for word in words[:3]):
            yield Path(words[words.index("--folder") + 1])
