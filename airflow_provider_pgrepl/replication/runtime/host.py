"""A check for library versions with data errors, and threads that run for the duration of a block.

The package's metadata requires the same versions. An environment may nevertheless have others, if it was
installed without dependencies or with a constraint, or if its image was built for another purpose.
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
"""The oldest correct version of each library, and the fault of earlier ones."""


def check_libraries() -> None:
    """Raise ToolError if an installed library is older than its version in FLOORS."""
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

    `leaving_s`: seconds to wait for the thread at the end of the block.
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
