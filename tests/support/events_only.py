"""A pipeline without lake tables, its apps real processes in which Spark cannot be imported."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord
from tests.support.jetstream import CreekMessage, CreekStream, creek_applied
from tests.support.received import Received
from tests.support.replicated import kill, wait_for_end, wait_until

WITHOUT_SPARK = Path(__file__).with_name("without_spark.py")


class EventsOnly(Received):
    """A pipeline without lake tables that publishes to NATS, by default in creek's format."""

    def __init__(self, dsn: str, folder: Path, tables: tuple[str, ...], uri: str, **options: Any) -> None:
        super().__init__(dsn, folder, tables, lake_tables="none", **options)
        self.uri = uri
        self.publisher()

    def publisher(self, **settings: Any) -> None:
        given = {"target": "nats", "database": self.pipeline.name, **settings}
        self.configure(publishers={"events": given})

    @property
    def access(self) -> Access:
        return Access(self.pipeline, self.dsn, self.dsn)

    @property
    def stream(self) -> CreekStream:
        return CreekStream(self.uri, self.pipeline.name)

    def launch(self, app: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(app, app, *arguments, script=WITHOUT_SPARK)

    def run_here(self, app: str, *arguments: str) -> int:
        """Run an app in the test's process, and return its exit code."""
        ours, handler = logging.getLogger("airflow_provider_pgrepl"), logging.FileHandler(self.log)
        program = import_module(f"airflow_provider_pgrepl.replication.app.{app}")
        ours.addHandler(handler)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv(process.DSN_VARIABLE, self.dsn)
                return int(program.main(["--pipeline", str(self.file), *arguments]))
        finally:
            ours.removeHandler(handler)
            handler.close()

    def take(self, *arguments: str) -> None:
        assert self.run_here("snapshot", *arguments) == process.DONE, self.log_tail()

    @contextmanager
    def at_work(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run receiver and publisher in one process during the block, and ask it to end afterwards."""
        running = self.launch("replicate", "--publish", "events", *arguments)
        try:
            yield running
            running.send_signal(signal.SIGTERM)
            assert wait_for_end(running) == 0, self.log_tail()
        finally:
            kill(running)

    def catch_up(self, *arguments: str) -> None:
        """Receive, scan and publish everything that was committed."""
        given = arguments or ("--publish", "events")
        assert self.run_here("replicate", "--until", "caught-up", *given) == process.DONE, self.log_tail()

    def seen(self) -> list[tuple[str, str, Any]]:
        """Return the table, operation and key of each message that a consumer applies."""
        return [_seen(one) for one in creek_applied(self.stream.messages())]

    def wait_for(self, *wanted: tuple[str, str, Any]) -> None:
        try:
            wait_until(lambda: set(wanted) <= set(self.seen()), 120, f"{wanted}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the log ends with:\n{self.log_tail()}") from None

    def records(self) -> dict[str, TableRecord]:
        with StateDatabase(self.dsn, "look at states") as state_db:
            return {str(name): one for name, one in state_db.read_tables(self.pipeline.name).items()}

    def states(self) -> dict[str, str]:
        return {name: str(record.state) for name, record in self.records().items()}


def _seen(message: CreekMessage) -> tuple[str, str, Any]:
    row = message.value["after"] or message.value["before"]
    return message.subject.rpartition(".")[2], message.op, row["id"]
