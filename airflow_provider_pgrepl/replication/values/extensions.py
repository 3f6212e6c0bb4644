"""Types of extensions: hstore, geometry and geography of PostGIS, vector and halfvec of pgvector."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions
from airflow_provider_pgrepl.replication.values.nested import list_array, split_array, split_pairs
from airflow_provider_pgrepl.replication.values.parser import cast, not_output_of_type
from airflow_provider_pgrepl.replication.values.scalars import Binary


class HStore:
    """hstore as a map of text. A value may be null, keys are unique, the order of pairs has no meaning."""

    lake_type: pa.DataType = pa.map_(pa.string(), pa.string())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        starts, keys, values = split_pairs(texts)
        return pa.MapArray.from_arrays(
            starts, keys, values, mask=texts.is_null() if texts.null_count else None
        )


def hstore(_: PgType, __: ColumnOptions) -> HStore:
    """Return the parser of the extension's type hstore."""
    return HStore()


class Spatial:
    """Spatial values as EWKB: well-known binary with the SRID, which PostGIS writes in hexadecimal digits."""

    lake_type: pa.DataType = pa.binary()
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        prefix, none = (pa.scalar(text, texts.type) for text in ("\\x", ""))
        return Binary().parse(pc.binary_join_element_wise(prefix, texts, none))


def spatial(_: PgType, __: ColumnOptions) -> Spatial:
    """Return the parser of PostGIS's geometry and geography."""
    return Spatial()


class Vector:
    """Vectors as lists of 32-bit floats, which represent the 16-bit floats of halfvec exactly."""

    lake_type: pa.DataType = pa.list_(pa.float32())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_array(texts, brackets="[]")
        numbers = cast(parts.texts, pa.float32())
        if numbers is None or numbers.null_count:
            raise not_output_of_type()
        return list_array(parts.starts, numbers, texts)


def vector(_: PgType, __: ColumnOptions) -> Vector:
    """Return the parser of pgvector's vector and halfvec."""
    return Vector()
