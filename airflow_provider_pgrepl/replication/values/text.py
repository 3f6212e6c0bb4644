"""Everything whose lake value is the text that PostgreSQL writes."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice


class Text:
    """The exact text: char(n) with its padding, json as written, time, uuid, enums, all other types."""

    lake_type: pa.DataType = pa.string()
    csv_type: pa.DataType | None = pa.string()

    def parse(self, texts: pa.Array) -> pa.Array:
        return as_string(texts)


def as_string(texts: pa.Array) -> pa.Array:
    """`texts` as `string`; above 2 GiB, which `string` cannot address, as `large_string`."""
    if pa.types.is_string(texts.type):
        return texts
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return texts.cast(pa.large_string())


def text(_: PgType, __: ColumnChoice) -> Text:
    """A type whose text is its value."""
    return Text()
