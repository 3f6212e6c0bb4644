"""Watcher: looks, each few seconds, at what would be gone at the end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Watcher(ABC):
    """Looks when its block begins, each `every_s` seconds within, and when it ends."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._stopping = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        """Look now."""
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
