"""The apps as a user runs them: `python spark_apps/….py --pipeline FILE.json`, each its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks.source import Source
from benchmarks.store import local_folder
from benchmarks.visibility import table_position

_ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.2


class App:
    """One of the apps; its output goes to a file."""

    def __init__(self, name: str, dsn: str, pipeline: Pipeline, *arguments: str) -> None:
        folder = local_folder(pipeline.lake_root).parent
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{pipeline.name}.json"
        file.write_text(pipeline.to_json())
        self.name, self.log = name, folder / f"{pipeline.name}_{name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(_ROOT / "spark_apps" / f"{name}.py"),
                    "--pipeline",
                    str(file),
                    *arguments,
                ],
                env={**os.environ, "PGREPL_DSN": dsn, "PYTHONPATH": str(_ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float = 300) -> None:
        """Wait for its end. Raises RuntimeError when it was not a good one."""
        self._check_code(self._process.wait(timeout_s))

    def check(self) -> None:
        """Raise RuntimeError when it has ended."""
        if self._process.poll() is not None:
            self._check_code(self._process.returncode or 1)

    def stop(self) -> None:
        """Ask it to end, and end what remains of its own group."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _check_code(self, code: int) -> None:
        if code:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the {self.name} app ended with {code}:\n{tail}")


@contextmanager
def replicating(dsn: str, pipeline: Pipeline) -> Iterator[App]:
    """The tables taken, the replication app running until the end of the block."""
    App("snapshot", dsn, pipeline).wait(600)
    with resumed(dsn, pipeline) as app:
        yield app


@contextmanager
def resumed(dsn: str, pipeline: Pipeline) -> Iterator[App]:
    """The replication app running again until the end of the block."""
    app = App("replicate", dsn, pipeline)
    try:
        yield app
        app.check()
    finally:
        app.stop()


@contextmanager
def streaming(source: Source, pipeline: Pipeline) -> Iterator[App]:
    """As `replicating`, from when the app has caught up with all that the source has."""
    with replicating(source.replicator_dsn(), pipeline) as app:
        wait_applied(app, pipeline, source.end_lsn(), 600)
        yield app


def wait_shown(app: App, pipeline: Pipeline, tables: Sequence[str], lsn: LSN, timeout_s: float = 600) -> None:
    """Wait until each of the lake tables, all of which change after an LSN, shows what is before it."""
    deadline = time.monotonic() + timeout_s
    for table in tables:
        while (position := table_position(pipeline, table)) < lsn:
            app.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the lake table of {table} is at {position}, not at {lsn}")
            time.sleep(_POLL_S)


def wait_applied(app: App, pipeline: Pipeline, lsn: LSN, timeout_s: float = 120) -> None:
    """Wait until a consistent point covers an LSN."""
    deadline = time.monotonic() + timeout_s
    while applied_lsn(pipeline) + 1 < lsn:
        app.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the lake is at {applied_lsn(pipeline)}, not at {lsn}")
        time.sleep(_POLL_S)


def applied_lsn(pipeline: Pipeline) -> LSN:
    """The newest consistent point of the lake."""
    point = Points(pipeline.lake_root).latest()
    return LSN(point.lsn) if point else LSN(0)
