"""Arrays of any type."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.nested import split_array, split_rows
from airflow_provider_pgrepl.replication.values.parser import Parser, ParserOf


@dataclass(frozen=True)
class Array:
    """An array as a list of what `element` makes of its elements.

    A list has neither a first index nor a fixed number of dimensions, which belong to an array's value, not
    to its type. So an array that does not begin at 1, or has other dimensions than the column is to have, is
    refused. `of_rows`: the elements are themselves rows of an array of more than one dimension.
    """

    element: Parser
    delimiter: str = ","
    of_rows: bool = False
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.list_(self.element.lake_type)

    def parse(self, texts: pa.Array) -> pa.Array:
        split = split_rows if self.of_rows else split_array
        parts = split(texts, self.delimiter)
        return list_array(parts.starts, self.element.parse(parts.texts), texts)


def list_array(starts: pa.Array, values: pa.Array, texts: pa.Array) -> pa.Array:
    """Lists that begin at `starts`, null where the texts are."""
    return pa.ListArray.from_arrays(starts, values, mask=texts.is_null() if texts.null_count else None)


def array(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Parser:
    """A list, or by the column's choice lists of lists, the outer of which is what an empty array becomes."""
    element = pg_type.only_part
    parser: Parser = Array(parser_of(element, replace(choice, lake_type=None)), element.delimiter)
    for _ in range(1, choice.lake_type.dimensions if choice.lake_type else 1):
        parser = Array(parser, element.delimiter, of_rows=True)
    return parser
