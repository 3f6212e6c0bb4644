"""The status of a pipeline, also while its apps do not run: gathered from source, state and lake."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, LakeError, NoChangelogError, PgReplError, StateError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import check_lake_tables_setting, lost_lake
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import differences
from airflow_provider_pgrepl.replication.app.sequences import SequencesStatus, read_sequences_status
from airflow_provider_pgrepl.replication.app.source_problems import (
    published_refused,
    source_problems,
    source_warnings,
)
from airflow_provider_pgrepl.replication.app.tables import file_differences
from airflow_provider_pgrepl.replication.changelog.layout import (
    PARTITION,
    EpochRecord,
    changelog_uri,
    start_of_hour,
)
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_durable_lsn
from airflow_provider_pgrepl.replication.events.publish.record import StoppedTable, read_record
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    TablePosition,
    read_table_position,
)
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, address, connect
from airflow_provider_pgrepl.replication.source.server import read_server, read_slot_limits, wal_lsn
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot, why_invalidated
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import Progress, TableBytes, TableMerges
from airflow_provider_pgrepl.replication.state.recorded_events import RunEvent
from airflow_provider_pgrepl.replication.state.reports import CopyProgress
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class PublisherStatus:
    """The state of a publisher of events, as it last saved it.

    Everything that committed at or before `position` is published, except for `stopped` tables. `lag_bytes`:
    the source's WAL after it. `error`: the error that ended the publisher.
    """

    name: str
    target: str
    position: str | None = None
    lag_bytes: int | None = None
    published: int = 0
    skipped: int = 0
    holder: str = ""
    saved_at: datetime | None = None
    stopped: tuple[StoppedTable, ...] = ()
    error: str = ""
    reason: str = ""
    hint: str = ""


def read_publisher(pipeline: Pipeline, name: str, end: LSN) -> PublisherStatus:
    """Return the status of a publisher of the pipeline file. If it cannot be read, the status holds the
    error.

    :param end: the end of the source's WAL
    """
    target = pipeline.publisher(name).target
    try:
        record = read_record(pipeline.lake_root, name)
    except PgReplError as error:
        kind = type(error).__name__
        return PublisherStatus(name, target, error=kind, reason=error.message, hint=error.hint)
    if record is None:
        return PublisherStatus(name, target)
    return PublisherStatus(
        name,
        target,
        str(record.position),
        max(0, end - record.position.commit_lsn - 1),
        record.published,
        record.skipped,
        record.holder,
        record.saved_at,
        tuple(record.stopped.values()),
        record.error,
        record.reason,
        record.hint,
    )


@dataclass(frozen=True)
class ChangelogStatus:
    """The changelog's files that hold changes.

    `bytes`: their size in the storage. `since`: their oldest hour. `slowest`: the table whose position is the
    lowest, None without one. `needed_bytes`: the size of the files that this table needs.
    `oldest_needed_at`: the commit time of the oldest change that a table which follows the stream has not
    applied; of a compacted file, the newest commit time counts.
    """

    files: int
    bytes: int
    since: datetime | None = None
    slowest: str | None = None
    needed_bytes: int = 0
    oldest_needed_at: datetime | None = None


def changelog_status(
    changelog: DeltaTable, epoch: int, positions: Mapping[str, LSN], followed: LSN | None = None
) -> ChangelogStatus:
    """Return the status of the changelog.

    :param positions: for each table, the LSN of this epoch up to which it is whole
    :param followed: the lowest LSN up to which a table is whole that follows the stream
    """
    files = pa.table(changelog.get_add_actions(flatten=True))
    if files.num_rows == 0:
        return ChangelogStatus(0, 0)
    slowest = min(positions, key=lambda table: positions[table], default=None)
    needed = 0
    if slowest is not None:
        needed = pc.sum(_above(files, epoch, positions[slowest])["size_bytes"]).as_py() or 0
    oldest = None if followed is None else pc.min(_above(files, epoch, followed)["max.commit_ts"]).as_py()
    since = start_of_hour(pc.min(files[f"partition.{PARTITION}"]).as_py())
    return ChangelogStatus(
        files.num_rows, pc.sum(files["size_bytes"]).as_py(), since, slowest, needed, oldest
    )


def _above(files: pa.Table, epoch: int, position: LSN) -> pa.Table:
    """Return the rows of the files of this epoch that hold changes above a position."""
    is_epoch = pc.equal(files["min.epoch"], epoch)
    return files.filter(pc.and_(is_epoch, pc.greater(files["max.commit_lsn"], position)))


@dataclass(frozen=True)
class SourceStatus:
    """The source as it answered: its address, its version, and the end of its WAL.

    `wal_keep_bytes`: its max_slot_wal_keep_size, None without a limit.
    """

    address: str
    server_version_num: int
    wal_lsn: LSN
    wal_keep_bytes: int | None = None


@dataclass(frozen=True)
class SlotStatus:
    """The state of the slot. `held_bytes`: bytes of WAL that the server keeps for it.

    `why_invalidated`: the reason why the server invalidated it, and the setting, as a sentence.
    """

    name: str
    active: bool
    active_pid: int | None
    held_bytes: int | None
    wal_status: str | None
    invalidation: str | None
    why_invalidated: str = ""


@dataclass(frozen=True)
class AppStatus:
    """The last report of the replication app about itself.

    `is_running`: a session holds the pipeline's lock, so that an app runs, even if it does not read the slot.
    `ended`: the event of its stop or failure, unless it runs, or ended without a trace.
    """

    holder: str
    reported_at: datetime | None
    changes_per_s: float
    is_running: bool = False
    ended: RunEvent | None = None


@dataclass(frozen=True)
class Step:
    """The LSN that one step of replication has reached, and the bytes of WAL from there to the source's
    end."""

    lsn: LSN | None
    lag_bytes: int | None


@dataclass(frozen=True)
class TableStatus:
    """The status of a table.

    Everything that committed at or before `position_lsn` is in the lake. So is everything at or before
    `whole_lsn`: the last consistent point, if that is later and holds the table. `lag_bytes`: the source's
    WAL after `whole_lsn`. `error`: the class of its error, `error_lsn`: where it happened. `trace`: lines
    with classes and frames of the unexpected exception that was the cause. `verified_through` and
    `verified_at`: the LSN and the time at which it was last found equal to its source. `copying`: the
    progress of its copy, None before its first report.
    """

    table: str
    state: TableState
    since: datetime
    position_lsn: LSN | None
    lag_bytes: int | None
    rows_copied: int | None
    error: str
    reason: str
    hint: str
    error_lsn: LSN | None
    bytes: TableBytes | None = None
    merges: TableMerges | None = None
    whole_lsn: LSN | None = None
    trace: tuple[str, ...] = ()
    verified_through: LSN | None = None
    verified_at: datetime | None = None
    copying: CopyProgress | None = None


@dataclass(frozen=True)
class PipelineStatus:
    """The status of a pipeline.

    `problems`: sentences about what is wrong or could not be read. `warnings`: those of the problems that may
    be intended. `steps`: received, durable, confirmed,
    applied. `tables`: without removed ones. `recorded`: the state database records the pipeline, which it
    does not after a teardown that kept the lake. `is_ours`: source, lake and state do not contradict each
    other; otherwise `problems` has the contradictions. `read_at`: the time at which it was read, by the clock
    of the state database, which dates its records: this host's clock may be wrong.
    """

    pipeline: str
    lake: str
    source: SourceStatus
    set_up: bool
    recorded: bool = True
    epoch: int | None = None
    slot: SlotStatus | None = None
    app: AppStatus | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    last_applied_commit_age_s: float | None = None
    consistent_point: ConsistentPoint | None = None
    tables: tuple[TableStatus, ...] = ()
    publishers: tuple[PublisherStatus, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changelog: ChangelogStatus | None = None
    is_ours: bool = True
    has_lake_tables: bool = True
    wal_budget: int | None = None
    read_at: datetime = field(default_factory=_now)
    sequences: SequencesStatus | None = None

    @property
    def wal_limit_bytes(self) -> int | None:
        """The bytes of WAL that the slot may retain, or None without a limit."""
        limits = [limit for limit in (self.source.wal_keep_bytes, self.wal_budget) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True)
class _Lake:
    """The state of the lake as the lake records it, which is authoritative for positions."""

    epoch: EpochRecord | None = None
    durable_lsn: LSN | None = None
    point: ConsistentPoint | None = None
    problems: tuple[str, ...] = ()
    changelog: DeltaTable | None = None


def read_status(pipeline: Pipeline, access: Access | None = None) -> PipelineStatus:
    """Read the status from source, state database and lake.

    :param access: the connection strings, by default those of the environment

    Raises ConfigError, SourceConnectionError, PrivilegeError. Whatever else cannot be read is a problem in
    the result.
    """
    access = access or Access.from_environment(pipeline)
    dsn = access.dsn
    with closing(connect(dsn, f"status {pipeline.name}")) as connection:
        end = wal_lsn(connection)
        limit = read_slot_limits(connection).wal_keep_bytes
        source = SourceStatus(address(dsn), read_server(connection).version_num, end, limit)
        slot = read_slot(connection, pipeline.slot)
        slot_status = _slot(connection, slot, end) if slot else None
        state = _read_state(access)
        recorded, progress, tables, problems = state.recorded, state.progress, state.tables, state.problems
        contradictions = _contradictions(access, connection)
        suffered, warnings = _source_problems(connection, pipeline, tables)
    lake = _read_lake(pipeline)
    if not contradictions and lake == _Lake() and any(record.position_lsn is not None for record in tables):
        away = lost_lake(pipeline)
        problems = (*problems, f"{away.message}: {away.hint}")
    differences = file_differences(pipeline, {record.table: record for record in tables}) if tables else ()
    problems = (*problems, *_lake_choice(pipeline, tables), *differences, *suffered, *warnings)
    applied = _applied(pipeline, lake, progress)
    sequences, late = read_sequences_status(pipeline, lake.epoch, lake.point, state.read_at)
    statuses = tuple(
        _table(pipeline, record, lake, end, progress)
        for record in tables
        if record.state is not TableState.REMOVED
    )
    return PipelineStatus(
        pipeline=pipeline.name,
        lake=pipeline.lake_root,
        source=source,
        set_up=recorded or lake.epoch is not None,
        recorded=recorded,
        epoch=lake.epoch.epoch if lake.epoch else None,
        slot=slot_status,
        app=_app(state),
        steps={
            "received": _step(progress.received_lsn if progress else None, end),
            "durable": _step(lake.durable_lsn, end),
            "confirmed": _step(slot.confirmed_flush_lsn if slot else None, end),
            "applied": Step(applied, _lag(applied, end)),
        },
        last_applied_commit_age_s=_age(lake.point, state.read_at),
        consistent_point=lake.point,
        tables=statuses,
        publishers=tuple(read_publisher(pipeline, name, end) for name in pipeline.publishers),
        problems=(*problems, *contradictions, *lake.problems, *late),
        warnings=(*differences, *warnings),
        is_ours=not contradictions,
        changelog=_changelog(lake, statuses),
        has_lake_tables=pipeline.has_lake_tables,
        wal_budget=pipeline.wal_budget,
        read_at=state.read_at,
        sequences=sequences,
    )


def _lake_choice(pipeline: Pipeline, tables: Iterable[TableRecord]) -> tuple[str, ...]:
    try:
        check_lake_tables_setting(pipeline, {record.table: record for record in tables})
    except ConfigError as error:
        return (_sentence(error),)
    return ()


def _applied(pipeline: Pipeline, lake: _Lake, progress: Progress | None) -> LSN | None:
    """Return the LSN up to which changes are applied: that of the last consistent point.

    Without lake tables: the LSN up to which the changelog is known to have all changes of each table.
    """
    if not pipeline.has_lake_tables:
        return progress.applied_lsn if progress else None
    return LSN(lake.point.lsn) if lake.point else None


def _sentence(error: PgReplError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message


def _source_problems(
    source: Connection, pipeline: Pipeline, tables: Iterable[TableRecord]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the problems at the source, and the warnings."""
    records = {record.table: record for record in tables}
    try:
        refused = published_refused(source, pipeline, records)
        return source_problems(source, pipeline, refused), source_warnings(source, pipeline, records)
    except PgReplError as error:
        return (f"the source could not be looked at: {error.message}",), ()


@dataclass(frozen=True)
class _State:
    """The records of a pipeline in the state database.

    `is_running`: its replication lock is held. `run`: the last start, stop or failure of its app.
    """

    recorded: bool = False
    progress: Progress | None = None
    tables: tuple[TableRecord, ...] = ()
    problems: tuple[str, ...] = ()
    is_running: bool = False
    run: RunEvent | None = None
    read_at: datetime = field(default_factory=_now)


def _read_state(access: Access) -> _State:
    name = access.pipeline.name
    with StateDatabase(access.state_dsn, f"status {name}") as state_db:
        if not state_db.is_set_up():
            return _State()  # The first snapshot creates its schema.
        try:
            if state_db.read_pipeline(name) is None:
                return _State()
            tables = tuple(state_db.read_tables(name).values())
            is_running = state_db.is_locked(name, "replicate")
            left = _left_behind(access.pipeline, state_db, tables)
            progress = state_db.read_progress(name)
            run = state_db.read_run(name)
            return _State(True, progress, tables, left, is_running, run, state_db.now())
        except StateError as error:
            return _State(True, problems=(_sentence(error),))


def _app(state: _State) -> AppStatus | None:
    found = state.progress
    if found is None:
        return None
    ended = None if state.is_running else state.run
    if ended is not None and not ended.has_ended_since(found.updated_at):
        ended = None
    return AppStatus(found.holder, found.updated_at, found.changes_per_s, state.is_running, ended)


def _left_behind(
    pipeline: Pipeline, state_db: StateDatabase, tables: Iterable[TableRecord]
) -> tuple[str, ...]:
    """Return sentences about tables that a killed snapshot app left `snapshotting`, or a killed repair
    `paused`."""
    found = []
    copied = [str(record.table) for record in tables if record.state is TableState.SNAPSHOTTING]
    if copied and not state_db.is_locked(pipeline.name, "snapshot"):
        found.append(
            f"{', '.join(copied)}: not being copied, because the snapshot was killed: {errors.SNAPSHOT}"
        )
    repaired = [str(record.table) for record in tables if record.is_paused_by_repair]
    if repaired and not state_db.is_locked(pipeline.name, "verify"):
        names = " ".join(f"'{name}'" for name in repaired)
        found.append(
            f"{', '.join(repaired)}: still paused, because the repair was killed: run pgrepl verify FILE.json"
            f" --repair, which resumes and repairs it, or only pgrepl resume FILE.json {names}"
        )
    return tuple(found)


def _contradictions(access: Access, source: Connection) -> tuple[str, ...]:
    """Return the contradictions to source, lake and state being this pipeline's, as sentences."""
    pipeline = access.pipeline
    with StateDatabase(access.state_dsn, f"status {pipeline.name}") as state_db:
        try:
            found = gather(pipeline, state_db, source, lake_may_fail=True, migrates=False)
        except StateError:
            return ()  # A schema of an older version, which _read_state reports.
    return tuple(_sentence(each.error) for each in differences(found))


def _read_lake(pipeline: Pipeline) -> _Lake:
    try:
        changelog = open_changelog(changelog_uri(pipeline.lake_root))
    except NoChangelogError:
        return _Lake()
    except Exception as error:  # noqa: BLE001 - status says of anything that it cannot be read
        log_unexpected(log, "reading the changelog", error, logging.WARNING)
        return _Lake(problems=(f"the changelog cannot be read: {type(error).__name__}",))
    try:
        epoch = EpochRecord.from_json(changelog.metadata().description)
    except PgReplError as error:
        return _Lake(problems=(error.message,))
    problems: tuple[str, ...] = ()
    point = None
    try:
        points = ConsistentPoints(pipeline.lake_root)
        points.check_lake()
        point = points.latest()
    except LakeError as error:
        problems = (*problems, error.message)
    if point is not None:
        positions: dict[str, int] = {key: LSN(position) for key, position in point.positions.items()}
        shown = replace(point, lsn=LSN(point.lsn), positions=positions)
        point = shown if point.epoch == epoch.epoch else None
    return _Lake(epoch, read_durable_lsn(changelog), point, problems, changelog)


def _changelog(lake: _Lake, tables: Iterable[TableStatus]) -> ChangelogStatus | None:
    if lake.changelog is None or lake.epoch is None:
        return None
    needing = {table.table: table.whole_lsn for table in tables if table.state.needs_changes}
    positions = {table: lsn for table, lsn in needing.items() if lsn is not None}
    following = (table.whole_lsn for table in tables if table.state.is_followed)
    followed = min((lsn for lsn in following if lsn is not None), default=None)
    return changelog_status(lake.changelog, lake.epoch.epoch, positions, followed)


def _table(
    pipeline: Pipeline, record: TableRecord, lake: _Lake, end: LSN, progress: Progress | None
) -> TableStatus:
    position = _table_position(pipeline, record, lake) if pipeline.has_lake_tables else None
    own, whole = (None, None) if position is None else (position.own, position.whole)
    if not pipeline.has_lake_tables:
        own = whole = record.position_lsn
    in_lake = not record.state.is_being_copied
    return TableStatus(
        table=str(record.table),
        state=record.state,
        since=record.since,
        position_lsn=own,
        whole_lsn=whole,
        lag_bytes=_lag(whole, end) if in_lake else None,
        rows_copied=record.rows_copied if pipeline.has_lake_tables else None,
        error=record.error,
        reason=record.reason,
        hint=record.hint,
        error_lsn=record.lsn,
        trace=tuple(record.trace.splitlines()),
        bytes=progress.table_bytes.get(record.table.path) if progress else None,
        merges=progress.table_merges.get(record.table.path) if progress else None,
        verified_through=record.verified_through,
        verified_at=record.verified_at,
        copying=record.copying,
    )


def _table_position(pipeline: Pipeline, record: TableRecord, lake: _Lake) -> TablePosition | None:
    if lake.epoch is None:
        return None
    key, point = str(record.table), lake.point
    try:
        table = open_table(f"{pipeline.lake_root}/{record.table.path}")
        named = point if point and key in point.tables else None
        return read_table_position(table, app_id(pipeline.name, lake.epoch.epoch), key, named)
    except PgReplError:
        return None


def _slot(source: Connection, slot: Slot, end: LSN) -> SlotStatus:
    held = slot.held_bytes(end)
    why = why_invalidated(source, slot) if slot.invalidation else ""
    return SlotStatus(slot.name, slot.active, slot.active_pid, held, slot.wal_status, slot.invalidation, why)


def _step(lsn: LSN | None, end: LSN) -> Step:
    """Return the step of an LSN before which everything is done. The LSN itself is not included."""
    return Step(lsn or None, max(0, end - lsn) if lsn else None)


def _lag(position: LSN | None, end: LSN) -> int | None:
    """Return the bytes of WAL after a position, which is included. The end of the WAL is not included."""
    return None if position is None else max(0, end - position - 1)


def _age(point: ConsistentPoint | None, now: datetime) -> float | None:
    if point is None or point.commit_ts is None:
        return None
    return max(0.0, (now - point.commit_ts).total_seconds())
