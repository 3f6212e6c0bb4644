"""The snapshot app: begins an epoch, or takes single tables, and copies them at one source snapshot.

    snapshot --pipeline FILE.json                    what is not in the lake yet, or is errored
    snapshot --pipeline FILE.json --tables a.b,c.d   copy these tables again, whatever state they are in
    snapshot --pipeline FILE.json --add a.b,c.d      tables that are not in the pipeline file
    snapshot --pipeline FILE.json --add              tables that match a pattern now, whatever new_tables says
    snapshot --pipeline FILE.json --new-epoch        a new history: new slot, all tables copied again

`take_tables`, `resnapshot`, `add_tables` and `begin_new_epoch` do the same for callers in Python. At first
set-up everything is refused when anything is wrong, and nothing is created. Later on an error of one table
marks that table errored, and the others are copied.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch_record import check_owner, find_epoch, has_tables
from airflow_provider_pgrepl.replication.app.lost_lake import check_lake
from airflow_provider_pgrepl.replication.app.lost_state import check_state
from airflow_provider_pgrepl.replication.app.requested_tables import (
    Records,
    left_out,
    read_records,
    requested_of,
    retire_unknown_tables,
    unrecorded,
)
from airflow_provider_pgrepl.replication.app.snapshotting.epoch_beginning import begin_epoch
from airflow_provider_pgrepl.replication.app.snapshotting.start_check import check_addable, check_known
from airflow_provider_pgrepl.replication.app.snapshotting.table_snapshotter import Outcome, TableSnapshotter
from airflow_provider_pgrepl.replication.app.torn_commits import settle_idle_lake
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.compiled import begin_compiling
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.session import LazySession, build_session
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.run_result import leave_result
from airflow_provider_pgrepl.replication.source.ddl_capture import event_trigger
from airflow_provider_pgrepl.replication.source.preflight.check import check_source, check_surroundings
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    Selected,
    check_choices,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.slot.record import read_slot
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState

__all__ = ["Outcome", "add_tables", "begin_new_epoch", "check_owner", "main", "resnapshot", "take_tables"]

log = logging.getLogger(__name__)

_DONE_STATES = (TableState.STREAMING, TableState.CATCHING_UP, TableState.PAUSED)


def main(argv: Sequence[str]) -> int:
    """Run the app; returns its exit code."""
    return process.run("snapshot", argv, _add_arguments, _run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--tables", metavar="a.b,c.d", help="copy these tables (again), and no others")
    ways.add_argument(
        "--add",
        metavar="a.b,c.d",
        nargs="?",
        const="",
        help="take tables that the pipeline file does not hold; without names: those that match a pattern",
    )
    ways.add_argument(
        "--new-epoch", action="store_true", help="begin a new history: new slot, all tables copied again"
    )


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    begin_compiling()
    access = Access.from_environment(pipeline)
    if arguments.tables:
        outcome = resnapshot(access, _parse_tables("--tables", arguments.tables))
    elif arguments.add is not None:
        outcome = add_tables(access, _parse_tables("--add", arguments.add) or None)
    elif arguments.new_epoch:
        outcome = begin_new_epoch(access)
    else:
        outcome = take_tables(access)
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


def _result(access: Access, outcome: Outcome) -> dict[str, Any]:
    """What was copied, for who reads it as data: tables, rows, and the consistent point of the copies."""
    with access.store("snapshot") as store:
        records = store.read_tables(access.pipeline.name)
    copied = [records[table] for table in sorted(outcome.copied) if table in records]
    positions = [record.position_lsn for record in copied if record.position_lsn is not None]
    return {
        "tables": [str(record.table) for record in copied],
        "rows": sum(record.rows_copied or 0 for record in copied),
        # A copy at a consistent point has the position before it.
        "lsn": str(LSN(max(positions) + 1)) if positions else None,
        "failed": [str(table) for table in sorted(outcome.failed)],
    }


def _parse_tables(option: str, text: str) -> list[TableName]:
    try:
        return [TableName.parse(name.strip()) for name in text.split(",") if name.strip()]
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def take_tables(access: Access) -> Outcome:
    """Begin the first epoch, or take what is not in the lake yet, or is errored. Raises PgReplError."""
    with _opened(access) as run:
        if not run.has_begun:
            return run.begin()
        selected, requested = run.select(run.requested)
        leave = left_out(access.pipeline, unrecorded(selected, run.records))
        retire_unknown_tables(run.taking.store, access.pipeline, run.records)
        return run.take(
            [table for table in selected.tables - leave if run.is_due(selected, table)], requested
        )


def begin_new_epoch(access: Access) -> Outcome:
    """Begin a new epoch: new slot, publication and positions, all tables copied again. Raises PgReplError."""
    with _opened(access, new_epoch=True) as run:
        return run.begin()


def resnapshot(access: Access, tables: Collection[TableName]) -> Outcome:
    """Copy these tables of the pipeline again, whatever state they are in. Readers keep the old version until
    one commit replaces it; the table then catches up with the others.

    One that cannot be taken is errored then. Raises ConfigError for tables that are not the pipeline's, and
    PgReplError for what concerns more than a table; run again, it takes what was not finished.
    """
    wanted = frozenset(tables)
    with _opened(access) as run:
        run.check_has_begun("--tables")
        selected, requested = run.select(
            replace(
                run.requested,
                added=run.requested.added | (wanted & run.requested.removed),
                removed=run.requested.removed - wanted,
            )
        )
        check_known(wanted, selected, run.records)
        return run.take(wanted, requested)


def add_tables(access: Access, tables: Collection[TableName] | None = None) -> Outcome:
    """Take tables that the pipeline file does not hold, or that were removed; None: all that match a pattern
    now and are not recorded yet. What is in the lake already is left as it is.

    Raises ConfigError, TableError for a table that cannot be replicated, with nothing done; SnapshotError,
    which a retry may mend, when a table is written all the time and cannot be locked.
    """
    wanted = frozenset(tables or ())
    with _opened(access) as run:
        run.check_has_begun("--add")
        selected, requested = run.select(
            replace(run.requested, added=run.requested.added | wanted, removed=run.requested.removed - wanted)
        )
        if tables is None:
            wanted = frozenset(unrecorded(selected, run.records))
        check_addable(wanted, selected, run.records)
        due = {table for table in wanted if table in run.requested.removed or run.is_due(selected, table)}
        for table in sorted(wanted - due):
            log.info("table %s is replicated already", table)
        return run.take(due, requested)


@dataclass
class _Run:
    """One run on a pipeline whose lock it holds."""

    taking: TableSnapshotter
    epoch: EpochRecord | None
    records: Records
    new_epoch: bool

    @property
    def has_begun(self) -> bool:
        return not self.new_epoch and has_tables(self.epoch, self.records)

    @property
    def requested(self) -> RequestedTables:
        return requested_of(self.records)

    def check_has_begun(self, option: str) -> None:
        if not self.has_begun:
            raise ConfigError(f"{option}: this pipeline has no epoch yet", f"run it without {option} first")

    def select(self, requested: RequestedTables) -> tuple[Selected, RequestedTables]:
        """What belongs to the pipeline then. Raises ConfigError for choices for other tables."""
        selected = select_tables(self.taking.source, self.taking.pipeline, requested)
        check_choices(self.taking.pipeline, selected.tables | requested.removed)
        return selected, requested

    def is_due(self, selected: Selected, table: TableName) -> bool:
        """Whether a table is to be taken, or can no longer be replicated and has to be told so."""
        record = self.records.get(table)
        if record is None or record.state not in _DONE_STATES:
            return True
        return table in selected.problems and record.state is not TableState.PAUSED

    def begin(self) -> Outcome:
        taking = self.taking
        requested = self.requested
        selected, _ = self.select(requested)
        leave = left_out(taking.pipeline, unrecorded(selected, self.records)) if self.epoch else frozenset()
        relations = [relation for relation in selected.relations if relation.table not in leave]
        retire_unknown_tables(taking.store, taking.pipeline, self.records)
        return begin_epoch(taking, relations, requested, self.epoch)

    def take(self, tables: Collection[TableName], requested: RequestedTables) -> Outcome:
        if not tables:
            log.info("nothing to do: every table has been copied already")
            if requested.removed:
                removed = ", ".join(map(str, sorted(requested.removed)))
                log.info(
                    "left out, because they were removed: %s; --tables or --add takes them again", removed
                )
            return Outcome()
        assert self.epoch is not None
        return self.taking.take(frozenset(tables), requested, self.epoch)


@contextlib.contextmanager
def _opened(access: Access, *, new_epoch: bool = False) -> Iterator[_Run]:
    """Check the source, open the state, take the pipeline's lock.

    Raises what the checks say, before anything is created; BusyError, which names the holder, while
    another run is at work.
    """
    pipeline = access.pipeline
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(access.state_dsn, f"snapshot {pipeline.name}"))
        settle_idle_lake(store, pipeline, None if new_epoch else access.dsn)
        epoch = find_epoch(pipeline)
        if not new_epoch and _has_slot(access):
            check_state(store, pipeline, epoch)
        records = read_records(store, pipeline)
        if not new_epoch:
            check_lake(pipeline, epoch, records)
        if new_epoch or not has_tables(epoch, records):
            check_source(access.dsn, pipeline, requested_of(records), new_epoch=new_epoch, makes_slot=True)
        else:
            check_surroundings(access.dsn, pipeline)
        store.migrate()
        store.lock(pipeline.name, "snapshot")
        source = stack.enter_context(access.source("snapshot"))
        event_trigger.keep_installed(source, pipeline)
        session = LazySession(lambda: build_session(f"pgrepl snapshot {pipeline.name}", delta=False))
        stack.callback(session.stop)
        records = store.read_tables(pipeline.name)
        yield _Run(
            TableSnapshotter(access, source, store, session.get), find_epoch(pipeline), records, new_epoch
        )


def _has_slot(access: Access) -> bool:
    """Without one, a pipeline that is not recorded has been torn down, and its lake kept."""
    with access.source("snapshot") as source:
        return read_slot(source, access.pipeline.slot) is not None
