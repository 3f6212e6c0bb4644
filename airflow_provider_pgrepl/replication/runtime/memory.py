"""Memory of this process: its size, and the release of freed buffers and of pages of libraries.

Loading the compiled functions reads most of LLVM, and the first commit much of delta-rs: 150 MB of libraries
that are rarely used again. The kernel would drop such pages only when memory is short. This module drops them
while the process is idle. Pages that are needed are read again from the page cache or the disk.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

_MADV_DONTNEED = 4
"""See madvise(2). A mapping without private pages loses nothing: its pages are read from the file again.
MADV_PAGEOUT would not drop pages that several processes have mapped."""
_IDLE_S, _AGAIN_S = 5.0, 600.0
"""Seconds without activity after which unused memory is released, and seconds until it is released again."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*\.so")


def release_unused_memory() -> None:
    """Release unused memory of this process. Does nothing that the system does not support.

    Frees Arrow's unused buffers; on Linux also free memory of the C heap, and unmodified pages of libraries.
    """
    pa.default_memory_pool().release_unused()
    if sys.platform != "linux":
        return
    # The C library may lack malloc_trim, and the kernel may lack smaps.
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _code_of_libraries():
            libc.madvise(start, end - start, _MADV_DONTNEED)


class IdleRelease:
    """Releases unused memory once nothing has happened for 5 s, and again after 10 minutes."""

    def __init__(
        self,
        release: Callable[[], None] = release_unused_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release, self._clock = release, clock
        self._seen: object = None
        self._release_at = float("inf")

    def look(self, activity: object) -> None:
        """Release memory if it is time. Called repeatedly; `activity`: a value that changes with all work."""
        now = self._clock()
        if activity != self._seen:
            self._seen, self._release_at = activity, now + _IDLE_S
        elif now >= self._release_at:
            self._release()
            self._release_at = now + _AGAIN_S


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None on systems without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _code_of_libraries() -> list[tuple[int, int]]:
    """Return the (start, end) addresses of mappings of libraries that equal the file.

    These mappings are not writable, and have no anonymous page.
    """
    found: list[tuple[int, int]] = []
    mapping: re.Match[str] | None = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if (begins := _MAPPING.match(line)) is not None or re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapping = begins
        elif line.startswith("Anonymous:") and mapping is not None:
            if line.split()[1] == "0" and "w" not in mapping[3]:
                found.append((int(mapping[1], 16), int(mapping[2], 16)))
            mapping = None
    return found
