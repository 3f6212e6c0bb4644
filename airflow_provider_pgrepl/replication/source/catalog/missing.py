"""Missing values: what rows have in a column that was added, with a constant default, after them.

PostgreSQL keeps such a value beside the column (pg_attribute.attmissingval) and rewrites nothing, so no
stream tells of it. A partitioned table has none of its own: each of its partitions has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf
from airflow_provider_pgrepl.replication.source.connection import Connection, rows

# The array has one element, read as if it were an array of texts; array_to_string puts together again what
# comes apart because the type, as box, has another delimiter and does not quote commas.
MISSING = """
SELECT a.attrelid::bigint, a.attname, a.xmin::text::bigint,
    CASE WHEN NOT a.atttypid = ANY (%(row_types)s::oid[])
        THEN pg_catalog.array_to_string(a.attmissingval::text::text[], ',') END
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.atthasmissing AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True)
class Missing:
    """The missing value of one table's column; `xmin` is the column's, `text` None when it cannot be told."""

    xmin: int
    text: str | None


Found = Mapping[tuple[int, str], Missing]


def read_missing(connection: Connection, oids: Iterable[int], row_types: Iterable[int]) -> Found:
    """The missing values of these tables, by table and column. Raises psycopg2's errors.

    A value of one of `row_types` is not told: to write it out the server would wait for whoever alters it.
    """
    wanted = {"oids": sorted(set(oids)), "row_types": sorted(row_types)}
    return {(oid, name): Missing(xmin, text) for oid, name, xmin, text in rows(connection, MISSING, wanted)}


def with_missing(relation: Relation, leaves: Sequence[Leaf], found: Found) -> Relation:
    """The relation with its columns' missing values; `leaves`: those of a partitioned table.

    Where one cannot be told, the relfilenode is negative: the file counts as rewritten.
    """
    values, unclear = {}, set()
    for column in relation.columns:
        if relation.relkind == "p":
            text, because_of = _agreed(column, leaves, found)
        else:
            own = found.get((relation.oid, column.name))
            text = own.text if own else None
            because_of = {relation.oid} if own and own.text is None else set()
        values[column.attnum] = text
        unclear |= because_of
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
    """A partitioned table's missing value, and the leaves because of which none can be told.

    Asked are the leaves that got the column as partitions: what one brought with it when it was attached says
    nothing of the others' rows. Those rewritten since have no missing value any more, those made since never
    had one; no row of them is older than the column and still without a value of its own. Of the others those
    count whose column was last altered together with the partitioned table's.
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
