"""A periodic reader of values that would be lost at the end, such as the CPU time of short processes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Watcher(ABC):
    """A context manager that calls `_look` at the start, every `every_s` seconds, and at the end."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._stopping = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        """Call `_look` now. Calls never overlap."""
        with self._looking:
            self._look()

    @abstractmethod
    def _look(self) -> None: ...

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self.look()
