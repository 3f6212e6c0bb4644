"""A pipeline whose apps run inside the test's process, on its one Spark session: a second, not ten.

The apps' own `main` runs; only starting and stopping the session are taken from it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_provider_pgrepl.replication.app import lake_replication, process, snapshot, verify
from airflow_provider_pgrepl.replication.app import replicate as replicate_app
from airflow_provider_pgrepl.replication.app import snapshot as snapshot_app
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.apply.applier import Applier
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.read import ArrowView
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APPS: dict[str, Any] = {"snapshot": snapshot_app, "replicate": replicate_app, "verify": verify}
SESSIONS: dict[str, Any] = {"snapshot": snapshot, "replicate": lake_replication, "verify": verify}
"""The modules that make an app's session."""


class EndedAtOnce(BaseException):
    """Raised where an app ends its process as a kill would; the test's process continues."""


class Borrowed:
    """The tests' session, which no app may stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Do nothing: the next test uses the session."""


def _end_at_once() -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        raise EndedAtOnce
    # The main thread hangs: nothing but the end of the test's process is left.
    print("an app in the test's process did not end in time", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(process.RETRY_MAY_HELP)


@dataclass
class Running:
    """Receiver and applier at work."""

    receiver: Receiver
    applier: Applier

    def wait_for(self, lsn: LSN) -> None:
        """Wait until all that the changelog holds up to an LSN is in the lake; raises what went wrong."""
        wait_until_seen(self.receiver, lsn)
        version = self.receiver.progress.changelog_version

        def applied() -> bool:
            if self.applier.error is not None:
                raise self.applier.error
            return self.applier.progress.version >= version

        wait_until(applied, what=f"the lake to be at changelog version {version}")


class InProcess(Received):
    """Replicated, with the apps in this process and their parts at hand."""

    def __init__(
        self,
        spark: SparkSession,
        dsn: str,
        folder: Path,
        tables: tuple[str, ...],
        **options: Any,
    ) -> None:
        # Tables are merged as soon as they change, and meet at a point each second: no test waits for that.
        defaults = {"flush_interval_s": 0.05, "merge_interval_s": 0.1, "consistent_point_interval_s": 1.0}
        options = {**defaults, **options}
        super().__init__(dsn, folder, tables, **options)
        self.spark = Borrowed(spark)

    def run(self, app: str, *arguments: str, timeout: float = 0) -> int:
        """Run an app's main to its end; returns its exit code. Its log goes to `log`."""
        with self._surroundings(SESSIONS[app]):
            try:
                return int(APPS[app].main(["--pipeline", str(self.file), *arguments]))
            except EndedAtOnce:
                return process.RETRY_MAY_HELP

    @contextlib.contextmanager
    def _surroundings(self, module: Any) -> Iterator[None]:
        start_spark, end_at_once = module.start_spark, process.end_at_once
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        root, to_file = logging.getLogger(), logging.FileHandler(self.log)
        level = root.level
        root.addHandler(to_file)
        root.setLevel(logging.INFO)
        module.start_spark = lambda *_: self.spark
        process.end_at_once = _end_at_once
        os.environ[process.DSN_VARIABLE] = self.dsn
        try:
            yield
        finally:
            del os.environ[process.DSN_VARIABLE]
            module.start_spark = start_spark
            process.end_at_once = end_at_once
            root.removeHandler(to_file)
            root.setLevel(level)
            to_file.close()
            for number, before in handlers.items():
                signal.signal(number, before)

    @contextlib.contextmanager
    def replicating(self, keepalive: KeepaliveRule | None = None) -> Iterator[Running]:
        """Receiver and applier at work, stopped gracefully at the end of the block."""
        with StateDatabase(self.dsn, "replicate test") as state_db, self.receiving(keepalive) as receiver:
            applier = Applier(self.spark, self.pipeline, state_db, read_epoch(self.changelog))
            applier.start()
            wait_until(lambda: applier.progress.batches or applier.error)
            try:
                yield Running(receiver, applier)
            finally:
                applier.stop()

    def states(self) -> dict[str, TableRecord]:
        with StateDatabase(self.dsn, "look at states") as state_db:
            return {str(name): record for name, record in state_db.read_tables(self.pipeline.name).items()}

    def resnapshot(self, table: str) -> None:
        assert self.run("snapshot", "--tables", table) == 0, self.log_tail()

    def resync(self) -> None:
        """Resync as the error of the first try says."""
        assert self.run("snapshot", "--resync") == 78
        name = re.findall(r"--give-up ([^ ,]+)", self.log_tail())[-1]
        assert self.run("snapshot", "--resync", "--give-up", name) == 0, self.log_tail()

    def position(self, table: str) -> LSN | None:
        """The LSN up to which every transaction is in a lake table."""
        record = read_epoch(self.changelog)
        return read_position(open_table(self.lake_path(table)), app_id(record.pipeline, record.epoch))

    def wait_for_points(self, more: int, *tables: str) -> None:
        """Wait until `more` further consistent points of these tables are recorded."""

        # Points that were seen once count, because maintenance deletes old ones.
        seen: set[tuple[int, int]] = set()

        def look() -> int:
            seen.update(
                point.order
                for point in ConsistentPoints(self.pipeline.lake_root).all()
                if set(tables) <= set(point.tables)
            )
            return len(seen)

        wanted = look() + more
        wait_until(lambda: look() >= wanted, what=f"{more} consistent points")

    def at_every_point(self, sql: str, *tables: str) -> list[dict[str, Any]]:
        """The one row that a query gives at each recorded consistent point of these tables, oldest first."""
        return at_every_point(self.pipeline.lake_root, sql, *tables)


def at_every_point(lake_root: str, sql: str, *tables: str) -> list[dict[str, Any]]:
    """The one row that a query gives at each recorded consistent point of these tables, oldest first."""
    return [
        ArrowView(point, lake_root).sql(sql).to_pylist()[0]
        for point in ConsistentPoints(lake_root).all()
        if set(tables) <= set(point.tables)
    ]
