"""What a DAG's form may ask for: tables of a pipeline."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Param

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.operators.pipeline_argument import PipelineArgument, read_pipeline
from airflow_provider_pgrepl.replication.relation import TableName


def tables_param(pipeline: PipelineArgument, **schema: Any) -> Param:
    """A Param of tables, from which people pick those that the pipeline lists by name.

    For a pipeline with patterns, or a file that cannot be read yet, the form takes names, one a line: what
    patterns stand for only the source knows, which no DAG asks when it is parsed, and a form that offers some
    tables takes no others. `schema` is the rest of the Param, as `title`, `description`, `minItems`.
    """
    if tables := _listed(pipeline):
        schema["examples"] = tables
    return Param([], type="array", items={"type": "string"}, **schema)


def _listed(value: PipelineArgument) -> list[str]:
    try:
        pipeline = read_pipeline(value)
    except ConfigError:
        return []
    if any(text.endswith(".*") for text in pipeline.tables):
        return []
    return sorted(str(TableName.parse(text)) for text in {*pipeline.tables, *pipeline.insert_only})
