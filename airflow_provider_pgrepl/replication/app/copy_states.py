"""The states that a snapshot run records for its tables, and their restoration if the run fails."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Self

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError, PgReplError, Remedy, SnapshotError, TableError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import given_up
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import SnapshotHolder
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.publication import drop_tables, table_names
from airflow_provider_pgrepl.replication.source.slot_creation import ExportedSnapshot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.trace import traced

from .tables import membership_of

log = logging.getLogger(__name__)

_COPY_AGAIN_HINT = f"fix the cause, then {errors.RESNAPSHOT}"


class CopyStates:
    """A context manager that leaves no table `snapshotting` when its block raises.

    If the block raises before `copying` was called, the lake is unchanged: tables return to their previous
    state (`streaming` ones to `catching_up`), the records of new tables are deleted, and tables that this run
    published are dropped from the publication. If it raises later, the tables are marked errored. Tables that
    a killed run left `snapshotting` are marked errored in both cases.
    """

    def __init__(self, dsn: str, pipeline: Pipeline, state_db: StateDatabase) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._state_db = state_db
        self._before: dict[TableName, TableRecord | None] = {}
        self._oids: dict[TableName, int] = {}
        self._stopped: list[TableRecord] = []
        self._joined: dict[TableName, int] = {}
        self._is_copying = False

    def join(self, relations: Iterable[Relation]) -> None:
        """Remember that these tables joined the publication for this run."""
        self._joined |= {relation.table: relation.oid for relation in relations}

    def begin(self, relations: Collection[Relation]) -> None:
        """Record that these tables are requested, and set them to `snapshotting`.

        A table that has one of them under an earlier name is marked errored: the source's changes are applied
        to one lake table.
        """
        name, records = self._pipeline.name, self._state_db.read_tables(self._pipeline.name)
        self._oids |= {relation.table: relation.oid for relation in relations}
        self._stop_earlier_names(records, {relation.oid: relation.table for relation in relations})
        for table in (relation.table for relation in relations):
            record = records.get(table)
            self._before.setdefault(table, record)
            if record is None or record.state is TableState.REMOVED:
                self._state_db.set_state(name, table, TableState.PENDING)
            elif record.state is TableState.PAUSED:
                self._state_db.set_state(name, table, TableState.CATCHING_UP)
            self._record_membership(table, record)
            self._state_db.set_state(name, table, TableState.SNAPSHOTTING)

    def _stop_earlier_names(
        self, records: Mapping[TableName, TableRecord], copied: Mapping[int, TableName]
    ) -> None:
        for table, record in records.items():
            if record.relation is None or table in copied.values():
                continue
            if record.relation.oid in copied:
                now = copied[record.relation.oid]
                reason = f"the table was renamed or moved to {now}, and is copied under that name"
                hint = (
                    f"{errors.remove(table)}; or name it back at the source, {errors.remove(now)}, and then"
                    f" {errors.retry(table)}"
                )
                self._stop(record, DriftError(reason, hint, Remedy.MOVED))

    def _stop(self, seen: TableRecord, error: PgReplError) -> None:
        """Mark a table errored if changes are applied to it, or will be, whatever the app does meanwhile."""
        name, record = self._pipeline.name, seen
        while record.state.needs_changes:
            if self._state_db.mark_errored(name, record, error):
                log.error("%s is errored: %s", record.table, error.message)
                self._stopped.append(record)
                return
            gone = replace(record, state=TableState.REMOVED)
            record = self._state_db.read_tables(name).get(record.table, gone)

    def copying(self) -> None:
        """Remember that lake tables may be written from now on."""
        self._is_copying = True

    def mark_errored(self, table: TableName, error: PgReplError) -> None:
        """Mark this table errored; the other tables continue."""
        if isinstance(error, SnapshotError):
            error = given_up(error)
        log.error("%s is errored: %s", table, str(error).removeprefix(f"{table}: "))
        record = self._state_db.read_tables(self._pipeline.name).get(table)
        if record is None or record.state is TableState.REMOVED:
            self._state_db.set_state(self._pipeline.name, table, TableState.PENDING)
        self._record_membership(table, record)
        self._state_db.set_state(
            self._pipeline.name,
            table,
            TableState.ERRORED,
            error=type(error).__name__,
            reason=error.message,
            hint=errors.named(error.hint or _COPY_AGAIN_HINT, table),
            remedy=error.remedy,
            trace=error.trace,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Restore the tables or mark them errored.

        A PgReplError here is only logged: the block's error is raised.
        """
        try:
            records = self._state_db.read_tables(self._pipeline.name)
            begun = {table for table in self._before if self._is_begun(records.get(table), table)}
            restored = set() if self._is_copying else set(filter(self._is_restorable, begun))
            if not self._is_copying:
                out = self._joined.keys() - (begun - restored) | set(filter(self._was_out, restored))
                oids = self._oids | self._joined
                self.withdraw([oids[table] for table in out if table in oids])
                for record in self._stopped:
                    self._restore_record(record)
            for table in sorted(begun):
                if table in restored:
                    self._restore(table)
                else:
                    self.mark_errored(table, _cause(error))
        except PgReplError as failure:
            log.warning(
                "tables %s may stay in state snapshotting, as the state database could not be written: %s."
                " Copy each: pgrepl snapshot FILE.json --tables NAME",
                *(", ".join(map(str, sorted(self._before))), failure),
            )

    def _is_begun(self, now: TableRecord | None, table: TableName) -> bool:
        before = self._before[table]
        # A paused table becomes `catching_up` before it becomes `snapshotting`.
        is_resumed = before is not None and before.state is TableState.PAUSED and not self._is_copying
        return _is_under_way(now) or (is_resumed and now is not None and now.state is TableState.CATCHING_UP)

    def _is_restorable(self, table: TableName) -> bool:
        before = self._before[table]
        return before is None or not _is_under_way(before)

    def _was_out(self, table: TableName) -> bool:
        """Return True if the table was not replicated before. A killed run may have published it."""
        before = self._before[table]
        return before is None or before.state is TableState.REMOVED

    def withdraw(self, oids: Collection[int]) -> None:
        """Drop tables that this run published from the publication, if that is the pipeline's own. A failure
        is logged."""
        pipeline = self._pipeline
        if not oids or pipeline.publication_mode != "create":
            return
        try:
            if not self._state_db.owns_publication(pipeline):
                log.warning(
                    "publication %s was not altered, because it was not made by %r: set `publication_mode` to"
                    ' "use"',
                    *(pipeline.publication, pipeline.name),
                )
                return
            # Connect again: the error may come from the connection that published the tables.
            with closing(connect(self._dsn, "unpublish")) as source:
                # Find them by OID, because they may have been renamed.
                tables = table_names(source, oids)
                drop_tables(source, pipeline.publication, tables, pipeline.lock_timeout_s)
        except PgReplError as failure:
            known = {oid: str(table) for table, oid in (self._oids | self._joined).items()}
            names = ", ".join(sorted(known.get(oid, f"the table with oid {oid}") for oid in oids))
            log.warning(
                "tables that were not copied stay in publication %s: %s (%s). Run pgrepl remove FILE.json"
                " TABLE for each, or copy them",
                *(pipeline.publication, names, failure),
            )

    def _restore(self, table: TableName) -> None:
        before = self._before[table]
        if before is None:
            self._state_db.remove_table(self._pipeline.name, table)
        else:
            self._restore_record(before)

    def _restore_record(self, before: TableRecord) -> None:
        name, table = self._pipeline.name, before.table
        state = TableState.CATCHING_UP if before.state is TableState.STREAMING else before.state
        self._state_db.set_state(
            name,
            table,
            state,
            error=before.error,
            reason=before.reason,
            hint=before.hint,
            remedy=before.remedy,
            lsn=before.lsn,
            trace=before.trace,
        )
        self._state_db.set_membership(name, table, before.membership)

    def _record_membership(self, table: TableName, record: TableRecord | None) -> None:
        wanted = membership_of(self._pipeline, table)
        if (record.membership if record else "configured") != wanted:
            self._state_db.set_membership(self._pipeline.name, table, wanted)


def _is_under_way(record: TableRecord | None) -> bool:
    """Return True if the table waits for its copy, is being copied, or was when a run was killed."""
    return record is not None and record.state.is_being_copied


def _cause(error: BaseException) -> PgReplError:
    if isinstance(error, PgReplError):
        return error
    return traced(
        SnapshotError(f"the snapshot was stopped before the table was copied ({type(error).__name__})"), error
    )


def record_tables(
    pipeline: Pipeline,
    state_db: StateDatabase,
    states: CopyStates,
    record: EpochRecord,
    keeper: SnapshotHolder,
    exported: ExportedSnapshot,
) -> CopyResult:
    """Record the keeper's tables, which are `snapshotting`, as of its snapshot. Reads no rows.

    A table that the settings no longer fit is marked errored. If the snapshot is lost, no table is recorded.
    Raises LakeError, StateError.
    """
    # A commit at the consistent point itself is not in the snapshot.
    position = LSN(exported.consistent_point - 1)
    index = RelationIndex(relations_uri(pipeline.lake_root))
    try:
        watching = keeper.read(lambda source: trigger.read_watching(source, pipeline))
    except SnapshotError as lost:
        return CopyResult(lost=lost)
    place = None if watching is None else EffectiveFrom(position, watching)
    rules = BoundRules(pipeline, index.records, lambda: set(index.relation_ids()))
    found = CopyResult()
    # Do this first: a repeated run does not record a recorded table again, and would skip this step.
    _leave_lake(pipeline, record, position)
    for relation in (without_excluded_defaults(known, pipeline) for known in keeper.relations):
        if problems := list(rules.problems(relation)):
            error: PgReplError = TableError("\n".join(f"{relation.table}: {one}" for one in problems))
            states.mark_errored(relation.table, error)
            found.failed[relation.table] = error
            continue
        index.add(record.epoch, RelationRecord.of_catalog(relation), place)
        state_db.record_snapshot(pipeline.name, relation, position, 0, pipeline.to_json())
        state_db.set_state(pipeline.name, relation.table, TableState.CATCHING_UP, reached=position)
        found.done[relation.table] = 0
        log.info("recorded table %s: the changelog holds its changes after %s", relation.table, position)
    return found


def _leave_lake(pipeline: Pipeline, record: EpochRecord, position: LSN) -> None:
    """Append a consistent point without tables if the newest one has any.

    The lake tables no longer change, and readers must not take them for current.
    """
    points = ConsistentPoints(pipeline.lake_root)
    newest = points.latest()
    if newest is not None and newest.tables:
        points.append(ConsistentPoint(record.epoch, position, None, {}, {}))
        log.warning(
            "lake_tables is none: the lake tables in %s are no longer updated, and the newest consistent"
            " point names none of them",
            pipeline.lake_root,
        )
