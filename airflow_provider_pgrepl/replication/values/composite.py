"""Composite types."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.nested import split_record
from airflow_provider_pgrepl.replication.values.parser import Parser, ParserOf
from airflow_provider_pgrepl.replication.values.text import Text


@dataclass(frozen=True)
class Composite:
    """A composite as a struct with its attributes, in their order."""

    attributes: tuple[tuple[str, Parser], ...]
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.struct([(name, parser.lake_type) for name, parser in self.attributes])

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_record(texts, len(self.attributes))
        values = [parser.parse(part) for (_, parser), part in zip(self.attributes, parts, strict=True)]
        return pa.StructArray.from_arrays(
            values,
            names=[name for name, _ in self.attributes],
            mask=texts.is_null() if texts.null_count else None,
        )


def composite(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Parser:
    """The exact text where a struct cannot be: without attributes, or when names differ only in case."""
    names = {name.casefold() for name, _ in pg_type.parts}
    if not names or len(names) < len(pg_type.parts):
        return Text()
    inner = replace(choice, lake_type=None)
    return Composite(tuple((name, parser_of(part, inner)) for name, part in pg_type.parts))
