"""A table as pg_catalog has it, in the terms of the stream: published columns, key, membership.

Only plain reads of catalog tables: they obey the transaction's snapshot, which functions such as
pg_relation_filenode() do not. So the same queries tell what a table was under an exported snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.replication.relation import Column, Relation, TableName
from airflow_provider_pgrepl.replication.source.connection import Connection, rows, source_errors
from airflow_provider_pgrepl.replication.source.types import Types

_TABLES = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text, c.relfilenode::bigint
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])
"""

_COLUMNS = """
SELECT a.attrelid::bigint, a.attnum, a.attname, a.atttypid::bigint, a.atttypmod,
       pg_catalog.format_type(a.atttypid, a.atttypmod), t.typtype::text, a.attnotnull,
       a.xmin::text::bigint, a.attgenerated::text
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""

_KEYS = """
SELECT i.indrelid::bigint, (i.indkey::int2[])[0 : i.indnkeyatts - 1]
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
WHERE i.indrelid = ANY (%(oids)s::oid[]) AND i.indisvalid AND CASE c.relreplident
    WHEN 'd' THEN i.indisprimary AND i.indimmediate
    WHEN 'f' THEN i.indisprimary
    WHEN 'i' THEN i.indisreplident
    ELSE false END
"""

_PUBLICATION = """
SELECT p.oid::bigint, p.xmin::text::bigint, p.puballtables, pg_catalog.to_jsonb(p) ->> 'pubgencols'
FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s
"""

# A partition is also published through the tables that it is a part of, then without their column lists.
_ABOVE = """
WITH RECURSIVE above (oid, published, depth) AS (
    SELECT c.oid, c.oid, 0 FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION ALL
    SELECT above.oid, i.inhparent, above.depth + 1
    FROM above JOIN pg_catalog.pg_class c ON c.oid = above.published AND c.relispartition
        JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.published
)
"""

_MEMBERS = """
SELECT above.oid::bigint, m.oid::bigint, m.xmin::text::bigint,
    CASE WHEN above.depth = 0 THEN {columns} END
FROM above JOIN pg_catalog.pg_publication_rel m ON m.prrelid = above.published
WHERE m.prpubid = %(publication_oid)s ORDER BY above.depth DESC
"""

_SCHEMA_MEMBERS = """
SELECT above.oid::bigint, m.oid::bigint, m.xmin::text::bigint
FROM above JOIN pg_catalog.pg_class c ON c.oid = above.published
    JOIN pg_catalog.pg_publication_namespace m ON m.pnnspid = c.relnamespace
WHERE m.pnpubid = %(publication_oid)s ORDER BY above.depth DESC
"""

_LEAVES = """
WITH RECURSIVE part (oid) AS (
    SELECT %(oid)s::oid
    UNION ALL
    SELECT i.inhrelid FROM pg_catalog.pg_inherits i JOIN part ON part.oid = i.inhparent
)
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relfilenode::bigint
FROM part JOIN pg_catalog.pg_class c ON c.oid = part.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind <> 'p' ORDER BY n.nspname, c.relname
"""

COLUMN_LISTS_SINCE = 150000
"""Server version from which publications have column lists, row filters and whole schemas."""

GENERATED_COLUMNS_SINCE = 180000
"""Server version from which publications can hold stored generated columns."""


@dataclass(frozen=True)
class Leaf:
    """A table that holds rows: the table itself, or a partition at the bottom."""

    oid: int
    table: TableName
    relkind: str
    persistence: str
    relfilenode: int


@dataclass(frozen=True)
class _Membership:
    publication_oid: int = 0
    oid: int = 0
    xmin: int = 0
    columns: frozenset[int] | None = None  # attnums of a column list
    stored_generated: bool = False


def read_relation(connection: Connection, oid: int, publication: str | None) -> Relation | None:
    """The table with this oid, as `publication` publishes it; None when it is gone.

    Without a publication all columns that are not generated; a table that is not a member of it, as if it
    were added without a column list.
    """
    return read_relations(connection, [oid], publication).get(oid)


def find_relation(
    connection: Connection, table: TableName, publication: str | None = None
) -> Relation | None:
    """The table of this name; None when there is none."""
    with source_errors(f"looking for {table}"):
        found = rows(
            connection,
            "SELECT c.oid::bigint FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n"
            " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            (table.schema, table.name),
        )
    return read_relation(connection, found[0][0], publication) if found else None


def read_relations(
    connection: Connection, oids: Iterable[int], publication: str | None, *, planned: bool = False
) -> dict[int, Relation]:
    """Many tables at once, by oid; those that are gone are left out.

    `planned`: a publication that is not there yet publishes what `create_publication` will have it publish.
    """
    wanted = {"oids": list(oids)}
    with source_errors("reading the catalog"):
        members = _memberships(connection, wanted["oids"], publication, planned=planned)
        keys = {oid: frozenset(attnums) for oid, attnums in rows(connection, _KEYS, wanted)}
        columns: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for oid, *column in rows(connection, _COLUMNS, wanted):
            columns[oid].append(tuple(column))
        tables = rows(connection, _TABLES, wanted)
        types = Types.read(connection, {column[2] for found in columns.values() for column in found})
    return {
        oid: _Shape(columns[oid], keys.get(oid, frozenset()), members[oid], types).relation(oid, *fields)
        for oid, *fields in tables
    }


def read_leaves(connection: Connection, oid: int) -> list[Leaf]:
    """The tables that hold the rows of this one, by name; itself unless it is partitioned.

    Children by plain inheritance are tables of their own and not among them.
    """
    with source_errors("reading the partitions"):
        found = rows(connection, "SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = %s", (oid,))
        leaves = rows(connection, _LEAVES, {"oid": oid})
    partitioned = bool(found) and found[0][0] == "p"
    return [
        Leaf(leaf, TableName(schema, name), kind, persistence, filenode)
        for leaf, schema, name, kind, persistence, filenode in leaves
        if partitioned or leaf == oid
    ]


@dataclass(frozen=True)
class _Shape:
    """What the catalog says of one table's columns."""

    columns: list[tuple[Any, ...]]
    key: frozenset[int]
    member: _Membership
    types: Types

    def relation(
        self, oid: int, schema: str, name: str, relkind: str, identity: str, filenode: int
    ) -> Relation:
        published = [column for column in self.columns if _is_published(column, self.member)]
        key = self.key
        if not key <= {column[0] for column in published}:
            key = frozenset()  # half a key would match too many rows
        unpublished = [column for column in self.columns if _is_left_out(column, self.member)]
        return Relation(
            oid=oid,
            table=TableName(schema, name),
            columns=tuple(self._column(column, key) for column in published),
            replica_identity=identity,
            relkind=relkind,
            relfilenode=filenode,
            publication_oid=self.member.publication_oid,
            membership_oid=self.member.oid,
            membership_xmin=self.member.xmin,
            unpublished=tuple(self._column(column, self.key) for column in unpublished),
        )

    def _column(self, column: tuple[Any, ...], key: frozenset[int]) -> Column:
        attnum, name, type_oid, typmod, type_name, type_kind, not_null, xmin, _ = column
        return Column(
            name=name,
            attnum=attnum,
            type_oid=type_oid,
            typmod=typmod,
            type_name=type_name,
            type_kind=type_kind,
            is_key=attnum in key,
            not_null=not_null,
            xmin=xmin,
            type=self.types.find(type_oid, typmod),
        )


def _is_published(column: tuple[Any, ...], member: _Membership) -> bool:
    attnum, generated = column[0], column[-1]
    if member.columns is not None:
        return attnum in member.columns
    return generated == "" or (generated == "s" and member.stored_generated)


def _is_left_out(column: tuple[Any, ...], member: _Membership) -> bool:
    """A generated column that nobody left out on purpose, but whose values are not sent."""
    return bool(column[-1]) and member.columns is None and not _is_published(column, member)


def _memberships(
    connection: Connection, oids: Sequence[int], publication: str | None, *, planned: bool
) -> dict[int, _Membership]:
    found = rows(connection, _PUBLICATION, {"publication": publication}) if publication else []
    if not found:
        stored = planned and connection.server_version >= GENERATED_COLUMNS_SINCE
        return dict.fromkeys(oids, _Membership(stored_generated=stored))
    publication_oid, xmin, all_tables, generated = found[0]
    stored = generated == "s"
    if all_tables:
        return dict.fromkeys(oids, _Membership(publication_oid, publication_oid, xmin, None, stored))
    # A table that is not in it would have its generated columns published or not as the others have.
    members = dict.fromkeys(oids, _Membership(stored_generated=stored))
    by_version = connection.server_version >= COLUMN_LISTS_SINCE
    wanted = {"publication_oid": publication_oid, "oids": oids}
    query = _ABOVE + _MEMBERS.replace("{columns}", "m.prattrs::int2[]" if by_version else "NULL::int2[]")
    for oid, member, member_xmin, listed in rows(connection, query, wanted):
        columns = None if listed is None else frozenset(listed)
        members[oid] = _Membership(publication_oid, member, member_xmin, columns, stored)
    if by_version:
        # A whole schema wins over a member of it: neither column list nor row filter is used then.
        for oid, member, member_xmin in rows(connection, _ABOVE + _SCHEMA_MEMBERS, wanted):
            members[oid] = _Membership(publication_oid, member, member_xmin, None, stored)
    return members
