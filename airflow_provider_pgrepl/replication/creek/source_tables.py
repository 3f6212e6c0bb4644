"""SourceTables: the tables that creek's publication has, and the functions by which they come and go."""

from __future__ import annotations

import logging
import re
from hashlib import sha256
from pathlib import Path

from airflow_provider_pgrepl.errors import PgReplError, PrivilegeError, PublicationError, TableError
from airflow_provider_pgrepl.replication.creek.deployment import Deployment
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.preflight.refused_tables import refused_once_published
from airflow_provider_pgrepl.replication.source.publication import create_at_once, read_publication
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot

log = logging.getLogger(__name__)

_SCHEMA, *_FUNCTIONS = (
    (Path(__file__).parent / "functions.sql").read_text(encoding="utf-8").strip().split("\n\n")
)
_SIGNATURE = re.compile(r"CREATE OR REPLACE FUNCTION (_creek\.\w+)")
_SOURCE = """
SELECT prosrc, proconfig IS NULL AND NOT prosecdef FROM pg_catalog.pg_proc
WHERE oid = pg_catalog.to_regprocedure(%s)
"""
_EARLIER = frozenset(
    {
        "6af26bbb34fb1064a69b1ef2b12715aab5556eab307b084800bf0d8e4a504ab3",
        "0add4bce346f3dded772f668dce40661151f8e47b9d9dabd4ee2a7d6bbf31461",
    }
)
"""SHA-256 of the bodies that earlier versions of this package gave its functions, which had no settings."""


class SourceTables:
    """A connection to the source that hears when a table is added or removed; one that was lost is opened
    again. Methods raise SourceConnectionError, and what a right that is missing raises."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._connection: Connection | None = None

    def prepare(self) -> None:
        """Make what is missing: functions, publication. Raises TableError for tables whose changes the source
        would refuse; SnapshotError when the locks on its tables are not had in time."""
        connection = self._connected()
        try:
            with source_errors("making the schema _creek"):
                _execute(connection, _SCHEMA)
                for function in _FUNCTIONS:
                    _make(connection, function)
        except PrivilegeError as error:
            log.warning("the functions of schema _creek stay as they are, if they are there: %s", error)
        if read_publication(connection, self._deployment.publication) is None:
            self._create_publication(connection)

    def _create_publication(self, connection: Connection) -> None:
        """As creek does, for the tables that it was given."""
        name, tables = self._deployment.publication, self._deployment.tables
        # Before it is there: from then on the application's UPDATE and DELETE of such a table fail.
        if refused := refused_once_published(connection, self._deployment.pipeline(tables), tables):
            raise TableError(
                "\n".join(f"{one.table}: {one.problem}. Either {one.cure}" for one in refused),
                "nothing was published: mend that, or take the table out of PG_TABLES; a table into which"
                " rows are only inserted may be listed in insert_only (PGREPL_PIPELINE_OPTIONS)",
            )
        create_at_once(connection, name, tables)
        log.info("made the publication %s", name)

    def planned(self) -> frozenset[TableName]:
        """The publication's tables, or those that it will be made for. Raises PublicationError if it is to be
        made for none."""
        name = self._deployment.publication
        found = read_publication(self._connected(), name)
        if found is not None:
            return found.tables
        if not self._deployment.tables:
            raise PublicationError(
                f"there is no publication {name}, and PG_TABLES names no tables for it",
                "set PG_TABLES",
            )
        return frozenset(self._deployment.tables)

    def published(self) -> frozenset[TableName]:
        """The publication's tables. Raises PublicationError when it is gone."""
        found = read_publication(self._connected(), self._deployment.publication)
        if found is None:
            raise PublicationError(
                f"the publication {self._deployment.publication} was dropped",
                "changes since then are lost: drop the pipeline's slot and the lake, and begin again",
            )
        return found.tables

    def replaced_slot(self) -> Slot | None:
        """creek's own, where it is still there."""
        return read_slot(self._connected(), self._deployment.replaced_slot)

    def has_news(self) -> bool:
        """Whether somebody has added or removed a table since this was asked before."""
        try:
            connection = self._connected()
            with source_errors("listening"):
                connection.poll()
        except PgReplError as error:
            log.warning("nothing is heard of tables that are added: %s", error.message)
            self.close()
            return False
        heard = bool(connection.notifies)
        connection.notifies = []
        return heard

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._deployment.dsn, "creek")
            with source_errors("listening"):
                _execute(self._connection, "LISTEN creek")
        return self._connection

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _make(connection: Connection, function: str) -> None:
    """Make a function of schema _creek if there is none of its name and arguments. Only one that an earlier
    version of this package has made, and nobody has changed, is replaced."""
    match = _SIGNATURE.match(function)
    assert match is not None
    name, body = match[1], function.split("$$")[1]
    found = rows(connection, _SOURCE, (f"{name}(text, regclass)",))
    if not found or _is_earlier(*found[0]):
        _execute(connection, function)
    elif found[0][0] != body:
        log.warning(
            "the function %s was not made by this package, and stays. To have the table checked and locked"
            " first, drop it and start again",
            name,
        )


def _is_earlier(body: str, has_no_settings: bool) -> bool:
    return has_no_settings and sha256(body.encode()).hexdigest() in _EARLIER


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)
