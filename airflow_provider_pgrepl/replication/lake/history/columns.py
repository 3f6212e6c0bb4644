"""The columns of a table's history.

It is only ever appended to: each row is a version of a row that has ended. A version is valid from the
transaction that made it up to, not including, the one that ended it.
"""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import typed_columns

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


def history_schema(relation: Relation, choices: TableChoices) -> pa.Schema:
    """The columns that a history of this table begins with: the lake table's typed ones, then LIFETIME.

    A column that the table gets later stands behind these, and one that it loses stays. Raises ConfigError.
    """
    fields = [pa.field(typed.name, typed.lake_type) for typed in typed_columns(relation, choices)]
    return pa.schema([*fields, *LIFETIME])
