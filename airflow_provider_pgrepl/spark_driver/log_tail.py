"""LogTail: what an application has said since the last reader, perhaps of an earlier try, stopped."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from airflow_provider_pgrepl.replication.runtime.process_io import LogLine, is_error, parse
from airflow_provider_pgrepl.spark_driver import supervisor

_MARK = "log.forwarded"
_CHUNK_BYTES = 1 << 20
_TAIL_LINES = 20


class LogTail:
    """Lines of all segments, in order. The folder keeps how far they were read, and the last error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = folder / _MARK
        self._number, self._offset, self.last_error = self._read_mark()
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def new_lines(self, *, ended: bool = False) -> Iterator[LogLine]:
        """Complete lines not read before; with `ended` also an unfinished last one."""
        yield from self._skip_what_is_gone()
        while True:
            # Asked before the segment is read: what it then lacks is in no later one.
            has_next = self._segment(self._number + 1).exists()
            yield from self._lines(ended or has_next)
            if not has_next:
                return
            self._number, self._offset = self._number + 1, 0

    def why(self) -> str:
        """Its last error, for people; its last lines where it had none."""
        return self.last_error or "\n".join(self.last_lines)

    def _lines(self, is_whole: bool) -> Iterator[LogLine]:
        """The segment from where reading stopped; `is_whole` when nothing more will be written to it."""
        try:
            segment = self._segment(self._number).open("rb")
        except FileNotFoundError:
            return
        with segment:
            while True:
                segment.seek(self._offset)
                chunk = segment.read(_CHUNK_BYTES)
                whole = chunk.rfind(b"\n") + 1
                if (is_whole and len(chunk) < _CHUNK_BYTES) or (not whole and len(chunk) == _CHUNK_BYTES):
                    whole = len(chunk)
                if not whole:
                    return
                for raw in chunk[:whole].splitlines():
                    yield self._noted(parse(raw.decode("utf-8", errors="replace").rstrip()))
                self._offset += whole
                self._write_mark()

    def _noted(self, line: LogLine) -> LogLine:
        self.last_lines.append(line.text)
        if is_error(line):
            self.last_error = line.text
        return line

    def _skip_what_is_gone(self) -> Iterator[LogLine]:
        oldest = min((int(path.name.rpartition("-")[2]) for path in self._folder.glob("log-*")), default=0)
        if oldest > self._number:
            self._number, self._offset = oldest, 0
            yield parse("earlier lines were dropped while nobody read them")

    def _segment(self, number: int) -> Path:
        return self._folder / supervisor.LOG_PATTERN.format(number)

    def _read_mark(self) -> tuple[int, int, str]:
        try:
            mark = json.loads(self._mark.read_text(encoding="utf-8"))
            return int(mark["segment"]), int(mark["offset"]), str(mark["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0, ""

    def _write_mark(self) -> None:
        mark = {"segment": self._number, "offset": self._offset, "error": self.last_error}
        self._mark.write_text(json.dumps(mark), encoding="utf-8")
