"""A column of a lake table: where its values come from, its type, and how texts become that."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ConfigError, ValueRangeError, one_line
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values.parser import Parser, Unholdable
from airflow_provider_pgrepl.replication.values.registry import parser_of


@dataclass(frozen=True)
class TypedColumn:
    """One column of a lake table.

    `index`: its place among the relation's published columns; None for one that the stream does not carry (a
    generated column, or one dropped since), whose new values are null.
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
        """The type to give pyarrow's CSV reader when what that accepts equals `parse`, else None: a string.

        Holds for COPY's CSV with the options of `lake.copying.csv.read_csv` (booleans are `t` and `f`).
        """
        return self.parser.csv_type

    def parse(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Type texts (`string` or `large_string`; null is NULL).

        Above 2 GiB of values `string` and `binary` become `large_string` and `large_binary`.
        Raises ValueRangeError, which names the column, its type and the table, never the value.
        """
        if isinstance(texts, pa.ChunkedArray):
            return _concatenate([self.parse(chunk) for chunk in texts.chunks], self.lake_type)
        try:
            return self.parser.parse(texts)
        except Unholdable as unholdable:
            reason, hint = unholdable.reason, unholdable.hint
        raise ValueRangeError(
            f'column "{one_line(self.name)}" of {self.table} ({one_line(self.column.type_name)}) holds a'
            f" value that lake type {self.lake_type} cannot: {reason}",
            hints.named(hint, self.table),
        )


def typed_column(
    column: Column, table: TableName, choices: TableChoices, index: int | None = None
) -> TypedColumn:
    """The column as the pipeline wants it in the lake. Raises ConfigError for a type that does not fit."""
    choice = choices.column(column.name, is_key=column.is_key)
    try:
        parser = parser_of(column.pg_type, choice)
    except ConfigError as error:
        what = f"types: column {show_identifier(column.name)} of type {one_line(column.type_name)}"
        raise ConfigError(f"{what} {error.message}", error.hint) from None
    return TypedColumn(column, table, index, parser)


def _concatenate(chunks: list[pa.Array], target: pa.DataType) -> pa.Array:
    """One array of all chunks, large when `target` cannot address so much."""
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(target)
    if large is not None and (
        sum(chunk.nbytes for chunk in chunks) >= 2**31 or any(chunk.type == large for chunk in chunks)
    ):
        target = large
    return pa.concat_arrays([chunk.cast(target) for chunk in chunks]) if chunks else pa.array([], target)
