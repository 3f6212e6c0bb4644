"""Libraries of this host that read or write wrongly, and threads that work as long as a block of code runs.

The package's metadata demands the same, but an environment may hold others: installed without dependencies,
held by a constraint, or by an image that was built for something else.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from airflow_provider_pgrepl.errors import ToolError

FLOORS = {"deltalake": ("1.6.6", "gives deleted rows back and loses others in tables with deletion vectors")}
"""The oldest version that is right, and what earlier ones do."""


def check_libraries() -> None:
    """Raise ToolError if a library of this process is older than its floor."""
    for name, (floor, fault) in FLOORS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if _numbers(found) < _numbers(floor):
            raise ToolError(
                f"{name} {found} is installed, which {fault}, without an error; {floor} or newer is needed",
                f"pip install '{name}>={floor}', in the environment of every host that runs this package",
            )


check_once = cache(check_libraries)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


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
