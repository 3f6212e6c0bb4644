"""The definition of a table from pg_catalog, in the terms of the stream: published columns, key, membership.

All queries are plain reads of catalog tables. They see the transaction's snapshot, which functions such as
pg_relation_filenode() do not. So the same queries return a table's definition under an exported snapshot.

A missing value is the value of a column in rows that are older than the column, which was added with a
constant default. PostgreSQL stores it with the column (pg_attribute.attmissingval) and rewrites no row, so
the stream does not report it. A partitioned table has no missing values; each of its partitions has.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg2

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.source.connection import Connection, one_moment, rows
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors

from .partitions import Leaf, leaves_of, read_leaves, with_had_rows
from .types import TypePartBudget, Types

# The array has one element, and is read as an array of texts. array_to_string rejoins a value that was split
# because its type, such as box, has another delimiter and does not quote commas.
MISSING = """
SELECT a.attrelid::bigint, a.attname, a.xmin::text::bigint,
    CASE WHEN NOT a.atttypid = ANY (%(row_types)s::oid[])
        THEN pg_catalog.array_to_string(a.attmissingval::text::text[], ',') END
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.atthasmissing AND a.attnum > 0 AND NOT a.attisdropped
"""
_BY_NAME = """
SELECT c.oid::bigint, n.nspname, c.relname
FROM unnest(%s::text[], %s::text[]) AS wanted (schema, name)
    JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.name
WHERE c.relkind IN ('r', 'p', 'f')
"""
PUBLICATION = """
SELECT p.oid::bigint, p.xmin::text::bigint, p.puballtables, pg_catalog.to_jsonb(p) ->> 'pubgencols'
FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s
"""
# A partition is also published through the tables above it, then without their column lists.
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
# A table that left its schema and returned has another pg_depend row for it; nothing else replaces that row.
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
"""The server version from which publications have column lists, row filters and whole schemas."""
GENERATED_COLUMNS_SINCE = 180000
"""The server version from which publications can include stored generated columns."""
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
log = logging.getLogger(__name__)
MOST_CHARACTERS = 4000
"""The length from which a comment is shortened: readers load all comments of a table when they open it."""
_COMMENTS = """
SELECT a.attname, d.description
FROM pg_catalog.pg_description d LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND NOT a.attisdropped
WHERE d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objoid = %(oid)s::oid
    AND (d.objsubid = 0 OR a.attname IS NOT NULL)
"""


@dataclass(frozen=True)
class MissingValue:
    """The missing value of one table's column.

    `xmin`: the xmin of the column. `text`: None if the value cannot be determined.
    """

    xmin: int
    text: str | None


Found = Mapping[tuple[int, str], MissingValue]


def read_missing(connection: Connection, oids: Iterable[int], row_types: Iterable[int]) -> Found:
    """Return the missing values of these tables, by table and column. Raises psycopg2's errors.

    A value of one of `row_types` is not read: to convert it to text, the server would wait for a session that
    alters the type.
    """
    wanted = {"oids": sorted(set(oids)), "row_types": sorted(row_types)}
    return {
        (oid, name): MissingValue(xmin, text) for oid, name, xmin, text in rows(connection, MISSING, wanted)
    }


def with_missing(relation: Relation, leaves: Sequence[Leaf], found: Found) -> Relation:
    """Return the relation with its columns' missing values. `leaves`: the leaves of a partitioned table.

    If a value cannot be determined, the relfilenode is negative: the file counts as rewritten.
    """
    values, unclear = {}, set()
    for column in relation.columns:
        if relation.relkind == "p":
            text, unclear_oids = _agreed(column, leaves, found)
        else:
            own = found.get((relation.oid, column.name))
            text = own.text if own else None
            unclear_oids = {relation.oid} if own and own.text is None else set()
        values[column.attnum] = text
        unclear |= unclear_oids
    return replace(
        relation,
        columns=tuple(replace(column, missing=values[column.attnum]) for column in relation.columns),
        relfilenode=-relation.relfilenode if relation.oid in unclear else relation.relfilenode,
        partitions=tuple(
            replace(part, relfilenode=-part.relfilenode) if part.oid in unclear else part
            for part in relation.partitions
        ),
    )


def _agreed(column: Column, leaves: Sequence[Leaf], found: Found) -> tuple[str | None, set[int]]:
    """Return a partitioned table's missing value, and the leaves because of which it cannot be determined.

    Only leaves that got the column as partitions count: a leaf that had the column when it was attached says
    nothing about rows of the others. Leaves rewritten since have no missing value any more, and leaves
    created since never had one: all their rows have a value of their own. Of the rest, the leaves count whose
    column was last altered together with the partitioned table's, if there are any.
    """
    own = {
        leaf.oid: missing
        for leaf in leaves
        if (missing := found.get((leaf.oid, column.name))) and not leaf.brought(missing.xmin)
    }
    together = {oid: missing for oid, missing in own.items() if missing.xmin == column.xmin} or own
    texts = {missing.text for missing in together.values()}
    if len(texts) <= 1 and None not in texts:
        return next(iter(texts), None), set()
    return None, set(together)


@dataclass(frozen=True)
class Membership:
    """A table's membership in a publication. `oid` is 0 if the table is not in it.

    `xmin`: changes with the table's column list and row filter or, if a whole schema is published, when the
    table enters the schema. `columns`: the attnums of a column list, or None without one. `stored_generated`:
    stored generated columns are published if there is no column list. `by_name`: the table itself is listed,
    so that PostgreSQL rejects making it unlogged. `links`: the xmin of each pg_inherits row up to the table
    through which a partition is published.
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
    """Return the query for the members of a publication that publish some tables, and their column lists."""
    lists = "m.prattrs::int2[]" if server_version >= COLUMN_LISTS_SINCE else "NULL::int2[]"
    return ABOVE + _MEMBERS.replace("{columns}", lists)


def memberships(
    connection: Connection, oids: Sequence[int], publication: str | None, *, planned: bool
) -> dict[int, Membership]:
    """Return the membership of each of these tables in a publication, by oid. Raises psycopg2's errors.

    `planned`: a publication that does not exist yet counts as created by `create_publication`.
    """
    found = rows(connection, PUBLICATION, {"publication": publication}) if publication else []
    if not found:
        stored = planned and connection.server_version >= GENERATED_COLUMNS_SINCE
        return dict.fromkeys(oids, Membership(stored_generated=stored))
    publication_oid, xmin, all_tables, generated = found[0]
    stored = generated == "s"
    if all_tables:
        return dict.fromkeys(oids, Membership(publication_oid, xmin, publication_oid, xmin, None, stored))
    # For a table that is not in the publication, assume the publication's setting for generated columns.
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
        # A published schema overrides a listed table in it: its column list and row filter are not used.
        for oid, member, member_xmin, links in rows(connection, SCHEMA_MEMBERS, wanted):
            by_name = members[oid].by_name
            members[oid] = Membership(
                publication_oid, xmin, member, member_xmin, None, stored, by_name, tuple(links)
            )
    return members


def read_relation(
    connection: Connection,
    oid: int,
    publication: str | None,
    *,
    had_rows: bool = False,
    trusts_owners: bool = False,
    received_xid: int = 0,
) -> Relation | None:
    """Return the table with this oid, as `publication` publishes it, or None if it does not exist.

    Without a publication, it has all columns that are not generated. A table that is not in the publication
    is read as if it were added without a column list. `had_rows`: read everything in one snapshot, and set
    `had_rows` of the partitions. That needs a connection in autocommit mode, and the right to read small
    partitions. `trusts_owners`: code of their owners may run then. `received_xid`: the xid of the
    transaction that is being received, or 0.
    """
    if not had_rows:
        return read_relations(connection, [oid], publication).get(oid)
    with source_errors("reading the catalog"), one_moment(connection):
        found = read_relations(connection, [oid], publication).get(oid)
    if found is None:
        return None
    with source_errors("checking the partitions for rows"):
        return with_had_rows(connection, found, trusts_owners=trusts_owners, received_xid=received_xid)


def find_relation(
    connection: Connection, table: TableName, publication: str | None = None
) -> Relation | None:
    """Return the table of this name, or None if there is none."""
    oid = find_tables(connection, [table]).get(table)
    return None if oid is None else read_relation(connection, oid, publication)


def find_tables(connection: Connection, names: Iterable[TableName]) -> dict[TableName, int]:
    """Return the OIDs of the tables that have these names. Views and other relations are left out: an
    application that renames a table often leaves a view with its name."""
    wanted = sorted(names)
    if not wanted:
        return {}
    with source_errors("looking for tables by name"):
        found = rows(connection, _BY_NAME, ([one.schema for one in wanted], [one.name for one in wanted]))
    return {TableName(schema, name): oid for oid, schema, name in found}


def any_exists(connection: Connection, oids: Iterable[int]) -> bool:
    """Return True if a relation with one of these OIDs exists."""
    with source_errors("looking for relations"):
        found = rows(
            connection,
            "SELECT 1 FROM pg_catalog.pg_class WHERE oid = ANY (%s::oid[]) LIMIT 1",
            (sorted(oids),),
        )
    return bool(found)


def read_relations(
    connection: Connection, oids: Iterable[int], publication: str | None, *, planned: bool = False
) -> dict[int, Relation]:
    """Return many tables, by oid, without those that no longer exist.

    `planned`: a publication that does not exist yet counts as created by `create_publication`.
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
    """The columns, key and membership of one table from the catalog."""

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
        room = TypePartBudget()
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

    def _column(self, column: tuple[Any, ...], key: frozenset[int], room: TypePartBudget) -> Column:
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
    """Return True for a generated column that no column list leaves out, but whose values are not sent."""
    return bool(column[-1]) and member.columns is None and not _is_published(column, member)


@dataclass(frozen=True)
class Comments:
    """The comments on one table and on its columns, by column name. `table` is "" without a comment."""

    table: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)


def read_comments(connection: Connection, table: TableName, oid: int) -> Comments:
    """Return the comments on a table and its columns, read in the current transaction.

    If they cannot be read, logs a warning and returns no comments: a comment may hold bytes that are no text,
    or the role may not read pg_description. The table can be copied without them. Raises SourceError if the
    connection is lost. https://www.postgresql.org/docs/current/catalog-pg-description.html
    """
    with source_errors(f"reading the comments of {table}"), connection.cursor() as cursor:
        cursor.execute("SAVEPOINT comments")
        try:
            cursor.execute(_COMMENTS, {"oid": oid})
            found = {column: _shortened(text) for column, text in cursor.fetchall()}
        except (psycopg2.Error, UnicodeDecodeError) as error:
            if connection.closed:
                raise
            log.warning("%s is copied without its comments: %s", table, describe(error))
            cursor.execute("ROLLBACK TO SAVEPOINT comments")
            return Comments()
    about_table = found.pop(None, "")
    return Comments(about_table, found)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
