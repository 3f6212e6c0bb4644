"""Columns of a lake table: their types, the table's schema, and its partition column.

The partition is a separate text column, and the user's column stays in the data files. Delta stores partition
values as text in its log, and some readers take an empty value for NULL. So an empty partition is null here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, TableError, ValueRangeError, one_line
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, PartitionBy, TableOptions

from .parser import Parser, UnsupportedValue
from .registry import parser_of

CHANGE_IT = "change partition_by of the table in per_table, or take it out"
TEXT_BYTES = 64
"""The maximum number of bytes of a text that form its partition. deltalake and Spark name a folder after it,
with up to 3 characters for a byte; a folder's name has at most 255."""
_MOST_CONDITIONS = 1000
# The second is the name that deltalake and Spark give to the folder of rows without a value.
_LIKE_NONE = ["", "__HIVE_DEFAULT_PARTITION__"]
_PLAIN = {*(oids.BOOL, oids.INT2, oids.INT4, oids.INT8, oids.TEXT, oids.VARCHAR, oids.DATE, oids.UUID)}
_DATED = {oids.DATE, oids.TIMESTAMP, oids.TIMESTAMPTZ}
_MICROSECONDS_A_DAY = 86_400_000_000
_DAY, _MONTH, _YEAR = "datetime64[D]", "datetime64[M]", "datetime64[Y]"
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
COMMIT_LSN = "_pgrepl_commit_lsn"
COMMIT_TS = "_pgrepl_commit_ts"
DELETED = "_pgrepl_deleted"
PARTITION_RULE = "pgrepl.partition_by"
"""The key in the metadata of the partition column whose value is the `partition_by` of the copy."""
RESERVED = f"column {PARTITION} has the name of one that the lake uses itself"


@dataclass(frozen=True)
class TypedColumn:
    """One column of a lake table.

    `index`: its position among the relation's published columns; None for a column that the stream does not
    carry (generated, or dropped since), whose new values are null.
    """

    column: Column
    table: TableName
    index: int | None
    parser: Parser

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def lake_type(self) -> pa.DataType:
        """The Arrow type that the column has in the lake."""
        return self.parser.lake_type

    @property
    def csv_type(self) -> pa.DataType | None:
        """The type for pyarrow's CSV reader if its values equal those of `parse`; None to read text.

        This holds for COPY's CSV with the options of `lake.snapshot.csv.read_csv` (booleans are `t` and `f`).
        """
        return self.parser.csv_type

    def parse(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Convert texts (`string` or `large_string`; null is NULL) to the lake type.

        Above 2 GiB of values, `string` and `binary` become `large_string` and `large_binary`. Raises
        ValueRangeError, which names the column, its type and the table, never the value.
        """
        if isinstance(texts, pa.ChunkedArray):
            return _concatenate([self.parse(chunk) for chunk in texts.chunks], self.lake_type)
        try:
            return self.parser.parse(texts)
        except UnsupportedValue as unholdable:
            reason, hint = unholdable.reason, unholdable.hint
        raise ValueRangeError(
            f'column "{one_line(self.name)}" of {self.table} ({one_line(self.column.type_name)}) holds a'
            f" value that lake type {self.lake_type} cannot: {reason}",
            errors.named(hint, self.table),
        )


def typed_column(
    column: Column, table: TableName, options: TableOptions, index: int | None = None
) -> TypedColumn:
    """Return the lake column for a column, according to the pipeline's settings.

    Raises ConfigError for a lake type that does not fit the column's type.
    """
    choice = options.column(column.name, is_key=column.is_key)
    try:
        parser = parser_of(column.pg_type, choice)
    except ConfigError as error:
        what = f"column {show_identifier(column.name)} of type {one_line(column.type_name)}"
        if column.name in options.named.get("types", {}):
            what = f"types: {what}"
        raise ConfigError(f"{what} {error.message}", error.hint) from None
    return TypedColumn(column, table, index, parser)


def _concatenate(chunks: list[pa.Array], target: pa.DataType) -> pa.Array:
    """Return one array of all chunks; of the large type if `target` cannot address all of it."""
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(target)
    if large is not None and (
        sum(chunk.nbytes for chunk in chunks) >= 2**31 or any(chunk.type == large for chunk in chunks)
    ):
        target = large
    return pa.concat_arrays([chunk.cast(target) for chunk in chunks]) if chunks else pa.array([], target)


@dataclass(frozen=True)
class Partitioning:
    """The partitioning of a lake table: a column, and the unit to which its dates are truncated."""

    typed: TypedColumn
    unit: str

    def of_rows(self, rows: pa.Table) -> set[str | None] | None:
        """Return the partitions of the given rows of the lake; None if they lack the column."""
        if self.typed.name not in rows.column_names:
            return None
        return set(self.texts(rows[self.typed.name]).unique().to_pylist())

    def conditions(self, keys: pa.Table) -> Iterator[str]:
        """Yield an SQL condition on the partitions of the lake's rows `t` with these keys, or nothing.

        By constants, deltalake can skip files. It cannot by equality with a column of the other side. Yields
        nothing if the keys lack the column, or have more than 1,000 partitions.
        """
        known = self.of_rows(keys.drop_null())
        if known is None or len(known) > _MOST_CONDITIONS:
            return
        named = ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}'" for name in sorted(filter(None, known)))
        either = [f"t.{PARTITION} in ({named})"] if named else []
        either += [f"t.{PARTITION} is null"] if None in known else []
        if either:
            yield f"({' or '.join(either)})"

    def texts(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Return the partition of each value of the column, which has its lake type; null for no value."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        kind = values.type
        if pa.types.is_date32(kind):
            return _dates(values, pa.int32(), 1, self.unit or "day")
        if pa.types.is_timestamp(kind):
            return _dates(values, pa.int64(), _MICROSECONDS_A_DAY, self.unit)
        if pa.types.is_boolean(kind):
            return pc.if_else(values, pa.scalar("true"), pa.scalar("false"))
        if pa.types.is_integer(kind):
            return values.cast(pa.string())
        return _short(values)


def partitioning(relation: Relation, options: TableOptions) -> Partitioning | None:
    """Return the partitioning of a table, or None if the pipeline sets none.

    Raises TableError if the table cannot be partitioned by the column, ConfigError.
    """
    by = options.policy.partition
    if by is None:
        return None
    problem = _missing(relation, options, by)
    column = next((column for column in relation.columns if column.name == by.column), None)
    if problem or column is None:
        raise TableError(
            f"partition_by names column {show_identifier(by.column)}, {problem}", _hint(relation)
        )
    index = relation.columns.index(column)
    found = typed_column(column, relation.table, options, index)
    if reason := _reason_against(column, found.lake_type, by):
        raise TableError(f"partition_by: {by}: {reason}", _hint(relation))
    return Partitioning(found, by.unit)


def _hint(relation: Relation) -> str:
    copied = errors.resnapshot(relation.table)
    return f"{CHANGE_IT}; if the table was copied before, then {copied}"


def _missing(relation: Relation, options: TableOptions, by: PartitionBy) -> str:
    if options.column(by.column).excluded:
        return "which exclude_columns leaves out"
    published = {column.name: column.attnum for column in relation.columns}
    if by.column in published:
        return "which is left out since it came" if published[by.column] in relation.ignored else ""
    if any(column.name == by.column for column in relation.unpublished):
        return "whose values the publication does not carry"
    if any(column.name == by.column for column in relation.dropped):
        return "which was dropped"
    return "which the table does not have"


def _reason_against(column: Column, lake_type: pa.DataType, by: PartitionBy) -> str:
    """Return the reason why a column cannot be the partition column, or ""."""
    base = column.pg_type.without_domain
    shown = one_line(column.type_name)
    if by.unit:
        if base.oid not in _DATED:
            return f"{shown} has no {by.unit}; date, timestamp and timestamp with time zone have"
        if not (pa.types.is_date32(lake_type) or pa.types.is_timestamp(lake_type)):
            return f"the column's lake type is {lake_type}, which has no {by.unit}"
        return ""
    if base.oid in _PLAIN or base.kind == "e":
        return ""
    plain = "boolean, integer types, date, text, varchar, uuid and enums"
    times = "; write year(…), month(…) or day(…) of it" if base.oid in _DATED else ""
    return f"rows cannot be kept apart by whole values of type {shown}, only by {plain}{times}"


def _dates(values: pa.Array, counted_in: pa.DataType, a_day: int, unit: str) -> pa.Array:
    """Return the partition texts of dates or timestamps, truncated to a unit; null stays null.

    Years may have more than 4 digits, or be negative: year 0 is 1 BC. `a_day`: the count of a day.
    """
    numbers: Ints = values.cast(counted_in).fill_null(0).to_numpy().astype(np.int64) // a_day
    days = numbers.astype(_DAY)
    shown: Callable[[int], str] = {"day": _day, "month": _month, "year": _year}[unit]
    of_unit = {"day": numbers, "month": days.astype(_MONTH).astype(np.int64)}.get(unit)
    if of_unit is None:
        of_unit = days.astype(_YEAR).astype(np.int64)
    distinct, place = np.unique(of_unit, return_inverse=True)
    texts = pa.array([shown(number) for number in distinct.tolist()], pa.string())
    missing = values.is_null().to_numpy(zero_copy_only=False)
    return texts.take(pa.array(place.astype(np.int64), mask=missing))


def _year(number: int) -> str:
    year = 1970 + number
    return f"{year:04d}" if year >= 0 else f"-{-year:04d}"


def _month(number: int) -> str:
    years, month = divmod(number, 12)
    return f"{_year(years)}-{month + 1:02d}"


def _day(number: int) -> str:
    month = np.datetime64(number, "D").astype(_MONTH)
    first = int(month.astype(_DAY).astype(np.int64))
    return f"{_month(int(month.astype(np.int64)))}-{number - first + 1:02d}"


def _short(texts: pa.Array) -> pa.Array:
    beginnings = pc.utf8_slice_codeunits(texts, 0, TEXT_BYTES).cast(pa.string())
    if pc.any(pc.greater(pc.binary_length(beginnings), TEXT_BYTES)).as_py():
        encoded = beginnings.dictionary_encode()
        cut = [text.encode()[:TEXT_BYTES].decode(errors="ignore") for text in encoded.dictionary.to_pylist()]
        beginnings = pa.array(cut, pa.string()).take(encoded.indices)
    nothing = pc.is_in(beginnings, value_set=pa.array(_LIKE_NONE))
    return pc.if_else(nothing, pa.scalar(None, pa.string()), beginnings)


def typed_columns(relation: Relation, options: TableOptions) -> tuple[TypedColumn, ...]:
    """Return the lake table's columns of a relation, ordered by attnum, without excluded and ignored ones.

    Raises ConfigError for a lake type that does not fit its column.
    """
    typed = (
        typed_column(column, relation.table, options, index)
        for column, index in stored_columns(relation, options)
    )
    return tuple(sorted(typed, key=lambda typed: typed.column.attnum))


def stored_columns(relation: Relation, options: TableOptions) -> Iterator[tuple[Column, int | None]]:
    """Yield the columns of a relation that the lake table has, each with its index as in TypedColumn."""
    published = [(column, index) for index, column in enumerate(relation.columns)]
    others = [(column, None) for column in (*relation.unpublished, *relation.dropped)]
    for column, index in (*published, *others):
        if column.attnum not in relation.ignored and not options.column(column.name).excluded:
            yield column, index


def copied_part(relation: Relation, options: TableOptions) -> Relation:
    """Return the relation without excluded columns, whose values a snapshot does not read from the source."""
    kept = (c for c in relation.columns if not options.column(c.name).excluded)
    return replace(relation, columns=tuple(kept))


def lake_schema(relation: Relation, options: TableOptions) -> pa.Schema:
    """Return the lake table's schema: the relation's columns, then the pipeline's bookkeeping columns.

    All columns are nullable: a key of the source does not constrain soft-deleted rows or older versions in
    the lake. Raises TableError if a column has a reserved name, or if two names differ only in case, which a
    lake table does not allow; ConfigError.
    """
    fields = [pa.field(typed.name, typed.lake_type) for typed in typed_columns(relation, options)]
    taken = {field.name.casefold() for field in fields}
    for own, option in ((COMMIT_LSN, "commit_lsn_column"), (COMMIT_TS, "commit_ts_column")):
        if own in taken and getattr(options, option):
            raise TableError(
                f"{relation.table}: column {own} has the name of a column that the lake table gets",
                f"set {option} to false, rename the column, or leave it out with exclude_columns",
            )
    if any(field.name.casefold() == PARTITION for field in fields):
        raise TableError(f"{relation.table}: {RESERVED}", "rename it, or leave it out with exclude_columns")
    if options.policy.deletes == "soft":
        fields.append(pa.field(DELETED, pa.bool_()))
    if options.commit_lsn_column:
        fields.append(pa.field(COMMIT_LSN, pa.int64()))
    if options.commit_ts_column:
        fields.append(pa.field(COMMIT_TS, pa.timestamp("us", "UTC")))
    if partitioning(relation, options) is not None:
        rule = {PARTITION_RULE: str(options.policy.partition)}
        fields.append(pa.field(PARTITION, pa.string(), metadata=rule))
    counts = Counter(field.name.casefold() for field in fields)
    doubles = [one_line(f'"{field.name}"') for field in fields if counts[field.name.casefold()] > 1]
    if doubles:
        raise TableError(
            f"{relation.table}: the lake cannot tell the columns {', '.join(doubles)} apart",
            "rename one, or leave it out with exclude_columns",
        )
    return pa.schema(fields)


def partition_rule(schema: pa.Schema) -> str | None:
    """Return the `partition_by` of the copy of a lake table with these columns.

    Returns None if it is not partitioned, or was copied by an earlier version of this package, which did not
    record it.
    """
    if PARTITION not in schema.names:
        return None
    rule = (schema.field(PARTITION).metadata or {}).get(PARTITION_RULE.encode())
    return None if rule is None else rule.decode()


def held_options(relation: Relation, options: TableOptions, held: pa.Schema) -> TableOptions:
    """Return the settings by which a lake table for `relation` got the columns `held`.

    Whether deletes are soft, which bookkeeping columns there are, and how the table is partitioned, follows
    from the columns: `options` may have changed since the table was copied. The other settings are those in
    `options`.
    """
    own = set(held.names) - {column.name for column, _ in stored_columns(relation, options)}
    rule = partition_rule(held) or options.policy.partition_by
    policy = replace(
        options.policy,
        deletes="soft" if DELETED in own else "hard",
        partition_by=rule if PARTITION in own else None,
    )
    return replace(
        options, policy=policy, commit_lsn_column=COMMIT_LSN in own, commit_ts_column=COMMIT_TS in own
    )


def option_problems(relation: Relation, options: TableOptions) -> Iterator[str]:
    """Yield the settings of the pipeline that do not fit this table or its columns, as messages."""
    yield from _column_problems(relation, options)
    yield from partition_problems(relation, options)
    yield from _key_problems(relation, options)
    if options.policy.history:
        yield from history_problems(relation)


def _column_problems(relation: Relation, options: TableOptions) -> Iterator[str]:
    known = {column.name: column for column in (*relation.columns, *relation.unpublished)}
    for field, names in options.named.items():
        for name in names:
            column, shown = known.get(name), show_identifier(name)
            if column is None:
                yield f"{field} names column {shown}, which it does not have or does not publish"
            elif column.is_key and field == "exclude_columns":
                yield f"{field} names column {shown}, which belongs to its key and cannot be left out"
            elif column.is_key and field == "per_column":
                yield f"{field} names column {shown}, which is of its key and must stay exact"
    kept = [column for column in known.values() if not options.column(column.name).excluded]
    if known and not kept:
        yield "exclude_columns leaves it no column; take one out of there, or the table out of tables"
    yield from _type_problems(relation.table, kept, options)


def partition_problems(relation: Relation, options: TableOptions) -> Iterator[str]:
    """Yield the reasons why the table cannot have its partitioning, or has a column with a reserved name."""
    columns = (*relation.columns, *relation.unpublished)
    if any(c.name.casefold() == PARTITION and not options.column(c.name).excluded for c in columns):
        yield f"{RESERVED}; rename it, or leave it out with exclude_columns"
    try:
        partitioning(relation, options)
    except TableError as error:
        yield f"{error.message}; {error.hint}"
    except ConfigError:
        # _type_problems reports a lake type that does not fit, for all columns.
        pass


def _type_problems(table: TableName, columns: Iterable[Column], options: TableOptions) -> Iterator[str]:
    for column in columns:
        try:
            typed_column(column, table, options)
        except ConfigError as error:
            yield f"{error.message}; {error.hint}"


def _key_problems(relation: Relation, options: TableOptions) -> Iterator[str]:
    """Yield the key columns whose different texts would become equal values in the lake.

    Only checked if rows that the source no longer has may stay: then keys are distinguished by their texts.
    """
    if not options.policy.follows_keys:
        return
    for column in relation.key_columns:
        choice = options.column(column.name, is_key=True)
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
    free = pg_type.oid == oids.NUMERIC and pg_type.typmod < 0
    return free or any(_has_free_numeric(part) for _, part in pg_type.parts)


def history_problems(relation: Relation) -> Iterator[str]:
    """Yield the reasons why a table cannot have a history."""
    if not relation.key_columns:
        yield (
            "history needs a key, which identifies the versions of a row: give the table a primary"
            ' key, or set {"history": false} for it in per_table'
        )
    for column in relation.columns:
        if column.name.casefold().startswith(("_pgrepl_from_", "_pgrepl_to_")):
            shown = show_identifier(column.name)
            yield f"column {shown} has a name that history uses itself; rename it, or leave it out"
