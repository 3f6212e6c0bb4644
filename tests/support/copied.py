"""A pipeline that is published to NATS, and a database in which its tables are kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import psycopg2.extensions

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.app import process
from demo.nats import NatsServer
from tests.conftest import closing_connection
from tests.support.jetstream import CreekStream
from tests.support.landed import Landed
from tests.support.publishing import finish, publishing_in_thread
from tests.support.replicated import ROOT, execute, wait_until


class Copied(Landed):
    """A pipeline that is published to NATS, and a database in which its tables are kept."""

    copy_dsn: str
    file_of_consumer: Path
    stream: CreekStream

    def configure_copy(self, tables: dict[str, str] | None = None, **more: Any) -> None:
        own = self.pipeline.tables
        named = tables or {f"{self.pipeline.name}.{table}": f"copied.{table[7:]}" for table in own}
        self.file_of_consumer.write_text(json.dumps({"name": "copy", "tables": named, **more}))

    def start_consumer(self, *arguments: str) -> subprocess.Popen[bytes]:
        return start_consumer(self.file_of_consumer, self.copy_dsn, self.log, *arguments)

    def consume(self, *arguments: str, code: int = process.DONE) -> None:
        assert self.run_consumer(*arguments) == code, self.log_tail()

    def run_consumer(self, *arguments: str) -> int:
        """Run the consumer in the test's process; its output also goes to the log."""
        os.environ["PGREPL_CONSUMER_DSN"] = self.copy_dsn
        ours = logging.getLogger("airflow_provider_pgrepl")
        with self.log.open("a") as log, redirect_stderr(log):
            handler = logging.StreamHandler(log)
            ours.addHandler(handler)
            try:
                return main(["consume", str(self.file_of_consumer), "--until", "caught-up", *arguments])
            finally:
                ours.removeHandler(handler)

    def send(self, *statements: str) -> None:
        """Execute statements, receive their changes and publish them."""
        execute(self.dsn, *statements)
        self.receive()
        finish(self)

    def assert_equal(self, *tables: str) -> None:
        for table in tables or self.pipeline.tables:
            name = table[7:]
            assert rows(self.copy_dsn, f"copied.{name}") == rows(self.dsn, table), name


def start_consumer(file: Path, copy_dsn: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a consumer; its output goes to `log`."""
    command = [sys.executable, "-m", "airflow_provider_pgrepl", "consume", str(file), *arguments]
    env = {**os.environ, "PGREPL_CONSUMER_DSN": copy_dsn, "PYTHONPATH": str(ROOT)}
    with log.open("ab") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)


def rows(dsn: str, table: str) -> list[Any]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"select t::text from {table} t order by 1")
        return cursor.fetchall()


@contextmanager
def copying(
    dsn: str, folder: Path, jetstream: NatsServer, tables: tuple[str, ...], **options: Any
) -> Iterator[Copied]:
    """A copy of these tables, which are there; nothing is in it yet."""
    pipeline = Copied(dsn, folder, tables, flush_interval_s=0.05, **options)
    pipeline.begin()
    pipeline.configure(publishers={"events": {"target": "nats", "database": pipeline.pipeline.name}})
    pipeline.stream = CreekStream(jetstream.uri, pipeline.pipeline.name)
    name = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    execute(dsn, f"create database {name}_copy")
    pipeline.copy_dsn = dsn.replace(name, f"{name}_copy")
    execute(pipeline.copy_dsn, "create schema copied")
    pipeline.file_of_consumer = folder / "consumer.json"
    pipeline.configure_copy()
    try:
        yield pipeline
    finally:
        execute(dsn, f"drop database {name}_copy with (force)")


def begun(copied: Copied, *statements: str, during: Callable[[], None] = lambda: None) -> None:
    """Execute statements, and bring the copy to the state after them."""
    execute(copied.dsn, *statements)
    copied.receive()
    copied.apply()
    with publishing_in_thread(copied):
        wait_until(lambda: copied.stream.schemas(), 150, "the publisher to be there")
        copied.consume()
        during()
    finish(copied)
