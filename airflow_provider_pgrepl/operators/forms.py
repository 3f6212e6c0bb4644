"""Fields of a DAG's form: tables of a pipeline."""

from __future__ import annotations

from airflow.sdk import Param

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, read_pipeline
from airflow_provider_pgrepl.replication.postgres.names import TableName

PICKED_TABLES = "{{ (params.tables or []) + (params.get('more_tables') or []) }}"
"""The operators' `tables=` for `tables_params`, in a DAG with `render_template_as_native_obj=True`."""


def tables_params(pipeline: PipelineArgument, title: str, description: str = "") -> dict[str, Param]:
    """Params of a DAG by which people say which tables: `tables`, and where needed `more_tables`.

    They pick from the tables that the pipeline lists by name. Such a form takes no other names, so that there
    is a second field for those: of tables that are to be added, or that were. For a pipeline with patterns,
    or a file that cannot be read yet, one field takes names, one a line: what patterns stand for only the
    source knows, which no DAG asks when it is parsed.
    """
    listed = _listed(pipeline)
    if not listed:
        return {"tables": _names(title, f"{description}One a line, as public.orders")}
    # No minItems: `airflow tasks test` begins with the defaults, and must be allowed to.
    picker = Param(
        [],
        type=["null", "array"],
        items={"type": "string"},
        title=title,
        description=description or None,
        examples=listed,
    )
    return {"tables": picker, "more_tables": _names("More tables", "Not in the list; one a line")}


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
