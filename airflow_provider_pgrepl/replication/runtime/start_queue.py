"""The queue of apps that start Spark on this host, among those of the same user.

A start keeps a processor busy for some seconds. If many apps start at once, as after a restart of the
host, Spark's Python workers may not connect in time, and Spark gives up.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from .compiled_loops import is_private
from .file_locks import LockedFile, holder_of

log = logging.getLogger(__name__)

LIMIT_S = 300.0
"""The longest wait of a start in seconds. Then it begins at the same time as others."""
_CORES_OF_A_START = 4
_POLL_S = 0.2


def start_folder() -> Path | None:
    """Return the folder of the lock files, or None if another user could write it."""
    folder = Path(tempfile.gettempdir()) / f"pgrepl-{os.geteuid()}"
    return folder if is_private(folder) else None


def start_slots() -> int:
    """Return the number of starts that may run at the same time: one for each four processors."""
    return max(1, (os.cpu_count() or 1) // _CORES_OF_A_START)


class StartTurn:
    """A context manager that holds one of the host's slots for starts during its block.

    The kernel releases the slot if the process dies. A host on which no lock file can be written has no
    queue.

    :param name: the app and its pipeline, as waiting processes log it
    :param gives_up: returns True if it is time to end: then the wait ends
    """

    def __init__(
        self,
        name: str,
        gives_up: Callable[[], bool] = lambda: False,
        *,
        folder: Path | None = None,
        slots: int | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._name = name
        self._gives_up = gives_up
        self._folder = folder
        self._slots = slots or start_slots()
        self._limit_s = limit_s
        self._lock: LockedFile | None = None
        self._has_come = threading.Event()

    def __enter__(self) -> Self:
        try:
            if (folder := self._folder or start_folder()) is not None:
                self._lock = self._wait([folder / f"start-{number}" for number in range(self._slots)])
        except OSError as error:
            log.warning("Spark is started without a queue: %s", error.strerror)
        finally:
            self._has_come.set()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def await_turn(self) -> None:
        """Wait until another thread has entered the block."""
        self._has_come.wait()

    def _wait(self, files: list[Path]) -> LockedFile | None:
        """Return the lock on one of the files; None if the wait took too long, or it is time to end."""
        deadline = time.monotonic() + self._limit_s
        logged = ""
        while True:
            for file in files:
                if (lock := LockedFile.take(file, self._name)) is not None:
                    return lock
            holders = ", ".join(holder_of(file) or "another process" for file in files)
            if self._gives_up():
                return None
            if time.monotonic() >= deadline:
                log.warning(
                    "the start of %s has not ended within %g s: Spark is started at the same time",
                    holders,
                    self._limit_s,
                )
                return None
            if holders != logged:
                log.info("waiting for the start of %s", holders)
                logged = holders
            time.sleep(_POLL_S)
