"""Snapshots of tables from the source, for a pipeline without lake tables.

The rows are those of a snapshot that the server exports with a position in the stream. They are written to a
temporary file as they will be sent. Neither memory nor a slow broker limits the table's size, and the
source's snapshot is held only while rows are copied.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Protocol

import pyarrow as pa

from airflow_provider_pgrepl.errors import (
    PgReplError,
    Retry,
    SnapshotError,
    TableError,
    TargetError,
    TargetUnavailableError,
)
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.creek.snapshot import SnapshotRows
from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import StopRequested
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord, read_columns
from airflow_provider_pgrepl.replication.events.reader import changelog_errors
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.lake.snapshot.csv import read_texts
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableSnapshotHolder, keep_for
from airflow_provider_pgrepl.replication.source.slot import temporary_name
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.values import copied_part

from . import evidence, process
from .tables import followed_names

log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 5.0)
_LOOK_S, _PATIENCE_S = 0.1, 300.0
"""Seconds between looks at the publisher's position, and the most seconds to wait for it. If the receiver
runs in another process, the changelog shows only after a minute or two that nothing has come."""
_AT_ONCE = 4 << 20
_SIZE_BYTES = 4


class Waiter(Protocol):
    """A signal that it is time to end."""

    def wait(self, seconds: float) -> bool:
        """Wait for up to `seconds`, and return True if it is time to end."""


Published = Callable[[LSN], PublisherRecord | None]
"""Returns the publisher's record once everything that committed at or before an LSN is published, else
None."""


class SourceSnapshots:
    """The snapshots of a publisher's tables. `servers`: the addresses of the NATS servers."""

    at_once = 2

    def __init__(
        self, pipeline: Pipeline, settings: PublisherSettings, servers: Sequence[str], published: Published
    ) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._servers, self._published = servers, published
        self._dsn, self._salt = process.source_dsn(), process.hash_salt(settings)

    def why_not(self, table: TableName) -> str:
        with changelog_errors():
            known = KnownRelations(self._pipeline.lake_root).names()
        return "" if table in known else "the pipeline has no such table"

    def send(self, table: TableName, subject: str, is_over: Waiter) -> bool:
        """Copy a table and send it to a subject. Return False if it was time to end before.

        Raises SourceError, TargetError, TableError, DriftError, and contradictions to source and state being
        those of the lake.
        """
        # Imported here, where the client is known to be installed.
        from airflow_provider_pgrepl.replication.creek.streams import SnapshotRequest, send_snapshot

        epoch = read_epoch(changelog_uri(self._pipeline.lake_root)).epoch
        with tempfile.TemporaryFile(prefix="pgrepl-snapshot-") as file:
            try:
                copy = self._copied(table, file, is_over)
                self._wait_until_published(copy.position, table, is_over)
                place = EventPosition.after_transaction(epoch, copy.position)
                now = datetime.now(UTC)
                log.info("a snapshot of %s: %d rows, as of %s", table, copy.count, copy.position)
                wanted = SnapshotRequest(
                    StreamLake(self._pipeline.lake_root),
                    table,
                    place,
                    now,
                    lambda at: (copy.rows.header(place, at.stamp, at.at, copy.count), _read(file, is_over)),
                )
                send_snapshot(self._servers, self._settings, subject, wanted)
                return True
            except StopRequested:
                log.warning(
                    "asked to end: the snapshot of %s has no end, which says that it is not whole", table
                )
                return False

    def _copied(self, table: TableName, file: IO[bytes], is_over: Waiter) -> _Copy:
        """Copy the table. If a snapshot could not be held, take another one, up to three in all."""
        for pause in (*_PAUSES_S, None):
            file.seek(0)
            file.truncate()
            try:
                return self._copy(table, file, is_over)
            except PgReplError as error:
                if pause is None or error.retry is Retry.NEVER:
                    raise
                log.info("the snapshot of %s is taken again: %s", table, error.message)
            if is_over.wait(pause):
                raise StopRequested
        raise AssertionError

    def _copy(self, table: TableName, file: IO[bytes], is_over: Waiter) -> _Copy:
        pipeline = self._pipeline
        # Consumers replace their rows with these, so the source must be the pipeline's. Nothing else in a
        # publisher's process uses the source.
        with StateDatabase(process.state_dsn(), f"snapshot {pipeline.name}") as state_db:
            evidence.check(pipeline, state_db, self._dsn)
        with ExitStack() as held:
            with closing(connect(self._dsn, f"snapshot {pipeline.name}")) as source:
                relation = self._find(source, table)
                name = temporary_name(source)
            if relation is None:
                raise SnapshotError(f"{table} is not there any more")
            exported = export_snapshot(
                self._dsn, name, timeout_s=pipeline.slot_timeout_s, primary_dsn=process.primary_dsn()
            )
            with exported:
                keeper = held.enter_context(keep_for(pipeline, self._dsn, exported, [relation]))
            (relation,) = keeper.relations
            rows = self._rows(relation)
            table_keeper = held.enter_context(keeper.hold(relation))
            options = pipeline.options(table)
            copied = copied_part(relation, options)
            count = 0
            for part in table_keeper.plan(copied, pipeline.snapshot_range_bytes):
                count += self._copy_range(table_keeper, part, rows, file, is_over)
            table_keeper.check()
        file.flush()
        # A commit at the consistent point itself is not in the snapshot.
        return _Copy(rows, LSN(exported.consistent_point - 1), count)

    def _find(self, source: Connection, table: TableName) -> Relation | None:
        """Return the table that the pipeline has under this name, or None if the source has none."""
        names, publication = followed_names(self._pipeline), self._pipeline.publication
        oid = next((oid for oid, name in names.followed().items() if name == table), None)
        found = None if oid is None else read_relation(source, oid, publication)
        found = found and names.apply(source, found)
        if found is None or found.table != table:
            found = find_relation(source, table, publication)
            found = found and names.apply(source, found)
        return found if found is not None and found.table == table else None

    def _rows(self, relation: Relation) -> SnapshotRows:
        """Return the encoder of a table's rows.

        Raises TableError if the pipeline's settings name the table or its columns by names that they no
        longer have.
        """
        pipeline, table = self._pipeline, relation.table
        index = RelationIndex(relations_uri(pipeline.lake_root))
        rules = BoundRules(pipeline, index.records, lambda: set(index.relation_ids()))
        if problems := list(rules.problems(relation)):
            raise TableError("\n".join(f"{table}: {one}" for one in problems))
        with changelog_errors():
            relations = KnownRelations(pipeline.lake_root)
        initial_columns = read_columns(pipeline.lake_root, self._settings.name)
        published = PublishedColumns(
            relations, self._settings.column_rules, self._salt, initial_columns=initial_columns
        )
        return SnapshotRows(relation, pipeline.options(table), published, of_source=True)

    def _copy_range(
        self,
        keeper: TableSnapshotHolder,
        part: CopyRange,
        rows: SnapshotRows,
        file: IO[bytes],
        is_over: Waiter,
    ) -> int:
        """Copy a range of rows, and return its number of rows.

        If the copy ended because the lock was lent to a statement, the range is copied again.
        """
        begin = file.tell()
        while True:
            try:
                return self._write_range(keeper.snapshot, part, rows, file, is_over)
            except PgReplError as error:
                keeper.check()
                if error.retry is Retry.NEVER or not keeper.renew():
                    raise
            file.seek(begin)
            file.truncate()

    def _write_range(
        self, snapshot: str, part: CopyRange, rows: SnapshotRows, file: IO[bytes], is_over: Waiter
    ) -> int:
        count, options = 0, self._pipeline.options(rows.relation.table)
        with open_copy(self._dsn, snapshot, part) as stream:
            for batch in read_texts(stream, rows.relation, options):
                if is_over.wait(0.0):
                    raise StopRequested
                for row in rows.encode(pa.Table.from_batches([batch])):
                    file.write(len(row).to_bytes(_SIZE_BYTES, "big"))
                    file.write(row)
                count += batch.num_rows
        return count

    def _wait_until_published(self, position: LSN, table: TableName, is_over: Waiter) -> None:
        end = time.monotonic() + _PATIENCE_S
        while (record := self._published(position)) is None:
            if time.monotonic() > end:
                raise TargetUnavailableError(
                    f"publisher {self._settings.name} has not published up to {position} within"
                    f" {_PATIENCE_S:g} s",
                    "check with pgrepl status FILE.json that the publisher runs, and run this command again",
                )
            if is_over.wait(_LOOK_S):
                raise StopRequested
        if any(stopped.table == str(table) for stopped in record.stopped.values()):
            raise TargetError(
                f"{table} is no longer published",
                "no changes would follow the snapshot: see the cause with pgrepl status FILE.json",
            )


@dataclass(frozen=True)
class _Copy:
    """The rows of a table, with everything that committed at or before `position`."""

    rows: SnapshotRows
    position: LSN
    count: int


def _read(file: IO[bytes], is_over: Waiter) -> Iterator[list[bytes]]:
    file.seek(0)
    some: list[bytes] = []
    size = 0
    while head := file.read(_SIZE_BYTES):
        some.append(file.read(int.from_bytes(head, "big")))
        size += len(some[-1])
        if size >= _AT_ONCE or len(some) >= 5_000:
            if is_over.wait(0.0):
                raise StopRequested
            yield some
            some, size = [], 0
    if some:
        yield some
