"""Whether tables were taken with lake tables or without, as the pipeline file says it now.

The pipeline file by which a table was taken is recorded with it.
"""

from __future__ import annotations

import json

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import BusyError, ConfigError
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord

_NAMED = 5


def taken_otherwise(pipeline: Pipeline, record: TableRecord) -> bool:
    """Whether a table has a lake table and is to have none, or the other way round.

    Tables that were copied by older versions have one.
    """
    if record.position_lsn is None or record.state is TableState.REMOVED:
        return False
    known = json.loads(record.config) if record.config else {}
    return bool(known.get("lake_tables", "all") != pipeline.lake_tables)


def otherwise_taken(pipeline: Pipeline, records: Records) -> list[TableName]:
    """Those that are to be taken the other way."""
    return sorted(table for table, record in records.items() if taken_otherwise(pipeline, record))


def check_lake_choice(pipeline: Pipeline, records: Records) -> None:
    """Raises ConfigError, naming the tables that were taken the other way than the file says."""
    found = otherwise_taken(pipeline, records)
    if not found:
        return
    names = ", ".join(map(str, found[:_NAMED])) + (", …" if len(found) > _NAMED else "")
    if pipeline.has_lake_tables:
        raise ConfigError(
            f"lake_tables: {len(found)} tables have no lake table: they were taken with none: {names}",
            f"{hints.SNAPSHOT}: it copies them; or set lake_tables back to none",
        )
    raise ConfigError(
        f"lake_tables: none, and {len(found)} tables have lake tables, which would not be kept: {names}",
        f"{hints.SNAPSHOT}: from then on their lake tables stay as they are, and cannot be read at a"
        " consistent point; or set lake_tables back to all",
    )


def check_may_change(store: Store, pipeline: Pipeline, tables: list[TableName]) -> None:
    """Raises BusyError while a replication runs, which does with these tables what the file said before."""
    if tables and store.is_locked(pipeline.name, "replicate"):
        raise BusyError(
            f"lake_tables is {pipeline.lake_tables} now, and the replication that runs was started with"
            " the other",
            "stop it, run this again, and start it again",
        )


def refuse_without_lake(pipeline: Pipeline, what: str, instead: str) -> None:
    """Raises ConfigError for what only lake tables can be asked for."""
    if not pipeline.has_lake_tables:
        raise ConfigError(f"{what}: pipeline {pipeline.name} has no lake tables (lake_tables: none)", instead)
