"""PostgreSQL's types and values in Arrow: the same code for snapshot and stream.

Lossless or loud: what a column's `parse` returns is exactly the value whose text it was given, or it raises.
"""

from airflow_provider_pgrepl.replication.values.columns import (
    CHANGE_IT,
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    Partitioning,
    TypedColumn,
    choice_problems,
    copied_part,
    history_problems,
    lake_schema,
    partitioning,
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
    "choice_problems",
    "copied_part",
    "history_problems",
    "lake_schema",
    "partitioning",
    "typed_column",
    "typed_columns",
]
