"""The choices that shape a lake table: those by which it was copied, until it is resnapshotted."""

from __future__ import annotations

import dataclasses

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import COLUMN_FIELDS, TableChoices

_OF_ALL_COLUMNS = ("infinity", "numeric_nan", "unconstrained_numeric", "timestamp_without_tz")
_BOOKKEEPING = ("commit_lsn_column", "commit_ts_column")
_SHAPING = ("deletes", "history", "partition_by")


def copied_choices(running: Pipeline, config: str | None, table: TableName) -> TableChoices:
    """The choices by which a table was copied; of its policy only what shapes it, the rest as it is now.

    `config`: the pipeline file then, as TableRecord has it; None (copied by an older version) leaves all as
    it is. Raises ConfigError for one that cannot be read.
    """
    now = running.choices(table)
    if config is None:
        return now
    then = Pipeline.from_json(config).choices(table)
    shape = {name: getattr(then.policy, name) for name in _SHAPING}
    return dataclasses.replace(then, policy=dataclasses.replace(now.policy, **shape))


def changed_choices(running: Pipeline, config: str | None, table: TableName) -> list[str]:
    """The fields of which the pipeline file says another thing for the table than when it was copied."""
    if config is None:
        return []
    copied = Pipeline.from_json(config)
    now, then = running.choices(table), copied.choices(table)
    named = [name for name in COLUMN_FIELDS if now.named[name] != then.named[name]]
    plain = [
        name for name in (*_OF_ALL_COLUMNS, *_BOOKKEEPING) if getattr(running, name) != getattr(copied, name)
    ]
    policies = [name for name in _SHAPING if getattr(now.policy, name) != getattr(then.policy, name)]
    return [*named, *plain, *policies]
