"""boolean."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column
from airflow_provider_pgrepl.replication.values.family import not_output_of_type


class Boolean:
    """boolean, which PostgreSQL writes `t` or `f`. (The CSV reader must be told the same two words.)"""

    def lake_type(self, column: Column, pipeline: Pipeline) -> pa.DataType:  # noqa: ARG002
        return pa.bool_()

    def csv_type(self, lake_type: pa.DataType) -> pa.DataType | None:
        return lake_type

    def parse(self, texts: pa.Array, lake_type: pa.DataType) -> pa.Array:  # noqa: ARG002
        true = pc.equal(texts, pa.scalar("t", texts.type))
        false = pc.equal(texts, pa.scalar("f", texts.type))
        if pc.all(pc.or_(true, false)).as_py() is False:
            raise not_output_of_type()
        return true


BOOLEAN = Boolean()
