"""The app that sends snapshots of tables to NATS in creek's format, from the lake or from the source."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError, LakeError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import StopSignal, of_publish_snapshot
from airflow_provider_pgrepl.replication.app.publish import has_published, open_target
from airflow_provider_pgrepl.replication.app.source_snapshots import SourceSnapshots
from airflow_provider_pgrepl.replication.creek.snapshot import SnapshotRows, current
from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.creek.wire import Wire
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import StopRequested
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherRecord,
    read_columns,
    read_record,
)
from airflow_provider_pgrepl.replication.events.reader import changelog_errors
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.memory import release_unused_memory
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import FORMATS

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.creek.stream_reading import StreamPosition

log = logging.getLogger("airflow_provider_pgrepl.publish_snapshot")

_PATIENCE_S, _PAUSE_S = 45.0, 0.5
_AT_ONCE, _AT_ONCE_BYTES = 5_000, 8 << 20
"""Rows, and bytes of rows, that are encoded and sent at once."""
_SERVE, _IDLE_S = "--requests", 60.0


def main(argv: Sequence[str]) -> int:
    """Run the app and return its exit code."""
    if _SERVE in argv:
        return serve([given for given in argv if given != _SERVE])
    return process.run("publish-snapshot", argv, of_publish_snapshot, run)


def serve(argv: Sequence[str], idle_s: float = _IDLE_S) -> int:
    """Send the snapshots that lines of stdin request, and answer each with a line with its exit code.

    A request is `{"table": …, "subject": …}`. Ends at the end of stdin, or when no request came for `idle_s`
    seconds.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Output of a library must not be read as an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    begin_compiling()
    while line := _next_request(idle_s):
        wanted = json.loads(line)
        given = [*argv, f"--table={wanted['table']}", f"--subject={wanted['subject']}"]
        answers.write(f"{process.run('publish-snapshot', given, of_publish_snapshot, send)}\n")
        answers.flush()
        gc.collect()
        release_unused_memory()
    return process.DONE


def _next_request(idle_s: float) -> str:
    """Return the next line of stdin, or "" at its end or if none came within `idle_s` seconds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Restore the defaults: the handlers of the last snapshot's StopSignal would ignore the signal.
        signal.signal(number, signal.SIG_DFL)
    return sys.stdin.readline() if select.select([sys.stdin], [], [], idle_s)[0] else ""


def run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    """Send a snapshot, print its subject to stdout, and return the exit code. Raises what `send` raises."""
    if not arguments.subject:
        settings = pipeline.publisher(arguments.publisher)
        table = _wanted(settings, arguments.table)
        wire = Wire(settings.namespace, settings.database, settings.wire)
        arguments.subject = wire.new_snapshot(str(table), datetime.now(UTC))
    code = send(pipeline, arguments)
    if code == process.DONE:
        sys.stdout.write(f"{arguments.subject}\n")
    return code


def send(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    """Send a snapshot to a subject, and return the exit code.

    Raises ConfigError, ToolError, TargetError, and what reading the lake or the source raises.
    """
    settings, subject = pipeline.publisher(arguments.publisher), arguments.subject
    table = _wanted(settings, arguments.table)
    target = open_target(settings, process.target_uri())
    # Imported here, where the client is known to be installed.
    from airflow_provider_pgrepl.replication.creek.streams import SnapshotRequest, send_snapshot
    from airflow_provider_pgrepl.replication.events.targets.jetstream import jetstream_of

    servers = jetstream_of(target).servers

    begin_compiling()
    with StopSignal() as stop:
        if not pipeline.has_lake_tables:
            published = partial(_published_up_to, pipeline, settings)
            source = SourceSnapshots(pipeline, settings, servers, published)
            return process.DONE if source.send(table, subject, stop) else process.RETRY_MAY_HELP
        try:
            position, at = _shown_and_published(pipeline, settings, table, stop)
            read = partial(_payloads, pipeline, settings, table, position, stop=stop)
            lake = StreamLake(pipeline.lake_root)
            send_snapshot(servers, settings, subject, SnapshotRequest(lake, table, position, at, read))
        except StopRequested:
            log.warning("stopped while sending a snapshot of %s: its missing end marks it as partial", table)
            return process.RETRY_MAY_HELP
    return process.DONE


def _published_up_to(pipeline: Pipeline, settings: PublisherSettings, lsn: LSN) -> PublisherRecord | None:
    """Return the saved record of a publisher in another process once it has published up to `lsn`, else None.

    Raises TargetUnavailableError if it has not published anything.
    """
    record = read_record(pipeline.lake_root, settings.name)
    if record is None or not record.generation:
        raise _not_begun(settings.name)
    return record if has_published(record, LSN(lsn + 1)) else None


def _wanted(settings: PublisherSettings, given: str) -> TableName:
    """Return the name of the table. Raises ConfigError for a table, or a publisher, that has no snapshots."""
    if not FORMATS[settings.format].has_snapshots:
        raise ConfigError(
            f"publisher {settings.name} does not use the creek format, and other formats have no snapshots",
            "read the table from the lake at a consistent point, and publish --after that point",
        )
    try:
        table = TableName.parse(given)
    except ValueError as error:
        raise ConfigError(f"--table: {error}") from None
    if not TableSelection.parse(settings.tables).has(-1, {table}):
        raise ConfigError(f"--table: {table} is not one of publisher {settings.name}'s tables")
    return table


def _shown_and_published(
    pipeline: Pipeline, settings: PublisherSettings, table: TableName, stop: StopSignal
) -> tuple[EventPosition, datetime]:
    """Wait until the lake can show the table at the published position, and return what `_published` returns.

    A table that was just copied is in the lake only as of a position that the publisher has yet to reach.
    Raises LakeError after 45 s, StopRequested, and the errors of `_published`.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        position, at = _published(pipeline, settings, table)
        try:
            arrow_view_as_of(pipeline, lsn=position.commit_lsn, epoch=position.epoch).relation(str(table))
        except LakeError:
            if time.monotonic() > end:
                raise
        else:
            return position, at
        if stop.wait(_PAUSE_S):
            raise StopRequested


def _not_begun(publisher: str) -> TargetUnavailableError:
    return TargetUnavailableError(
        f"publisher {publisher} has not published anything yet",
        f"start it, as with pgrepl publish FILE.json --publisher {publisher}, wait until pgrepl status"
        " FILE.json shows its position, and run this command again",
    )


def _published(
    pipeline: Pipeline, settings: PublisherSettings, table: TableName
) -> tuple[EventPosition, datetime]:
    """Return the end of a transaction up to which a table is published, and when the publisher saved that.

    Raises TargetUnavailableError if nothing is published yet, TargetError for a stopped table.
    """
    record = read_record(pipeline.lake_root, settings.name)
    if record is None or not record.generation or record.saved_at is None:
        raise _not_begun(settings.name)
    if any(stopped.table == str(table) for stopped in record.stopped.values()):
        raise TargetError(
            f"{table} is no longer published",
            "no changes would follow the snapshot: see the cause with pgrepl status FILE.json",
        )
    position = record.position
    lsn = position.commit_lsn if position.is_after_transaction else LSN(position.commit_lsn - 1)
    return EventPosition.after_transaction(position.epoch, lsn), record.saved_at


def _payloads(
    pipeline: Pipeline,
    settings: PublisherSettings,
    table: TableName,
    position: EventPosition,
    place: StreamPosition,
    stop: StopSignal,
) -> tuple[bytes, Iterator[list[bytes]]]:
    """Return the header and the encoded rows of the table as of a position."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnverifiedWarning)
            view = arrow_view_as_of(pipeline, lsn=int(position.commit_lsn), epoch=position.epoch)
            relation, rows = view.relation(str(table)), current(view.table(str(table)))
    except UnverifiedWarning as warning:
        raise LakeError(
            str(warning), "request the snapshot again after the replication app has passed this position"
        ) from None
    salt = process.hash_salt(settings)
    with changelog_errors():
        relations = KnownRelations(pipeline.lake_root)
    initial_columns = read_columns(pipeline.lake_root, settings.name)
    published = PublishedColumns(relations, settings.column_rules, salt, initial_columns=initial_columns)
    snapshot = SnapshotRows(relation, pipeline.options(table), published)
    log.info("a snapshot of %s: %d rows, as of %s", table, rows.num_rows, view.lsn)
    header = snapshot.header(position, place.stamp, place.at, rows.num_rows)
    return header, _encoded(snapshot, rows, stop)


def _encoded(snapshot: SnapshotRows, rows: pa.Table, stop: StopSignal) -> Iterator[list[bytes]]:
    step = max(1, min(_AT_ONCE, rows.num_rows * _AT_ONCE_BYTES // max(1, rows.nbytes)))
    for start in range(0, rows.num_rows, step):
        if stop.is_set:
            raise StopRequested
        yield snapshot.encode(rows.slice(start, step))


if __name__ == "__main__":
    process.leave(main(sys.argv[1:]))
