"""The partitions of a table, and whether they may have held rows when they were attached.

The stream does not report such rows. A partition created by CREATE TABLE … PARTITION OF was empty. A
partition that was attached, or is below an attached one, is searched for earlier rows if it is small. If the
result is unclear, it counts as having had rows.

`inherited_warnings` finds tables that inherit from a replicated table and are not replicated. Their rows are
not in its lake table. `SELECT … FROM parent` reads the rows of all its children, by plain inheritance as by
partitioning. But each child by inheritance is published, copied and sent as a separate table, and its parent
as `ONLY parent`. https://www.postgresql.org/docs/current/ddl-inherit.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import psycopg2

from airflow_provider_pgrepl.errors import BusyError, SourceError, one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Partition, Relation
from airflow_provider_pgrepl.replication.source.connection import Connection, limit_idleness, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import with_short_waits

from .owner_code import OwnerCode, shut_owners_out

# Plain reads, like those of relations.py: they see the transaction's snapshot. A table's pg_attribute row for
# a system column is never updated, unlike its pg_class and pg_type rows: its xmin created the table.
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
# `born` is the table's pg_attribute row for a system column, which is never updated. RENAME replaces the
# pg_type row, often in the transaction that attaches. ATTACH replaces the rows of all other columns: a row of
# that transaction from before the link was created with the partition.
_NODES = """
WITH RECURSIVE part (oid, parent, relkind, relpages, linked, linked_cmin, linked_xmax) AS (
    SELECT c.oid, 0::oid, c.relkind, 0, '0'::xid, '0'::cid, '0'::xid
    FROM pg_catalog.pg_class c WHERE c.oid = %(oid)s
    UNION ALL
    SELECT c.oid, i.inhparent, c.relkind, c.relpages, i.xmin, i.cmin, i.xmax
    FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.oid AND NOT i.inhdetachpending
        JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
    WHERE part.relkind = 'p'
)
SELECT part.oid::bigint, part.parent::bigint, part.relkind::text, part.relpages,
    born.xmin::text::bigint, born.cmin::text::bigint, pg_catalog.age(born.xmin),
    part.linked::text::bigint, part.linked_cmin::text::bigint, pg_catalog.age(part.linked),
    part.linked_xmax = '0'::xid,
    EXISTS (SELECT FROM pg_catalog.pg_attribute own WHERE own.attrelid = part.oid AND own.attnum > 0
        AND own.xmin = part.linked AND own.xmax = '0'::xid
        AND own.cmin::text::bigint < part.linked_cmin::text::bigint),
    class.relfilenode IN (0, class.oid), class.xmin::text::bigint
FROM part JOIN pg_catalog.pg_attribute born ON born.attrelid = part.oid AND born.attnum = -1
    JOIN pg_catalog.pg_class class ON class.oid = part.oid
WHERE part.parent <> 0
"""
# A row is clearly later if the linking transaction wrote it after linking, or a later transaction wrote it.
# Subtransactions of the linking transaction have their own xids, like later transactions, but continue its
# command count. A transaction that rewrote the whole table is the xmin of all rows, also of earlier ones.
_HAS_EARLIER_ROW = """
SELECT CASE WHEN pg_catalog.pg_relation_size(%(oid)s::oid) > %(most)s THEN true ELSE EXISTS (
    SELECT FROM ONLY {table} AS r WHERE NOT CASE
        WHEN r.xmin = %(rewriter)s::text::xid THEN false
        WHEN r.xmin = %(linked)s::text::xid THEN r.xmax = '0'::xid AND r.cmin::text::bigint > %(linked_cmin)s
        WHEN pg_catalog.age(r.xmin) < 0
            OR pg_catalog.age(r.xmin) >= pg_catalog.age(%(linked)s::text::xid) THEN false
        WHEN %(at_once)s THEN r.xmax = '0'::xid
            AND NOT r.cmin::text::bigint BETWEEN %(born_cmin)s + 1 AND %(linked_cmin)s - 1
        ELSE %(linked_cmin)s = 0 END
) END
"""
# The first row of a table is at (0,1). Until a VACUUM, no other row takes its place, and no page is removed.
# `reltuples` shows that no VACUUM ran, until an ANALYZE. So does `relfrozenxid` from PostgreSQL 15 on, which
# starts no later than the table (src/backend/access/heap/README.HOT, vac_update_relstats in
# src/backend/commands/vacuum.c).
_FIRST_ROW_IS_THERE = """
SELECT (c.reltuples < 0 OR pg_catalog.current_setting('server_version_num')::int >= 150000
        AND pg_catalog.age(c.relfrozenxid) >= %(born_age)s)
    AND (pg_catalog.pg_relation_size(c.oid) = 0
         OR EXISTS (SELECT FROM ONLY {table} AS r WHERE r.ctid = '(0,1)'))
FROM pg_catalog.pg_class c WHERE c.oid = %(oid)s::oid
"""
_MOST_PAGES = 64
_MOST_BYTES = _MOST_PAGES * 8192
_MOST_TABLES = 32
_XIDS = 1 << 32
_LOCK_TRIES_S = 0.9
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


@dataclass(frozen=True)
class Leaf:
    """A table that holds rows: the table itself, or a partition at the lowest level.

    `xmin`: the xmin of its pg_class row. `made`: the transaction that created it. `links`: the xmin of each
    pg_inherits row from the partitioned table down to it; empty for the table itself.
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
        """Return the leaf as a partition of a relation."""
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
        """Return True if the leaf had a column before it was attached. `column_xmin`: the column's xmin."""
        return bool(self.links) and self.made != self.links[-1] == column_xmin


def read_leaves(connection: Connection, oid: int) -> list[Leaf]:
    """Return the tables that hold the rows of this one, ordered by name; itself unless it is partitioned.

    Children by plain inheritance are separate tables and not included. Nor is a partition whose DETACH …
    CONCURRENTLY has begun: its rows no longer belong to the table.
    """
    with source_errors("reading the partitions"):
        return leaves_of(connection, [oid]).get(oid, [])


def leaves_of(connection: Connection, oids: Iterable[int]) -> dict[int, list[Leaf]]:
    """Return the result of `read_leaves` for many tables, by oid. Raises psycopg2's errors."""
    leaves: dict[int, list[Leaf]] = defaultdict(list)
    for root, links, oid, schema, name, *facts in rows(connection, LEAVES, {"oids": list(oids)}):
        leaf = Leaf(oid, TableName(schema, name), *facts)
        leaves[root].append(replace(leaf, links=tuple(links)))
    return leaves


@dataclass(frozen=True)
class _Node:
    """A table below a partitioned one, with the transactions that created it and linked it to its parent."""

    oid: int
    parent: int
    relkind: str
    pages: int
    born: int
    born_cmin: int
    born_age: int
    linked: int
    linked_cmin: int
    linked_age: int
    link_is_clear: bool
    has_own_column: bool
    has_first_file: bool
    altered: int

    @property
    def is_made_as_one(self) -> bool:
        """Return True if CREATE TABLE … PARTITION OF created the table."""
        return self.link_is_clear and self.linked == self.born and self.has_own_column

    def is_older_than(self, leaf: _Node) -> bool:
        """Return True if this table was linked before the leaf was created."""
        if self.linked == leaf.born:
            return self.link_is_clear and self.linked_cmin < leaf.born_cmin
        return 0 <= leaf.born_age < self.linked_age


def with_had_rows(
    connection: Connection, relation: Relation, *, trusts_owners: bool = False, received_xid: int = 0
) -> Relation:
    """Return the relation with `had_rows` of its partitions: see `say_had_rows`."""
    said = say_had_rows(
        connection, relation.oid, relation.partitions, trusts_owners=trusts_owners, received_xid=received_xid
    )
    return replace(relation, partitions=said)


def say_had_rows(
    connection: Connection,
    oid: int,
    found: Sequence[Partition],
    *,
    trusts_owners: bool = False,
    received_xid: int = 0,
) -> tuple[Partition, ...]:
    """Return a table's partitions with `had_rows`. Does not wait for locks that the application holds.

    `received_xid`: the xid of the transaction that is being received, or 0. A partition that a later
    transaction attached may have been attached before, and have lost rows that the stream has yet to send.
    It counts as having had rows, unless its first row is still in place, which shows that none was lost.

    Searching a partition takes a SELECT. If its owner could have code run by that, and is not trusted, the
    partition counts as having had rows. The connection is in autocommit mode. Raises psycopg2's errors if it
    is lost.
    """
    if not found:
        return ()
    nodes = {node.oid: node for node in (_Node(*row) for row in rows(connection, _NODES, {"oid": oid}))}
    doubtful = {
        part.oid: links
        for part in found
        if (links := list(_doubtful_links(nodes, part.oid))) or part.oid not in nodes
    }
    # Search the partitions that were linked last: the lake table has known the older ones for long.
    looked_into = sorted(
        (oid for oid, links in doubtful.items() if links), key=lambda oid: doubtful[oid][0].linked_age
    )[:_MOST_TABLES]
    partitions = {part.oid: part for part in found}
    had_rows = set(doubtful) - {
        oid
        for oid in looked_into
        if not _has_earlier_row(
            connection,
            partitions[oid],
            nodes[oid],
            doubtful[oid],
            trusts_owners=trusts_owners,
            received_xid=received_xid,
        )
    }
    return tuple(replace(part, had_rows=part.oid in had_rows) for part in found)


def _doubtful_links(nodes: dict[int, _Node], oid: int) -> Iterator[_Node]:
    """Yield the tables, from a leaf upwards, that were linked when the leaf may already have had rows."""
    leaf = node = nodes.get(oid)
    while leaf is not None and node is not None:
        if not node.is_made_as_one and (node is leaf or not node.is_older_than(leaf)):
            yield node
        node = nodes.get(node.parent)


def _may_be_there_again(leaf: _Node, links: list[_Node], received_xid: int) -> bool:
    """Return True if the leaf was linked after transaction `received_xid`, and existed before it was
    linked."""
    return any(
        link.linked != leaf.born and 0 < (link.linked - received_xid) % _XIDS < _XIDS // 2 for link in links
    )


def _may_not_be_sent(connection: Connection) -> bool:
    """Return True if this server's walsenders may not send the rows of a table that was attached.

    Before PostgreSQL 15, ATTACH PARTITION does not invalidate a walsender's cache entry of the table. If the
    walsender has decoded a row of the table before, it treats the table as unpublished until it ends.
    (rel_sync_cache_relation_cb in src/backend/replication/pgoutput/pgoutput.c)
    """
    return bool(connection.server_version < 150000)


def _has_earlier_row(
    connection: Connection,
    part: Partition,
    leaf: _Node,
    links: list[_Node],
    *,
    trusts_owners: bool,
    received_xid: int,
) -> bool:
    if leaf.relkind != "r" or leaf.pages > _MOST_PAGES or not all(link.link_is_clear for link in links):
        return True
    with connection.cursor() as cursor:
        cursor.execute("BEGIN READ ONLY")
        limit_idleness(connection)
        try:
            cursor.execute(f"LOCK TABLE ONLY {part.table.sql} IN ACCESS SHARE MODE NOWAIT")
            # The result is not empty if there is such code, and None if the owner can add some.
            if not trusts_owners and _read_code(connection, part) != {}:
                return True
            may_lack_rows = _may_not_be_sent(connection) or (
                bool(received_xid) and _may_be_there_again(leaf, links, received_xid)
            )
            if may_lack_rows and not _keeps_its_first_row(connection, part, leaf):
                return True
            return any(_is_earlier(connection, part, leaf, link) for link in links)
        except (psycopg2.Error, SourceError):
            # The partition is being altered, no longer exists or may not be read: it may have had rows.
            if connection.closed:
                raise
            return True
        finally:
            if not connection.closed:
                cursor.execute("ROLLBACK")


def _read_code(connection: Connection, part: Partition) -> dict[int, list[OwnerCode]] | None:
    def attempt(_: float) -> dict[int, list[OwnerCode]] | None:
        return shut_owners_out(connection, connection, {part.oid: part.table})

    return with_short_waits(attempt, _LOCK_TRIES_S, BusyError)


def _keeps_its_first_row(connection: Connection, part: Partition, leaf: _Node) -> bool:
    """Return True if the table never had a row, or its first row is still in place.

    In both cases, no earlier row can have been removed.
    """
    if not leaf.has_first_file:
        return False
    query = _on(part.table, _FIRST_ROW_IS_THERE)
    found = rows(connection, query, {"oid": leaf.oid, "born_age": leaf.born_age})
    return bool(found and found[0][0])


def _is_earlier(connection: Connection, part: Partition, leaf: _Node, link: _Node) -> bool:
    values = {
        "oid": part.oid,
        "most": _MOST_BYTES,
        "linked": str(link.linked),
        "linked_cmin": link.linked_cmin,
        "born_cmin": leaf.born_cmin,
        "at_once": leaf.born == link.linked,
        "rewriter": "0" if leaf.has_first_file else str(leaf.altered),
    }
    return bool(rows(connection, _on(part.table, _HAS_EARLIER_ROW), values)[0][0])


def _on(table: TableName, query: str) -> str:
    """Return the query with the table's name, in which % is escaped.

    Otherwise psycopg2 could fill in a placeholder in the name, and the query would read another table than
    the locked one.
    """
    return query.replace("{table}", table.sql.replace("%", "%%"))


def inherited_warnings(connection: Connection, oids: Collection[int]) -> Iterator[str]:
    """Yield a warning for each of a pipeline's tables with children by inheritance outside of the pipeline.

    `oids`: all tables of the pipeline. Raises SourceConnectionError, SourceError.
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
