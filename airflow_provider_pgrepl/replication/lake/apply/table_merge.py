"""Apply changelog files to one lake table, in a Spark task. Does not import Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl import errors as hints
from airflow_provider_pgrepl.errors import (
    DriftError,
    LakeTableError,
    LakeUnavailableError,
    OvertakenError,
    PgReplError,
    Remedy,
    Scope,
)
from airflow_provider_pgrepl.replication.changelog.gaps import first_gap
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.lake.delta.commit import written_bytes
from airflow_provider_pgrepl.replication.lake.delta.live_files import commit_fingerprint, live_bytes
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import check_writers
from airflow_provider_pgrepl.replication.lake.delta.table import (
    epoch_of,
    forget,
    leave,
    no_position,
    open_newest,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.history.apply import check_history
from airflow_provider_pgrepl.replication.lake.history.table import history_uri
from airflow_provider_pgrepl.replication.lake.merge.large_transactions import LargeChanges, bytes_of
from airflow_provider_pgrepl.replication.lake.merge.merge import check_columns, refused_truncate
from airflow_provider_pgrepl.replication.lake.schema_evolution.evolution import EvolvingTable
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import (
    RelationCache,
    RelationTimeline,
    read_relations,
    relation_timeline,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.storage import is_store_unavailable, open_storage, storage_error
from airflow_provider_pgrepl.replication.values import lake_schema
from airflow_provider_pgrepl.trace import log_unexpected, trace_of

log = logging.getLogger(__name__)
_LARGE = 2
"""Changes of more than this many slices are outlined first, and not read into memory as a whole."""
_Stop = tuple[LSN, PgReplError]


@dataclass(frozen=True)
class TableResult:
    """The result of applying changes to one table. `version`, `position`: those of the lake table. `error`:
    None if the work succeeded.

    `history_version`: the version of its history, None if it has none. `relation`: the relation of the lake
    table, as JSON, if it is not the recorded one. `fingerprint`: of the newest commits of the table and its
    history. `trace`: classes and frames of an unexpected exception behind the error.

    `has_gone_back`: the lake table is at a position before the known one, and nothing was applied.
    `overtaken`: the message about a commit of another program that prevented the work, which is then tried
    again. Otherwise empty.

    `seconds`: duration. `bytes_changed`: uncompressed values of the table's changes. `bytes_written`: to the
    table and its history. `bytes_live`: size of the lake table afterwards.
    """

    relation_id: int
    position: int = 0
    version: int = 0
    changes: int = 0
    error: str | None = None
    hint: str = ""
    error_kind: str = ""
    stops_pipeline: bool = False
    error_lsn: int = 0
    history_version: int | None = None
    relation: str | None = None
    remedy: Remedy | None = None
    fingerprint: str = ""
    has_gone_back: bool = False
    overtaken: str = ""
    seconds: float = 0.0
    bytes_changed: int = 0
    bytes_written: int = 0
    bytes_live: int = 0
    trace: str = ""

    @classmethod
    def of_error(cls, relation_id: int, error: PgReplError) -> TableResult:
        """Return the result of a table that stops with its own error."""
        return cls(relation_id)._with(error)

    def stopped(self, lsn: LSN, error: PgReplError) -> TableResult:
        """Return this result with the error of a table that stops before the transaction at `lsn`."""
        return replace(self._with(error), error_lsn=int(lsn))

    def _with(self, error: PgReplError) -> TableResult:
        return replace(
            self,
            error=error.message,
            hint=error.hint,
            error_kind=type(error).__name__,
            remedy=error.remedy,
            trace=error.trace,
        )

    def to_error(self, table: TableName) -> PgReplError:
        """Return the error of the task as an exception of its original class.

        An error that stops only the table always has a hint: by default to resnapshot it, or for an
        unexpected exception to keep its trace and retry first.
        """
        of_unknown_kind = LakeUnavailableError if self.stops_pipeline else LakeTableError
        kind: type[PgReplError] = getattr(errors, self.error_kind, of_unknown_kind)
        if self.stops_pipeline:
            error = kind(str(self.error), self.hint)
        else:
            error = kind(str(self.error), self.hint or self._default_hint(table), self.remedy)
        error.trace = self.trace
        return error

    def _default_hint(self, table: TableName) -> str:
        if not self.trace:
            return hints.resnapshot(table)
        return (
            "save the trace for a bug report (pgrepl status FILE.json --json), then retry the table: pgrepl"
            f" retry FILE.json '{table}'; if it stops again, {hints.resnapshot(table)}"
        )


@dataclass(frozen=True)
class TableContext:
    """Everything that a task needs to know about a table: its location, the pipeline that writes it, and its
    definition.

    `relation`: as recorded. If the lake table names another one, that is used. `choices`: the settings with
    which the table was copied. `version`: a version of the lake table that this pipeline is known to have
    written, or None. `position`: the position that the table is known to have reached. The files contain all
    its later changes.
    """

    relation: Relation
    options: TableOptions
    app: str
    lake_root: str
    slice_bytes: int
    version: int | None = None
    position: int = 0

    @property
    def changelog(self) -> str:
        return changelog_uri(self.lake_root)

    @property
    def uri(self) -> str:
        return f"{self.lake_root}/{self.relation.table.path}"

    @property
    def history_uri(self) -> str | None:
        """The URI of the table's history, None if it has none."""
        if not self.options.policy.history:
            return None
        return history_uri(self.lake_root, self.relation.table)

    def close(self) -> None:
        """Drop the open handles of the table and its history: after an error they may be at another version
        than the next work expects."""
        for uri in (self.uri, self.history_uri):
            if uri is not None:
                forget(uri)

    @property
    def relations(self) -> RelationCache:
        return RelationCache(self.lake_root, self.changelog, self.relation.oid)


def bring_forward(work: TableContext, paths: Iterable[str], upto_lsn: LSN) -> TableResult:
    """Apply the table's changes below `upto_lsn` that are in the files at `paths`. Errors are returned in the
    result."""
    relation_id = work.relation.oid
    try:
        return _apply(work, list(paths), upto_lsn)
    except OvertakenError as error:
        work.close()
        return TableResult(relation_id, overtaken=error.message)
    except PgReplError as error:
        work.close()
        result = TableResult.of_error(relation_id, error)
        return replace(result, stops_pipeline=error.scope is Scope.PIPELINE)
    except Exception as error:  # noqa: BLE001 - it goes into the result, without its text
        work.close()
        if isinstance(error, OSError) or is_store_unavailable(error):
            told = storage_error("the lake cannot be read or written", error)
            return TableResult(
                relation_id,
                error=told.message,
                hint=told.hint,
                error_kind=type(told).__name__,
                stops_pipeline=True,
                trace=trace_of(error),
            )
        # The message may contain values of rows, so only the class and the frames are reported.
        log_unexpected(log, f"applying changes to {work.relation.table}", error)
        return TableResult(relation_id, error=f"unexpected {error.__class__.__name__}", trace=trace_of(error))


def _apply(work: TableContext, paths: list[str], upto_lsn: LSN) -> TableResult:
    table, left = open_newest(work.uri, work.app, work.version)
    position = _position(table, work)
    if position < work.position:
        work.close()
        return TableResult(work.relation.oid, position, int(table.version()), has_gone_back=True)
    lake = _open(work, table, left)
    rows, timeline, stop = _follow(work, lake, paths, upto_lsn)
    work.relations.add(timeline.derived, epoch_of(work.app))
    opened = int(lake.table.version())
    history_opened = 0 if lake.history is None else int(lake.history.version())
    changes = lake.follow(timeline)
    # Delta accepts our commit after another program's append, so check for other writers again.
    check_writers(lake.table, work.relation.table, opened)
    result = TableResult(
        work.relation.oid,
        lake.position,
        lake.table.version(),
        changes,
        history_version=None if lake.history is None else lake.history.version(),
        relation=_changed_relation(work, lake),
        fingerprint=_leave(work, lake),
        bytes_changed=bytes_of(rows),
        bytes_written=_written(lake, opened, history_opened),
        bytes_live=live_bytes(lake.table),
    )
    stop = timeline.stop or stop
    return result if stop is None else result.stopped(*stop)


def _follow(
    work: TableContext, lake: EvolvingTable, paths: list[str], upto_lsn: LSN
) -> tuple[pa.Table, RelationTimeline, _Stop | None]:
    """Return the table's changes, the relations that they introduce, and the transaction at which the table
    stops, if any.

    If there are many changes, return an outline of them instead, and have them read in parts.
    """
    filesystem, root = open_storage(work.changelog)
    large = LargeChanges(filesystem, root, paths, work.relation.oid, lake.position, upto_lsn)
    if lake.history is None and large.bytes > _LARGE * work.slice_bytes:
        followed = _follow_rows(work, lake, large.outline())
        # If a transaction alters the table midway, the changes before its DDL have to be converted to the new
        # relation. That needs all rows.
        if not any(span.before for span in followed[1].spans):
            lake.large = large
            return followed
    return _follow_rows(work, lake, large.all())


def _follow_rows(
    work: TableContext, lake: EvolvingTable, rows: pa.Table
) -> tuple[pa.Table, RelationTimeline, _Stop | None]:
    work.relations.remember(rows)
    stop = _first_stop(rows, work)
    if stop is not None:
        rows = rows.filter(pc.less(rows["commit_lsn"], stop[0]))
    return rows, relation_timeline(lake.first, rows, work.relations.find, work.options), stop


def _written(lake: EvolvingTable, opened: int, history_opened: int) -> int:
    size = written_bytes(lake.table.table_uri, opened, int(lake.table.version()))
    if lake.history is None:
        return size
    return size + written_bytes(lake.history.table_uri, history_opened, int(lake.history.version()))


def _first_stop(rows: pa.Table, work: TableContext) -> _Stop | None:
    """Return the first transaction at which the table has to stop whatever its columns are, and the error: a
    refused TRUNCATE or a gap. None if there is none."""
    truncate = refused_truncate(rows, work.relation, work.options)
    gap = first_gap(rows, work.relation.table)
    stops: list[_Stop] = [stop for stop in (truncate, gap) if stop is not None]
    return min(stops, key=lambda stop: stop[0], default=None)


def fingerprints_at(work: TableContext, version: int, history_version: int | None) -> str:
    """Return a fingerprint that identifies the commits of the lake table and its history at these
    versions."""
    fingerprint = commit_fingerprint(work.uri, version)
    if work.history_uri is None or history_version is None:
        return fingerprint
    return f"{fingerprint} {commit_fingerprint(work.history_uri, history_version)}"


def _leave(work: TableContext, lake: EvolvingTable) -> str:
    fingerprint = leave(lake.table, work.uri)
    if work.history_uri is None or lake.history is None:
        return fingerprint
    return f"{fingerprint} {leave(lake.history, work.history_uri)}"


def _position(table: DeltaTable, work: TableContext) -> LSN:
    position = read_position(table, work.app)
    if position is None:
        raise DriftError(f"{work.relation.table}: {no_position(table)}")
    return position


def _open(work: TableContext, table: DeltaTable, left: int | None) -> EvolvingTable:
    """Open the table with its history, as `_apply` needs it. Raises LakeTableError, FencedError if the table
    is not as this pipeline left it."""
    known = max((version for version in (work.version, left) if version is not None), default=None)
    if known is None or table.version() > known:
        check_writers(table, work.relation.table, known)
    built, first = _relations(work, table)
    if left is None:
        check_columns(table, lake_schema(built, work.options), built)
    # Pass no known version for the history: no commit of a history is set aside because a file is missing, as
    # a snapshot could not restore it.
    history = None if work.history_uri is None else open_newest(work.history_uri, work.app)[0]
    if history is not None:
        check_history(table, history, work.relation, work.app)
    return EvolvingTable(
        work.options, work.lake_root, work.slice_bytes, work.app, table, history, built, first
    )


def _relations(work: TableContext, table: DeltaTable) -> tuple[Relation, Relation]:
    """Return the relation of the lake table, and the relation of its next changes. Both are the recorded one
    if an earlier version of this package wrote the table without them."""
    versions = read_relations(table)
    if versions is None:
        return work.relation, work.relation
    built = _relation_of(work, versions[0])
    return built, built if versions[1] == versions[0] else _relation_of(work, versions[1])


def _relation_of(work: TableContext, version: int) -> Relation:
    if version == work.relation.version:
        return work.relation
    record = work.relations.find(version)
    if record is None or record.catalog is None:
        raise LakeTableError(
            f"{work.relation.table}: the definition that its lake table is for is not known any more"
        )
    return record.catalog


def _changed_relation(work: TableContext, lake: EvolvingTable) -> str | None:
    """Return the relation of the lake table as JSON if it is not the recorded one, otherwise None."""
    versions = read_relations(lake.table)
    if versions is None or versions[0] == work.relation.version:
        return None
    return _relation_of(work, versions[0]).to_json()
