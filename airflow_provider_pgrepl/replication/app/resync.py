"""Finds an epoch that a resync has begun, and the tables that it lacks.

A lake table shows to which epoch it belongs: the first commit of an epoch has that epoch's app ID.
"""

from __future__ import annotations

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import differences, has_begun
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState


def may_continue(access: Access) -> bool:
    """Return True if source, lake and state agree that the present epoch continues: its slot and publication
    are those that it began with."""
    pipeline = access.pipeline
    role = f"resync {pipeline.name}"
    with (
        StateDatabase(access.state_dsn, role, access.started_by) as state_db,
        access.source("resync") as source,
    ):
        evidence = gather(pipeline, state_db, source, lake_may_fail=True)
        epoch = evidence.epoch
        if epoch is None or not has_begun(evidence) or any(differences(evidence)):
            return False
        slot, found = evidence.slots.get(epoch.slot), publication.read_identity(source, epoch.publication)
        names = (epoch.slot, epoch.publication)
        return (
            slot is not None
            and not slot.invalidation
            and found is not None
            and found[0] == epoch.publication_oid
            and names == (pipeline.slot, pipeline.publication)
        )


def unwritten(pipeline: Pipeline, epoch: EpochRecord | None, records: Records) -> set[TableName]:
    """Return the tables that an interrupted run left: those that the epoch has not written, and if there are
    any, those that are being copied. Raises LakeUnavailableError."""
    if epoch is None:
        return set()
    app = app_id(pipeline.name, epoch.epoch)
    known = {
        table: record.state for table, record in records.items() if record.state is not TableState.REMOVED
    }
    left = {table for table in known if not _has_app(f"{pipeline.lake_root}/{table.path}", app)}
    return left and left | {table for table, state in known.items() if state.is_being_copied}


def _has_app(uri: str, app: str) -> bool:
    try:
        return app_version(open_table(uri), app) is not None
    except LakeTableError:
        return False
