"""What is to be said of a server, or of the database on it, that can be replicated all the same."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_pgrepl.replication.source.connection import Connection, row, source_errors

_SENDABLE = (
    "UTF8 LATIN1 LATIN2 LATIN4 LATIN5 LATIN6 LATIN7 LATIN8 LATIN9 LATIN10 WIN866 WIN1256 KOI8R KOI8U"
    " ISO_8859_5"
)
ALWAYS_SENDABLE = frozenset(_SENDABLE.split())
"""Encodings of which every byte that PostgreSQL lets in can be converted into UTF-8."""


def server_warnings(connection: Connection) -> Iterator[str]:
    """Sentences about the database that one connects to."""
    with source_errors("asking for the encoding"):
        encoding = row(connection, "SELECT pg_catalog.current_setting('server_encoding')")[0]
    if encoding not in ALWAYS_SENDABLE:
        yield (
            f"the database's encoding is {encoding}, in which PostgreSQL takes texts that it cannot convert"
            " into UTF-8. One such value in a published table ends the replication of the whole pipeline at"
            " its transaction, until somebody gets past it; a copy of the table stops at it, too"
        )
