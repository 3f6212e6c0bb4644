"""The limits of a test run's time: a hang outside a test, and the end of a run that CI would stop.

While a test runs, pytest's `faulthandler_timeout` ends a process that hangs. Elsewhere a hang would last
until the run is ended from outside, and nothing would say what it waited for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator

import pytest

END_VARIABLE = "PGREPL_TESTS_END"
"""Unix time in seconds after which no further test begins."""
_CONTROLLER_WAITS = 1.2
"""Times as long as a worker, so that the process that hangs speaks first."""


class Watchdog:
    """The end of its process after `faulthandler_timeout` seconds without any test's report."""

    def __init__(self, config: pytest.Config) -> None:
        factor = 1.0 if hasattr(config, "workerinput") else _CONTROLLER_WAITS
        self._timeout_s = float(config.getini("faulthandler_timeout")) * factor
        # pytest closes its own copy when the session ends, and the process may hang after that.
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._watch()

    def pytest_runtest_logreport(self) -> None:
        self._watch()

    def _watch(self) -> None:
        if self._timeout_s and self._stderr is not None:
            faulthandler.dump_traceback_later(self._timeout_s, file=self._stderr, exit=True)


class Deadline:
    """The end of the time that the environment gives to a run: tests that have not begun are skipped."""

    def __init__(self) -> None:
        self._ends_at = float(os.environ.get(END_VARIABLE) or "inf")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() >= self._ends_at:
            pytest.skip(f"no time was left for {item.path.relative_to(item.config.rootpath)}")
