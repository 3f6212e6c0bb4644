"""Removal of tables from a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from airflow_provider_pgrepl.errors import BusyError, ConfigError, NoChangelogError
from airflow_provider_pgrepl.replication.app import evidence
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.ownership import check_no_foreign_receiver
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake import drop
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.publication import drop_tables, reason_to_keep, table_names
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from . import selection
from .selection import change, choose

log = logging.getLogger(__name__)


def remove_tables(
    access: Access,
    tables: Iterable[TableName | str],
    drop_lake_tables: bool = False,
    timeout_s: float = 60.0,
) -> None:
    """Remove tables from the pipeline, and from its publication if the pipeline owns it.

    With `drop_lake_tables` their lake tables are dropped with their histories, and consistent points that
    name them can no longer be used to read them. Otherwise the lake tables stay unchanged. The apps may keep
    running. For a table that was removed before, the remaining steps are done, so that an interrupted run can
    be repeated.

    Raises ConfigError for names that are not among the pipeline's tables, and for the last tables of the
    pipeline. Raises BusyError, so that a later run may succeed, if a process copies or applies the tables for
    longer than `timeout_s` seconds or holds a lock at the source; with `drop_lake_tables` also if a
    verification or maintenance runs for longer. Raises LakeError for a lake table that the
    pipeline has not written; PrivilegeError.
    """
    name = access.pipeline.name
    deadline = selection.Deadline(timeout_s)
    with access.state_db("remove") as state_db:
        evidence.check(access.pipeline, state_db, access.dsn, lake_may_fail=not drop_lake_tables)
        records = _removable(access, state_db, tables, drop_lake_tables)
        chosen = [record.table for record in records]
        if drop_lake_tables or _being_copied(records):
            selection.lock(state_db, name, "snapshot", deadline)
        if drop_lake_tables:
            # A repair or a compaction would commit its next version into the dropped folder, which could then
            # neither be dropped nor be replaced by a copy.
            for purpose in ("verify", "maintain"):
                selection.lock(state_db, name, purpose, deadline)
            check_no_foreign_receiver(state_db, access.pipeline)
        # A snapshot that copies a table again waits for this lock, or has set the state before the states are
        # read.
        with state_db.locked(name, "publication", timeout_s):
            records = _removable(access, state_db, chosen, drop_lake_tables)
            if _being_copied(records):
                state_db.lock(name, "snapshot")
            _set_removed(state_db, name, records)
            _unpublish(access, state_db, records)
        if drop_lake_tables:
            _drop(access, state_db, chosen, deadline)


def check_removable(access: Access, tables: Iterable[TableName | str], *, drop_lake_tables: bool) -> None:
    """Raise what `remove_tables` would raise, as far as it is known beforehand."""
    with access.state_db("remove") as state_db:
        evidence.check(access.pipeline, state_db, access.dsn, lake_may_fail=not drop_lake_tables)
        _removable(access, state_db, tables, drop_lake_tables)


def _removable(
    access: Access, state_db: StateDatabase, tables: Iterable[TableName | str], drop_lake_tables: bool
) -> list[TableRecord]:
    pipeline = access.pipeline
    records = choose(state_db, pipeline.name, tables)
    _refuse_last(state_db, pipeline.name, records)
    if drop_lake_tables:
        read_epoch(changelog_uri(pipeline.lake_root))
        _check_droppable(access, state_db, [record.table for record in records])
    return records


def _check_droppable(access: Access, state_db: StateDatabase, tables: Sequence[TableName]) -> None:
    name, root = access.pipeline.name, access.pipeline.lake_root
    copied = {table for table, one in state_db.read_tables(name).items() if one.position_lsn is not None}
    drop.check_droppable(root, tables, name, copied)


def _being_copied(records: Iterable[TableRecord]) -> bool:
    return any(record.state.is_being_copied for record in records)


def _refuse_last(state_db: StateDatabase, name: str, records: Sequence[TableRecord]) -> None:
    leaving = {record.table for record in records}
    staying = [
        table
        for table, record in state_db.read_tables(name).items()
        if table not in leaving and record.state is not TableState.REMOVED
    ]
    if not staying and any(record.state is not TableState.REMOVED for record in records):
        raise ConfigError(
            f"no table would be left in pipeline {name}",
            "use teardown to give up the pipeline with its slot and publication",
        )


def _set_removed(state_db: StateDatabase, name: str, records: Sequence[TableRecord]) -> None:
    def is_done(record: TableRecord) -> bool:
        return record.state is TableState.REMOVED and record.membership == "removed"

    change(
        state_db,
        name,
        records,
        lambda _: None,
        lambda record: (
            is_done(record) or state_db.move(name, record, TableState.REMOVED, membership="removed")
        ),
    )


def _unpublish(access: Access, state_db: StateDatabase, records: Sequence[TableRecord]) -> None:
    name = access.pipeline.name
    recorded = state_db.read_pipeline(name)
    if recorded is None or not recorded.publication_owned:
        return
    others = [
        record for record in state_db.read_tables(name).values() if record.state is not TableState.REMOVED
    ]
    with access.source("remove") as source:
        reason = reason_to_keep(source, recorded.publication, name, _publication_oid(access))
        if reason is not None:
            log.warning("publication %s was not altered: %s", recorded.publication, reason)
            return
        leaving = _names(source, records, others)
        left = drop_tables(source, recorded.publication, leaving, access.pipeline.lock_timeout_s)
    for table in left:
        log.info("table %s is no longer in publication %s", table, recorded.publication)


def _publication_oid(access: Access) -> int | None:
    """Return the OID of the epoch's publication; None without a changelog."""
    try:
        return read_epoch(changelog_uri(access.pipeline.lake_root)).publication_oid
    except NoChangelogError:
        return None


def _names(
    source: Connection, records: Iterable[TableRecord], others: Sequence[TableRecord]
) -> set[TableName]:
    """Return the recorded and the present names of these tables, without names that other tables of the
    pipeline have now: after renames, the recorded name of one can be the present name of another."""
    oids, staying = _oids(records), _oids(others)
    renamed = table_names(source, oids - staying) - {record.table for record in others}
    return ({record.table for record in records} | renamed) - table_names(source, staying)


def _oids(records: Iterable[TableRecord]) -> set[int]:
    return {record.relation.oid for record in records if record.relation is not None}


def _drop(
    access: Access, state_db: StateDatabase, tables: Sequence[TableName], deadline: selection.Deadline
) -> None:
    root, since = access.pipeline.lake_root, state_db.now()
    # Commit a marker: the replication app then begins a batch with the new states, even without changes.
    writer.mark(changelog_uri(root))
    try:
        selection.wait_until_released(state_db, access.pipeline.name, since, deadline)
    except BusyError as busy:
        raise BusyError(
            "the tables are removed, but their lake tables are not dropped: the replication app did not end"
            f" its batch in time ({busy.message})",
            "run the same command again; it drops the lake tables",
        ) from None
    # Check again: another program may have written there during the wait for the batch.
    _check_droppable(access, state_db, tables)
    for path in drop.foreign_files(root, tables):
        log.warning("%s was not written by this pipeline, and is kept", path)
    for table in drop.drop_lake_tables(root, tables):
        log.info("dropped lake table %s", table)
