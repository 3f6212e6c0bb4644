"""Whether anything moved that decides what is published, and how each table is published now."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Partition, PublicationStanding
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, leaves_of
from airflow_provider_pgrepl.replication.source.catalog.publication_membership import (
    ABOVE,
    COLUMN_LISTS_SINCE,
    memberships,
)
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# Rows that are altered, or made again, have another xmin; one that is frozen or moved keeps it.
_PUBLISHED = """{above}
SELECT p.oid::bigint, p.xmin::text,
    (SELECT pg_catalog.string_agg(m.oid::text || ' ' || m.xmin::text, ',' ORDER BY m.oid)
     FROM pg_catalog.pg_publication_rel m WHERE m.prpubid = p.oid),
    {schemas},
    (SELECT pg_catalog.string_agg(known.oid::text, ',' ORDER BY known.oid)
     FROM pg_catalog.unnest(%(oids)s::bigint[]) AS known (oid)
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = known.oid)),
    (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', c.oid, c.relnamespace, c.relname), ','
                                  ORDER BY c.oid)
     FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])),
    (SELECT pg_catalog.string_agg(i.inhrelid::text || ' ' || i.xmin::text, ','
                                  ORDER BY i.inhrelid, i.inhparent)
     FROM pg_catalog.pg_inherits i WHERE i.inhrelid IN (SELECT above.published FROM above))
FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s
"""

_BY_SCHEMA = """
    (SELECT pg_catalog.string_agg(m.oid::text || ' ' || d.objid::text || ' ' || d.xmin::text, ','
                                  ORDER BY m.oid, d.objid)
     FROM pg_catalog.pg_publication_namespace m LEFT JOIN pg_catalog.pg_depend d
         ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
         AND d.objid IN (SELECT above.published FROM above)
         AND d.objsubid = 0 AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
     WHERE m.pnpubid = p.oid)"""

# Where rows are: links from a table to its partitions, and whether what is there is logged. What is unlogged
# sends nothing, and only what is listed cannot become so.
_PLACES = """
WITH RECURSIVE below (oid, relkind, relpersistence, parent, link) AS (
    SELECT c.oid, c.relkind, c.relpersistence, '0'::oid, '0'::xid
    FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION ALL
    SELECT c.oid, c.relkind, c.relpersistence, i.inhparent, i.xmin
    FROM below JOIN pg_catalog.pg_inherits i ON below.relkind = 'p' AND i.inhparent = below.oid
        JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
)
SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', oid, parent, link, relkind, relpersistence), ','
                             ORDER BY oid, parent) FROM below
"""

_PRESENT = """
SELECT c.oid::bigint, c.relkind::text, c.relpersistence::text, n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])
"""

Names = Callable[[int], Collection[TableName]]
"""What a relation was called."""


@dataclass(frozen=True)
class Publishing:
    """A publication, and the tables whose changes are followed, by oid."""

    publication: str
    oids: Sequence[int]

    def digest(self, connection: Connection) -> int:
        """A hash of all that decides what is published of these tables; it never comes back to what it was
        when something was altered and set back. Waits for no lock, and reads no table of theirs."""
        by_schema = _BY_SCHEMA if connection.server_version >= COLUMN_LISTS_SINCE else "NULL"
        wanted = {"publication": self.publication, "oids": list(self.oids)}
        with source_errors(f"looking at publication {self.publication}"):
            query = _PUBLISHED.replace("{above}", ABOVE).replace("{schemas}", by_schema)
            found = rows(connection, query, wanted)
            found += rows(connection, _PLACES, wanted)
        # Never 0, which says that nobody has looked.
        return (int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=8).digest()) >> 1) | 1

    def standings(self, connection: Connection, names: Names) -> dict[int, PublicationStanding]:
        """How each is published now; where one is gone, who has its name. It is silent of `had_rows`."""
        oids = list(self.oids)
        with source_errors(f"looking at publication {self.publication}"):
            members = memberships(connection, oids, self.publication, planned=False)
            present = {oid: more for oid, *more in rows(connection, _PRESENT, {"oids": oids})}
            partitioned = [oid for oid, (relkind, *_) in present.items() if relkind == "p"]
            leaves = leaves_of(connection, partitioned) if partitioned else {}
        found = {}
        for oid, member in members.items():
            if oid in present:
                partitions = tuple(_without_file(leaf) for leaf in leaves.get(oid, ()))
                place = (member.publication_oid, member.publication_xmin, member.oid, member.xmin)
                _, persistence, *name = present[oid]
                moved_to = _moved_to(connection, oid, TableName(*name), names(oid))
                found[oid] = PublicationStanding(oid, *place, member.links, persistence, partitions, moved_to)
            else:
                found[oid] = PublicationStanding(_successor(connection, names(oid)))
        return found


def _without_file(leaf: Leaf) -> Partition:
    """A file moves with a TRUNCATE that the stream has yet to tell of."""
    return replace(leaf.partition, relfilenode=0, xmin=0)


def _moved_to(
    connection: Connection, oid: int, name: TableName, names: Collection[TableName]
) -> TableName | None:
    """Return the relation's name if another relation has one now that it had, which no stream tells of."""
    is_taken = any(_successor(connection, [former]) not in (0, oid) for former in names if former != name)
    return name if is_taken else None


def _successor(connection: Connection, names: Collection[TableName]) -> int:
    """The oid of the table that has one of these names now; 0 when none has."""
    for name in sorted(names):
        found = find_relation(connection, name)
        if found is not None:
            return found.oid
    return 0
