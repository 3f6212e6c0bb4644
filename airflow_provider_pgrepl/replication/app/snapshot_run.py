"""SnapshotRun: one run of the snapshot app, with what it looked at before it began."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ConfigError, SparkError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import check_lake, known_tables
from airflow_provider_pgrepl.replication.app.epoch_beginning import begin_epoch
from airflow_provider_pgrepl.replication.app.epoch_record import find_epoch, has_tables
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.foreign_receiver import check_no_foreign_receiver
from airflow_provider_pgrepl.replication.app.lake_choice import (
    check_may_change,
    otherwise_taken,
    taken_otherwise,
)
from airflow_provider_pgrepl.replication.app.ownership import (
    Evidence,
    check_new_epoch,
    check_ours,
    differences,
)
from airflow_provider_pgrepl.replication.app.recorded_names import recorded_names
from airflow_provider_pgrepl.replication.app.recovery import settle_idle_lake
from airflow_provider_pgrepl.replication.app.snapshot_tables import Outcome, TableSnapshotter
from airflow_provider_pgrepl.replication.app.start_check import check_own_tables
from airflow_provider_pgrepl.replication.app.tables import (
    Records,
    left_out,
    read_records,
    read_selected,
    requested_of,
    retire_unknown_tables,
    unrecorded,
)
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.nested_lakes import check_not_nested
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.preflight.check import check_source, check_surroundings
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    Selected,
    check_choices,
    log_left_out,
    select_tables,
)
from airflow_provider_pgrepl.replication.spark.executors import await_executors
from airflow_provider_pgrepl.replication.spark.session import LazySession, build_session, runs_on_cluster
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord
from airflow_provider_pgrepl.replication.storage.probe import check_directory, check_store

log = logging.getLogger(__name__)

_EXECUTOR_S = 600.0
"""How long a snapshot waits for executors, which answer within seconds where there are any."""
_DONE_STATES = (TableState.STREAMING, TableState.CATCHING_UP, TableState.PAUSED)


@dataclass
class SnapshotRun:
    """One run on a pipeline whose lock it holds."""

    taking: TableSnapshotter
    epoch: EpochRecord | None
    records: Records
    new_epoch: bool
    names: str
    """Pipeline, source and lake."""
    check_executors: Callable[[], None]
    """Raises ToolError; to be called before anything is made for a copy."""
    recorded: BoundRules | None = None
    lost: Collection[own_tables.MissingTable] = ()
    """The lake's own tables that are given up with the epoch before."""

    @property
    def has_begun(self) -> bool:
        return not self.new_epoch and has_tables(self.epoch, self.records)

    @property
    def requested(self) -> RequestedTables:
        return requested_of(self.records, self.recorded)

    def check_has_begun(self, option: str) -> None:
        """Raises ConfigError naming the option, which is for pipelines that have begun."""
        if not self.has_begun:
            raise ConfigError(f"{option}: this pipeline has no epoch yet", f"run it without {option} first")

    def select(self, requested: RequestedTables) -> tuple[Selected, RequestedTables]:
        """What belongs to the pipeline then. Raises ConfigError for choices for other tables."""
        selected = select_tables(self.taking.source, self.taking.pipeline, requested)
        check_choices(self.taking.pipeline, selected.tables | requested.removed)
        if self.has_begun:  # Else the preflight has said it.
            log_left_out(selected)
        return selected, requested

    def is_due(self, selected: Selected, table: TableName) -> bool:
        """Whether a table is to be taken, or can no longer be replicated and has to be told so."""
        record = self.records.get(table)
        if record is None or taken_otherwise(self.taking.pipeline, record):
            return True
        if self._stays_errored(record):
            return False
        if record.state not in _DONE_STATES:
            return True
        if table in selected.unnamed:
            # Nothing is copied of it now: the receiver knows its columns by their attnums.
            log.warning("%s; the table goes on, and cannot be copied until then", selected.problems[table])
            return False
        return table in selected.problems and record.state is not TableState.PAUSED

    def _stays_errored(self, record: TableRecord) -> bool:
        """Whether a table stopped at a place in the stream, and taking it would mend nothing: without lake
        tables no row is read, and what is missing in its events stays so."""
        if self.taking.pipeline.has_lake_tables or record.lsn is None:
            return False
        if record.state is not TableState.ERRORED:
            return False
        log.warning(
            "table %s stays errored: %s. Give the consumers of its events a snapshot of it; then %s",
            record.table,
            record.reason,
            hints.resnapshot(record.table),
        )
        return True

    def begin(self, take_over: str = "") -> Outcome:
        """Begin an epoch; `take_over` as in `begin_epoch`, and raising what that does."""
        taking = self.taking
        if self.epoch is not None:
            check_no_foreign_receiver(taking.store, taking.pipeline)
        requested = self.requested
        selected, _ = self.select(requested)
        leave = left_out(taking.pipeline, unrecorded(selected, self.records)) if self.epoch else frozenset()
        relations = [relation for relation in selected.relations if relation.table not in leave]
        self.check_executors()
        retire_unknown_tables(taking.store, taking.pipeline, self.records)
        if self.lost:
            own_tables.give_up(taking.pipeline.lake_root, self.lost)
            log.warning("given up: %s", "; ".join(one.reason for one in self.lost))
        return begin_epoch(taking, relations, requested, self.epoch, take_over, replace_record=self.new_epoch)

    def take(self, tables: Collection[TableName], requested: RequestedTables, selected: Selected) -> Outcome:
        """Copy these into the epoch that runs."""
        if not tables:
            log.info("nothing to do: every table has been copied already (%s)", self.names)
            if requested.removed:
                removed = ", ".join(map(str, sorted(requested.removed)))
                log.info(
                    "left out, because they were removed: %s; --tables or --add takes them again", removed
                )
            return Outcome()
        assert self.epoch is not None
        changing = otherwise_taken(self.taking.pipeline, self.records)
        check_may_change(self.taking.store, self.taking.pipeline, changing)
        # Settings are bound to the tables as they are now: executors may be long in coming.
        wanted = [relation for relation in selected.relations if relation.table in tables]
        self.taking.index_selected(self.epoch.epoch, wanted)
        self.check_executors()
        return self.taking.take(frozenset(tables), requested, self.epoch)


@contextlib.contextmanager
def opened(
    access: Access, *, new_epoch: bool = False, give_up: Collection[str] = ()
) -> Iterator[SnapshotRun]:
    """Check source, lake and state, open the state, take the pipeline's lock.

    `give_up`: names of what a new epoch may replace though it is not this source's or lake's. Raises what the
    checks say, before anything is created or set aside; BusyError, which names the holder, while another run
    is at work.
    """
    pipeline, given_up = access.pipeline, frozenset(give_up)
    check_store(pipeline.lake_root)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(access.state_dsn, f"snapshot {pipeline.name}"))
        source = stack.enter_context(access.source("snapshot"))
        for lake_may_fail in (True, False):
            evidence = gather(pipeline, store, source, lake_may_fail=lake_may_fail)
            if new_epoch:
                check_new_epoch(evidence, given_up)
            else:
                check_ours(evidence)
            if lake_may_fail:
                settle_idle_lake(store, evidence, access.dsn, given_up if new_epoch else None)
        log.info("%s", evidence.describe())
        epoch = evidence.epoch
        if epoch is None:
            check_not_nested(pipeline.lake_root)
            # Before anything is recorded: such a record would keep the next try from another lake.
            check_directory(pipeline.lake_root)
        records = read_records(store, pipeline)
        if not new_epoch:
            check_lake(pipeline, epoch, records)
        lost = _find_lost(store, evidence, new_epoch=new_epoch)
        if new_epoch or not has_tables(epoch, records):
            selected = read_selected(store, pipeline)
            names = recorded_names(source, pipeline, epoch, records, evidence.recorded, selected)
            requested = requested_of(records, names)
            check_source(access.dsn, pipeline, requested, new_epoch=new_epoch, makes_slot=True)
        else:
            check_surroundings(access.dsn, pipeline)
        check_own_tables(access, store, source)
        store.migrate()
        store.lock(pipeline.name, "snapshot")
        known = (evidence.recorded, epoch)
        former = [record.publication for record in known if record is not None]
        trigger.keep_installed(source, pipeline, former)
        session = LazySession(lambda: build_session(f"pgrepl snapshot {pipeline.name}", delta=False))
        stack.callback(session.stop)
        records = store.read_tables(pipeline.name)
        taking = TableSnapshotter(access, source, store, session.get)
        epoch = find_epoch(pipeline)
        yield SnapshotRun(
            taking,
            epoch,
            records,
            new_epoch,
            evidence.describe(),
            lambda: _check_executors(session, access),
            recorded_names(
                source, pipeline, epoch, records, evidence.recorded, store.read_selected(pipeline.name)
            ),
            lost,
        )


def _find_lost(store: Store, evidence: Evidence, *, new_epoch: bool) -> list[own_tables.MissingTable]:
    """The lake's own tables that are lost with an epoch which is given up: `pgrepl accept-missing` refuses
    there. Raises LakeError for those of one that goes on, and where another table is in the place."""
    root = evidence.pipeline.lake_root
    if evidence.torn_down or (new_epoch and any(differences(evidence))):
        return own_tables.find_lost(root)
    own_tables.check(root, known_tables(store, evidence.pipeline, evidence.epoch))
    return []


def _check_executors(session: LazySession, access: Access) -> None:
    """Those of a cluster: a local session has the driver's."""
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
