"""The ways out that hints lead to, each in one wording: what to do, and the command or operator for it."""

from __future__ import annotations

SNAPSHOT = "run pgrepl snapshot FILE.json, or PgSnapshotOperator"
NEW_EPOCH = (
    "begin a new epoch, which resnapshots every table: pgrepl snapshot FILE.json --new-epoch, or"
    " PgSnapshotOperator with new_epoch=True"
)
RESNAPSHOT = "resnapshot the table: pgrepl snapshot FILE.json --tables NAME, or PgResnapshotOperator"


def resnapshot(table: object) -> str:
    """For a table that only a new copy sets right. `table`: its name as people write it."""
    return f"resnapshot it: pgrepl snapshot FILE.json --tables '{table}', or PgResnapshotOperator"


def add(table: object) -> str:
    """For a table that is not the pipeline's, or no longer."""
    return f"add {table}: pgrepl snapshot FILE.json --add '{table}', or PgAddTablesOperator"
