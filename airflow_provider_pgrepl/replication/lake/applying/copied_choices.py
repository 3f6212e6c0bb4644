"""The choices that shape a lake table: those by which it was copied, until it is taken anew."""

from __future__ import annotations

import dataclasses

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import ColumnName, TableName

_VALUES = ("infinity", "numeric_nan", "unconstrained_numeric", "timestamp_without_tz")
_OF_COLUMNS = ("types", "text_columns", "exclude_columns", "per_column")
_BOOKKEEPING = ("commit_lsn_column", "commit_ts_column")
_SHAPING = ("deletes", "history")


def pipeline_of(running: Pipeline, config: str | None, table: TableName) -> Pipeline:
    """The running pipeline with the choices for a table by which it was copied.

    `config`: the pipeline file then, as TableRecord has it; None (copied by an older version) leaves all as
    it is. Raises ConfigError for one that cannot be read.
    """
    if config is None:
        return running
    copied = Pipeline.from_json(config)
    now, then = running.policy(table), copied.policy(table)
    policy = dataclasses.replace(now, **{name: getattr(then, name) for name in _SHAPING})
    return dataclasses.replace(
        running,
        **{name: getattr(copied, name) for name in (*_VALUES, *_OF_COLUMNS, *_BOOKKEEPING)},
        history=False,
        per_table={str(table): dataclasses.asdict(policy)},
    )


def changed_choices(running: Pipeline, config: str | None, table: TableName) -> list[str]:
    """The fields of which the pipeline file says another thing for the table than when it was copied."""
    if config is None:
        return []
    copied = Pipeline.from_json(config)
    plain = [name for name in (*_VALUES, *_BOOKKEEPING) if getattr(running, name) != getattr(copied, name)]
    columns = [name for name in _OF_COLUMNS if _own(running, name, table) != _own(copied, name, table)]
    policies = [
        name
        for name in _SHAPING
        if getattr(running.policy(table), name) != getattr(copied.policy(table), name)
    ]
    return [*columns, *plain, *policies]


def _own(pipeline: Pipeline, field: str, table: TableName) -> dict[ColumnName, object]:
    """What a field says of the columns of one table."""
    given = getattr(pipeline, field)
    names = ((ColumnName.parse(name), name) for name in given)
    return {
        column: given[name] if isinstance(given, dict) else True
        for column, name in names
        if column.table == table
    }
