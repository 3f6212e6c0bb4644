"""The store of intent, table states and progress: schema `_pgrepl` in PostgreSQL.

Every method is one short autocommit statement, so that nothing here ever holds back the source's vacuum.
"""

from __future__ import annotations

from datetime import datetime

from airflow_provider_pgrepl.replication.source.catalog import all_tables_publications
from airflow_provider_pgrepl.replication.source.connection import row
from airflow_provider_pgrepl.replication.state import schema
from airflow_provider_pgrepl.replication.state.connection import state_errors
from airflow_provider_pgrepl.replication.state.locks import PipelineLocks, Purpose
from airflow_provider_pgrepl.replication.state.pipelines import PipelineRecord, PipelineRecords
from airflow_provider_pgrepl.replication.state.progress_records import ProgressRecords
from airflow_provider_pgrepl.replication.state.selected_relations import SelectedRelations
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableRecords

__all__ = ["PipelineRecord", "Purpose", "Store", "TableRecord"]

_OTHER_PLACE = (
    "nothing was created. Give another database for the state (state_conn_id, or PGREPL_STATE_DSN), or let"
    " those publications list their tables"
)


class Store(PipelineLocks, PipelineRecords, TableRecords, SelectedRelations, ProgressRecords):
    """A connection to the state database. Its locks last as long as it does.

    Raises SourceConnectionError when the database cannot be reached or the connection is lost, and StateError
    when the schema is missing.
    """

    def migrate(self) -> None:
        """Set the schema up, or bring it to this version; see `migrations.migrate`."""
        schema.migrate(self._connection)

    def check_unsent(self, slot: str, used: str) -> None:
        """Raises PublicationError where subscribers would be sent the tables that `migrate` creates.

        `slot` and `used`: as in `all_tables_publications`.
        """
        if not self.is_set_up():
            all_tables_publications.check_unsent(self._connection, slot, used, _OTHER_PLACE)

    def is_set_up(self) -> bool:
        """Whether the schema is there, of whatever version. Raises StateError for a newer one."""
        return schema.is_set_up(self._connection)

    def remove_schema(self) -> bool:
        """Take the schema away when no pipeline is recorded in it any more; whether there is none now."""
        return schema.remove_schema(self._connection)

    def now(self) -> datetime:
        """The clock of the state database, by which everything in it is dated."""
        with state_errors("asking for the time"):
            found: datetime = row(self._connection, "SELECT pg_catalog.clock_timestamp()")[0]
        return found
