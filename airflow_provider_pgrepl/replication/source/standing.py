"""Whether anything moved that decides what is published, and how each table is published now."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.relation import Standing, TableName
from airflow_provider_pgrepl.replication.source.connection import Connection, rows, source_errors
from airflow_provider_pgrepl.replication.source.membership import ABOVE, COLUMN_LISTS_SINCE, memberships
from airflow_provider_pgrepl.replication.source.relations import find_relation

# Rows that are altered, or made again, have another xmin; one that is frozen or moved keeps it.
_PUBLISHED = """{above}
SELECT p.oid::bigint, p.xmin::text,
    (SELECT pg_catalog.string_agg(m.oid::text || ' ' || m.xmin::text, ',' ORDER BY m.oid)
     FROM pg_catalog.pg_publication_rel m WHERE m.prpubid = p.oid),
    {schemas},
    (SELECT pg_catalog.string_agg(known.oid::text, ',' ORDER BY known.oid)
     FROM pg_catalog.unnest(%(oids)s::bigint[]) AS known (oid)
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = known.oid)),
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

_PRESENT = "SELECT c.oid::bigint FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])"

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
        # Never 0, which says that nobody has looked.
        return (int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=8).digest()) >> 1) | 1

    def standings(self, connection: Connection, names: Names) -> dict[int, Standing]:
        """How each table is published now; where one is gone, who has its name."""
        oids = list(self.oids)
        with source_errors(f"looking at publication {self.publication}"):
            members = memberships(connection, oids, self.publication, planned=False)
            present = {oid for (oid,) in rows(connection, _PRESENT, {"oids": oids})}
        found = {}
        for oid, member in members.items():
            place = (member.publication_oid, member.publication_xmin, member.oid, member.xmin, member.links)
            if oid in present:
                found[oid] = Standing(oid, *place)
            else:
                found[oid] = Standing(_successor(connection, names(oid)))
        return found


def _successor(connection: Connection, names: Collection[TableName]) -> int:
    """The oid of the table that has one of these names now; 0 when none has."""
    for name in sorted(names):
        found = find_relation(connection, name)
        if found is not None:
            return found.oid
    return 0
