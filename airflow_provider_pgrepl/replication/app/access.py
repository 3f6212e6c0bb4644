"""A pipeline together with the connection strings of its source and its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from airflow_provider_pgrepl.errors import SNAPSHOT, StateError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, address, connect
from airflow_provider_pgrepl.replication.state.database import StateDatabase

from . import process


@dataclass(frozen=True)
class Access:
    """A pipeline and the connection strings that operations on it need.

    `started_by` names what started the operation, for the events that it records. The repr omits the
    connection strings.
    """

    pipeline: Pipeline
    dsn: str = field(repr=False)
    state_dsn: str = field(repr=False)
    started_by: str = ""
    primary_dsn: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, pipeline: Pipeline) -> Access:
        """Return the access with the connection strings in PGREPL_DSN, PGREPL_STATE_DSN and
        PGREPL_PRIMARY_DSN.

        Raises ConfigError.
        """
        return cls(pipeline, process.source_dsn(), process.state_dsn(), primary_dsn=process.primary_dsn())

    def describe(self) -> str:
        """Return the names of pipeline, source and lake, for the message that asks for `--yes`."""
        source = address(self.dsn)
        return f"pipeline {self.pipeline.name}, source {source}, lake {self.pipeline.lake_root}"

    @contextmanager
    def source(self, role: str) -> Iterator[Connection]:
        """Open a connection to the source in autocommit mode for the block. Raises SourceConnectionError."""
        connection = connect(self.dsn, f"{role} {self.pipeline.name}")
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def state_db(self, role: str) -> Iterator[StateDatabase]:
        """Open the state of a pipeline for the block, and migrate its schema to this version.

        Creates no schema: raises StateError if the state is not set up, as in a database that was named by
        mistake. Raises SourceConnectionError.
        """
        with StateDatabase(self.state_dsn, f"{role} {self.pipeline.name}", self.started_by) as state_db:
            if not state_db.is_set_up():
                raise not_recorded(self.pipeline.name)
            state_db.migrate()
            yield state_db


def not_recorded(pipeline: str) -> StateError:
    """Return the error of a pipeline that is not recorded in the state database."""
    return StateError(
        f"pipeline {pipeline} is not recorded in this database",
        "if the pipeline exists, set PGREPL_STATE_DSN, or state_conn_id, to the database with its records;"
        f" only for a new pipeline {SNAPSHOT}",
    )
