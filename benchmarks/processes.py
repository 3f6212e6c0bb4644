"""The CPU time and memory of an app's processes, which are those of its session."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.watcher import Watcher

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTime(Watcher):
    """The CPU time of all processes of a session, including those that have ended."""

    def __init__(self, session: int) -> None:
        super().__init__(every_s=1.0)
        self._session = session
        self._ticks: dict[tuple[str, str], int] = {}

    def seconds(self) -> float:
        """Return the seconds of CPU time used so far."""
        self.look()
        return sum(self._ticks.values()) / _TICKS_PER_S

    def _look(self) -> None:
        for process, fields in _processes(self._session):
            self._ticks[process.name, fields[19]] = int(fields[11]) + int(fields[12])


class TaskPeak(Watcher):
    """The largest resident memory of a Python process that Spark has started, in `mb`."""

    def __init__(self, session: int) -> None:
        super().__init__(every_s=0.25)
        self._session = session
        self.mb = 0.0

    def _look(self) -> None:
        tasks = [int(process.name) for process, _ in _processes(self._session) if _is_task(process)]
        self.mb = max([self.mb, *map(peak_mb, tasks)])


def proportional_mb(session: int) -> dict[str, float]:
    """Return the memory of a session's processes in MB by kind of process. Shared memory counts once."""
    found: dict[str, float] = {}
    for process, _ in _processes(session):
        kind = "app" if process.name == str(session) else _name(process)
        megabytes = _kilobytes(process / "smaps_rollup", "Pss") * 1024 / 1e6
        found[kind] = found.get(kind, 0.0) + megabytes
    return found


def resident_mb(process: int) -> float:
    """Return the resident memory of a process in MB."""
    return _kilobytes(_PROC / str(process) / "status", "VmRSS") * 1024 / 1e6


def peak_mb(process: int) -> float:
    """Return the largest resident memory of a process in MB, since its start or since `forget_peak`."""
    return _kilobytes(_PROC / str(process) / "status", "VmHWM") * 1024 / 1e6


def forget_peak(process: int) -> None:
    """Reset the peak memory of a process to its current memory."""
    (_PROC / str(process) / "clear_refs").write_text("5")


def _is_task(process: Path) -> bool:
    return _name(process).rpartition(".")[2] in ("daemon", "worker_daemon")


def _name(process: Path) -> str:
    """Return the name of a process's program, or of the module that Python runs. "" if it has ended."""
    try:
        program, *arguments = (process / "cmdline").read_text().split("\0")
    except OSError:
        return ""
    return arguments[1] if arguments[:1] == ["-m"] else Path(program).name


def _processes(session: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the processes of a session, each with the fields of its `stat` file after the name."""
    for process in _PROC.glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) == session:
            yield process, fields


def _kilobytes(file: Path, field: str) -> int:
    """Return the kilobytes in a field of a process's file, or 0 if the process has ended."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
