"""PostgreSQL's types and values in Arrow, with the same code for snapshot and stream.

A column's `parse` returns exactly the values of the given texts, or it raises an error.
"""

from airflow_provider_pgrepl.replication.values.columns import (
    CHANGE_IT,
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    Partitioning,
    TypedColumn,
    copied_part,
    held_options,
    history_problems,
    lake_schema,
    option_problems,
    partition_rule,
    partitioning,
    stored_columns,
    typed_column,
    typed_columns,
)

__all__ = [
    "CHANGE_IT",
    "COMMIT_LSN",
    "COMMIT_TS",
    "DELETED",
    "Partitioning",
    "TypedColumn",
    "copied_part",
    "held_options",
    "history_problems",
    "lake_schema",
    "option_problems",
    "partition_rule",
    "partitioning",
    "stored_columns",
    "typed_column",
    "typed_columns",
]
