"""Tables that inherit from a replicated one and are not replicated: their rows are not in its lake table.

`SELECT … FROM parent` reads the rows of all its children, by plain inheritance as by partitioning, but each
child by inheritance is published, copied and sent as a table of its own, and its parent as `ONLY parent`.
https://www.postgresql.org/docs/current/ddl-inherit.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_SHOWN = 3
_CHUNKS = "_timescaledb_internal"
"""The schema of TimescaleDB's chunks, which inherit from their hypertable."""

_CHILDREN = """
WITH RECURSIVE below (parent, oid) AS (
    SELECT i.inhparent, i.inhrelid
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class p ON p.oid = i.inhparent
    WHERE i.inhparent = ANY (%(oids)s::oid[]) AND p.relkind = 'r'
    UNION
    SELECT below.parent, i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid
)
SELECT below.parent::pg_catalog.regclass::text, count(*)::int, bool_or(n.nspname = %(chunks)s),
    (pg_catalog.array_agg(c.oid::pg_catalog.regclass::text ORDER BY c.oid))[1:%(shown)s]
FROM below JOIN pg_catalog.pg_class c ON c.oid = below.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE NOT c.oid = ANY (%(oids)s::oid[])
GROUP BY below.parent ORDER BY below.parent
"""


def inherited_warnings(connection: Connection, oids: Collection[int]) -> Iterator[str]:
    """Say of which of a pipeline's tables (all of its `oids`) children are not among them.

    Raises SourceConnectionError, SourceError.
    """
    wanted = {"oids": list(oids), "chunks": _CHUNKS, "shown": _SHOWN}
    with source_errors("looking for inherited tables"):
        found = rows(connection, _CHILDREN, wanted)
    for shown_parent, count, is_hypertable, some in found:
        parent = one_line(shown_parent)
        children = ", ".join(map(one_line, some)) + (", …" if count > len(some) else "")
        if is_hypertable:
            yield (
                f"{parent} is a hypertable of TimescaleDB: its rows are in {count} chunks that are not in the"
                f" pipeline ({children}), and its lake table lacks them. Chunks can be replicated as tables"
                f" of their own ({_CHUNKS}.*); they cannot be gathered in one lake table"
            )
        else:
            yield (
                f"{parent}: {count} of the tables that inherit from it {'is' if count == 1 else 'are'} not in"
                f" the pipeline ({children}). Its lake table has the rows of ONLY {parent}, and lacks theirs;"
                " list them to have each as a table of its own"
            )
