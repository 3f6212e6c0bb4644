"""hstore, of the extension of that name."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.nested import split_pairs


class HStore:
    """A map of text; a value may be null, and a key occurs once. The order of pairs means nothing."""

    lake_type: pa.DataType = pa.map_(pa.string(), pa.string())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        starts, keys, values = split_pairs(texts)
        return pa.MapArray.from_arrays(
            starts, keys, values, mask=texts.is_null() if texts.null_count else None
        )


def hstore(_: PgType, __: ColumnChoice) -> HStore:
    """hstore, of the extension."""
    return HStore()
