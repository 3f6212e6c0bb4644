"""Publications FOR ALL TABLES, which send the tables of schema `_pgrepl` to subscribers that lack them.

A subscriber stops at the first row of a table that it does not have.
https://www.postgresql.org/docs/current/logical-replication-subscription.html
"""

from __future__ import annotations

from airflow_provider_pgrepl.errors import PublicationError, one_line
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# Which publications a slot's reader uses is recorded nowhere.
_PUBLICATIONS = """
SELECT pg_catalog.quote_ident(p.pubname) FROM pg_catalog.pg_publication p
WHERE p.puballtables AND (p.pubname <> %(used)s OR EXISTS (
    SELECT FROM pg_catalog.pg_replication_slots s
    WHERE s.database = pg_catalog.current_database() AND s.plugin = 'pgoutput' AND NOT s.temporary
    AND s.slot_name <> %(slot)s))
ORDER BY 1
"""
_HAS_TABLES = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relkind = 'r' AND c.relpersistence = 'p')
"""


def all_tables_publications(connection: Connection, slot: str, used: str = "") -> list[str]:
    """Return the publications FOR ALL TABLES that others than the reader of `slot` may read, quoted.

    `used`: the publication that the reader of `slot` uses, "" when it has made one of its own.
    """
    with source_errors("looking for publications FOR ALL TABLES"):
        return [name for (name,) in rows(connection, _PUBLICATIONS, {"slot": slot, "used": used})]


def check_unsent(connection: Connection, slot: str, used: str, hint: str) -> None:
    """Raises PublicationError where subscribers would be sent the tables of schema `_pgrepl`."""
    found = all_tables_publications(connection, slot, used)
    if found:
        raise PublicationError(f"{_sends(found)}. Its subscribers lack these tables, and stop", hint)


def all_tables_warning(connection: Connection, slot: str, used: str = "") -> str | None:
    """Return a sentence about publications that send the tables of schema `_pgrepl`; None without any."""
    with source_errors("looking for the tables of schema _pgrepl"):
        if not row(connection, _HAS_TABLES, (STATE_SCHEMA,))[0]:
            return None
    found = all_tables_publications(connection, slot, used)
    if not found:
        return None
    return (
        f"{_sends(found)}: a subscriber that lacks them stops. Create them there (pg_dump --schema-only"
        f" --schema={STATE_SCHEMA}), or publish a list of tables"
    )


def _sends(names: list[str]) -> str:
    several = len(names) > 1
    return (
        f"publication{'s' if several else ''} {', '.join(map(one_line, names))}"
        f" {'are' if several else 'is'} FOR ALL TABLES, and {'send' if several else 'sends'} the tables of"
        f" schema {STATE_SCHEMA} too"
    )
