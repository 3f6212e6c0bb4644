"""Partitions: the tables that hold the rows of a table, and what they say of rows older than a column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Partition
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# Plain reads, like those of relations: they obey the transaction's snapshot. A table's row of pg_attribute
# for a system column is never touched again, unlike those of pg_class and pg_type: its xmin is the maker's.
LEAVES = """
WITH RECURSIVE part (root, oid, relkind, links) AS (
    SELECT c.oid, c.oid, c.relkind, '{}'::bigint[]
    FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION ALL
    SELECT part.root, c.oid, c.relkind, part.links || i.xmin::text::bigint
    FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.oid AND NOT i.inhdetachpending
        JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
    WHERE part.relkind = 'p'
)
SELECT part.root::bigint, part.links, c.oid::bigint, n.nspname, c.relname, c.relkind::text,
    c.relpersistence::text, c.relfilenode::bigint, c.xmin::text::bigint, first.xmin::text::bigint
FROM part JOIN pg_catalog.pg_class c ON c.oid = part.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_attribute first ON first.attrelid = c.oid AND first.attnum = -1
WHERE c.relkind <> 'p' ORDER BY n.nspname, c.relname
"""


@dataclass(frozen=True)
class Leaf:
    """A table that holds rows: the table itself, or a partition at the bottom.

    `xmin`: that of its pg_class row; `made`: in which transaction; `links`: xmin of each pg_inherits row on
    the way down to it, none of the table itself.
    """

    oid: int
    table: TableName
    relkind: str
    persistence: str
    relfilenode: int
    xmin: int = 0
    made: int = 0
    links: tuple[int, ...] = ()

    @property
    def partition(self) -> Partition:
        """What a relation says of it."""
        return Partition(
            self.oid,
            self.table,
            self.relfilenode,
            xmin=self.xmin,
            links=self.links,
            relkind=self.relkind,
            persistence=self.persistence,
        )

    def brought(self, column_xmin: int) -> bool:
        """Whether it had a column, last altered then, before it became a partition."""
        return bool(self.links) and self.made != self.links[-1] == column_xmin


def read_leaves(connection: Connection, oid: int) -> list[Leaf]:
    """The tables that hold the rows of this one, by name; itself unless it is partitioned.

    Children by plain inheritance are tables of their own and not among them, nor is a partition of which
    DETACH … CONCURRENTLY was begun: its rows are no longer the table's.
    """
    with source_errors("reading the partitions"):
        return leaves_of(connection, [oid]).get(oid, [])


def leaves_of(connection: Connection, oids: Iterable[int]) -> dict[int, list[Leaf]]:
    """`read_leaves` of many tables at once. Raises psycopg2's errors."""
    leaves: dict[int, list[Leaf]] = defaultdict(list)
    for root, links, oid, schema, name, *facts in rows(connection, LEAVES, {"oids": list(oids)}):
        leaf = Leaf(oid, TableName(schema, name), *facts)
        leaves[root].append(replace(leaf, links=tuple(links)))
    return leaves
