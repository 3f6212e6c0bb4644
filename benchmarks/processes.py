"""What the processes of an app take: CPU time and memory. An app has a session of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.watcher import Watcher

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTime(Watcher):
    """Of all processes of a session, those that end meanwhile included."""

    def __init__(self, session: int) -> None:
        super().__init__(every_s=1.0)
        self._session = session
        self._ticks: dict[tuple[str, str], int] = {}

    def seconds(self) -> float:
        """What they have used until now."""
        self.look()
        return sum(self._ticks.values()) / _TICKS_PER_S

    def _look(self) -> None:
        for process, fields in _processes(self._session):
            self._ticks[process.name, fields[19]] = int(fields[11]) + int(fields[12])


class TaskPeak(Watcher):
    """Of the Python processes that Spark has started, the largest resident memory that one had: `mb`."""

    def __init__(self, session: int) -> None:
        super().__init__(every_s=0.25)
        self._session = session
        self.mb = 0.0

    def _look(self) -> None:
        tasks = [int(process.name) for process, _ in _processes(self._session) if _is_task(process)]
        self.mb = max([self.mb, *map(peak_mb, tasks)])


def proportional_mb(session: int) -> dict[str, float]:
    """The memory of all its processes in MB, in which what several share counts once, by kinds of them."""
    found: dict[str, float] = {}
    for process, _ in _processes(session):
        kind = "app" if process.name == str(session) else _name(process)
        megabytes = _kilobytes(process / "smaps_rollup", "Pss") * 1024 / 1e6
        found[kind] = found.get(kind, 0.0) + megabytes
    return found


def resident_mb(process: int) -> float:
    """The resident memory of one process in MB."""
    return _kilobytes(_PROC / str(process) / "status", "VmRSS") * 1024 / 1e6


def peak_mb(process: int) -> float:
    """The largest resident memory that it has had, in MB, since `forget_peak`."""
    return _kilobytes(_PROC / str(process) / "status", "VmHWM") * 1024 / 1e6


def forget_peak(process: int) -> None:
    """The peak counts from now."""
    (_PROC / str(process) / "clear_refs").write_text("5")


def _is_task(process: Path) -> bool:
    return _name(process) == "pyspark.daemon"


def _name(process: Path) -> str:
    """Of its program, or of the module that Python runs; empty of one that has ended."""
    try:
        program, *arguments = (process / "cmdline").read_text().split("\0")
    except OSError:
        return ""
    return arguments[1] if arguments[:1] == ["-m"] else Path(program).name


def _processes(session: int) -> Iterator[tuple[Path, list[str]]]:
    """Those of a session, and the fields of their `stat` after the name."""
    for process in _PROC.glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            yield process, fields


def _kilobytes(file: Path, field: str) -> int:
    """0 of a process that has ended."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
