"""BlockThread: a thread that works as long as a block of code runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class BlockThread(ABC):
    """A context manager that runs `_run` in a thread, and sets `_stopping` when the block ends.

    `leaving_s`: how long it then waits for the thread.
    """

    def __init__(self, name: str, leaving_s: float = 0.0) -> None:
        self._leaving_s = leaving_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(self._leaving_s)

    @abstractmethod
    def _run(self) -> None:
        """Work until `_stopping` is set."""
