"""A table as pg_catalog has it, in the terms of the stream: published columns, key, membership.

Only plain reads of catalog tables: they obey the transaction's snapshot, which functions such as
pg_relation_filenode() do not. So the same queries tell what a table was under an exported snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.source.catalog.attached_partitions import with_had_rows
from airflow_provider_pgrepl.replication.source.catalog.missing import read_missing, with_missing
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, leaves_of, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.publication_membership import (
    COLUMN_LISTS_SINCE,
    GENERATED_COLUMNS_SINCE,
    Membership,
    memberships,
)
from airflow_provider_pgrepl.replication.source.catalog.types import Room, Types
from airflow_provider_pgrepl.replication.source.connection import Connection, one_moment, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

__all__ = [
    "COLUMN_LISTS_SINCE",
    "GENERATED_COLUMNS_SINCE",
    "Leaf",
    "find_relation",
    "read_leaves",
    "read_relation",
    "read_relations",
]

TABLES = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text, c.relfilenode::bigint,
    c.relnatts, c.relpersistence::text, c.xmin::text::bigint
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])
"""

COLUMNS = """
SELECT a.attrelid::bigint, a.attnum, a.attname, a.atttypid::bigint, a.atttypmod,
       pg_catalog.format_type(a.atttypid, a.atttypmod), t.typtype::text, a.attnotnull,
       a.xmin::text::bigint, coalesce(d.oid, 0)::bigint, a.atthasmissing, a.attgenerated::text
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""

KEYS = """
SELECT i.indrelid::bigint, (i.indkey::int2[])[0 : i.indnkeyatts - 1]
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
WHERE i.indrelid = ANY (%(oids)s::oid[]) AND i.indisvalid AND CASE c.relreplident
    WHEN 'd' THEN i.indisprimary AND i.indimmediate
    WHEN 'f' THEN i.indisprimary
    WHEN 'i' THEN i.indisreplident
    ELSE false END
"""


def read_relation(
    connection: Connection,
    oid: int,
    publication: str | None,
    *,
    had_rows: bool = False,
    trusts_owners: bool = False,
    told_by: int = 0,
) -> Relation | None:
    """The table with this oid, as `publication` publishes it; None when it is gone.

    Without a publication all columns that are not generated; a table that is not a member of it, as if it
    were added without a column list. `had_rows`: all as it is at one moment, and with what is said of
    partitions that may have held rows before they were partitions; that needs a connection in autocommit
    mode, and the right to look into small ones; `trusts_owners`: whether code of their owners may run then;
    `told_by`: the transaction that is read.
    """
    if not had_rows:
        return read_relations(connection, [oid], publication).get(oid)
    with source_errors("reading the catalog"), one_moment(connection):
        found = read_relations(connection, [oid], publication).get(oid)
    if found is None:
        return None
    with source_errors("looking into the partitions"):
        return with_had_rows(connection, found, trusts_owners=trusts_owners, told_by=told_by)


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
        members = memberships(connection, wanted["oids"], publication, planned=planned)
        keys = {oid: frozenset(attnums) for oid, attnums in rows(connection, KEYS, wanted)}
        columns: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for oid, *column in rows(connection, COLUMNS, wanted):
            columns[oid].append(tuple(column))
        tables = {oid: tuple(more) for oid, *more in rows(connection, TABLES, wanted)}
        types = Types.read(connection, {column[2] for found in columns.values() for column in found})
        partitioned = [oid for oid, (_, _, relkind, *_) in tables.items() if relkind == "p"]
        leaves = leaves_of(connection, partitioned) if partitioned else {}
        holders = {leaf.oid for found in leaves.values() for leaf in found}
        holders |= {oid for oid, found in columns.items() if any(column[-2] for column in found)}
        missing = read_missing(connection, holders, types.with_rows()) if holders else {}
    relations = {
        oid: _Shape(columns[oid], keys.get(oid, frozenset()), members[oid], types).relation(oid, *fields)
        for oid, fields in tables.items()
    }
    return {
        oid: with_missing(_with_partitions(relation, leaves.get(oid, [])), leaves.get(oid, []), missing)
        for oid, relation in relations.items()
    }


def _with_partitions(relation: Relation, leaves: Iterable[Leaf]) -> Relation:
    return replace(relation, partitions=tuple(leaf.partition for leaf in leaves))


@dataclass(frozen=True)
class _Shape:
    """What the catalog says of one table's columns."""

    columns: list[tuple[Any, ...]]
    key: frozenset[int]
    member: Membership
    types: Types

    def relation(
        self,
        oid: int,
        schema: str,
        name: str,
        relkind: str,
        identity: str,
        filenode: int,
        natts: int,
        persistence: str,
        xmin: int,
    ) -> Relation:
        published = [column for column in self.columns if _is_published(column, self.member)]
        key = self.key
        if not key <= {column[0] for column in published}:
            key = frozenset()  # half a key would match too many rows
        unpublished = [column for column in self.columns if _is_left_out(column, self.member)]
        room = Room()
        return Relation(
            oid=oid,
            table=TableName(schema, name),
            columns=tuple(self._column(column, key, room) for column in published),
            replica_identity=identity,
            relkind=relkind,
            relfilenode=filenode,
            natts=natts,
            publication_oid=self.member.publication_oid,
            publication_xmin=self.member.publication_xmin,
            membership_oid=self.member.oid,
            membership_xmin=self.member.xmin,
            links=self.member.links,
            persistence=persistence,
            xmin=xmin if relkind == "r" and self.member.oid and not self.member.by_name else 0,
            unpublished=tuple(self._column(column, self.key, room) for column in unpublished),
        )

    def _column(self, column: tuple[Any, ...], key: frozenset[int], room: Room) -> Column:
        attnum, name, type_oid, typmod, type_name, type_kind, not_null, xmin, default_oid, *_ = column
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
            type=self.types.find(type_oid, typmod, room),
            default_oid=default_oid,
        )


def _is_published(column: tuple[Any, ...], member: Membership) -> bool:
    attnum, generated = column[0], column[-1]
    if member.columns is not None:
        return attnum in member.columns
    return generated == "" or (generated == "s" and member.stored_generated)


def _is_left_out(column: tuple[Any, ...], member: Membership) -> bool:
    """A generated column that nobody left out on purpose, but whose values are not sent."""
    return bool(column[-1]) and member.columns is None and not _is_published(column, member)
