"""geometry and geography, of PostGIS's extension `postgis`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.binary import Binary


class Spatial:
    """EWKB: well-known binary with the reference system's number, as PostGIS writes it in hexadecimal."""

    lake_type: pa.DataType = pa.binary()
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        prefix, none = (pa.scalar(text, texts.type) for text in ("\\x", ""))
        return Binary().parse(pc.binary_join_element_wise(prefix, texts, none))


def spatial(_: PgType, __: ColumnChoice) -> Spatial:
    """geometry and geography, of PostGIS."""
    return Spatial()
