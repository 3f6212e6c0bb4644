"""The snapshot app, and SnapshotRun, one run of it.

The app begins an epoch, or copies single tables, at one source snapshot.
    snapshot --pipeline FILE.json                    tables that are not in the lake yet, or are errored
    snapshot --pipeline FILE.json --tables a.b,c.d   copy these tables again, whatever state they are in
    snapshot --pipeline FILE.json --add a.b,c.d      tables that are not in the pipeline file
    snapshot --pipeline FILE.json --add              tables that match a pattern now, whatever new_tables says
    snapshot --pipeline FILE.json --new-epoch        a new history: new slot, all tables copied again
    snapshot --pipeline FILE.json --resync           the same, but tables are compared, and repaired
    snapshot --pipeline FILE.json --resync a.b,c.d   as --tables, but tables are compared, and repaired
    snapshot --pipeline FILE.json --adopt            as without it, but keep what another program has written
    snapshot --pipeline FILE.json --adopt a.b,c.d    as --add, but keep what another program has written
    snapshot --pipeline FILE.json --take-over SLOT   begin at the position of another program's slot

`take_tables`, `resnapshot`, `add_tables`, `begin_new_epoch`, `resync` and `take_over` do the same for callers
in Python. At the first set-up any problem stops the run, and nothing is created. Later on an error of one
table marks that table errored, and the other tables are copied.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, SparkError
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.own_tables import check_not_nested
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.process_io import leave_result
from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.preflight.check import check_source, check_surroundings
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    SelectedTables,
    check_choices,
    log_left_out,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import check_slot_to_take_over
from airflow_provider_pgrepl.replication.spark.executors import await_executors
from airflow_provider_pgrepl.replication.spark.session import LazySession, has_local_jvm, runs_on_cluster
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.storage.probe import check_directory, check_store

from . import process
from .access import Access
from .epoch import (
    check_lake,
    check_may_change,
    find_epoch,
    has_tables,
    is_copied_differently,
    known_tables,
    refuse_without_lake,
    tables_copied_differently,
    unwritten_tables,
)
from .evidence import check_followed, continues_epoch, gather, is_whole
from .ownership import (
    Evidence,
    check_lake_may_be_lost,
    check_new_epoch,
    check_no_foreign_receiver,
    check_ours,
    differences,
)
from .process import of_snapshot
from .recovery import settle_idle_lake
from .snapshot_tables import SnapshotResult, TableSnapshotter, begin_epoch, selected_tables
from .spark_start import start_spark
from .start_check import check_addable, check_known, check_own_tables
from .table_watch import recorded_names
from .tables import (
    Records,
    followed_at,
    left_out,
    read_records,
    read_selected,
    record_names,
    requested_of,
    retire_unknown_tables,
    unrecorded,
)

log = logging.getLogger(__name__)

_EXECUTOR_S = 600.0
"""Seconds that a snapshot waits for executors. If there are any, they answer within seconds."""


@dataclass
class SnapshotRun:
    """One run on a pipeline whose snapshot lock it holds."""

    snapshotter: TableSnapshotter
    epoch: EpochRecord | None
    records: Records
    new_epoch: bool
    names: str
    """The names of pipeline, source and lake."""
    prepare_executors: Callable[[], None]
    """Raises SparkError or ToolError. Call it before anything is created for a copy."""
    followed: FollowedNames
    recorded: BoundRules | None = None
    lost: Collection[own_tables.MissingTable] = ()
    """The lake's own tables that are given up with the previous epoch."""
    continues: bool = False
    """True if tables are copied into the present epoch. False if an epoch begins."""

    @property
    def requested(self) -> RequestedTables:
        return requested_of(self.records, self.followed, self.recorded)

    def check_has_begun(self, option: str) -> None:
        """Raise ConfigError, naming the option, if the pipeline has no epoch yet."""
        if not self.continues:
            raise ConfigError(f"{option}: this pipeline has no epoch yet", errors.SNAPSHOT)

    def select(self, requested: RequestedTables) -> tuple[SelectedTables, RequestedTables]:
        """Return the tables that belong to the pipeline with these requests, and the requests.

        Raises ConfigError for settings of other tables.
        """
        selected = select_tables(self.snapshotter.source, self.snapshotter.pipeline, requested)
        check_choices(self.snapshotter.pipeline, selected.tables | requested.removed)
        if self.continues:  # Otherwise the preflight has logged it.
            log_left_out(selected)
        return selected, requested

    def begins_elsewhere(self, slot: str) -> bool:
        """Return True if nothing was copied into the present epoch, and it begins at another position than
        this slot's, whose program may have read on."""
        found = read_slot(self.snapshotter.source, slot)
        if self.epoch is None or found is None or has_tables(self.epoch, self.records):
            return False
        return found.confirmed_flush_lsn != self.epoch.consistent_point

    def left_out(self, selected: SelectedTables) -> frozenset[TableName]:
        """Return the new tables that a run leaves out unless it names them. Raises what `left_out` raises."""
        # Without records, which may be lost or not written yet, no table is newer than the others.
        new = unrecorded(selected, self.records) if self.epoch and self.records else []
        return left_out(self.snapshotter.pipeline, new)

    def is_due(self, selected: SelectedTables, table: TableName) -> bool:
        """Return True if a table must be copied, or must be marked errored because it can no longer be
        replicated."""
        record = self.records.get(table)
        if record is None or is_copied_differently(self.snapshotter.pipeline, record):
            return True
        if self._stays_errored(record):
            return False
        # A run that is killed when it has begun an epoch may leave the state of the epoch before.
        if not record.state.needs_changes or not has_tables(self.epoch, {table: record}):
            return True
        if table in selected.unnamed:
            # Do not copy it now: the receiver identifies its columns by their attnums.
            log.warning(
                "%s; changes are still applied, but the table cannot be copied until the setting is changed",
                selected.problems[table],
            )
            return False
        return table in selected.problems and record.state is not TableState.PAUSED

    def _stays_errored(self, record: TableRecord) -> bool:
        """Return True if a table stopped at an LSN of the stream and a snapshot would not resolve that.

        Without lake tables no row is read, so the changes that are missing in its events stay missing.
        """
        if self.snapshotter.pipeline.has_lake_tables or record.lsn is None:
            return False
        if record.state is not TableState.ERRORED:
            return False
        log.warning(
            "table %s stays errored: %s. Give the consumers of its events a snapshot of it; then %s",
            record.table,
            record.reason,
            errors.resnapshot(record.table),
        )
        return True

    def begin(self, take_over: str = "") -> SnapshotResult:
        """Begin an epoch. `take_over` as in `begin_epoch`; raises what that raises.

        Raises ConfigError, before anything is changed, if no table is left to copy.
        """
        snapshotter = self.snapshotter
        if take_over:  # Before the present epoch's slot is dropped.
            check_slot_to_take_over(snapshotter.source, take_over)
        if self.continues:  # `opened` has not checked what a new epoch needs.
            check_source(snapshotter.access.dsn, snapshotter.pipeline, self.requested, makes_slot=True)
        if self.epoch is not None:
            check_no_foreign_receiver(snapshotter.state_db, snapshotter.pipeline)
        selected, requested = self.select(self.requested)
        leave = self.left_out(selected)
        relations = [relation for relation in selected.relations if relation.table not in leave]
        if not relations:
            raise ConfigError(
                "no table is left to copy",
                'name a table in `tables`, or set `new_tables` to "add" if all of them are new',
            )
        self.prepare_executors()
        retire_unknown_tables(snapshotter.state_db, snapshotter.pipeline, self.records)
        if self.lost:
            own_tables.give_up(snapshotter.pipeline.lake_root, self.lost)
            log.warning("given up: %s", "; ".join(one.reason for one in self.lost))
        return begin_epoch(
            snapshotter, relations, requested, self.epoch, take_over, replace_record=self.new_epoch
        )

    def take(
        self, tables: Collection[TableName], requested: RequestedTables, selected: SelectedTables
    ) -> SnapshotResult:
        """Copy these tables into the present epoch."""
        if not tables:
            log.info("nothing to do: every table has been copied already (%s)", self.names)
            if requested.removed:
                removed = ", ".join(map(str, sorted(requested.removed)))
                log.info(
                    "left out, because they were removed: %s; --tables or --add takes them again", removed
                )
            return SnapshotResult()
        assert self.epoch is not None
        changing = tables_copied_differently(self.snapshotter.pipeline, self.records)
        check_may_change(self.snapshotter.state_db, self.snapshotter.pipeline, changing)
        # Bind the settings to the tables as they are now: executors may take long to start.
        wanted = [relation for relation in selected.relations if relation.table in tables]
        self.snapshotter.index_selected(self.epoch.epoch, wanted)
        self.prepare_executors()
        return self.snapshotter.take(frozenset(tables), requested, self.epoch)


@contextlib.contextmanager
def opened(
    access: Access, *, new_epoch: bool = False, give_up: Collection[str] = ()
) -> Iterator[SnapshotRun]:
    """Check source, lake and state, open the state, and take the pipeline's snapshot lock.

    Raises what the checks raise, before anything is created. Ownership is checked before the remains of a
    crash are set aside. Raises BusyError, which names the holder, while another run holds the lock.

    :param give_up: the names of sources or lakes that a new epoch may replace although they are not the
        present ones
    """
    pipeline, given_up = access.pipeline, frozenset(give_up)
    check_store(pipeline.lake_root)
    with contextlib.ExitStack() as stack:
        state_db = stack.enter_context(
            StateDatabase(access.state_dsn, f"snapshot {pipeline.name}", access.started_by)
        )
        source = stack.enter_context(access.source("snapshot"))
        for lake_may_fail in (True, False):
            evidence = gather(pipeline, state_db, source, lake_may_fail=lake_may_fail)
            if new_epoch:
                check_new_epoch(evidence, given_up)
            else:
                check_ours(evidence)
                check_followed(evidence)
            if lake_may_fail:
                settle_idle_lake(state_db, evidence, access.dsn, given_up if new_epoch else None)
        if new_epoch:
            check_lake_may_be_lost(evidence, given_up)
        log.info("%s", evidence.describe())
        epoch = evidence.epoch
        if epoch is None:
            check_not_nested(pipeline.lake_root)
            # Check this before recording anything: the record would prevent another try with another lake.
            check_directory(pipeline.lake_root)
        records = read_records(state_db, pipeline)
        if not new_epoch:
            check_lake(pipeline, epoch, records)
        lost = _find_lost(state_db, evidence, new_epoch=new_epoch)
        name = f"snapshot {pipeline.name}"
        turn = StartTurn(name)
        session = LazySession(lambda: start_spark(name, turn))
        stack.callback(session.stop)
        continues = not new_epoch and continues_epoch(evidence, records, source)
        if not continues:
            # Tables will be copied: Spark starts while the source is checked.
            _begin_local(session, pipeline)
            selected = read_selected(state_db, pipeline)
            names = recorded_names(source, pipeline, epoch, records, evidence.recorded, selected)
            followed = followed_at(source, pipeline, records, epoch or evidence.recorded)
            requested = requested_of(records, followed, names)
            check_source(access.dsn, pipeline, requested, new_epoch=new_epoch, makes_slot=True)
        else:
            check_surroundings(access.dsn, pipeline)
        check_own_tables(access, state_db, source)
        state_db.migrate()
        state_db.lock(pipeline.name, "snapshot")
        known = (evidence.recorded, epoch)
        former = [record.publication for record in known if record is not None]
        trigger.keep_installed(source, pipeline, former)
        records = state_db.read_tables(pipeline.name)
        out = frozenset(table for table, record in records.items() if record.membership == "removed")
        snapshotter = TableSnapshotter(access, source, state_db, session.get, out=out)
        epoch = find_epoch(pipeline)
        if not new_epoch:
            # Another run may have begun an epoch, or dropped the slot, while this one waited for the lock.
            evidence = gather(pipeline, state_db, source)
            check_ours(evidence)
            continues = continues_epoch(evidence, records, source)
        if continues and epoch is not None:
            record_names(pipeline, state_db, epoch.epoch)
        yield SnapshotRun(
            snapshotter,
            epoch,
            records,
            new_epoch,
            evidence.describe(),
            lambda: _prepare_executors(session, turn, access),
            followed_at(source, pipeline, records, epoch or evidence.recorded),
            recorded_names(
                source, pipeline, epoch, records, evidence.recorded, state_db.read_selected(pipeline.name)
            ),
            lost,
            continues,
        )


def _find_lost(
    state_db: StateDatabase, evidence: Evidence, *, new_epoch: bool
) -> list[own_tables.MissingTable]:
    """Return the lake's own tables that are lost together with an epoch that is given up.

    `pgrepl accept-missing` cannot be run in that case. Raises LakeError if an epoch that continues lacks such
    a table, or if another table is in its place.
    """
    root = evidence.pipeline.lake_root
    if evidence.torn_down or (new_epoch and any(differences(evidence))):
        return own_tables.find_lost(root)
    own_tables.check(root, known_tables(state_db, evidence.pipeline, evidence.epoch))
    return []


def _begin_local(session: LazySession, pipeline: Pipeline) -> None:
    """Start a session whose JVM runs already. Executors of a cluster are requested only when everything else
    is checked."""
    if pipeline.has_lake_tables and has_local_jvm():
        session.begin()


def _prepare_executors(session: LazySession, turn: StartTurn, access: Access) -> None:
    """Raise SparkError if a cluster provides no executor in time, ToolError if its packages differ.

    Checks nothing for a local session, which has the driver's packages. Starts it, and waits for its turn: an
    exported snapshot would hold back VACUUM during the wait.
    """
    _begin_local(session, access.pipeline)
    if access.pipeline.has_lake_tables and has_local_jvm():
        turn.await_turn()
    if access.pipeline.has_lake_tables and runs_on_cluster():
        spark, dsn = session.get(), access.dsn
        until = time.monotonic() + _EXECUTOR_S
        have_come = await_executors(
            spark,
            access.pipeline.lake_root,
            lambda: time.monotonic() > until,
            lambda: connect(dsn, "executor").close(),
        )
        if not have_come:
            raise SparkError(
                f"Spark has given this app no executor for {_EXECUTOR_S / 60:g} minutes, or none answers",
                "see on the cluster's page whether it is full, and run it again; nothing was made",
            )


def main(argv: Sequence[str]) -> int:
    """Run the app and return its exit code."""
    return process.run("snapshot", argv, of_snapshot, _run)


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    if pipeline.has_lake_tables:
        begin_compiling()
    access = Access.from_environment(pipeline)
    outcome = _taken(access, arguments)
    leave_result(_result(access, outcome))
    if not outcome.failed:
        return process.DONE
    log.error(
        "%d of %d tables are errored: %s",
        len(outcome.failed),
        len(outcome.failed) + len(outcome.copied),
        ", ".join(map(str, sorted(outcome.failed))),
    )
    return process.WILL_NOT_HELP


def _taken(access: Access, arguments: argparse.Namespace) -> SnapshotResult:
    if arguments.give_up and isinstance(arguments.resync, str):
        raise ConfigError(
            "--give-up: a resync of single tables begins no new epoch, and so gives nothing up",
            "leave it out",
        )
    if arguments.tables is not None:
        return resnapshot(access, _parse_tables("--tables", arguments.tables))
    if arguments.add is not None:
        return add_tables(access, _parse_tables("--add", arguments.add) or None)
    if arguments.adopt is not None:
        refuse_without_lake(access.pipeline, "--adopt", "leave it out")
        named = _parse_tables("--adopt", arguments.adopt)
        return add_tables(access, named, adopts=True) if named else take_tables(access, adopts=True)
    if arguments.new_epoch:
        return begin_new_epoch(access, _names(arguments.give_up))
    if arguments.resync is True:
        return resync(access, _names(arguments.give_up))
    if arguments.resync is not None:
        return resnapshot(access, _parse_tables("--resync", arguments.resync), compares=True)
    return take_over(access, arguments.take_over) if arguments.take_over else take_tables(access)


def _result(access: Access, outcome: SnapshotResult) -> dict[str, Any]:
    """Return the result of a run as data: copied tables, rows, the copies' consistent point, and failed
    tables."""
    with access.state_db("snapshot") as state_db:
        records = state_db.read_tables(access.pipeline.name)
    copied = [records[table] for table in sorted(outcome.copied) if table in records]
    positions = [record.position_lsn for record in copied if record.position_lsn is not None]
    return {
        "tables": [str(record.table) for record in copied],
        "rows": sum(record.rows_copied or 0 for record in copied),
        # The position of a copy is the LSN before its consistent point.
        "lsn": str(LSN(max(positions) + 1)) if positions else None,
        "failed": [str(table) for table in sorted(outcome.failed)],
    }


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _parse_tables(option: str, text: str) -> list[TableName]:
    try:
        return [TableName.parse(name) for name in _names(text)]
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def take_tables(access: Access, *, adopts: bool = False) -> SnapshotResult:
    """Begin the first epoch, or copy the tables that are not in the lake yet or are errored, into the present
    one.

    Raises PgReplError.

    :param adopts: lake tables of other programs are compared with the source, and become the pipeline's
    """
    with opened(access) as run:
        run.snapshotter.adopts = adopts
        if not run.continues:
            return run.begin()
        selected, requested = run.select(run.requested)
        leave = run.left_out(selected)
        retire_unknown_tables(run.snapshotter.state_db, access.pipeline, run.records)
        due = [table for table in selected.tables - leave if run.is_due(selected, table)]
        return run.take(due, requested, selected)


def take_over(access: Access, slot: str) -> SnapshotResult:
    """Begin the first epoch at the position of another program's slot, so that no change is left out.

    If the pipeline has begun, does the same as `take_tables`, unless nothing was copied and its epoch begins
    elsewhere. The publication must be the one that the other program has used. Raises PgReplError, among them
    ConfigError if `publication_mode` is not "use".
    """
    if access.pipeline.publication_mode != "use":
        raise ConfigError(
            "--take-over: the slot's changes can be decoded only with a publication that existed when they"
            " were written",
            'set `publication` to the one that the other program uses, and `publication_mode` to "use"',
        )
    with opened(access) as run:
        if not run.continues or run.begins_elsewhere(slot):
            return run.begin(slot)
    log.info("the pipeline has begun: slot %s is not looked at any more", slot)
    return take_tables(access)


def begin_new_epoch(access: Access, give_up: Collection[str] = ()) -> SnapshotResult:
    """Begin a new epoch: new slot, publication and positions, all tables copied again.

    Raises ConfigError, which gives the name to pass, and PgReplError.

    :param give_up: the names of the source or lake that it replaces, if they are not the present ones
    """
    with opened(access, new_epoch=True, give_up=give_up) as run:
        return run.begin()


def resync(access: Access, give_up: Collection[str] = ()) -> SnapshotResult:
    """Begin a new epoch whose tables are compared with the source, and repaired.

    A table that cannot be compared is copied. If an interrupted run has begun the present epoch, continue it
    with the tables that it lacks. Raises as `begin_new_epoch`, and ConfigError without lake tables.

    :param give_up: as of `begin_new_epoch`
    """
    refuse_without_lake(access.pipeline, "resync", "begin a new epoch: pgrepl snapshot FILE.json --new-epoch")
    if _may_continue(access):
        with opened(access) as run:
            run.snapshotter.compares = True
            selected, requested = run.select(run.requested)
            left = unwritten_tables(access.pipeline, run.epoch, run.records) & selected_tables(selected)
            if left:
                names = ", ".join(map(str, sorted(left)))
                log.info("continuing the present epoch with the tables that it lacks: %s", names)
                return run.take(left, requested, selected)
    with opened(access, new_epoch=True, give_up=give_up) as run:
        run.snapshotter.compares = True
        return run.begin()


def resnapshot(access: Access, tables: Collection[TableName], *, compares: bool = False) -> SnapshotResult:
    """Copy these tables of the pipeline again, whatever state they are in.

    Readers keep the old version until one commit replaces it. The table then catches up with the others. A
    table that cannot be copied is marked errored. Raises ConfigError for tables that are not the pipeline's,
    and PgReplError for problems of more than one table. A repeated run copies the tables that were not
    finished.

    :param compares: compare the tables with the source, and replace the rows that differ. A table that
        cannot be compared is copied
    """
    wanted = frozenset(tables)
    if not wanted:
        raise ConfigError("no table was named", "name at least one, as public.orders")
    if compares:
        refuse_without_lake(
            access.pipeline, "resync", "leave resync out: pgrepl snapshot FILE.json --tables NAME"
        )
    with opened(access) as run:
        run.snapshotter.compares = compares
        run.check_has_begun("--tables")
        selected, requested = run.select(
            replace(
                run.requested,
                added=run.requested.added | (wanted & run.requested.removed),
                removed=run.requested.removed - wanted,
            )
        )
        check_known(wanted, selected, run.records)
        return run.take(wanted, requested, selected)


def add_tables(
    access: Access, tables: Collection[TableName] | None = None, *, adopts: bool = False
) -> SnapshotResult:
    """Add tables that the pipeline file does not list, or that were removed.

    Tables that are in the lake already stay unchanged. Raises ConfigError, or TableError for a table that
    cannot be replicated, before anything is changed. Raises SnapshotError, which a retry may resolve, if a
    table cannot be locked because it is written to all the time.

    :param tables: None to add all unrecorded tables that match a pattern now
    :param adopts: as of `take_tables`
    """
    wanted = frozenset(tables or ())
    with opened(access) as run:
        run.snapshotter.adopts = adopts
        run.check_has_begun("--adopt with names" if adopts else "--add")
        selected, requested = run.select(
            replace(run.requested, added=run.requested.added | wanted, removed=run.requested.removed - wanted)
        )
        if tables is None:
            wanted = frozenset(unrecorded(selected, run.records))
        check_addable(wanted, selected, run.records)
        due = {table for table in wanted if table in run.requested.removed or run.is_due(selected, table)}
        for table in sorted(wanted - due):
            log.info("table %s is replicated already", table)
        return run.take(due, requested, selected)


def _may_continue(access: Access) -> bool:
    """Return True if source, lake and state agree that the present epoch continues."""
    role = f"resync {access.pipeline.name}"
    with (
        StateDatabase(access.state_dsn, role, access.started_by) as state_db,
        access.source("resync") as source,
    ):
        evidence = gather(access.pipeline, state_db, source, lake_may_fail=True)
        return not any(differences(evidence)) and is_whole(evidence, source)
