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
        self._labels = _labels(PgReplError, OTHER)
        self._counts = dict.fromkeys([*self._labels.values(), OTHER], 0)

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
            self._counts[self._labels.get(name, OTHER)] += 1
        finally:
            self.release()

    def read(self) -> dict[str, int]:
        """Return the counts by the name of the class."""
        return self._counts.copy()


def _labels(kind: type[PgReplError], base: str) -> dict[str, str]:
    """Return the labels of the class and of those derived from it, by name. A private one has its base's."""
    label = base if kind.__name__.startswith("_") else kind.__name__
    found = {kind.__name__: label}
    for one in kind.__subclasses__():
        found |= _labels(one, label)
    return found
