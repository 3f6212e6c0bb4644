"""What a run of an app would refuse to begin with, asked of source, state and lake before it is started.

It reads only, takes no lock, and refuses nothing that the app itself would not; what it cannot see, the app
does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.tables import Records, requested_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import check_unsent
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.preflight.check import check_source, check_surroundings
from airflow_provider_pgrepl.replication.source.preflight.selection import Selected, select_tables
from airflow_provider_pgrepl.replication.state.store import Store

_WITHOUT_TRIGGER = (
    "nothing was created. Set event_trigger to false, or let those publications list their tables"
)


def check_own_tables(access: Access, store: Store, source: Connection) -> None:
    """Raises PublicationError where subscribers of others would be sent the tables that a snapshot creates
    in schema `_pgrepl`: the state's, and the key of the event trigger."""
    pipeline = access.pipeline
    used = pipeline.used_publication
    store.check_unsent(pipeline.slot, used if access.state_dsn == access.dsn else "")
    if pipeline.event_trigger and not trigger.is_present(source, pipeline):
        check_unsent(source, pipeline.slot, used, _WITHOUT_TRIGGER)


def check_replication(access: Access) -> None:
    """Raise what keeps the replication app from receiving: login, rights, settings, a slot that is lost, a
    lake that is not there."""
    check_surroundings(access.dsn, access.pipeline)
    _check_lake(access.pipeline, _read_records(access), must_have_begun=True)


def check_snapshot(
    access: Access,
    *,
    resnapshot: Collection[TableName] = (),
    added: Collection[TableName] = (),
    new_epoch: bool = False,
) -> None:
    """Raise what keeps the snapshot app from beginning; it is to copy the tables `resnapshot` and `added`."""
    with Store(access.state_dsn, "preflight") as store, access.source("preflight") as source:
        check_own_tables(access, store, source)
    records = _read_records(access)
    if not new_epoch:
        _check_lake(access.pipeline, records, must_have_begun=False)
    if records is None or (not new_epoch and _has_begun(records)):
        check_surroundings(access.dsn, access.pipeline)
    else:
        check_source(access.dsn, access.pipeline, requested_of(records), new_epoch=new_epoch, makes_slot=True)
    if records is not None and (resnapshot or added):
        _check_named(access, records, frozenset(resnapshot), frozenset(added))


def check_known(wanted: Collection[TableName], selected: Selected, records: Records) -> None:
    """Raises ConfigError for tables that are to be resnapshotted, and are not the pipeline's."""
    unknown = sorted(set(wanted) - selected.tables - records.keys())
    if unknown:
        raise ConfigError(
            f"--tables: not among the tables of the pipeline: {', '.join(map(str, unknown))}",
            "check the name; or add it to `tables` in the pipeline file, or take it with --add, or"
            " PgAddTablesOperator",
        )


def check_addable(wanted: Collection[TableName], selected: Selected, records: Records) -> None:
    """Raises TableError for a table that is to be added, and cannot be replicated."""
    for table in sorted(set(wanted) - records.keys()):
        if table in selected.problems:
            raise selected.problems[table]


def _check_named(
    access: Access, records: Records, resnapshot: frozenset[TableName], added: frozenset[TableName]
) -> None:
    requested = requested_of(records)
    requested = replace(
        requested,
        added=requested.added | added | (resnapshot & requested.removed),
        removed=requested.removed - added - resnapshot,
    )
    with access.source("preflight") as source:
        selected = select_tables(source, access.pipeline, requested)
    check_known(resnapshot, selected, records)
    check_addable(added, selected, records)


def _check_lake(pipeline: Pipeline, records: Records | None, *, must_have_begun: bool) -> None:
    # It reads the lake, which whoever parses DAGs need not be able to.
    from airflow_provider_pgrepl.replication.app.epoch import check_lake_is_there

    if records is not None:
        check_lake_is_there(pipeline, records, must_have_begun=must_have_begun)


def _has_begun(records: Records) -> bool:
    """Whether a table was taken; the lake, which knows it for certain, is not asked here."""
    return any(record.position_lsn is not None for record in records.values())


def _read_records(access: Access) -> Records | None:
    """The recorded tables; none where the state has not been set up, None where it cannot be read yet."""
    with Store(access.state_dsn, f"preflight {access.pipeline.name}") as store:
        try:
            return store.read_tables(access.pipeline.name) if store.is_set_up() else {}
        except StateError:
            return None
