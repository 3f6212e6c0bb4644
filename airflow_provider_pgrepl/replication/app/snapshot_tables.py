"""Snapshots of tables: the first ones of an epoch, and later ones in a running epoch (TableSnapshotter)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import (
    BusyError,
    LakeTableError,
    PgReplError,
    PrivilegeError,
    PublicationError,
    SnapshotError,
    TableError,
    resnapshot,
)
from airflow_provider_pgrepl.replication.changelog import own_tables, writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    check_timeline,
    lake_id,
    open_changelog,
    read_token,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.snapshot.kept_ranges import forget_all
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import given_up
from airflow_provider_pgrepl.replication.source.failover import wants_failover
from airflow_provider_pgrepl.replication.source.preflight.check import table_faults
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    SelectedTables,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.preflight.tables import table_warnings
from airflow_provider_pgrepl.replication.source.server import Server, known_source, read_server
from airflow_provider_pgrepl.replication.source.slot import SlotInUse, renew_walsender, temporary_name
from airflow_provider_pgrepl.replication.source.slot_creation import (
    ExportedSnapshot,
    create_slot,
    drop_unused,
    export_snapshot,
    take_over_slot,
)
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import forget_tokens, write_token
from airflow_provider_pgrepl.replication.state.tables import TableRecord

from .access import Access
from .copy_states import CopyStates, record_tables
from .source_ownership import NextEpoch, SourceOwnership, find_next_epoch
from .table_watch import recorded_names
from .tables import Records, followed_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum number of snapshots in a row that fail before their error is raised."""
_PAUSES_S = (1.0, 5.0, 15.0, 60.0)
"""Seconds to wait before unfinished tables are copied under a new snapshot.

Applies after copies were canceled because they blocked statements of the source, and after a lost snapshot.
The fifth time in a row, canceled tables are marked errored. A finished table restarts the count."""


@dataclass(frozen=True)
class SnapshotResult:
    """The result of a run: the tables that were copied, and those that are errored now, with their errors."""

    copied: tuple[TableName, ...] = ()
    failed: dict[TableName, PgReplError] = field(default_factory=dict)


@dataclass
class TableSnapshotter:
    """The connections of one run, and its copying of tables.

    `spark` returns the session when it is needed. `compares`: tables are compared with their lake tables, and
    copied only if that is not possible. `adopts`: tables that another program has written are adopted, not
    rejected. `out`: the tables that were removed when the run began.
    """

    access: Access
    source: Connection
    state_db: StateDatabase
    spark: Callable[[], SparkSession]
    compares: bool = False
    adopts: bool = False
    out: frozenset[TableName] = frozenset()

    @property
    def pipeline(self) -> Pipeline:
        return self.access.pipeline

    def records(self) -> Records:
        return self.state_db.read_tables(self.pipeline.name)

    def take(
        self, tables: Collection[TableName], requested: RequestedTables, record: EpochRecord
    ) -> SnapshotResult:
        """Copy these tables, whatever state they are in. A table that cannot be copied is marked errored.

        Raises BusyError if one is being repaired. Raises SnapshotError if a lock was not available in time,
        or if several snapshots in a row failed. If nothing was copied yet, tables and publication are then
        restored; otherwise the remaining tables are marked errored. Tables whose copies blocked statements of
        the source 5 times in a row are marked errored, and TableSnapshotError is raised.
        """
        with self.copy_states() as states:
            try:
                return self._take(states, set(tables), requested, record)
            except SnapshotError as error:
                raise given_up(error) from None

    def staying(self, relations: Sequence[Relation]) -> list[Relation]:
        """Return these relations without those of tables that a command has removed since the run began."""
        records = self.records()
        removed = {table for table, record in records.items() if record.membership == "removed"} - self.out
        for relation in relations:
            if relation.table in removed:
                log.warning("table %s was removed meanwhile: it is not copied", relation.table)
        return [relation for relation in relations if relation.table not in removed]

    def locked_publication(self) -> AbstractContextManager[None]:
        """Return the context manager of the lock under which tables join the publication and leave it."""
        return self.state_db.locked(self.pipeline.name, "publication", self.pipeline.lock_timeout_s)

    def copy_states(self) -> CopyStates:
        """Return the context manager that records the states of tables while they are copied."""
        return CopyStates(self.access.dsn, self.pipeline, self.state_db)

    def _take(
        self, states: CopyStates, left: set[TableName], requested: RequestedTables, record: EpochRecord
    ) -> SnapshotResult:
        copied, attempt, given_way = list[TableName](), 1, 0
        failed: dict[TableName, PgReplError] = {}
        added: dict[TableName, int] = {}
        ownership = SourceOwnership(self.access.dsn, self.source, self.pipeline, self.state_db)
        ownership.check_publication(record.publication_oid)
        while left:
            relations, faults = self.examine(left, requested, record)
            failed |= faults
            left -= faults.keys()
            # A published table without a key, for example, rejects the application's updates. Find it by OID,
            # because it may have been renamed. The lake has no rows of it.
            if withdrawn := [added[table] for table in faults if table in added]:
                states.withdraw(withdrawn)
            if not relations:
                break
            self.index_selected(record.epoch, relations)
            relations, joined = self._begin(states, ownership, relations)
            left = {relation.table for relation in relations}
            if not relations:
                break
            added |= {relation.table: relation.oid for relation in joined}
            exported = export_snapshot(
                self.access.dsn,
                temporary_name(self.source),
                timeout_s=self.pipeline.slot_timeout_s,
                primary_dsn=self.access.primary_dsn,
            )
            try:
                result = self._copy_at(states, exported, relations, record)
            except (SnapshotError, PrivilegeError) as error:
                lost: PgReplError = error
            else:
                copied += result.done
                failed |= result.failed
                left -= result.done.keys() | result.failed.keys()
                if result.unusable is None:
                    break
                attempt, given_way = 0, 0 if result.done else given_way
                self._wait_or_stop(states, result, given_way)
                given_way += 1
                lost = result.unusable
            if attempt >= ATTEMPTS:
                raise lost
            attempt += 1
            log.warning(
                "the snapshot is no longer usable: %s. Copying these tables again under a new snapshot: %s",
                lost.message,
                ", ".join(map(str, sorted(left))),
            )
        return SnapshotResult(tuple(copied), failed)

    def _begin(
        self, states: CopyStates, ownership: SourceOwnership, relations: Sequence[Relation]
    ) -> tuple[list[Relation], list[Relation]]:
        """Publish the tables, and record that they are being copied. Return them, and those of them that were
        not published.

        Leaves out tables that were removed meanwhile. Raises BusyError, before anything is changed, if one is
        being repaired.
        """
        # Under this lock: a process that removes or repairs a table has either begun before, or sees that it
        # is copied again.
        with self.locked_publication():
            if not (relations := self.staying(relations)):
                return [], []
            records = self.records()
            self._check_not_repaired(records[one.table] for one in relations if one.table in records)
            joined = ownership.publish(relations)
            states.join(joined)
            # Also for a table that is published already, unless its changes are received: a run may have been
            # killed between the two steps, and the publication's owner adds a table without a lock.
            if joined or not all(_is_received(records.get(relation.table)) for relation in relations):
                renew_walsender(self.source, self.pipeline.slot)
            # Recorded before the snapshot is exported: the applier's batches then hold no changes of these
            # tables that are not in the snapshot.
            states.begin(relations)
        return relations, joined

    def _check_not_repaired(self, records: Iterable[TableRecord]) -> None:
        """Raise BusyError if a repair that runs has paused one of the tables: each would overtake the
        other's snapshot. A killed repair holds no lock."""
        paused = [str(record.table) for record in records if record.is_paused_by_repair]
        if not paused:
            return
        try:
            self.state_db.check_unlocked(self.pipeline.name, "verify")
        except BusyError as busy:
            raise BusyError(
                f"{', '.join(paused)}: not copied, because a repair has not ended ({busy.message})",
                "run the same command again when the repair has ended",
            ) from None

    def _wait_or_stop(self, states: CopyStates, result: CopyResult, times: int) -> None:
        """Pause, so that blocked statements of the source can run.

        If `times` exceeds the number of pauses, mark the displaced tables errored, and raise the error of the
        unusable snapshot instead.
        """
        assert result.unusable is not None
        if times < len(_PAUSES_S):
            time.sleep(_PAUSES_S[times])
            return
        for table, error in result.displaced.items():
            states.mark_errored(table, error)
        raise result.unusable

    def examine(
        self, tables: Collection[TableName], requested: RequestedTables, epoch: EpochRecord | None
    ) -> tuple[list[Relation], dict[TableName, PgReplError]]:
        """Return the tables that can be copied, as the source has them now, and the errors of the others.

        The others are marked errored.
        """
        recorded = epoch or self.state_db.read_pipeline(self.pipeline.name)
        followed = followed_at(self.source, self.pipeline, self.records(), recorded)
        requested = replace(requested, recorded=self._recorded_names(epoch), followed=followed)
        selected = select_tables(self.source, self.pipeline, requested)
        relations = [relation for relation in selected.relations if relation.table in tables]
        faults: dict[TableName, PgReplError] = {
            table: selected.problems.get(table) or _gone(table)
            for table in set(tables) - selected_tables(selected)
        }
        faults |= table_faults(self.source, self.pipeline, relations) if relations else {}
        states = self.copy_states()
        for table, fault in faults.items():
            states.mark_errored(table, fault)
        return [relation for relation in relations if relation.table not in faults], faults

    def _recorded_names(self, epoch: EpochRecord | None) -> BoundRules | None:
        """Return the names and settings under which tables are recorded now: each selection adds to them."""
        name = self.pipeline.name
        recorded, selected = self.state_db.read_pipeline(name), self.state_db.read_selected(name)
        return recorded_names(self.source, self.pipeline, epoch, self.records(), recorded, selected)

    def record_selected(self, relations: Iterable[Relation]) -> None:
        """Record the tables in the state while there is no epoch, so that settings are bound to them."""
        self.state_db.record_selected(self.pipeline.name, self._bare(relations))

    def index_selected(self, epoch: Epoch, relations: Iterable[Relation]) -> None:
        """Record the tables in the lake before they are published, so that the receiver can hide their
        columns."""
        RelationIndex(relations_uri(self.pipeline.lake_root)).add_selected(epoch, self._bare(relations))

    def _bare(self, relations: Iterable[Relation]) -> list[Relation]:
        return [without_excluded_defaults(relation, self.pipeline) for relation in relations]

    def _copy_at(
        self,
        states: CopyStates,
        exported: ExportedSnapshot,
        relations: list[Relation],
        record: EpochRecord,
    ) -> CopyResult:
        with exported:
            keeper = self.keep(exported, relations)
        with keeper:
            states.copying()
            return self.copy(keeper, exported, record, states)

    def keep(self, exported: ExportedSnapshot, relations: list[Relation]) -> snapshot_holder.SnapshotHolder:
        """Hold the snapshot and its tables. Raises what `snapshot_holder.keep` raises.

        A table outside the publication raises SnapshotError if this package adds tables to it.
        """
        try:
            return snapshot_holder.keep_for(self.pipeline, self.access.dsn, exported, relations)
        except PublicationError as error:
            if self.pipeline.publication_mode != "create":
                raise
            # This run has published the tables, and another one publishes them again.
            raise SnapshotError(
                f"tables left the publication after this run had added them: {error.message}",
                "run the command again, which adds them again",
            ) from None

    def copy(
        self,
        keeper: snapshot_holder.SnapshotHolder,
        exported: ExportedSnapshot,
        record: EpochRecord,
        states: CopyStates,
        *,
        begins_epoch: bool = False,
    ) -> CopyResult:
        """Copy the keeper's tables, or record them if there are no lake tables, and wake the applier."""
        for warning in table_warnings(self.source, keeper.relations, self.pipeline):
            log.warning("%s", warning)
        if self.pipeline.has_lake_tables:
            copied = self._copy_rows(keeper, exported, record, begins_epoch=begins_epoch)
        else:
            copied = record_tables(self.pipeline, self.state_db, states, record, keeper, exported)
        own_tables.record(self.pipeline.lake_root)
        writer.mark(changelog_uri(self.pipeline.lake_root))
        self._check_timeline(copied, record, states)
        return copied

    def _check_timeline(self, copied: CopyResult, record: EpochRecord, states: CopyStates) -> None:
        """Mark the copied tables errored, and raise SnapshotError, if the source has failed over meanwhile.

        The receiver may have checked the tables' positions just before their copies were committed.
        """
        try:
            check_timeline(open_changelog(changelog_uri(self.pipeline.lake_root)), record)
        except SnapshotError as error:
            for table in copied.done:
                states.mark_errored(table, LakeTableError(f"{table}: {error.message}", resnapshot(table)))
            raise

    def _copy_rows(
        self,
        keeper: snapshot_holder.SnapshotHolder,
        exported: ExportedSnapshot,
        record: EpochRecord,
        *,
        begins_epoch: bool,
    ) -> CopyResult:
        # Imported here: it needs Spark, which need not be installed without lake tables.
        from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
        from airflow_provider_pgrepl.replication.lake.verify.adoption import Adoption
        from airflow_provider_pgrepl.replication.lake.verify.resync import Resync

        kind = Adoption if self.adopts else Resync if self.compares else SnapshotCopy
        copy = kind(self.spark(), self.access.dsn, self.pipeline, self.state_db, record, keeper, exported)
        with SlotInUse(self.access.dsn, self.pipeline.slot):
            copied = copy.run()
        if begins_epoch:
            copy.write_point()
        return copied


def selected_tables(selected: SelectedTables) -> set[TableName]:
    """Return the selected tables that can be replicated."""
    return {relation.table for relation in selected.relations}


def _gone(table: TableName) -> PgReplError:
    return TableError(f"{table}: does not exist, or is not among the tables of the pipeline")


def _is_received(record: TableRecord | None) -> bool:
    return record is not None and record.state.needs_changes


def begin_epoch(
    snapshotter: TableSnapshotter,
    relations: list[Relation],
    requested: RequestedTables,
    last: EpochRecord | None,
    take_over: str = "",
    *,
    replace_record: bool = False,
) -> SnapshotResult:
    """Create publication and slot, and copy these tables at the slot's snapshot.

    If that snapshot is lost, unfinished tables are copied under another one, into the epoch that has begun.
    Raises SlotError or PublicationError if one exists that the pipeline does not own, and SnapshotError if no
    snapshot could be held. No slot and no publication of this run is left then.

    :param take_over: another program's slot, at which the epoch begins; tables are then copied as new ones
        are
    :param replace_record: a new epoch was requested, possibly of another source, slot or lake than recorded
    """
    pipeline, server = snapshotter.pipeline, read_server(snapshotter.source)
    ownership = SourceOwnership(snapshotter.access.dsn, snapshotter.source, pipeline, snapshotter.state_db)
    tables = [relation.table for relation in relations]
    beginning = find_next_epoch(snapshotter.state_db, pipeline, tables, last)
    is_recorded = snapshotter.state_db.read_pipeline(pipeline.name) is not None
    if replace_record or last is None or not is_recorded:
        # Nothing shows that the source is the one, with the history, from which ranges were copied.
        forget_all(pipeline.lake_root)
    ownership.claim(server, last, replace_record=replace_record)
    with ownership.record_slot_loss(), ownership.publication_undone():
        return _make_epoch(snapshotter, ownership, server, relations, requested, last, take_over, beginning)


def _make_epoch(
    snapshotter: TableSnapshotter,
    ownership: SourceOwnership,
    server: Server,
    relations: list[Relation],
    requested: RequestedTables,
    last: EpochRecord | None,
    take_over: str,
    beginning: NextEpoch,
) -> SnapshotResult:
    pipeline, tables = snapshotter.pipeline, [relation.table for relation in relations]
    # Drop the slot first: this fails while the slot is being read, and nothing may be altered under a running
    # app.
    ownership.drop_slot()
    relations = snapshotter.staying(relations)
    # Record this first: settings are bound to the tables as they are now, even if this run fails.
    snapshotter.record_selected(relations)
    ownership.prepare_publication(relations)
    if take_over:
        position = take_over_slot(snapshotter.access.dsn, pipeline.slot, take_over, pipeline.publication)
        ownership.record_slot()
        record = _open_epoch(snapshotter, ownership, server, relations, position, last, beginning)
        return snapshotter.take(tables, requested, record)
    failed: dict[TableName, PgReplError] = {}
    for attempt in range(1, ATTEMPTS + 1):
        ownership.drop_slot()
        exported = create_slot(
            snapshotter.access.dsn,
            pipeline.slot,
            through=temporary_name(snapshotter.source),
            timeout_s=pipeline.slot_timeout_s,
            made=ownership.record_slot,
            primary_dsn=snapshotter.access.primary_dsn,
            failover=wants_failover(snapshotter.source, server, pipeline.failover),
        )
        try:
            record, copied = _begin(snapshotter, exported, ownership, server, relations, last, beginning)
            break
        except SnapshotError as error:
            if attempt == ATTEMPTS:
                ownership.drop_slot()
                raise given_up(error) from None
            log.warning("the snapshot is not usable, creating slot and snapshot again: %s", error.message)
        wanted = {relation.table for relation in snapshotter.staying(relations)}
        relations, faults = snapshotter.examine(wanted, requested, last)
        failed |= faults
        if not relations:
            ownership.drop_slot()
            return SnapshotResult(failed=failed)
        snapshotter.record_selected(relations)
        ownership.drop_slot()
        ownership.prepare_publication(relations)
    failed |= copied.failed
    unfinished = {relation.table for relation in relations} - copied.done.keys() - copied.failed.keys()
    if copied.unusable is None or not unfinished:
        return SnapshotResult(tuple(copied.done), failed)
    log.warning(
        "the snapshot is no longer usable: %s. Finished tables are kept. Copying these tables again under a"
        " new snapshot: %s",
        copied.unusable.message,
        ", ".join(map(str, sorted(unfinished))),
    )
    more = snapshotter.take(unfinished, requested, record)
    return SnapshotResult((*copied.done, *more.copied), failed | more.failed)


def _begin(
    snapshotter: TableSnapshotter,
    exported: ExportedSnapshot,
    ownership: SourceOwnership,
    server: Server,
    relations: list[Relation],
    last: EpochRecord | None,
    beginning: NextEpoch,
) -> tuple[EpochRecord, CopyResult]:
    with exported, ExitStack() as held, snapshotter.copy_states() as states, ExitStack() as lock:
        try:
            keeper = held.enter_context(snapshotter.keep(exported, relations))
            exported.close()
            lock.enter_context(snapshotter.locked_publication())
            if len(snapshotter.staying(relations)) < len(relations):
                raise SnapshotError("tables were removed after the publication was created")
        except BaseException:
            drop_unused(snapshotter.access.dsn, snapshotter.source, snapshotter.pipeline.slot)
            raise
        begins = exported.consistent_point
        record = _open_epoch(snapshotter, ownership, server, relations, begins, last, beginning)
        # States from another epoch must not be restored.
        states.copying()
        states.begin(relations)
        lock.close()
        return record, snapshotter.copy(keeper, exported, record, states, begins_epoch=True)


def _open_epoch(
    snapshotter: TableSnapshotter,
    ownership: SourceOwnership,
    server: Server,
    relations: Sequence[Relation],
    begins: LSN,
    last: EpochRecord | None,
    beginning: NextEpoch,
) -> EpochRecord:
    pipeline = snapshotter.pipeline
    uri = changelog_uri(pipeline.lake_root)
    is_other_source = last is not None and known_source(last, server).differs(server)
    try:
        # The names of the tables that are copied come last: they are those in the pipeline.
        selected = [*snapshotter.state_db.read_selected(pipeline.name), *relations]
        record = EpochRecord(
            pipeline.name,
            beginning.epoch,
            server.system_identifier,
            server.timeline,
            pipeline.slot,
            pipeline.publication,
            ownership.publication_oid(),
            begins,
            database=server.database,
            database_oid=server.database_oid,
            pipeline_id=ownership.pipeline_id(),
        )
        # Write the token to the source first. The last epoch's token stays there until the changelog has this
        # one.
        before = read_token(open_changelog(uri)) if last is not None else 0
        token = write_token(snapshotter.source, pipeline.slot, before, pipeline.used_publication)
        if not is_other_source:
            # Index the tables before there is an epoch that a receiver could begin to read.
            snapshotter.index_selected(record.epoch, selected)
        if last is None:
            writer.create_changelog(uri, record, token, beginning.former_lake)
        else:
            writer.begin_epoch(uri, record, token)
            if is_other_source:
                RelationIndex(relations_uri(pipeline.lake_root)).begin_source(record.epoch)
                snapshotter.index_selected(record.epoch, selected)
            if last.slot != record.slot and not server.in_recovery:
                forget_tokens(snapshotter.source, last.slot, before)
        snapshotter.state_db.record_evidence(
            pipeline.name,
            database=server.database,
            database_oid=server.database_oid,
            lake=pipeline.lake_root,
            lake_id=lake_id(open_changelog(uri)),
        )
        snapshotter.state_db.record_epoch(pipeline.name, record.epoch, begins)
    except BaseException:
        # A slot without a changelog would retain WAL at the source, and no receiver would read it.
        drop_unused(snapshotter.access.dsn, snapshotter.source, pipeline.slot)
        raise
    ownership.keep_publication()
    log.info("epoch %d begins at %s", record.epoch, record.consistent_point)
    return record
