"""A pipeline with a slot and a changelog, its receiver run in the test's process; no Spark, no lake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_provider_pgrepl.errors import UnsendableError
from airflow_provider_pgrepl.replication.changelog.layout import (
    STATUS_ORDINAL,
    EpochRecord,
    changelog_uri,
)
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    live_files,
    open_changelog,
    read_durable_lsn,
    read_epoch,
)
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, ReconnectingReceiver
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.connection import Connection, row
from airflow_provider_pgrepl.replication.source.failover import wants_failover
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.server import read_server, wal_lsn
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot
from tests.support.replicated import Replicated, wait_until
from tests.support.sessions import session

_OPS = tuple("IUDTRMG")

EAGER = KeepaliveRule(min_interval_s=0.1, min_bytes=1, max_wait_s=0.1, idle_wait_s=0.1)
"""Records a keepalive as soon as it moved."""


class Received(Replicated):
    """Replicated as far as the changelog."""

    publisher_name = "events"

    def begin(self, *, amid_transactions: bool = False) -> LSN:
        """Make publication, slot and changelog, as the snapshot app does, and return the consistent point.

        `amid_transactions`: True if other transactions run meanwhile. Only then is the slot made by the four
        sessions of `create_slot`, which take 25 ms of CPU time.
        """
        with self.source() as source:
            relations = resolve_tables(source, self.pipeline)
            if self.pipeline.publication_mode == "create":
                publication.create_publication(
                    source, self.pipeline.publication, relations, made_for=self.pipeline.name
                )
            server = read_server(source)
            failover = wants_failover(source, server, self.pipeline.failover)
            consistent_point = self._create_slot(source, amid_transactions, failover)
            found = publication.read_publication(source, self.pipeline.publication)
        assert found is not None
        record = EpochRecord(
            self.pipeline.name,
            Epoch(1),
            server.system_identifier,
            server.timeline,
            self.pipeline.slot,
            self.pipeline.publication,
            found.oid,
            consistent_point,
            database=server.database,
            database_oid=server.database_oid,
        )
        create_changelog(self.changelog, record)
        return consistent_point

    def _create_slot(self, source: Connection, amid_transactions: bool, failover: bool) -> LSN:
        if amid_transactions or failover:
            with create_slot(self.dsn, self.pipeline.slot, timeout_s=30, failover=failover) as exported:
                return exported.consistent_point
        statement = "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')"
        return LSN.parse(row(source, statement, (self.pipeline.slot,))[0])

    @contextlib.contextmanager
    def source(self) -> Iterator[Connection]:
        with session(self.dsn, pinned=True) as connection:
            yield connection

    @contextlib.contextmanager
    def receiving(self, keepalive: KeepaliveRule | None = None) -> Iterator[Receiver]:
        """A receiver at work, stopped gracefully at the end of the block."""
        receiver = Receiver(self.dsn, self.pipeline, keepalive)
        receiver.start()
        try:
            yield receiver
        finally:
            receiver.stop()
        if receiver.error is not None:
            raise receiver.error

    def receive(self) -> None:
        """Receive everything that has been committed into the changelog."""
        target = self.source_lsn()
        with self.receiving() as receiver:
            wait_until_seen(receiver, target)

    def unsendable(self) -> LSN:
        """The commit LSN of the transaction at which a receiver ends because the server cannot send it."""
        receiver = Receiver(self.dsn, self.pipeline)
        receiver.start()
        assert receiver.failed.wait(60)
        receiver.stop()
        assert isinstance(receiver.error, UnsendableError)
        assert receiver.unfinished is not None
        lsn = LSN(receiver.unfinished.commit_lsn)
        assert f"--lsn {lsn} " in receiver.error.hint
        return lsn

    @property
    def changelog(self) -> str:
        return changelog_uri(self.pipeline.lake_root)

    @property
    def durable_lsn(self) -> LSN:
        return read_durable_lsn(open_changelog(self.changelog))

    def changelog_files(self) -> list[ChangelogFile]:
        """The files of the present epoch."""
        return live_files(open_changelog(self.changelog), read_epoch(self.changelog).epoch, LSN(0))

    def changelog_rows(self, *ops: str) -> list[dict[str, Any]]:
        """Return the changes of the present epoch, in order, of `ops` or all, with the file of each."""
        return [
            row for row in self._rows() if row["ordinal"] != STATUS_ORDINAL and row["op"] in (ops or _OPS)
        ]

    def publication_statuses(self) -> list[dict[str, Any]]:
        """Return the changelog rows in which the receiver recorded the publication's status."""
        return [row for row in self._rows() if row["ordinal"] == STATUS_ORDINAL]

    def _rows(self) -> list[dict[str, Any]]:
        pieces = []
        for file in self.changelog_files():
            rows = pq.read_table(f"{self.changelog}/{file.path}", partitioning=None)
            pieces.append(rows.append_column("file", pa.array([file.path] * rows.num_rows)))
        if not pieces:
            return []
        rows = pa.concat_tables(pieces).sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])
        found: list[dict[str, Any]] = rows.to_pylist()
        return found

    def slot(self) -> Slot:
        with self.source() as source:
            found = read_slot(source, self.pipeline.slot)
        assert found is not None
        return found

    def source_lsn(self) -> LSN:
        """Return an LSN that is not before any commit made before this call."""
        with self.source() as source:
            return wal_lsn(source)


def wait_until_seen(receiver: Receiver | ReconnectingReceiver, lsn: LSN, timeout: float = 150) -> None:
    """Wait until all changes up to an LSN are durable. Raises the error if the receiver ends."""

    def seen() -> bool:
        if receiver.error is not None:
            raise receiver.error
        receiver.request_keepalive()
        return receiver.progress.seen_lsn >= lsn

    wait_until(seen, timeout, f"the receiver to be at {lsn}")
