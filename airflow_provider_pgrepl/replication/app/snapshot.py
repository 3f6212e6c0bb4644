"""The snapshot app: begins an epoch, or takes single tables, and copies them at one source snapshot.

    snapshot --pipeline FILE.json                    what is not in the lake yet, or is errored
    snapshot --pipeline FILE.json --tables a.b,c.d   copy these tables again, whatever state they are in
    snapshot --pipeline FILE.json --add a.b,c.d      tables that are not in the pipeline file
    snapshot --pipeline FILE.json --add              tables that match a pattern now, whatever new_tables says
    snapshot --pipeline FILE.json --new-epoch        a new history: new slot, all tables copied again
    snapshot --pipeline FILE.json --take-over SLOT   begin where another program's slot stands

`take_tables`, `resnapshot`, `add_tables`, `begin_new_epoch` and `take_over` do the same for callers in
Python. At first set-up everything is refused when anything is wrong, and nothing is created. Later on an
error of one table marks that table errored, and the others are copied.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.app_arguments import of_snapshot
from airflow_provider_pgrepl.replication.app.snapshot_run import opened
from airflow_provider_pgrepl.replication.app.snapshot_tables import Outcome
from airflow_provider_pgrepl.replication.app.start_check import check_addable, check_known
from airflow_provider_pgrepl.replication.app.tables import left_out, retire_unknown_tables, unrecorded
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.run_result import leave_result
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the app; returns its exit code."""
    return process.run("snapshot", argv, of_snapshot, _run)


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    begin_compiling()
    access = Access.from_environment(pipeline)
    if arguments.tables:
        outcome = resnapshot(access, _parse_tables("--tables", arguments.tables))
    elif arguments.add is not None:
        outcome = add_tables(access, _parse_tables("--add", arguments.add) or None)
    elif arguments.new_epoch:
        outcome = begin_new_epoch(access, _names(arguments.give_up))
    elif arguments.take_over:
        outcome = take_over(access, arguments.take_over)
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


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _parse_tables(option: str, text: str) -> list[TableName]:
    try:
        return [TableName.parse(name) for name in _names(text)]
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def take_tables(access: Access) -> Outcome:
    """Begin the first epoch, or take what is not in the lake yet, or is errored. Raises PgReplError."""
    with opened(access) as run:
        if not run.has_begun:
            return run.begin()
        selected, requested = run.select(run.requested)
        leave = left_out(access.pipeline, unrecorded(selected, run.records))
        retire_unknown_tables(run.taking.store, access.pipeline, run.records)
        due = [table for table in selected.tables - leave if run.is_due(selected, table)]
        return run.take(due, requested, selected)


def take_over(access: Access, slot: str) -> Outcome:
    """Begin the first epoch where another program's slot stands: its changes come first, none is left out.
    Once it has begun, this does as `take_tables`.

    The publication must be the one that this program has used. Raises PgReplError.
    """
    if access.pipeline.publication_mode != "use":
        raise ConfigError(
            "--take-over: what the slot holds can be read with a publication from then alone",
            'name it as `publication`, and set `publication_mode` to "use"',
        )
    with opened(access) as run:
        if not run.has_begun:
            return run.begin(slot)
    log.info("the pipeline has begun: slot %s is not looked at any more", slot)
    return take_tables(access)


def begin_new_epoch(access: Access, give_up: Collection[str] = ()) -> Outcome:
    """Begin a new epoch: new slot, publication and positions, all tables copied again.

    `give_up`: the names of what it replaces, where that is of another source or lake. Raises ConfigError,
    which says the name, PgReplError.
    """
    with opened(access, new_epoch=True, give_up=give_up) as run:
        return run.begin()


def resnapshot(access: Access, tables: Collection[TableName]) -> Outcome:
    """Copy these tables of the pipeline again, whatever state they are in. Readers keep the old version until
    one commit replaces it; the table then catches up with the others.

    One that cannot be taken is errored then. Raises ConfigError for tables that are not the pipeline's, and
    PgReplError for what concerns more than a table; run again, it takes what was not finished.
    """
    wanted = frozenset(tables)
    with opened(access) as run:
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


def add_tables(access: Access, tables: Collection[TableName] | None = None) -> Outcome:
    """Take tables that the pipeline file does not hold, or that were removed; None: all that match a pattern
    now and are not recorded yet. What is in the lake already is left as it is.

    Raises ConfigError, TableError for a table that cannot be replicated, with nothing done; SnapshotError,
    which a retry may mend, when a table is written all the time and cannot be locked.
    """
    wanted = frozenset(tables or ())
    with opened(access) as run:
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
        return run.take(due, requested, selected)
