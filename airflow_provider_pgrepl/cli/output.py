"""Output of the commands of `pgrepl`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_provider_pgrepl.errors import escaped
from airflow_provider_pgrepl.replication.app import process

from .command import flag

JSON = flag("--json", "print the result as JSON")


def say(*lines: str) -> int:
    """Print lines, with unprintable characters escaped, and return exit code 0."""
    sys.stdout.write("".join(f"{escaped(line)}\n" for line in lines))
    return process.DONE


@contextmanager
def until_reader_ends(*, by_interrupt: bool = False) -> Iterator[None]:
    """Stop writing to stdout without an error if its reader closes the pipe, or on Ctrl-C `by_interrupt`."""
    ends = (BrokenPipeError, KeyboardInterrupt) if by_interrupt else BrokenPipeError
    try:
        yield
    except ends:
        # Python's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
