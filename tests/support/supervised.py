"""An app as a process that is started again when it ends, as its supervisor does."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter

from airflow_provider_pgrepl.replication.app.process import RETRY_MAY_HELP
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from tests.support.replicated import Replicated, kill, wait_for_end, wait_until


class Supervised:
    """An app of a pipeline, the replication app by default. `exits`: how often it ended with each exit
    code."""

    def __init__(self, pipeline: Replicated, app: str = "replicate", *arguments: str) -> None:
        self._pipeline, self._app = pipeline, (app, *arguments)
        self.exits: Counter[int] = Counter()
        self.start()

    def start(self) -> None:
        self.process = self._started()

    def restart(self, number: int) -> None:
        """End the app with a signal, and start it again."""
        self.end(number)
        self.start()

    def is_continuing(self) -> bool:
        """Start the app again if it has ended with the exit code for it. Return True."""
        if self.process.poll() is not None:
            self._check_end(RETRY_MAY_HELP)
            self.start()
        return True

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the app and its children with SIGKILL, or with SIGTERM ask it to end by itself.

        A supervisor sends SIGTERM to the app alone.
        """
        if self.process.poll() is not None:
            expected = RETRY_MAY_HELP
        elif number == signal.SIGTERM:
            expected = 0
            self.process.terminate()
            wait_for_end(self.process)
        else:
            expected = -number
        kill(self.process)
        self._check_end(expected)

    def newest_point(self) -> tuple[int, int]:
        point = ConsistentPoints(self._pipeline.pipeline.lake_root).latest()
        return (0, 0) if point is None else point.order

    def wait_for_point_above(self, order: tuple[int, int], what: str) -> None:
        """Wait until the lake has a later consistent point. `what`: what it follows, for the error."""
        wait_until(
            lambda: self.is_continuing() and self.newest_point() > order,
            what=f"a consistent point after {what}",
        )

    def _started(self) -> subprocess.Popen[bytes]:
        return self._pipeline.start(*self._app)

    def _check_end(self, expected: int) -> None:
        code = self.process.returncode
        self.exits[code] += 1
        assert code == expected, f"{self._app[0]} ended with {code}:\n{self._pipeline.log_tail()}"
