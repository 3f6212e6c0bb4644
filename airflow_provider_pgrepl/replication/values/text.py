"""Everything whose lake value is the text that PostgreSQL writes."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column


class Text:
    """The exact text: char(n) with its padding, json as written, time, uuid, enums, all other types."""

    def lake_type(self, column: Column, pipeline: Pipeline) -> pa.DataType:  # noqa: ARG002
        return pa.string()

    def csv_type(self, lake_type: pa.DataType) -> pa.DataType | None:
        return lake_type

    def parse(self, texts: pa.Array, lake_type: pa.DataType) -> pa.Array:
        return as_string(texts, lake_type)


def as_string(texts: pa.Array, lake_type: pa.DataType) -> pa.Array:
    """`texts` as `string`; above 2 GiB, which `string` cannot address, as `large_string`."""
    if texts.type == lake_type:
        return texts
    try:
        return texts.cast(lake_type)
    except pa.ArrowInvalid:
        return texts.cast(pa.large_string())


TEXT = Text()
