"""Child: one of the apps as a process of this one, which ends when this one does."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.runtime import spark_submit

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = process.STOP_LIMIT_S + 20.0


class Child:
    """Not started yet; `environment` is its own, with what this process has."""

    def __init__(self, app: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.app = app
        # Not by spark-submit: its JVM would stay, and the app with it, when this process is killed.
        self._command = [sys.executable, spark_submit.application(app), *arguments]
        self._environment = {**os.environ, **spark_submit.quiet_logging(), **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    def start(self) -> None:
        """Start it; its log is this process's."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def ended(self) -> int | None:
        """The exit code, once; None while it runs, or was not started."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process, self._due = None, time.monotonic() + _PAUSE_S
        return code

    @property
    def is_due(self) -> bool:
        """Whether it does not run, and has not ended just now."""
        return self._process is None and time.monotonic() >= self._due

    def ask_to_end(self) -> None:
        """Between two transactions."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended; who does not end is killed, which loses nothing."""
        if self._process is None:
            return
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            log.error("%s did not end in time, and is killed", self.app)
            self._process.kill()
            self._process.wait()
        self._process = None


def _end_with_parent() -> None:
    """In the child before it starts: ask Linux for a SIGTERM should this process be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
