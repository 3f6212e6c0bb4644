"""Where the history of a table lies, and its columns.

The lake table holds the version of each row that is valid now; its history holds all that have ended, one row
each, and is only ever appended to. A version is valid from the transaction that made it up to, not including,
the one that ended it.
"""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.choices import TableChoices
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.values import typed_columns

HISTORY_SUFFIX = "~history"
"""No table's own path ends so: there `~` stands before two hexadecimal digits, and `hi` is none."""

FROM_EPOCH, FROM_LSN, FROM_TS = "_pgrepl_from_epoch", "_pgrepl_from_lsn", "_pgrepl_from_ts"
TO_EPOCH, TO_LSN, TO_TS, TO_OP = "_pgrepl_to_epoch", "_pgrepl_to_lsn", "_pgrepl_to_ts", "_pgrepl_to_op"

TIME = pa.timestamp("us", "UTC")
LIFETIME = pa.schema(
    [
        (FROM_EPOCH, pa.int64()),
        (FROM_LSN, pa.int64()),
        (FROM_TS, TIME),
        (TO_EPOCH, pa.int64()),
        (TO_LSN, pa.int64()),
        (TO_TS, TIME),
        (TO_OP, pa.string()),
    ]
)
"""From when to when a version was valid: `[from, to)` in the order of (epoch, LSN). `to_op` is what ended it:
`U` a newer version of the row, `D` its deletion, `T` TRUNCATE, `S` a snapshot that took the table anew."""


def history_path(table: TableName) -> str:
    """The history's place under the lake root."""
    return table.path + HISTORY_SUFFIX


def history_uri(lake_root: str, table: TableName) -> str:
    """Where the history of a table lies."""
    return f"{lake_root}/{history_path(table)}"


def history_key(table: TableName) -> str:
    """The name of the history in a consistent point. No table has it: a name with `~` stands in quotes."""
    return str(table) + HISTORY_SUFFIX


def is_history(key: str) -> bool:
    """Whether a key of a consistent point, or a path under the lake root, is that of a history."""
    return key.endswith(HISTORY_SUFFIX)


def path_of(key: str) -> str:
    """The place under the lake root of what a consistent point names, be it a table or a history."""
    if is_history(key):
        return history_path(TableName.parse(key.removesuffix(HISTORY_SUFFIX)))
    return TableName.parse(key).path


def history_schema(relation: Relation, choices: TableChoices) -> pa.Schema:
    """The columns that a history of this table begins with: the lake table's typed ones, then LIFETIME.

    A column that the table gets later stands behind these, and one that it loses stays. Raises ConfigError.
    """
    fields = [pa.field(typed.name, typed.lake_type) for typed in typed_columns(relation, choices)]
    return pa.schema([*fields, *LIFETIME])
