"""Membership: how a publication publishes a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.source.connection import Connection, rows

PUBLICATION = """
SELECT p.oid::bigint, p.xmin::text::bigint, p.puballtables, pg_catalog.to_jsonb(p) ->> 'pubgencols'
FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s
"""

# A partition is also published through the tables that it is a part of, then without their column lists.
ABOVE = """
WITH RECURSIVE above (oid, published, depth, links) AS (
    SELECT c.oid, c.oid, 0, '{}'::bigint[] FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION ALL
    SELECT above.oid, i.inhparent, above.depth + 1, above.links || i.xmin::text::bigint
    FROM above JOIN pg_catalog.pg_class c ON c.oid = above.published AND c.relispartition
        JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.published AND NOT i.inhdetachpending
)
"""

_MEMBERS = """
SELECT above.oid::bigint, m.oid::bigint, m.xmin::text::bigint, above.links,
    CASE WHEN above.depth = 0 THEN {columns} END
FROM above JOIN pg_catalog.pg_publication_rel m ON m.prrelid = above.published
WHERE m.prpubid = %(publication_oid)s ORDER BY above.depth DESC
"""

# A table that left its schema and came back has another dependency on it; nothing else makes that anew.
SCHEMA_MEMBERS = (
    ABOVE
    + """
SELECT above.oid::bigint, m.oid::bigint, coalesce(d.xmin, m.xmin)::text::bigint, above.links
FROM above JOIN pg_catalog.pg_class c ON c.oid = above.published
    JOIN pg_catalog.pg_publication_namespace m ON m.pnnspid = c.relnamespace
    LEFT JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
        AND d.objid = c.oid AND d.objsubid = 0
        AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
WHERE m.pnpubid = %(publication_oid)s ORDER BY above.depth DESC
"""
)

COLUMN_LISTS_SINCE = 150000
"""Server version from which publications have column lists, row filters and whole schemas."""

GENERATED_COLUMNS_SINCE = 180000
"""Server version from which publications can hold stored generated columns."""


@dataclass(frozen=True)
class Membership:
    """A table's place in a publication; `oid` is 0 of one that is not in it, all are without a publication.

    `xmin`: what moves with its column list, row filter or, where a whole schema is published, with its coming
    into the schema.
    `columns`: attnums of a column list; None without one. `stored_generated`: whether stored generated
    columns are published where no list says so. `by_name`: the table itself is listed, so that PostgreSQL
    lets nobody make it unlogged. `links`: xmin of each pg_inherits row up to the table through which a
    partition is published.
    """

    publication_oid: int = 0
    publication_xmin: int = 0
    oid: int = 0
    xmin: int = 0
    columns: frozenset[int] | None = None
    stored_generated: bool = False
    by_name: bool = False
    links: tuple[int, ...] = ()


def members_query(server_version: int) -> str:
    """Which of a publication's members publish some tables, and by which column lists."""
    lists = "m.prattrs::int2[]" if server_version >= COLUMN_LISTS_SINCE else "NULL::int2[]"
    return ABOVE + _MEMBERS.replace("{columns}", lists)


def memberships(
    connection: Connection, oids: Sequence[int], publication: str | None, *, planned: bool
) -> dict[int, Membership]:
    """How a publication publishes each of these tables. Raises psycopg2's errors.

    `planned`: one that is not there yet publishes what `create_publication` will have it publish.
    """
    found = rows(connection, PUBLICATION, {"publication": publication}) if publication else []
    if not found:
        stored = planned and connection.server_version >= GENERATED_COLUMNS_SINCE
        return dict.fromkeys(oids, Membership(stored_generated=stored))
    publication_oid, xmin, all_tables, generated = found[0]
    stored = generated == "s"
    if all_tables:
        return dict.fromkeys(oids, Membership(publication_oid, xmin, publication_oid, xmin, None, stored))
    # A table that is not in it would have its generated columns published or not as the others have.
    members = dict.fromkeys(oids, Membership(publication_oid, xmin, stored_generated=stored))
    by_version = connection.server_version >= COLUMN_LISTS_SINCE
    wanted = {"publication_oid": publication_oid, "oids": oids}
    query = members_query(connection.server_version)
    for oid, member, member_xmin, links, listed in rows(connection, query, wanted):
        columns = None if listed is None else frozenset(listed)
        members[oid] = Membership(
            publication_oid, xmin, member, member_xmin, columns, stored, not links, tuple(links)
        )
    if by_version:
        # A whole schema wins over a member of it: neither column list nor row filter is used then.
        for oid, member, member_xmin, links in rows(connection, SCHEMA_MEMBERS, wanted):
            by_name = members[oid].by_name
            members[oid] = Membership(
                publication_oid, xmin, member, member_xmin, None, stored, by_name, tuple(links)
            )
    return members
