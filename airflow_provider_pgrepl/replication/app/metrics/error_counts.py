"""Counts of errors by class, for metrics."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.errors import PgReplError

OTHER = "other"
"""The class under which errors count whose class this version does not know."""


class ErrorCounts(logging.Handler):
    """A log handler that counts this package's errors in log lines. Other errors are counted by `add`.

    All classes begin at 0: Prometheus computes no increase for a series that begins at 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts = dict.fromkeys([*_classes(PgReplError), OTHER], 0)

    def emit(self, record: logging.LogRecord) -> None:
        """Count the errors among the arguments of a log line."""
        found = record.args if isinstance(record.args, tuple) else ()
        for error in found:
            if isinstance(error, PgReplError):
                self.add(type(error).__name__)

    def add(self, name: str) -> None:
        """Count an error of the class `name`."""
        self.acquire()
        try:
            self._counts[name if name in self._counts else OTHER] += 1
        finally:
            self.release()

    def read(self) -> dict[str, int]:
        """Return the counts by the name of the class."""
        return self._counts.copy()


def _classes(kind: type[PgReplError]) -> list[str]:
    """Return the names of the class and of those derived from it. A private one never leaves its module."""
    found = [] if kind.__name__.startswith("_") else [kind.__name__]
    for one in kind.__subclasses__():
        found += _classes(one)
    return found
