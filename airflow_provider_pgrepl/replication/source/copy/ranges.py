"""A table cut into ranges of pages, each the work of one COPY."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.publication_membership import COLUMN_LISTS_SINCE
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_SIZES = """
SELECT c.oid::bigint, pg_catalog.pg_relation_size(c.oid), pg_catalog.pg_table_size(c.oid),
    pg_catalog.current_setting('block_size')::int,
    coalesce((SELECT amname FROM pg_catalog.pg_am a WHERE a.oid = c.relam), 'heap') = 'heap',
    EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0
        AND a.attgenerated <> '' AND a.attname = ANY (%(columns)s))
FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
"""

_ROW_FILTER = """
SELECT pg_catalog.pg_get_expr(m.prqual, m.prrelid) FROM pg_catalog.pg_publication_rel m
WHERE m.oid = %s AND m.prpubid = %s AND m.prrelid = %s
"""

_NO_ROWS = "COPY (SELECT WHERE false) TO STDOUT (FORMAT csv)"


@dataclass(frozen=True)
class CopyRange:
    """A part of one table, copied by one task: the COPY that reads it, and how many pages that is.

    `leaf_oid`: of the table that is to be found under the leaf's name, 0 where any will do. `is_planned`:
    the COPY is of a SELECT, which runs what `owner_code.py` says.
    """

    relation_oid: int
    leaf: TableName
    sql: str
    pages: int
    leaf_oid: int = 0
    is_planned: bool = False


def plan_ranges(
    connection: Connection, relation: Relation, range_bytes: int, *, whole: bool = False
) -> list[CopyRange]:
    """Cut a table into ranges of about `range_bytes` (TOAST included), at least one; the last is open-ended.

    `whole`: partitions are not cut. Over a keeper's connection the partitions are those of the snapshot.
    Raises SourceError.
    """
    row_filter = _row_filter(connection, relation)
    leaves = read_leaves(connection, relation.oid)
    wanted = {"oids": [leaf.oid for leaf in leaves], "columns": [column.name for column in relation.columns]}
    with source_errors(f"measuring {relation.table}"):
        sizes = {oid: tuple(more) for oid, *more in rows(connection, _SIZES, wanted)}
    ranges = [
        part
        for leaf in leaves
        for part in _leaf_ranges(relation, leaf, sizes[leaf.oid], None if whole else range_bytes, row_filter)
    ]
    # A partitioned table without partitions has no rows.
    return ranges or [CopyRange(relation.oid, relation.table, _NO_ROWS, 0)]


def _leaf_ranges(
    relation: Relation, leaf: Leaf, size: tuple[Any, ...], range_bytes: int | None, row_filter: str | None
) -> list[CopyRange]:
    main_bytes, total_bytes, block_size, is_heap, is_generated = size
    pages = -(-main_bytes // block_size)
    wanted = min(pages, -(-total_bytes // range_bytes)) if is_heap and range_bytes else 1
    step = max(1, -(-pages // max(1, wanted)))
    starts = range(0, pages, step) if wanted > 1 else range(1)
    ranges = []
    for start in starts:
        is_last = start == starts[-1]
        bounds = [f"ctid >= '({start},0)'"] if len(starts) > 1 else []
        bounds += [] if is_last else [f"ctid < '({start + step},0)'"]
        bounds += [f"({row_filter})"] if row_filter else []
        covered = pages - start if is_last else step
        # COPY of a table takes neither a condition, nor generated columns, nor an empty list of columns.
        is_planned = bool(bounds) or is_generated or not relation.columns
        sql = _copy_rows(relation, leaf.table, bounds) if is_planned else _copy_table(relation, leaf.table)
        ranges.append(CopyRange(relation.oid, leaf.table, sql, covered, leaf.oid, is_planned))
    return ranges


def _copy_table(relation: Relation, leaf: TableName) -> str:
    return f"COPY {leaf.sql} ({_columns(relation)}) TO STDOUT (FORMAT csv)"


def _copy_rows(relation: Relation, leaf: TableName, bounds: list[str]) -> str:
    select = f"SELECT {_columns(relation)}" if relation.columns else "SELECT"
    where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
    return f"COPY ({select} FROM ONLY {leaf.sql}{where}) TO STDOUT (FORMAT csv)"


def _columns(relation: Relation) -> str:
    # By name: a partition may have them in another order than its partitioned table.
    return ", ".join(quote_identifier(column.name) for column in relation.columns)


def _row_filter(connection: Connection, relation: Relation) -> str | None:
    """The publication's row filter for this table: what it does not let through must not be copied either."""
    if connection.server_version < COLUMN_LISTS_SINCE:
        return None
    member = (relation.membership_oid, relation.publication_oid, relation.oid)
    with source_errors(f"reading the row filter of {relation.table}"):
        found = rows(connection, _ROW_FILTER, member)
    return found[0][0] if found else None
