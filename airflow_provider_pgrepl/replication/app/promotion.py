"""The checks of lake tables and commands when a promoted standby continues the changelog.

A table that was copied from the former primary after the last WAL that the standby received may have rows
that the source has lost. The changelog cannot correct them: the table's position is past the LSN at which the
standby was promoted, so that the first changes of the new primary would not be applied to it.
"""

from __future__ import annotations

import logging

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import BusyError, LakeTableError, Remedy
from airflow_provider_pgrepl.replication.app.ownership import Evidence
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

log = logging.getLogger(__name__)


def stop_lost_copies(
    pipeline: Pipeline, state_db: StateDatabase, record: EpochRecord, fork_lsn: LSN
) -> list[str]:
    """Mark each table errored whose copy is later than `fork_lsn`, and return their names.

    Called before changes are received from the promoted standby. Can be repeated after an interruption.
    Raises StateError, LakeError, SourceConnectionError.
    """
    lost = []
    for table in state_db.read_tables(pipeline.name).values():
        if table.state is TableState.REMOVED:
            continue
        position = _position(pipeline, table, record)
        if position <= fork_lsn:
            continue
        error = lost_copy(table, position, fork_lsn)
        log.error("%s", error)
        state_db.set_state(
            pipeline.name,
            table.table,
            TableState.ERRORED,
            error=type(error).__name__,
            reason=error.message,
            hint=error.hint,
            remedy=error.remedy,
        )
        lost.append(str(table.table))
    return lost


def lost_copy(table: TableRecord, position: LSN, fork_lsn: LSN) -> LakeTableError:
    """Return the error of a table that may have rows which the source lost in a failover."""
    return LakeTableError(
        f"{table.table}: it was copied from the former primary at {LSN(position + 1)}, past {fork_lsn}, where"
        " the promoted standby continues: it may have rows that the source has lost",
        errors.resnapshot(table.table),
        remedy=Remedy.RESNAPSHOT,
    )


def _position(pipeline: Pipeline, table: TableRecord, record: EpochRecord) -> LSN:
    recorded = table.position_lsn or LSN(0)
    if not pipeline.has_lake_tables:
        return recorded
    try:
        lake_table = open_table(f"{pipeline.lake_root}/{table.table.path}")
    except LakeTableError:
        # No table, or one that cannot be opened: its own merge reports that.
        return recorded
    return max(recorded, read_position(lake_table, app_id(record.pipeline, record.epoch)) or LSN(0))


def check_followed(evidence: Evidence) -> None:
    """Raise BusyError if the source was promoted, and the replication app has not followed it yet.

    The changelog's record shows from which primary a copy or a comparison has read.
    """
    if evidence.is_promoted:
        assert evidence.server is not None
        raise BusyError(
            f"the source was promoted to timeline {evidence.server.timeline}, and the replication app has not"
            " received from it yet",
            "start the replication app, then run this again",
        )
