"""The demo's child processes: all of them can be found again, and are ended by process id.

Airflow and the replication app start processes that leave their parents on purpose. Two things keep them
ours: the demo is their reaper (an orphan becomes its child), and each carries the demo's folder in its
environment, by which a later demo finds what a killed one left behind.
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
    """Make this process the reaper of all that descends from it, and mark all of it with the folder."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ[MARK] = str(folder)
    # Airflow renames its processes, and would write the new names over the mark.
    os.environ["SPT_NOENV"] = "1"


def start(
    command: Iterable[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start in a session of its own, so that the terminal's Ctrl-C reaches only the demo itself."""
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
    """End every process that descends from this one, except `spare` and what descends from that.

    Each is asked once (SIGTERM), also those that are found only after their parent went, and killed
    when it has not gone after twelve seconds.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + _GRACE_S
    # Processes are read one after the other: of one that ends meanwhile, children may be missed once.
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
    """Whether a process that descends from this one has an argument that ends so."""
    ending = argument.encode()
    return any(text.endswith(ending) for pid in _living(None) for text in _strings(pid, "cmdline"))


def end_leftovers(folder: Path) -> int:
    """Kill what an earlier demo in this folder left running when it was itself killed; how many that were."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < deadline:
        marked = _marked(folder)
        for pid in marked:
            _signal(pid, signal.SIGKILL)
        killed.update(marked)
        # A process loses its environment first and its ports last.
        if not killed & _parents().keys():
            break
        time.sleep(0.1)
    return len(killed)


def _marked(folder: Path) -> list[int]:
    mark = f"{MARK}={folder}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and mark in _strings(pid, "environ")]


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "    (no log)"
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def _living(spare: int | None) -> list[int]:
    """All that descends from this process and has not ended, without `spare` and what descends from that."""
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
    """Every process that has not ended, and its parent."""
    parents = {}
    for pid in _all_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Where other threads outlive the first one, the process looks like a zombie, and lives.
        if fields and (fields[0] not in "ZX" or int(fields[17]) > 1):
            parents[pid] = int(fields[1])
    return parents


def _strings(pid: int, file: str) -> list[bytes]:
    """The arguments (`cmdline`) or variables (`environ`) of a process; none when it is gone, or another's."""
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
