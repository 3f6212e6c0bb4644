"""The app that sends snapshots of tables to NATS, from the lake, as creek has them."""

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
from typing import TYPE_CHECKING, cast

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
from airflow_provider_pgrepl.replication.events.publish.publisher import TimeToEnd
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
    from airflow_provider_pgrepl.replication.creek.stream_reading import StreamPlace
    from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream

log = logging.getLogger("airflow_provider_pgrepl.publish_snapshot")

_PATIENCE_S, _PAUSE_S = 45.0, 0.5
_AT_ONCE, _AT_ONCE_BYTES = 5_000, 8 << 20
"""How much is encoded at once, and on its way."""
_SERVE, _IDLE_S = "--requests", 60.0


def main(argv: Sequence[str]) -> int:
    """Run the app; returns its exit code."""
    if _SERVE in argv:
        return serve([given for given in argv if given != _SERVE])
    return process.run("publish-snapshot", argv, of_publish_snapshot, run)


def serve(argv: Sequence[str], idle_s: float = _IDLE_S) -> int:
    """Make the snapshot that each line of stdin asks for, `{"table": …, "subject": …}`, and answer with
    its exit code, a line each. Ends with stdin, or when no request came for `idle_s`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Whatever a library prints is no answer.
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
    """Return the next line of stdin; nothing where it ended, or none came in time."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # The handlers of the last snapshot's StopSignal would let it pass.
        signal.signal(number, signal.SIG_DFL)
    return sys.stdin.readline() if select.select([sys.stdin], [], [], idle_s)[0] else ""


def run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    """Send a snapshot; its subject goes to stdout. Raises what `send` does."""
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
    """Send a snapshot to a subject. Raises ConfigError, ToolError, TargetError, and what reading the lake
    does."""
    settings, subject = pipeline.publisher(arguments.publisher), arguments.subject
    table = _wanted(settings, arguments.table)
    servers = cast("JetStream", open_target(settings, process.target_uri())).servers
    # With a client that is known to be there.
    from airflow_provider_pgrepl.replication.creek.snapshot_sender import Wanted, send_snapshot

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
            send_snapshot(servers, settings, subject, Wanted(lake, table, position, at, read))
        except TimeToEnd:
            log.warning("asked to end: the snapshot of %s has no end, which says that it is not whole", table)
            return process.RETRY_MAY_HELP
    return process.DONE


def _published_up_to(pipeline: Pipeline, settings: PublisherSettings, lsn: LSN) -> PublisherRecord | None:
    """Of a publisher that runs in another process, as it has written down. Raises TargetUnavailableError."""
    record = read_record(pipeline.lake_root, settings.name)
    if record is None or not record.generation:
        raise TargetUnavailableError(
            f"publisher {settings.name} has not published anything yet", "ask again when it has begun"
        )
    return record if has_published(record, LSN(lsn + 1)) else None


def _wanted(settings: PublisherSettings, given: str) -> TableName:
    """Raises ConfigError for a table, or a publisher, that has no snapshots."""
    if not FORMATS[settings.format].has_snapshots:
        raise ConfigError(
            f"publisher {settings.name} is not of creek's format, and others have no snapshots",
            "read the table from the lake at a consistent point, and publish --after that",
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
    """The same, once the lake can show the table as of it: it may hold it from a later position on only, to
    which the publisher comes soon."""
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
            raise TimeToEnd


def _published(
    pipeline: Pipeline, settings: PublisherSettings, table: TableName
) -> tuple[EventPosition, datetime]:
    """Up to which end of a transaction all of a table is published, and when that was written down."""
    record = read_record(pipeline.lake_root, settings.name)
    if record is None or not record.generation or record.saved_at is None:
        raise TargetUnavailableError(
            f"publisher {settings.name} has not published anything yet", "ask again when it has begun"
        )
    if any(stopped.table == str(table) for stopped in record.stopped.values()):
        raise TargetError(
            f"{table} is not published any more", "`pgrepl status` says why; a snapshot would not be followed"
        )
    position = record.position
    lsn = position.commit_lsn if position.is_after_transaction else LSN(position.commit_lsn - 1)
    return EventPosition.after_transaction(position.epoch, lsn), record.saved_at


def _payloads(
    pipeline: Pipeline,
    settings: PublisherSettings,
    table: TableName,
    position: EventPosition,
    place: StreamPlace,
    stop: StopSignal,
) -> tuple[bytes, Iterator[list[bytes]]]:
    """The table as of a position."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnverifiedWarning)
            view = arrow_view_as_of(pipeline, lsn=int(position.commit_lsn), epoch=position.epoch)
            relation, rows = view.relation(str(table)), current(view.table(str(table)))
    except UnverifiedWarning as warning:
        raise LakeError(str(warning), "ask again when the replication has come to it") from None
    salt = process.hash_salt(settings)
    with changelog_errors():
        relations = KnownRelations(pipeline.lake_root)
    begun_with = read_columns(pipeline.lake_root, settings.name)
    published = PublishedColumns(relations, settings.column_rules, salt, begun_with=begun_with)
    snapshot = SnapshotRows(relation, pipeline.choices(table), published)
    log.info("a snapshot of %s: %d rows, as of %s", table, rows.num_rows, view.lsn)
    header = snapshot.header(position, place.stamp, place.at, rows.num_rows)
    return header, _encoded(snapshot, rows, stop)


def _encoded(snapshot: SnapshotRows, rows: pa.Table, stop: StopSignal) -> Iterator[list[bytes]]:
    step = max(1, min(_AT_ONCE, rows.num_rows * _AT_ONCE_BYTES // max(1, rows.nbytes)))
    for start in range(0, rows.num_rows, step):
        if stop.is_set:
            raise TimeToEnd
        yield snapshot.encode(rows.slice(start, step))


if __name__ == "__main__":
    process.leave(main(sys.argv[1:]))
