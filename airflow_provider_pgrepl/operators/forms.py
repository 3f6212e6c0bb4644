"""The fields of a DAG's trigger form in which a user selects tables of a pipeline."""

from __future__ import annotations

from airflow.sdk import Param

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, read_pipeline
from airflow_provider_pgrepl.replication.postgres.names import TableName

PICKED_TABLES = "{{ (params.tables or []) + (params.get('more_tables') or []) }}"
"""The value of `tables=` in a DAG with `tables_params` and `render_template_as_native_obj=True`."""


def tables_params(pipeline: PipelineArgument, title: str, description: str = "") -> dict[str, Param]:
    """Return the Params of a DAG in which a user names tables: `tables`, and `more_tables` if needed.

    If the pipeline lists its tables by name, `tables` offers those, and accepts no other name. `more_tables`
    takes other names, one a line, for example tables to add. For a pipeline with patterns, or whose file
    cannot be read yet, `tables` takes names, one a line. Only the source knows the tables that match a
    pattern, and parsing a DAG must not query the source.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file
    :param title: the heading of the field `tables` in the form
    :param description: the text below the field
    """
    listed = _listed(pipeline)
    if not listed:
        return {"tables": _names(title, f"{description}One a line, as public.orders")}
    # Do not set minItems: `airflow tasks test` starts with the defaults, which are empty.
    picker = Param(
        [],
        type=["null", "array"],
        items={"type": "string"},
        title=title,
        description=description or None,
        examples=listed,
    )
    return {"tables": picker, "more_tables": _names("More tables", "Not in the list; one a line")}


def pipeline_tags(pipeline: PipelineArgument) -> list[str]:
    """Return the tags of a DAG that acts on a pipeline, by which the page "Replication" finds it.

    `pgrepl`, and `pipeline:NAME` if the pipeline can be read.
    """
    try:
        return ["pgrepl", f"pipeline:{read_pipeline(pipeline).name}"]
    except ConfigError:
        return ["pgrepl"]


def _names(title: str, description: str) -> Param:
    return Param([], type=["null", "array"], items={"type": "string"}, title=title, description=description)


def _listed(value: PipelineArgument) -> list[str]:
    try:
        pipeline = read_pipeline(value)
    except ConfigError:
        return []
    if any(text.endswith(".*") for text in pipeline.tables):
        return []
    return sorted(str(TableName.parse(text)) for text in {*pipeline.tables, *pipeline.insert_only})
