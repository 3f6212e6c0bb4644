"""The store of intent, table states and progress: schema `_pgrepl` in PostgreSQL.

Every method is one short autocommit statement, so that nothing here ever holds back the source's vacuum.
"""

from __future__ import annotations

from datetime import datetime

from airflow_provider_pgrepl.replication.source.connection import row
from airflow_provider_pgrepl.replication.state import migrations
from airflow_provider_pgrepl.replication.state.connection import state_errors
from airflow_provider_pgrepl.replication.state.pipeline_locks import PipelineLocks, Purpose
from airflow_provider_pgrepl.replication.state.pipelines import PipelineRecord, PipelineRecords
from airflow_provider_pgrepl.replication.state.progress_records import ProgressRecords
from airflow_provider_pgrepl.replication.state.selected_relations import SelectedRelations
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableRecords

__all__ = ["PipelineRecord", "Purpose", "Store", "TableRecord"]


class Store(PipelineLocks, PipelineRecords, TableRecords, SelectedRelations, ProgressRecords):
    """A connection to the state database. Its locks last as long as it does.

    Raises SourceConnectionError when the database cannot be reached or the connection is lost, and StateError
    when the schema is missing.
    """

    def migrate(self) -> None:
        """Set the schema up, or bring it to this version; see `migrations.migrate`."""
        migrations.migrate(self._connection)

    def is_set_up(self) -> bool:
        """Whether the schema is there, of whatever version. Raises StateError for a newer one."""
        return migrations.is_set_up(self._connection)

    def remove_schema(self) -> bool:
        """Take the schema away when no pipeline is recorded in it any more; whether there is none now."""
        return migrations.remove_schema(self._connection)

    def now(self) -> datetime:
        """The clock of the state database, by which everything in it is dated."""
        with state_errors("asking for the time"):
            found: datetime = row(self._connection, "SELECT pg_catalog.clock_timestamp()")[0]
        return found
