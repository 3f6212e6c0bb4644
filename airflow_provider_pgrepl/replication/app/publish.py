"""The publishing app: runs one publisher of a pipeline until it is stopped or has caught up."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from airflow_provider_pgrepl.errors import (
    ConfigError,
    FencedError,
    PgReplError,
    SourceError,
    StateError,
    ToolError,
)
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.creek.snapshot_requests import (
    LakeSnapshots,
    SnapshotRequests,
    Snapshots,
)
from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.events.event import PublishedCounts
from airflow_provider_pgrepl.replication.events.position import EventPosition, begin_after
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherLog,
    PublisherRecord,
    read_record,
)
from airflow_provider_pgrepl.replication.events.reader import changelog_errors
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import Target
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import check_client
from airflow_provider_pgrepl.replication.runtime.process_io import leave_result
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.reports import PublisherReport, StoppedEvents

from . import process, progress_writer
from .event_makers import converter_factory
from .evidence import gather
from .ownership import Answer, Evidence, differences
from .process import StopSignal, of_publish
from .progress_writer import LockKeeper
from .reconnecting_database import open_reconnecting_database
from .source_snapshots import SourceSnapshots

log = logging.getLogger(__name__)
DurableLsnLookup = Callable[[LSN], LSN | None]
"""Given an LSN, returns the changelog's durable LSN once everything that committed at or before the LSN is
durable. Returns None before that, and if it is not known. For an idle source the changelog records this only
after a delay."""
_PUBLISHING = "airflow_provider_pgrepl.replication.events.targets"
_WAIT_S = 1.0


def check_recorded_lake(pipeline: Pipeline, state_db: StateDatabase) -> None:
    """Raise an error if the state records another lake for the pipeline, or another database wrote the lake.

    Raises the error of the first such difference; LakeError, ChangelogError. If the state records no lake, as
    after a teardown, only the lake is read. Another history of the source raises nothing: changes that were
    received from it before are published.
    """
    evidence = _gather(pipeline, state_db)
    for difference in differences(evidence):
        is_certain = evidence.recorded is not None or difference.answer is not Answer.UNDETERMINED
        if is_certain and not difference.give_up_for_teardown:
            raise difference.error


def _gather(pipeline: Pipeline, state_db: StateDatabase) -> Evidence:
    """Return the evidence, without that of the source if it cannot be reached.

    Copies of lake and state agree with each other. Only the source shows that they belong to another
    database.
    """
    try:
        with closing(connect(process.source_dsn(), f"publish {pipeline.name}", read_only=True)) as source:
            return gather(pipeline, state_db, source)
    except (SourceError, ConfigError, StateError) as error:
        log.info("the source is not compared with the lake: %s", error.message)
    return gather(pipeline, state_db, None)


def check_tables(pipeline: Pipeline, settings: PublisherSettings) -> None:
    """Raise ConfigError if the settings name a table that the pipeline does not replicate and never has.

    The publisher would wait for the table forever, and a rule with a wrong name would hide nothing. A table
    that a pattern of the pipeline matches may still be created: without a column rule or row filter for it,
    only a warning is logged.
    """
    listed = TableSelection.parse(pipeline.tables)
    known = {*(listed.names or ()), *map(TableName.parse, pipeline.insert_only)}
    with changelog_errors():
        known |= KnownRelations(pipeline.lake_root).names()
    if unknown := sorted(map(str, {*settings.column_rules.tables(), *settings.rows.tables} - known)):
        raise ConfigError(
            f"publisher {settings.name} has rules for columns of {', '.join(unknown)}, and the changelog"
            " has never had such a table",
            "fix the name in the publisher's rules. If the table is created later, list it by name"
            " in the pipeline's tables, in addition to its schema",
        )
    chosen = TableSelection.parse(settings.tables, settings.messages)
    wanted = set(chosen.names or ()) | set(settings.rules)
    missing = sorted(table for table in wanted - known if table.schema not in listed.schemas)
    schemas = listed.schemas | {table.schema for table in known}
    what = [*map(str, missing), *(f"{schema}.*" for schema in sorted(chosen.schemas - schemas))]
    if what:
        raise ConfigError(
            f"publisher {settings.name} names {', '.join(what)}, which the pipeline does not replicate and"
            " the changelog has never had",
            "fix the name in the publisher's tables, outbox or transform, or add the table to the"
            " pipeline's tables",
        )
    for table in sorted(wanted - known):
        log.warning("table %s is not in the changelog yet: its events begin when it is created", table)


def check_destination(settings: PublisherSettings, record: PublisherRecord) -> None:
    """Raise ConfigError if the settings name another destination than the publisher has sent events to.

    Consumers at the new destination would miss all earlier events without notice.
    """
    if record.place and record.place != settings.destination_of:
        raise ConfigError(
            f"publisher {settings.name} has sent its events to {record.place}, and its settings now name"
            f" {settings.destination_of}",
            "to continue at the new destination from the current position (it gets no earlier events): pgrepl"
            f" publish FILE.json --publisher {settings.name} --after {record.needed_after}."
            " To send all retained changes to it, add a publisher with another name",
        )


def check_stopped(settings: PublisherSettings, record: PublisherRecord) -> None:
    """Raise ConfigError if tables are stopped and the settings have `transform_transaction`.

    The function would get the changes of these tables without the other changes of their transactions.
    """
    if settings.whole is not None and record.stopped:
        names = ", ".join(sorted(one.table for one in record.stopped.values()))
        raise ConfigError(
            f"publisher {settings.name}: transform_transaction needs all changes of a transaction, but"
            f" {names} stopped before it was set",
            "publish again from the position where the first table stopped: pgrepl publish FILE.json"
            f" --publisher {settings.name} --after {record.needed_after}. Events of the other tables since"
            " then are sent twice",
        )


@dataclass(frozen=True)
class PublishedUpTo:
    """A callable that returns the publisher's record once everything up to an LSN is published, else None.

    Everything that committed at or before the LSN counts. Can be called from any thread.
    """

    publisher: Publisher
    durable_with: DurableLsnLookup

    def __call__(self, lsn: LSN) -> PublisherRecord | None:
        if has_published(self.publisher.record, LSN(lsn + 1)):
            return self.publisher.record
        durable = self.durable_with(lsn)
        record = self.publisher.record
        return record if durable is not None and has_published(record, durable) else None


def has_published(record: PublisherRecord, durable: LSN) -> bool:
    """Return True if everything that committed before `durable` is published, except for stopped tables."""
    position = record.position
    if position.is_after_transaction:
        return position.commit_lsn >= durable - 1
    return position.commit_lsn >= durable


def main(argv: Sequence[str]) -> int:
    """Run the app and return its exit code."""
    return process.run("publish", argv, of_publish, _run)


def check_changelog(pipeline: Pipeline) -> None:
    """Raise ChangelogError or LakeUnavailableError if the lake has no readable changelog."""
    open_changelog(changelog_uri(pipeline.lake_root))


def open_target(settings: PublisherSettings, uri: str) -> Target:
    """Return the target of a publisher, not yet connected.

    Raises ToolError if its client is missing, TargetError.
    """
    kind = TARGETS[settings.target]
    try:
        target = getattr(importlib.import_module(f"{_PUBLISHING}.{kind.module}"), kind.title)
    except ImportError:
        raise ToolError(
            f"the client of {kind.title} ({kind.client}) is missing",
            f"pip install 'airflow-provider-pgrepl[{settings.target}]'",
        ) from None
    given = {"registry": process.registry_uri()} if FORMATS[settings.format].has_registry else {}
    found: Target = target(uri, settings, **given)
    return found


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    with StopSignal() as stop:
        publishers: list[Publisher] = []
        until = arguments.until
        try:
            reached = publish(
                pipeline,
                arguments.publisher,
                stop,
                until=until,
                after=arguments.after,
                snapshot_command=_snapshot_command(arguments),
                begun=publishers.append,
            )
        finally:
            if publishers:
                leave_result(summary(publishers[0].record))
    if not publishers:
        return process.RETRY_MAY_HELP if until is not None else process.DONE
    return _end(publishers[0], reached, is_limited=until is not None)


class Stop(Protocol):
    """A signal that it is time to end."""

    def wait(self, seconds: float) -> bool:
        """Wait for up to `seconds`, and return True if it is time to end."""

    @property
    def is_set(self) -> bool:
        """Return True if it is time to end."""


def publish(
    pipeline: Pipeline,
    name: str,
    stop: Stop,
    *,
    until: LSN | str | None = None,
    after: str | None = None,
    snapshot_command: Sequence[str] = (),
    durable_with: DurableLsnLookup = lambda _: None,
    begun: Callable[[Publisher], object],
) -> bool:
    """Publish until it is time to end, or until everything up to `until` is published: return True then.

    Raises PgReplError.

    :param until: an LSN, or `caught-up` for everything that is durable at the start
    :param snapshot_command: the command that starts the process of a snapshot from the lake
    :param durable_with: as in `PublishedUpTo`
    :param begun: called with the publisher before it publishes; not called if it is time to end before that
    """
    begin_compiling()
    settings = pipeline.publisher(name)
    # Silence the client libraries: they log each failed attempt to connect as an error, with a traceback.
    for client in (*(kind.logger for kind in TARGETS.values()), "httpx2"):
        logging.getLogger(client).setLevel(logging.CRITICAL)
    target = open_target(settings, process.target_uri())
    salt = process.hash_salt(settings)
    role = f"publish {pipeline.name} {settings.name}"
    with (
        closing(open_reconnecting_database(process.state_dsn(), role, 0.0, stop.wait)) as state_db,
        contextlib.ExitStack() as stack,
    ):
        check_recorded_lake(pipeline, state_db)
        check_tables(pipeline, settings)
        state_db.lock(pipeline.name, f"publish {settings.name}")
        publishers: list[Publisher] = []
        keeper = LockKeeper(
            state_db,
            process.end_at_once,
            report=lambda: _report(state_db, pipeline, settings, publishers),
        )
        stack.enter_context(keeper)
        publisher_log = PublisherLog(pipeline.lake_root, settings.name)
        record = _with_columns(_take(pipeline, settings, publisher_log, after), pipeline, settings)
        check_stopped(settings, record)
        durable = _durable_after(pipeline, record.position, stop)
        if durable is None:
            return False
        make = converter_factory(settings, salt, initial_columns=record.columns)
        publisher = Publisher(pipeline, settings, publisher_log, record, target, stop.wait, make)
        sent: PublishedCounts | None = None
        if FORMATS[settings.format].has_snapshots:
            # Imported here, where the client is known to be installed.
            from airflow_provider_pgrepl.replication.creek.streams import write_as_creek
            from airflow_provider_pgrepl.replication.events.targets.jetstream import jetstream_of

            jetstream = jetstream_of(target)
            sent = jetstream.sent
            snapshots: Snapshots
            if pipeline.has_lake_tables:
                snapshots = stack.enter_context(closing(LakeSnapshots(pipeline, snapshot_command)))
            else:
                published = PublishedUpTo(publisher, durable_with)
                snapshots = SourceSnapshots(pipeline, settings, jetstream.servers, published)
            requests = stack.enter_context(SnapshotRequests(pipeline, settings, snapshots))
            write_as_creek(jetstream, settings, StreamLake(pipeline.lake_root), requests.accept)
        if settings.metrics:
            check_client()
            from airflow_provider_pgrepl.replication.app.metrics.publisher import serve_publisher

            stack.enter_context(serve_publisher(pipeline.name, settings, lambda: publisher.progress, sent))
        begun(publisher)
        publishers.append(publisher)
        stack.callback(_report_last, state_db, pipeline, settings, publisher)
        try:
            return publisher.run(LSN(max(0, durable - 1)) if isinstance(until, str) else until)
        except FencedError as error:
            log.error("%s", error)
            process.end_at_once()


def _report(
    state_db: StateDatabase, pipeline: Pipeline, settings: PublisherSettings, publishers: Sequence[Publisher]
) -> None:
    """Record how far a publisher that has begun is, for the page in Airflow. Raises PgReplError."""
    for publisher in publishers:
        record = publisher.record
        stopped = tuple(
            StoppedEvents(one.names, str(one.after), one.error, one.reason, one.hint)
            for one in record.stopped.values()
        )
        report = PublisherReport(
            settings.name,
            settings.target,
            None if settings.tables is None else tuple(settings.tables),
            LSN(max(0, record.position.commit_lsn)),
            stopped,
            progress_writer.holder(),
        )
        state_db.write_publisher(pipeline.name, report)


def _report_last(
    state_db: StateDatabase, pipeline: Pipeline, settings: PublisherSettings, publisher: Publisher
) -> None:
    """Record where a publisher ended, unless the state database is away."""
    with contextlib.suppress(PgReplError):
        _report(state_db, pipeline, settings, [publisher])


def _snapshot_command(arguments: argparse.Namespace) -> list[str]:
    module = "airflow_provider_pgrepl.replication.app.creek.publish_snapshot"
    given = ("--pipeline", arguments.pipeline, "--publisher", arguments.publisher)
    return [sys.executable, "-m", module, *given]


def _end(publisher: Publisher, reached: bool, *, is_limited: bool) -> int:
    record = publisher.record
    log.info("published up to %s: %d events in all", record.position, record.published)
    if record.stopped:
        names = ", ".join(sorted(one.table for one in record.stopped.values()))
        log.error("not published, because the tables stopped: %s; run pgrepl status FILE.json", names)
    if not is_limited:
        return process.DONE
    if not reached:
        log.warning("stopped before the end was reached")
        return process.RETRY_MAY_HELP
    return process.WILL_NOT_HELP if record.stopped else process.DONE


def summary(record: PublisherRecord) -> dict[str, object]:
    """Return the state of a publisher in JSON types, small enough for XCom."""
    return {
        "position": str(record.position),
        "published": record.published,
        "skipped": record.skipped,
        "stopped": sorted(one.table for one in record.stopped.values()),
        "error": record.error,
    }


def _take(
    pipeline: Pipeline, settings: PublisherSettings, publisher_log: PublisherLog, after: str | None
) -> PublisherRecord:
    changelog = open_changelog(changelog_uri(pipeline.lake_root))
    holder = progress_writer.holder()
    if after is not None:
        begin = begin_after(changelog, after)
        taken = publisher_log.take(PublisherRecord(begin), holder, is_new=True)
        record = replace(taken, position=begin, stopped={}, columns=None, place=settings.destination_of)
        publisher_log.save(record)
        return record
    if (known := read_record(pipeline.lake_root, settings.name)) is not None:
        check_destination(settings, known)
    begin = begin_after(changelog, None)
    if settings.begin == "newest":
        durable = LSN(max(0, read_durable_lsn(changelog) - 1))
        begin = max(begin, EventPosition.after_transaction(read_epoch_number(changelog), durable))
    # The record of an earlier version lacks the destination.
    record = publisher_log.take(PublisherRecord(begin), holder)
    return replace(record, place=settings.destination_of)


def _with_columns(
    record: PublisherRecord, pipeline: Pipeline, settings: PublisherSettings
) -> PublisherRecord:
    """Return the record with the columns that the publisher begins with, unless `new_columns` is `publish`.

    The record is saved before anything is sent. `--after` discards the columns: the publisher then begins
    with those of that time.
    """
    if settings.new_columns == "publish":
        return replace(record, columns=None)
    if record.columns is not None:
        return record
    with changelog_errors():
        return replace(record, columns=KnownRelations(pipeline.lake_root).attnums())


def _durable_after(pipeline: Pipeline, position: EventPosition, stop: Stop) -> LSN | None:
    """Wait until the changelog is durable beyond `position`, and return its durable LSN.

    Returns None when it is time to end. A crash of the host may have removed published changes from the
    changelog: the server sends them again. If the changelog is in another epoch than `position`, the function
    returns without waiting.
    """
    has_said = False
    while True:
        changelog = open_changelog(changelog_uri(pipeline.lake_root))
        durable = read_durable_lsn(changelog)
        if position.is_within(durable) or read_epoch_number(changelog) != position.epoch:
            return durable
        if not has_said:
            log.warning(
                "changes up to %s are published, but the changelog ends at %s: it was restored from"
                " a copy, or the host crashed. Waiting until the changelog has passed the published"
                " position",
                *(position, durable),
            )
            has_said = True
        if stop.wait(_WAIT_S):
            return None
