"""The apps as users run them, as processes: `python spark_apps/….py --pipeline FILE.json`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import measuring
from benchmarks.source import Source
from benchmarks.store import local_folder
from benchmarks.visibility import table_position

_ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.2


class App:
    """A running app. Its output is written to a file."""

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
        """Wait for the end of the app. Raises RuntimeError unless the exit code is 0."""
        self._check_code(self._process.wait(timeout_s))

    def check(self) -> None:
        """Raise RuntimeError if the app has ended."""
        if self._process.poll() is not None:
            self._check_code(self._process.returncode or 1)

    def stop(self) -> None:
        """Ask the app to end. After 60 s, kill its process group."""
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
    """Copy the tables, and run the replication app until the end of the block."""
    App("snapshot", dsn, pipeline).wait(600)
    with resumed(dsn, pipeline) as app:
        yield app


@contextmanager
def resumed(dsn: str, pipeline: Pipeline) -> Iterator[App]:
    """Run the replication app until the end of the block. Raises RuntimeError if it ends earlier."""
    port = measuring.free_port()
    app = App("replicate", dsn, pipeline, *([f"--metrics-port={port}"] if measuring.is_on() else []))
    try:
        with measuring.scraped(port) if measuring.is_on() else nullcontext():
            yield app
        app.check()
    finally:
        app.stop()


@contextmanager
def streaming(source: Source, pipeline: Pipeline) -> Iterator[App]:
    """Do the same as `replicating`, and wait until the app has caught up with the source."""
    with replicating(source.replicator_dsn(), pipeline) as app:
        wait_applied(app, pipeline, source.end_lsn(), 600)
        yield app


def wait_shown(app: App, pipeline: Pipeline, tables: Sequence[str], lsn: LSN, timeout_s: float = 600) -> None:
    """Wait until each of the lake tables shows the changes before an LSN. All must also change after it."""
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
    """Return the LSN of the lake's newest consistent point, or 0 if there is none."""
    point = ConsistentPoints(pipeline.lake_root).latest()
    return LSN(point.lsn) if point else LSN(0)
