"""The processes of the demo, which are found again and ended by process id.

Airflow and the replication app start processes that detach from their parents. The demo finds them in two
ways. It is their reaper, so that an orphan becomes its child. And each has the demo's folder in its
environment, so that a later demo finds the processes of a killed one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

MARK = "PGREPL_DEMO"

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 12.0
_KILL_WAIT_S = 60.0


def adopt_orphans(folder: Path) -> None:
    """Make this process the reaper of its descendants, and mark their environment with the folder."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ[MARK] = str(folder)
    # Airflow renames its processes. Without this variable, the new names would overwrite the mark.
    os.environ["SPT_NOENV"] = "1"


def start(
    command: Iterable[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in its own session, so that the terminal's Ctrl-C reaches only the demo itself."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )


def end_descendants(*, spare: int | None = None) -> None:
    """End every descendant of this process, except `spare` and its descendants.

    Each process gets SIGTERM once, including those that are found after the end of their parent. Processes
    that still run after 12 s get SIGKILL.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + _GRACE_S
    # Processes are read one by one, so that children of a process that is ending may be missed once.
    seen_nobody = 0
    while seen_nobody < 2 and time.monotonic() < deadline + _KILL_WAIT_S:
        remaining, late = _living(spare), time.monotonic() > deadline
        seen_nobody = 0 if remaining else seen_nobody + 1
        for pid in remaining:
            if late or pid not in asked:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        _reap()
        time.sleep(0.1)
    _reap()


def has_descendant(argument: str) -> bool:
    """Return True if a descendant of this process has an argument that ends with `argument`."""
    ending = argument.encode()
    return any(text.endswith(ending) for pid in _living(None) for text in _strings(pid, "cmdline"))


def end_leftovers(folder: Path) -> int:
    """Kill the processes of an earlier demo in this folder that was killed. Return their number."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < deadline:
        marked = _marked(folder)
        for pid in marked:
            _signal(pid, signal.SIGKILL)
        killed.update(marked)
        # A process that is ending loses its environment before its ports, so wait until it is gone.
        if not killed & _parents().keys():
            break
        time.sleep(0.1)
    return len(killed)


def _marked(folder: Path) -> list[int]:
    mark = f"{MARK}={folder}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and mark in _strings(pid, "environ")]


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "    (no log)"
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def _living(spare: int | None) -> list[int]:
    """Return the running descendants of this process, without `spare` and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child != spare:
                found.append(child)
                waiting.append(child)
    return found


def _parents() -> dict[int, int]:
    """Return the parent of every process that has not ended."""
    parents = {}
    for pid in _all_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # If other threads outlive the first one, the process has the state of a zombie but still runs.
        if fields and (fields[0] not in "ZX" or int(fields[17]) > 1):
            parents[pid] = int(fields[1])
    return parents


def _strings(pid: int, file: str) -> list[bytes]:
    """Return the arguments (`cmdline`) or variables (`environ`) of a process.

    Empty if the process has ended or belongs to another user.
    """
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names, not paths


def _signal(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
