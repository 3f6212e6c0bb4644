"""A pipeline under test: its apps run as real processes, its lake compared with the source by value."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg2.errors
import psycopg2.extensions
import pyarrow as pa
from deltalake import QueryBuilder
from psycopg2.extras import register_default_json, register_default_jsonb

from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo.postgres import Server
from tests.support.sessions import session

ROOT = Path(__file__).resolve().parents[2]
APPS = ROOT / "spark_apps"
_HANGS_S = 300
"""After which a test fails that would wait for good; whatever is waited for takes seconds."""
OWN_COLUMNS = ("_pgrepl_commit_lsn", "_pgrepl_commit_ts", "_pgrepl_partition")


class Replicated:
    """One pipeline from a database into a lake under a temporary folder."""

    def __init__(self, dsn: str, folder: Path, tables: tuple[str, ...], **options: Any) -> None:
        name = options.pop("name", "p_" + dsn.split("dbname=")[1].split(maxsplit=1)[0].removeprefix("t_"))
        options.setdefault("flush_interval_s", 0.2)
        # The tests connect as a superuser, who owns all tables.
        options.setdefault("trust_table_owners", True)
        self.dsn = dsn
        options.setdefault("lake", str(folder / "lake"))
        self.pipeline = Pipeline(name=name, tables=tables, **options)
        self.file = folder / "pipeline.json"
        self.file.write_text(self.pipeline.to_json())
        self.log = folder / "app.log"

    def configure(self, **options: Any) -> None:
        """Change the pipeline's options."""
        self.pipeline = replace(self.pipeline, **options)
        self.file.write_text(self.pipeline.to_json())

    def start(self, app: str, *arguments: str, script: Path | None = None) -> subprocess.Popen[bytes]:
        """Start an app; its output goes to `log`."""
        command = [
            sys.executable,
            str(script or APPS / f"{app}.py"),
            "--pipeline",
            str(self.file),
            *arguments,
        ]
        env = {**os.environ, "PGREPL_DSN": self.dsn, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def run(self, app: str, *arguments: str, timeout: float = 500) -> int:
        """Run an app to its end, and return its exit code."""
        process = self.start(app, *arguments)
        try:
            return process.wait(timeout)
        finally:
            kill(process)

    def snapshot(self, *arguments: str) -> None:
        assert self.run("snapshot", *arguments) == 0, self.log_tail()

    def catch_up(self) -> None:
        assert self.run("replicate", "--until", "caught-up") == 0, self.log_tail()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def lake_path(self, table: str) -> str:
        return f"{self.pipeline.lake_root}/{TableName.parse(table).path}"

    def lake_rows(self, table: str) -> pa.Table:
        # Its read_all() would hold the interpreter, in which a test's store may run.
        rows = QueryBuilder().register("t", open_delta(self.lake_path(table))).execute("select * from t")
        return pa.table(rows)

    def differences(self, table: str) -> Counter[tuple[Any, ...]]:
        """Return rows of the lake less rows of the source, counted: empty if all values are equal."""
        lake = self.lake_rows(table)
        lake = lake.drop_columns([name for name in OWN_COLUMNS if name in lake.column_names])
        found: Counter[tuple[Any, ...]] = Counter(
            zip(*(map(plain, column.to_pylist()) for column in lake.columns), strict=True)
        )
        with session(self.dsn, pinned=True) as connection, connection.cursor() as cursor:
            for register in (register_default_json, register_default_jsonb):
                register(cursor, loads=str)
            cursor.execute(
                f"select {', '.join(map(quoted, lake.column_names))} from {TableName.parse(table).sql}"
            )
            expected = Counter(tuple(plain(value) for value in row) for row in cursor.fetchall())
        found.subtract(expected)
        return Counter({row: count for row, count in found.items() if count})

    def assert_equal(self, *tables: str) -> None:
        for table in tables:
            assert not self.differences(table), f"{table}: {list(self.differences(table).items())[:10]}"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def plain(value: Any) -> Any:
    """A value as psycopg2 or Arrow gives it, so that equal ones are equal and can be counted."""
    if isinstance(value, list):
        return tuple(map(plain, value))
    return bytes(value) if isinstance(value, memoryview) else value


def wait_for_end(process: subprocess.Popen[bytes]) -> int:
    """Wait until a process has ended by itself, and return its exit code."""
    return process.wait(_HANGS_S)


def kill(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """End the app and the JVM it started, which shares its process group or has one of its own."""
    groups = {process.pid}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(child.pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
    process.wait(_HANGS_S)


def wait_until(condition: Callable[[], Any], timeout: float = _HANGS_S, what: str = "the condition") -> Any:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + timeout
    while (began := time.monotonic()) < deadline:
        if result := condition():
            return result
        # What the condition asks for needs a processor, too.
        time.sleep(min(0.5, max(0.05, 9 * (time.monotonic() - began))))
    raise AssertionError(f"waited {timeout} s for {what}")


def set_in_database(dsn: str, setting: str, value: str) -> None:
    """Set it for sessions of the database that begin later, those of its walsenders among them."""
    execute(
        dsn,
        f"do $$ begin execute format('alter database %I set {setting} = %L',"
        f" current_database(), '{value}'); end $$",
    )


def let_senders_wait(dsn: str) -> None:
    """Set no limit to the time in which clients must answer the database's walsenders that start later."""
    set_in_database(dsn, "wal_sender_timeout", "0")


def has_no_sender(server: Server) -> bool:
    """Return True if no walsender runs: those of closed connections take some time to end."""
    with session(server.dsn()) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where backend_type = 'walsender'")
        return bool(cursor.fetchone() == (0,))


@contextlib.contextmanager
def repeating(change: Callable[[int], None], pause_s: float = 0) -> Iterator[None]:
    """Call `change` with 0, 1, 2 and so on in a thread during the block."""
    stop = threading.Event()

    def run() -> None:
        for turn in itertools.count():
            if stop.wait(pause_s):
                return
            change(turn)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def execute(dsn: str, *statements: str) -> None:
    """Run statements, each a transaction of its own."""
    with session(dsn) as connection, connection.cursor() as cursor:
        for statement in statements:
            _execute_when_free(cursor, statement)


def _execute_when_free(cursor: psycopg2.extensions.cursor, statement: str) -> None:
    """Run a statement. Waits for the walsender of a closed connection, which still holds its slot, to end."""
    deadline = time.monotonic() + _HANGS_S
    while True:
        try:
            cursor.execute(statement)
        except psycopg2.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
