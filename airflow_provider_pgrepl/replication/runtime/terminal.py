"""A log on a terminal, with one line below it that is rewritten.

The command `pgrepl` has the terminal. The driver writes to a pipe, which spark-submit forwards, so the
command passes the width of its terminal in an environment variable.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

COLUMNS_VARIABLE = "PGREPL_TERMINAL_COLUMNS"
_ERASE = "\r\x1b[K"


def terminal_columns() -> dict[str, str]:
    """Return COLUMNS_VARIABLE with the width of the terminal of this process; empty without a terminal."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return {}
    return {COLUMNS_VARIABLE: str(shutil.get_terminal_size().columns)}


class Terminal(logging.StreamHandler[TextIO]):
    """A log handler that keeps a line below the log.

    The output of other programs on the same terminal is appended to that line, and is not erased.
    """

    def __init__(self, stream: TextIO, columns: int) -> None:
        super().__init__(stream)
        self._columns = columns
        self._line = ""

    def show(self, line: str) -> None:
        """Replace the line below the log. An empty line removes it. Does nothing if the terminal is gone."""
        self.acquire()
        try:
            if line or self._line:
                self._line = line if len(line) < self._columns else f"{line[: self._columns - 4]}..."
                self.stream.write(_ERASE + self._line)
                self.flush()
        except (OSError, ValueError):
            self._line = ""
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record above the line."""
        line, self._line = self._line, ""
        with suppress(OSError, ValueError):
            self.stream.write(_ERASE if line else "")
        super().emit(record)
        self.show(line)


def log_handler(stream: TextIO, environment: Mapping[str, str]) -> logging.StreamHandler[TextIO]:
    """Return the handler for a stream: a Terminal if the environment has the width of one."""
    columns = environment.get(COLUMNS_VARIABLE, "")
    return Terminal(stream, int(columns)) if columns.isdecimal() else logging.StreamHandler(stream)


def find_terminal() -> Terminal | None:
    """Return the terminal on which this process logs, or None if its log goes elsewhere."""
    return next((one for one in logging.getLogger().handlers if isinstance(one, Terminal)), None)
