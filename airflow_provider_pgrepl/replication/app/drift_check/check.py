"""The check for drift: compares the tables at the source with what their lake tables were built for.

The stream reports DDL only before the next change of the table. This check reads the catalog, at any time,
also while the pipeline does not run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError, PgReplError, PrivilegeError, Remedy
from airflow_provider_pgrepl.replication.app.access import Access, not_recorded
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import check_ours
from airflow_provider_pgrepl.replication.app.source_problems import (
    protect_source,
    published_refused,
    source_problems,
    source_warnings,
)
from airflow_provider_pgrepl.replication.app.tables import followed_names, new_tables
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.files import new_partitions
from airflow_provider_pgrepl.replication.drift.judge import compare_catalog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.continuity import check_publication
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    find_relation,
    read_relation,
    read_relations,
)
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.tables import right_problems
from airflow_provider_pgrepl.replication.source.server import written_lsn
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from .report import DriftReport, TableDrift

WAIT_S = 75.0
"""Seconds to wait, a little more than it takes until an idle source's LSN is applied."""

_POLL_S = 0.5
_RUNNING = timedelta(seconds=15)
"""A running app has reported within this time: it reports every few seconds."""
_DRIFT_ERRORS = (DriftError.__name__, PrivilegeError.__name__)
_AWAITED = "all its files were replaced, as by a TRUNCATE that the stream has not sent yet"


def may_be_truncated(recorded: Relation, current: Relation | None, pipeline: Pipeline) -> bool:
    """Return True if one transaction replaced all files of the table, and no other change stops it."""
    if current is None:
        return False
    now = current.files
    before = {oid: file for oid, (file, _) in recorded.files.items()}
    # If the table had no partitions, only partitions that were created since can show it.
    before = before or {part.oid: part.relfilenode for part in new_partitions(recorded, current)}
    xids = [now[oid][1] for oid, file in before.items() if oid in now and now[oid][0] != file]
    if len(xids) != len(before) or len(set(xids)) != 1:
        return False
    assumed = replace(recorded, truncated_by=xids.pop())
    return compare_catalog(assumed, current, pipeline.options(recorded.table)).kind is not DriftKind.UNSAFE


def wait_until_applied(state_db: StateDatabase, pipeline: str, lsn: LSN, timeout_s: float = WAIT_S) -> bool:
    """Wait until the lake has every transaction up to `lsn`, and return True.

    Returns False after `timeout_s` seconds, and as soon as the replication app does not run.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        progress = state_db.read_progress(pipeline)
        if progress is not None and progress.applied_lsn >= lsn:
            return True
        is_running = (
            progress is not None
            and progress.updated_at is not None
            and state_db.now() - progress.updated_at < _RUNNING
        )
        if not is_running or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class TableFinding:
    """A difference between a relation and its record. `error`: set if the table cannot continue."""

    reason: str
    error: PgReplError | None


@dataclass(frozen=True)
class _Look:
    """The recorded tables, and what the source's catalog says of them."""

    records: Mapping[TableName, TableRecord]
    watched: dict[TableName, TableRecord]
    current: dict[TableName, Relation | None]
    rights: dict[int, PgReplError]
    seen_at: LSN

    @classmethod
    def read(cls, source: Connection, state_db: StateDatabase, pipeline: Pipeline) -> Self:
        # Read the records before the catalog: `mark_errored` then leaves alone tables whose record changed
        # since.
        records = state_db.read_tables(pipeline.name)
        watched = _watched(records)
        _check_publications(source, pipeline, watched.values())
        followed = followed_names(pipeline)
        current = current_relations(source, pipeline, _relations(watched), followed)
        current = _with_partitions(source, pipeline, current)
        rights = lost_rights(source, list(filter(None, current.values())))
        return cls(records, watched, current, rights, written_lsn(source))

    def truncated(self, pipeline: Pipeline) -> list[Relation]:
        """Return the recorded relations that look like a TRUNCATE which the stream may still send."""
        return [
            relation
            for relation in _relations(self.watched)
            if may_be_truncated(relation, self.current[relation.table], pipeline)
        ]

    def has_files_of(self, earlier: _Look, recorded: Relation) -> bool:
        """Return True if a table's files are those of an earlier look: it was not truncated again since."""
        now, then = self.current[recorded.table], earlier.current.get(recorded.table)
        return now is not None and then is not None and now.files == then.files


def check_drift(access: Access, mark_errored: bool = True) -> DriftReport:
    """Compare every table in the lake with the present catalog.

    Tables that cannot continue are marked errored, unless `mark_errored` is False. Changes that their lake
    tables follow on their own are only reported. Tables whose changes the source rejects because they are
    published are problems of the report. If the pipeline sets `protect_source` and `mark_errored` is True,
    these tables are dropped from the publication.

    May wait about a minute until a running pipeline has applied what was committed before: until then a
    TRUNCATE of a partitioned table looks like drift. Raises PublicationError if the publication no longer
    exists, was created again or publishes less; StateError for a pipeline that is not set up;
    SourceConnectionError, PrivilegeError.
    """
    pipeline = access.pipeline
    with access.source("drift") as source, access.state_db("drift") as state_db:
        if state_db.read_pipeline(pipeline.name) is None:
            raise not_recorded(pipeline.name)
        check_ours(gather(pipeline, state_db, source, lake_may_fail=True))
        look = _Look.read(source, state_db, pipeline)
        awaited = look.truncated(pipeline)
        if awaited:
            is_settled = wait_until_applied(state_db, pipeline.name, look.seen_at)
            # A TRUNCATE that the stream has sent until then is recorded by now, as is other DDL that was
            # applied meanwhile. So the catalog is read again, too: records must not be newer than it.
            before, look = look, _Look.read(source, state_db, pipeline)
            awaited = [
                known
                for known in look.truncated(pipeline)
                if not (is_settled and look.has_files_of(before, known))
            ]
        watched, records, rights = look.watched, look.records, look.rights
        findings = find_drift(pipeline, _relations(watched), look.current, rights)
        findings |= {known.table: TableFinding(_AWAITED, rights.get(known.oid)) for known in awaited}
        report = _Report(state_db, pipeline, look.seen_at, mark_errored)
        tables = tuple(report.drifts(watched, findings))
        refused = published_refused(source, pipeline, records)
        if pipeline.protect_source and mark_errored:
            protect_source(source, state_db, pipeline, refused)
        new = _new_tables(source, pipeline, records)
        problems = source_problems(source, pipeline, refused)
        warnings = source_warnings(source, pipeline, records)
    return DriftReport(pipeline.name, len(watched), tables, new, pipeline.new_tables, problems, warnings)


def find_drift(
    pipeline: Pipeline,
    recorded: Iterable[Relation],
    current: Mapping[TableName, Relation | None],
    rights: Mapping[int, PgReplError],
) -> dict[TableName, TableFinding]:
    """Return the findings about these relations, by the names that they were recorded with.

    :param rights: the errors of tables that may not be read any more, by OID
    """
    findings = {}
    for relation in recorded:
        result = compare_catalog(relation, current[relation.table], pipeline.options(relation.table))
        if result.kind is DriftKind.UNSAFE:
            error: PgReplError | None = DriftError(result.reason, result.hint, result.remedy)
        else:
            error = rights.get(relation.oid)
        if error is not None or result.kind is DriftKind.SAFE:
            reason = error.message if error is not None else result.reason
            findings[relation.table] = TableFinding(reason, error)
    return findings


def current_relations(
    source: Connection,
    pipeline: Pipeline,
    recorded: list[Relation],
    followed: FollowedNames,
    *,
    planned: bool = False,
) -> dict[TableName, Relation | None]:
    """Return each relation as it is now: the table with its OID, otherwise one with its name, otherwise None.

    :param followed: the names of renamed tables
    :param planned: as in `read_relations`
    """
    oids = {relation.table: relation.oid for relation in recorded}
    found = read_relations(source, oids.values(), pipeline.publication, planned=planned)
    for table, oid in oids.items():
        if oid not in found and (successor := find_relation(source, table)) is not None:
            oids[table] = successor.oid
    taken = set(oids.values()) - found.keys()
    found |= read_relations(source, taken, pipeline.publication, planned=planned) if taken else {}
    named = {oid: followed.apply(source, relation) for oid, relation in found.items()}
    return {table: named.get(oid) for table, oid in oids.items()}


def _with_partitions(
    source: Connection, pipeline: Pipeline, current: dict[TableName, Relation | None]
) -> dict[TableName, Relation | None]:
    """Read partitioned relations again, with `had_rows` of their partitions."""
    return {
        table: _with_had_rows(source, pipeline, relation)
        if relation is not None and relation.partitions
        else relation
        for table, relation in current.items()
    }


def _with_had_rows(source: Connection, pipeline: Pipeline, relation: Relation) -> Relation | None:
    found = read_relation(
        source,
        relation.oid,
        pipeline.publication,
        had_rows=True,
        trusts_owners=pipeline.trust_table_owners,
    )
    return found.followed_as(relation.table) if found and found.table == relation.source_table else found


def _watched(records: Mapping[TableName, TableRecord]) -> dict[TableName, TableRecord]:
    return {table: record for table, record in records.items() if _is_watched(record)}


def _relations(watched: Mapping[TableName, TableRecord]) -> list[Relation]:
    return [record.relation for record in watched.values() if record.relation is not None]


def _new_tables(
    source: Connection, pipeline: Pipeline, records: Mapping[TableName, TableRecord]
) -> tuple[str, ...]:
    if pipeline.new_tables == "ignore":
        return ()
    return tuple(str(table) for table in new_tables(source, pipeline, records))


def _is_watched(record: TableRecord) -> bool:
    if record.relation is None:
        return False
    return record.state.needs_changes or _is_drift_error(record)


def _is_drift_error(record: TableRecord) -> bool:
    """Return True if the table stopped for an error that this check finds.

    The check's result must not depend on which process noticed the error first.
    """
    return record.state is TableState.ERRORED and record.error in _DRIFT_ERRORS


def _check_publications(source: Connection, pipeline: Pipeline, watched: Iterable[TableRecord]) -> None:
    oids = {
        record.relation.publication_oid
        for record in watched
        if record.relation is not None and record.state.needs_changes
    }
    for oid in sorted(oids - {0}):
        check_publication(source, pipeline.publication, oid)


def lost_rights(source: Connection, relations: list[Relation]) -> dict[int, PgReplError]:
    """Return the errors of the tables that the role may not read, or not as a whole, by OID."""
    if not any(right_problems(source, relations)):
        return {}
    found: dict[int, PgReplError] = {}
    for relation in relations:
        problems = list(right_problems(source, [relation]))
        if problems:
            hint = "; ".join(problem.hint for problem in problems)
            found[relation.oid] = PrivilegeError(
                "; ".join(problem.message for problem in problems),
                f"{hint}; then {errors.retry(relation.table)}",
                Remedy.GRANT,
            )
    return found


@dataclass(frozen=True)
class _Report:
    """The conversion of findings into lines of the report. Marks tables errored that cannot continue."""

    state_db: StateDatabase
    pipeline: Pipeline
    lsn: LSN
    mark_errored: bool

    def drifts(
        self, watched: dict[TableName, TableRecord], findings: dict[TableName, TableFinding]
    ) -> Iterator[TableDrift]:
        for table, record in watched.items():
            finding = findings.get(table)
            if record.state is TableState.ERRORED:
                yield self._in_error(record, finding)
            elif finding is not None:
                yield from self._found(record, finding)

    def _found(self, record: TableRecord, finding: TableFinding) -> Iterator[TableDrift]:
        table, state = str(record.table), record.state.value
        if finding.error is None:
            yield TableDrift(table, DriftKind.SAFE.value, finding.reason, state=state)
            return
        marked = self.mark_errored and self.state_db.mark_errored(
            self.pipeline.name, record, finding.error, lsn=self.lsn
        )
        if self.mark_errored and not marked:
            # Another process changed the table first. If it was resnapshotted, it has not drifted; if it was
            # marked errored for drift, report that.
            now = self.state_db.read_tables(self.pipeline.name).get(record.table)
            if now is not None and _is_drift_error(now):
                yield self._in_error(now, finding)
            return
        yield TableDrift(table, DriftKind.UNSAFE.value, finding.reason, finding.error.hint, state, marked)

    def _in_error(self, record: TableRecord, finding: TableFinding | None) -> TableDrift:
        helps = record.remedy is not None and record.remedy.allows_retry
        gone = helps and (finding is None or finding.error is None)
        hint = f"the cause is gone: {errors.retry(record.table)}" if gone else record.hint
        return TableDrift(str(record.table), DriftKind.UNSAFE.value, record.reason, hint, record.state.value)
