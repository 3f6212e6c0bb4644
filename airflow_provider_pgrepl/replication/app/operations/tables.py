"""Operations on single tables of a pipeline, also while its apps run: pause, resume, retry, remove.

All tables are checked before any is changed. The other tables, the slot and the apps continue: the
replication app reads the states before each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    ChangelogError,
    DriftError,
    LakeTableError,
    PgReplError,
    StateError,
)
from airflow_provider_pgrepl.replication.app import evidence
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import check_lake_tables_setting, refuse_without_lake
from airflow_provider_pgrepl.replication.changelog import own_tables, writer
from airflow_provider_pgrepl.replication.changelog.gaps import check_no_gap
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import DriftResult, compare_catalog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints, read_table_position
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, app_id, no_position, open_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.continuity import check_publication
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, copied_options
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.tables import right_problems
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import REPAIRING, TableRecord, TableState
from airflow_provider_pgrepl.replication.values import lake_schema
from airflow_provider_pgrepl.trace import trace_of

from .removal import remove_tables
from .selection import change, choose, raise_all, recorded

__all__ = ["RetryResult", "pause_tables", "remove_tables", "resume_tables", "retry_tables"]
log = logging.getLogger(__name__)
_S = TableState
_APPLIED = (_S.CATCHING_UP, _S.STREAMING)
_INSTEAD = {
    _S.PENDING: f"it has not been copied yet: {errors.SNAPSHOT}",
    _S.SNAPSHOTTING: "wait for the snapshot; if it has died, pgrepl snapshot FILE.json --tables NAME",
    _S.ERRORED: f"{errors.RETRY}; or {errors.RESNAPSHOT}",
    _S.PAUSED: errors.RESUME,
    _S.REMOVED: "add it again: pgrepl snapshot FILE.json --add NAME, or PgAddTablesOperator",
}


@dataclass
class RetryCheck:
    """The check that errored tables can continue with what source, lake and changelog hold.

    The changelog is opened once for all tables.
    """

    source: Connection
    pipeline: Pipeline
    epoch: EpochRecord
    floor: LSN
    changelog: DeltaTable = field(repr=False)
    _points: ConsistentPoints = field(repr=False)
    _index: RelationIndex = field(init=False, repr=False)
    _followed: FollowedNames = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._index = RelationIndex(relations_uri(self.pipeline.lake_root))
        self._followed = FollowedNames.read(self.pipeline, self._index.pipeline_names)

    @classmethod
    def open(cls, source: Connection, pipeline: Pipeline) -> RetryCheck:
        """Open the lake for the checks.

        Raises ChangelogError, LakeError, and PublicationError if the publication no longer exists, was
        created again or publishes less.
        """
        points = ConsistentPoints(pipeline.lake_root)
        if pipeline.has_lake_tables:
            # Check the points before opening the changelog, which then covers all of them: a running app
            # appends more.
            points.check_lake()
        changelog = open_changelog(changelog_uri(pipeline.lake_root))
        own_tables.check(pipeline.lake_root)
        epoch = EpochRecord.from_json(changelog.metadata().description)
        check_publication(source, epoch.publication, epoch.publication_oid)
        return cls(source, pipeline, epoch, read_floor_lsn(changelog, epoch.epoch), changelog, points)

    def copied_names(self) -> Mapping[int, TableName]:
        """Return the names with which tables were copied last, or are being copied. Raises
        LakeUnavailableError."""
        self._index.catch_up()
        return self._index.pipeline_names()

    def check(self, record: TableRecord) -> Relation:
        """Return the relation that the lake table is for now.

        Raises LakeTableError without a copy of this epoch, ChangelogError if changes that the table needs are
        no longer kept, GapError if a transaction among them was skipped. Raises DriftError if the lake table
        does not fit the source's table, or was sent a change that it cannot follow, and PrivilegeError if the
        source's table cannot be read.
        """
        relation = self._relation_in_lake(record)
        publication = self.epoch.publication
        current = read_relation(self.source, relation.oid, publication) or find_relation(
            self.source, relation.table, publication
        )
        copied = copied_options(self.pipeline, record.config, record.table)
        if current is not None:
            current = self._followed.apply(self.source, current)
        verdict = compare_catalog(relation, current, copied)
        if verdict.kind is DriftKind.UNSAFE:
            hint, remedy = verdict.hint, verdict.remedy
            if _needs_copy(record) and not _needs_copy(verdict):
                hint, remedy = record.hint, record.remedy
            raise DriftError(f"{record.table}: {verdict.reason}", hint, remedy)
        if _needs_copy(record):
            raise DriftError(f"{record.table}: {record.reason}", record.hint, record.remedy)
        assert current is not None  # a missing table is unsafe
        raise_all(list(right_problems(self.source, [current])))
        return relation

    def _relation_in_lake(self, record: TableRecord) -> Relation:
        hint = errors.resnapshot(record.table)
        if record.relation is None or record.position_lsn is None:
            raise LakeTableError(f"{record.table}: was never copied as a whole", hint)
        if not self.pipeline.has_lake_tables:
            return self._relation_in_changelog(record, record.relation, record.position_lsn)
        table = open_table(f"{self.pipeline.lake_root}/{record.table.path}")
        point = self._points.last_of(record.table, self.epoch.epoch)
        app = app_id(self.pipeline.name, self.epoch.epoch)
        position = read_table_position(table, app, str(record.table), point)
        if position is None:
            raise LakeTableError(f"{record.table}: {no_position(table)}", hint)
        problem = position.problem(record.position_lsn, self.floor, read_durable_lsn(self.changelog))
        if problem is not None:
            raise type(problem)(f"{record.table}: {problem.message}", hint)
        check_no_gap(self.changelog, self.epoch.epoch, record.table, record.relation.oid, position.whole)
        received = self._index.find(record.relation.oid, app_version(table, RELATION_APP) or 0)
        return received.catalog if received and received.catalog else record.relation

    def _relation_in_changelog(self, record: TableRecord, relation: Relation, position: LSN) -> Relation:
        """Return the relation with which the check of definitions continues.

        Raises ChangelogError, GapError.
        """
        if position < self.floor:
            raise ChangelogError(
                f"{record.table}: changes after {position} are no longer kept",
                errors.resnapshot(record.table),
            )
        check_no_gap(self.changelog, self.epoch.epoch, record.table, relation.oid, position)
        return relation

    def options(self, record: TableRecord, relation: Relation) -> str | None:
        """Return the present pipeline file if it would have created the same lake table; else None."""
        if record.config is None:
            return None
        now = self.pipeline.options(relation.table)
        try:
            before = Pipeline.from_json(record.config).options(relation.table)
        except PgReplError:
            return None
        if before.policy.history != now.policy.history:
            return None
        if before.policy.partition != now.policy.partition:
            return None
        if lake_schema(relation, before) != lake_schema(relation, now):
            return None
        return self.pipeline.to_json()


def _needs_copy(known: TableRecord | DriftResult) -> bool:
    """Return True if only a new copy helps.

    The table may have stopped at a change from the stream. The changelog still holds that change, whatever
    the catalog shows.
    """
    return known.remedy is not None and not known.remedy.allows_retry


@dataclass(frozen=True)
class RetryResult:
    """The result of retrying a table.

    `refused`: the reason why it stays errored. `is_overtaken`: another process changed the table during the
    retry, which left it as that process set it.
    """

    table: TableName
    refused: PgReplError | None = None
    is_overtaken: bool = False


def pause_tables(access: Access, tables: Iterable[TableName | str], *, reason: str = "") -> None:
    """Set tables to `paused`. Their changes stay in the changelog as long as they are paused.

    A running batch is finished. Paused tables stay paused. `reason` is recorded; it replaces the reason of a
    table that a repair has paused, so that the end of the repair does not resume the table. Raises
    ConfigError for names that are not among the pipeline's tables, StateError for tables to which no changes
    are applied.
    """
    refuse_without_lake(
        access.pipeline,
        "pause",
        "stop the publisher instead: its changes stay in the changelog for publish_retention_h. Do not remove"
        " the table for a pause: it leaves the publication, and its changes are lost until it is added again",
    )
    name = access.pipeline.name
    with access.state_db("pause") as state_db:
        _check_place(access, state_db)

        def pause(record: TableRecord) -> bool:
            stays = record.state is _S.PAUSED and (reason == REPAIRING or not record.is_paused_by_repair)
            return stays or state_db.move(name, record, _S.PAUSED, reason=reason)

        change(
            state_db,
            name,
            choose(state_db, name, tables),
            lambda record: _must_be(record, "paused", (*_APPLIED, _S.PAUSED)),
            pause,
        )


def resume_tables(
    access: Access, tables: Iterable[TableName | str], *, reason: str | None = None
) -> dict[TableName, TableState]:
    """Set paused tables to `catching_up`. Tables to which changes are applied already stay as they are.

    With `reason`, tables that are paused for another reason stay paused. Returns the state that each table
    has now. Raises ConfigError for names that are not among the pipeline's tables, StateError for tables that
    cannot be resumed.
    """
    refuse_without_lake(access.pipeline, "resume", "nothing is applied to tables")
    name = access.pipeline.name
    states = dict[TableName, TableState]()
    with access.state_db("resume") as state_db:
        _check_place(access, state_db)

        def resume(record: TableRecord) -> bool:
            stays = record.state in _APPLIED or reason not in (None, record.reason)
            states[record.table] = record.state if stays else _S.CATCHING_UP
            return stays or state_db.move(name, record, _S.CATCHING_UP)

        change(state_db, name, choose(state_db, name, tables), _not_resumable, resume)
    _wake(access)
    return states


def retry_tables(access: Access, tables: Iterable[TableName | str] | None = None) -> tuple[RetryResult, ...]:
    """Set errored tables to `catching_up`, so that they continue from their position without a new copy.

    The cause is checked as far as source, lake and changelog show it. A cause that persists marks the table
    errored again. If the pipeline file has other settings now under which the lake table looks the same,
    these apply from here on.

    If tables are named, either all of them are retried or none. Then raises one error of the first problem's
    class that names all tables that cannot continue: LakeTableError without a copy, ChangelogError if changes
    are no longer kept, DriftError, PrivilegeError, StateError if a table is not errored. Otherwise the result
    holds the error of each table. Also raises errors that concern all tables: StateError, ChangelogError,
    PublicationError, ConfigError for unknown names.

    :param tables: None to retry all errored tables
    """
    name = access.pipeline.name
    with access.state_db("retry") as state_db:
        evidence.check(access.pipeline, state_db, access.dsn)
        # Otherwise the present file would be recorded as the one by which the tables were copied.
        check_lake_tables_setting(access.pipeline, recorded(state_db, name))
        if tables is None:
            errored = [r for r in recorded(state_db, name).values() if r.state is _S.ERRORED]
            if not errored:
                return ()
        else:
            errored = choose(state_db, name, tables)
            raise_all(_problems(errored))
            errored = [record for record in errored if record.state is _S.ERRORED]
        with access.source("retry") as source:
            lake = RetryCheck.open(source, access.pipeline)
            checked = [(record, *_checked(lake, record)) for record in errored]
        if tables is not None:
            raise_all([refused for _, _, refused in checked if refused is not None])
        # Under this lock: a run that copies the table under another name has begun, or sees this retry.
        with state_db.locked(name, "publication", access.pipeline.lock_timeout_s):
            present, names = recorded(state_db, name), lake.copied_names()
            checked = [
                (record, relation, refused or _replicated_as_another(record, present, names))
                for record, relation, refused in checked
            ]
            if tables is not None:
                raise_all([refused for _, _, refused in checked if refused is not None])
            results = [_retried(state_db, lake, *one) for one in checked]
    if any(relation is not None for _, relation, _ in checked):
        _wake(access)
    return tuple(results)


def _replicated_as_another(
    record: TableRecord, records: Mapping[TableName, TableRecord], names: Mapping[int, TableName]
) -> PgReplError | None:
    """Return the error of a table that the pipeline replicates under another name: only one of two lake
    tables would get its changes.

    :param names: the names with which tables were copied, or are being copied
    """
    assert record.relation is not None  # it was copied
    oid = record.relation.oid
    for table, other in records.items():
        known = names.get(oid) == table or (other.relation is not None and other.relation.oid == oid)
        is_active = other.state.needs_changes or other.state.is_being_copied
        if table != record.table and is_active and known:
            return DriftError(
                f"{record.table}: the table at the source is replicated as {table}",
                f"{errors.remove(record.table)}; or, to replicate it under this name again,"
                f" {errors.remove(table)}, then {errors.resnapshot(record.table)}",
            )
    return None


def _retried(
    state_db: StateDatabase,
    lake: RetryCheck,
    record: TableRecord,
    relation: Relation | None,
    refused: PgReplError | None,
) -> RetryResult:
    is_overtaken = (
        relation is not None
        and refused is None
        and not state_db.move(
            lake.pipeline.name, record, _S.CATCHING_UP, config=lake.options(record, relation)
        )
    )
    if is_overtaken:
        log.info("table %s was changed by another process during the retry", record.table)
    return RetryResult(record.table, refused, is_overtaken)


def _check_place(access: Access, state_db: StateDatabase) -> None:
    """Check source, lake and state for a command that changes only the state: leave out what is
    unreachable."""
    evidence.check(access.pipeline, state_db, access.dsn, lake_may_fail=True, needs_source=False)


def _problems(records: list[TableRecord]) -> list[PgReplError]:
    found = (_must_be(record, "retried", (*_APPLIED, _S.ERRORED)) for record in records)
    return [problem for problem in found if problem is not None]


def _checked(lake: RetryCheck, record: TableRecord) -> tuple[Relation | None, PgReplError | None]:
    try:
        relation = lake.check(record)
        lake.options(record, relation)
    except PgReplError as error:
        return None, error
    return relation, None


def _not_resumable(record: TableRecord) -> PgReplError | None:
    if record.state is _S.PAUSED and record.relation is None:
        return StateError(f"{record.table}: was paused before it was copied", errors.resnapshot(record.table))
    return _must_be(record, "resumed", (*_APPLIED, _S.PAUSED))


def _must_be(record: TableRecord, done: str, states: tuple[TableState, ...]) -> PgReplError | None:
    if record.state in states:
        return None
    instead = errors.named(_INSTEAD[record.state], record.table)
    return StateError(f"{record.table}: is {record.state}, and cannot be {done}", instead)


def _wake(access: Access) -> None:
    """Wake a replication app that waits for changes, so that it reads the states of its tables.

    An error is only logged: the next change wakes the app too.
    """
    try:
        writer.mark(changelog_uri(access.pipeline.lake_root))
    except Exception as error:  # noqa: BLE001 - deltalake raises many kinds
        log.warning("the replication app could not be woken: %s", trace_of(error))
