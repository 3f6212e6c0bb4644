"""The columns of a lake table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError, TableError, one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values.columns import partitioning
from airflow_provider_pgrepl.replication.values.typed_column import TypedColumn, typed_column

COMMIT_LSN = "_pgrepl_commit_lsn"
COMMIT_TS = "_pgrepl_commit_ts"
DELETED = "_pgrepl_deleted"

_NUMERIC = 1700

RESERVED = f"column {PARTITION} has the name of one that the lake uses itself"


def typed_columns(relation: Relation, choices: TableChoices) -> tuple[TypedColumn, ...]:
    """The relation's columns as the lake table has them, in the table's order; excluded and ignored ones are
    left out.

    Raises ConfigError for a lake type that does not fit its column.
    """
    published = [(column, index) for index, column in enumerate(relation.columns)]
    others = [(column, None) for column in (*relation.unpublished, *relation.dropped)]
    typed = (
        typed_column(column, relation.table, choices, index)
        for column, index in (*published, *others)
        if column.attnum not in relation.ignored and not choices.column(column.name).excluded
    )
    return tuple(sorted(typed, key=lambda typed: typed.column.attnum))


def copied_part(relation: Relation, choices: TableChoices) -> Relation:
    """The relation with those columns that a copy reads: values of excluded ones do not leave the source."""
    kept = (c for c in relation.columns if not choices.column(c.name).excluded)
    return replace(relation, columns=tuple(kept))


def lake_schema(relation: Relation, choices: TableChoices) -> pa.Schema:
    """The lake table's columns: the relation's, then the bookkeeping ones that the pipeline wants.

    All are nullable: a key of the source says nothing about soft deletes or older versions in the lake.
    Raises TableError when two names differ only in case, which a lake table cannot hold; ConfigError.
    """
    fields = [pa.field(typed.name, typed.lake_type) for typed in typed_columns(relation, choices)]
    taken = {field.name.casefold() for field in fields}
    for own, option in ((COMMIT_LSN, "commit_lsn_column"), (COMMIT_TS, "commit_ts_column")):
        if own in taken and getattr(choices, option):
            raise TableError(
                f"{relation.table}: column {own} has the name of a column that the lake table gets",
                f"set {option} to false, rename the column, or leave it out with exclude_columns",
            )
    if any(field.name.casefold() == PARTITION for field in fields):
        raise TableError(f"{relation.table}: {RESERVED}", "rename it, or leave it out with exclude_columns")
    if choices.policy.deletes == "soft":
        fields.append(pa.field(DELETED, pa.bool_()))
    if choices.commit_lsn_column:
        fields.append(pa.field(COMMIT_LSN, pa.int64()))
    if choices.commit_ts_column:
        fields.append(pa.field(COMMIT_TS, pa.timestamp("us", "UTC")))
    if partitioning(relation, choices) is not None:
        fields.append(pa.field(PARTITION, pa.string()))
    counts = Counter(field.name.casefold() for field in fields)
    doubles = [one_line(f'"{field.name}"') for field in fields if counts[field.name.casefold()] > 1]
    if doubles:
        raise TableError(
            f"{relation.table}: the lake cannot tell the columns {', '.join(doubles)} apart",
            "rename one, or leave it out with exclude_columns",
        )
    return pa.schema(fields)


def choice_problems(relation: Relation, choices: TableChoices) -> Iterator[str]:
    """What the pipeline chooses for this table, or for columns of it, that cannot be."""
    yield from _column_problems(relation, choices)
    yield from partition_problems(relation, choices)
    yield from _key_problems(relation, choices)
    if choices.policy.history:
        yield from history_problems(relation)


def _column_problems(relation: Relation, choices: TableChoices) -> Iterator[str]:
    known = {column.name: column for column in (*relation.columns, *relation.unpublished)}
    for field, names in choices.named.items():
        for name in names:
            column, shown = known.get(name), show_identifier(name)
            if column is None:
                yield f"{field} names column {shown}, which it does not have or does not publish"
            elif column.is_key and field == "exclude_columns":
                yield f"{field} names column {shown}, which belongs to its key and cannot be left out"
            elif column.is_key and field == "per_column":
                yield f"{field} names column {shown}, which is of its key and must stay exact"
    kept = [column for column in known.values() if not choices.column(column.name).excluded]
    if known and not kept:
        yield "exclude_columns leaves it no column; take one out of there, or the table out of tables"
    yield from _type_problems(relation.table, kept, choices)


def partition_problems(relation: Relation, choices: TableChoices) -> Iterator[str]:
    """What keeps a table from being partitioned as the pipeline wants it, or from being in the lake."""
    columns = (*relation.columns, *relation.unpublished)
    if any(c.name.casefold() == PARTITION and not choices.column(c.name).excluded for c in columns):
        yield f"{RESERVED}; rename it, or leave it out with exclude_columns"
    try:
        partitioning(relation, choices)
    except TableError as error:
        yield f"{error.message}; {error.hint}"
    except ConfigError:
        # A lake type that does not fit: of all columns at once.
        pass


def _type_problems(table: TableName, columns: Iterable[Column], choices: TableChoices) -> Iterator[str]:
    for column in columns:
        try:
            typed_column(column, table, choices)
        except ConfigError as error:
            yield f"{error.message}; {error.hint}"


def _key_problems(relation: Relation, choices: TableChoices) -> Iterator[str]:
    """Where rows that went may stay, keys are told apart by their texts: in the lake they must differ too."""
    if not choices.policy.follows_keys:
        return
    for column in relation.key_columns:
        choice = choices.column(column.name, is_key=True)
        chosen = choice.lake_type
        if chosen is None or chosen.name == "array":
            chosen = choice.unconstrained_numeric
        if chosen.name == "decimal" and _has_free_numeric(column.pg_type):
            yield (
                f"column {show_identifier(column.name)} of its key is numeric without precision, whose 1.0"
                f" and 1.00 would be one {chosen}: with soft deletes, or where TRUNCATE is ignored, give it"
                " lake type string in types"
            )


def _has_free_numeric(pg_type: PgType) -> bool:
    free = pg_type.oid == _NUMERIC and pg_type.typmod < 0
    return free or any(_has_free_numeric(part) for _, part in pg_type.parts)


def history_problems(relation: Relation) -> Iterator[str]:
    """What keeps a table from having its past versions kept."""
    if not relation.key_columns:
        yield (
            "history needs a key, by which the versions of a row are told from other rows: give the table a"
            ' primary key, or set {"history": false} for it in per_table'
        )
    for column in relation.columns:
        if column.name.casefold().startswith(("_pgrepl_from_", "_pgrepl_to_")):
            shown = show_identifier(column.name)
            yield f"column {shown} has a name that history uses itself; rename it, or leave it out"
