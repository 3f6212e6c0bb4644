"""A folder as a power cut would leave it: only flushed content, by the strictest reading.

A file holds what it held when it was last flushed, and nothing before that. A folder has the names that it
had when it was last flushed, less those that were deleted since: a deletion may reach the disk before them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import Any


def opened_path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


@dataclass
class RecordedDisk:
    """A recorder of the flushes of this process; `install` starts it."""

    folder: Path
    on_flush: Callable[[Path], None] | None = None
    _contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)

    def install(self, monkeypatch: Any) -> RecordedDisk:
        monkeypatch.setattr(os, "fsync", self._fsync)
        self._record_folder(self.folder)
        return self

    def _fsync(self, descriptor: int) -> None:
        path = opened_path(descriptor)
        if self.on_flush is not None:
            self.on_flush(path)
        if S_ISDIR(os.fstat(descriptor).st_mode):
            self._record_folder(path)
        else:
            # The open file, which another thread may rename.
            contents = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            self._contents[os.fstat(descriptor).st_ino] = contents

    def _record_folder(self, path: Path) -> None:
        found = {}
        for entry in path.iterdir():
            # Another thread may rename its temporary file meanwhile.
            with suppress(FileNotFoundError):
                found[entry.name] = entry.stat().st_ino
        self._names[path.stat().st_ino] = found

    def cut_to(self, place: Path) -> Path:
        """Copy the content that a power cut would leave to `place`, and return that."""
        place.mkdir()
        for name, number in self._names.get(self.folder.stat().st_ino, {}).items():
            self._copy(self.folder / name, number, place / name)
        return place

    def _copy(self, path: Path, number: int, place: Path) -> None:
        if not path.exists() or path.stat().st_ino != number:
            return
        if not path.is_dir():
            place.write_bytes(self._contents.get(number, b""))
            return
        place.mkdir()
        for name, below in self._names.get(number, {}).items():
            self._copy(path / name, below, place / name)
