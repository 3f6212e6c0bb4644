"""Where the history of a table lies, and what it is called.

The lake table holds the version of each row that is valid now; its history holds all that have ended.
"""

from __future__ import annotations

from airflow_provider_pgrepl.replication.postgres.names import TableName

HISTORY_SUFFIX = "~history"
"""No table's own path ends so: there `~` stands before two hexadecimal digits, and `hi` is none."""


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
