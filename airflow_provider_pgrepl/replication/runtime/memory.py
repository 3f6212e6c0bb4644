"""Giving back memory that a process which waits has no use for: freed buffers, and code that has run once.

Loading the compiled loops reads most of LLVM, and the first commit much of delta-rs: 150 MB of libraries that
are hardly looked at again. The kernel drops such pages when memory is short; here they go while nothing is to
be done, and those that are needed come back from the page cache, or the disk.
"""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

_MADV_DONTNEED = 4
"""madvise(2). Of a mapping that has no page of its own nothing is lost: all is read from the file again. What
several processes have mapped, MADV_PAGEOUT would leave."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*\.so")


def release_unused_memory() -> None:
    """Where the system cannot do it, nothing happens."""
    pa.default_memory_pool().release_unused()
    if sys.platform != "linux":
        return
    # Neither need be there: another C library, a kernel without smaps.
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _code_of_libraries():
            libc.madvise(start, end - start, _MADV_DONTNEED)


def _code_of_libraries() -> list[tuple[int, int]]:
    """Where it is mapped, as it is in the file: nobody may write there, and no page is another."""
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
