"""Comments of tables and columns: what COMMENT ON has said of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import psycopg2

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors

log = logging.getLogger(__name__)

MOST_CHARACTERS = 4000
"""Of one comment: readers of the lake get all of them whenever they open the table."""

_COMMENTS = """
SELECT a.attname, d.description
FROM pg_catalog.pg_description d LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND NOT a.attisdropped
WHERE d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objoid = %(oid)s::oid
    AND (d.objsubid = 0 OR a.attname IS NOT NULL)
"""


@dataclass(frozen=True)
class Comments:
    """Of one table, empty where there is none, and of its columns by their names."""

    table: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)


def read_comments(connection: Connection, table: TableName, oid: int) -> Comments:
    """Within the transaction that there is. None are told where the server gives none: a comment may be in
    bytes that are no text, pg_description may be nobody's to read, and a table is no worse for it.

    Raises SourceError when the connection is lost.
    https://www.postgresql.org/docs/current/catalog-pg-description.html
    """
    with source_errors(f"reading the comments of {table}"), connection.cursor() as cursor:
        cursor.execute("SAVEPOINT comments")
        try:
            cursor.execute(_COMMENTS, {"oid": oid})
            found = {column: _shortened(text) for column, text in cursor.fetchall()}
        except (psycopg2.Error, UnicodeDecodeError) as error:
            if connection.closed:
                raise
            log.warning("%s is copied without its comments: %s", table, describe(error))
            cursor.execute("ROLLBACK TO SAVEPOINT comments")
            return Comments()
    about_table = found.pop(None, "")
    return Comments(about_table, found)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
