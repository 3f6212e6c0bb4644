"""The ways out that hints lead to, each in one wording: what to do, and the command or operator for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_DOCUMENTS = _PACKAGE / "documents" / "docs"
"""Where a wheel carries them."""

SNAPSHOT = "run pgrepl snapshot FILE.json, or PgSnapshotOperator"
NEW_EPOCH = (
    "begin a new epoch, which resnapshots every table: pgrepl snapshot FILE.json --new-epoch, or"
    " PgSnapshotOperator with new_epoch=True"
)
RESNAPSHOT = "resnapshot the table: pgrepl snapshot FILE.json --tables NAME, or PgResnapshotOperator"
EXECUTORS = (
    "install the driver's version of this package for the Python of every executor, as in an image, and name"
    " that Python in spark.pyspark.python: docs/how-to/run-on-a-cluster.md"
)


def resnapshot(table: object) -> str:
    """For a table that only a new copy sets right. `table`: its name as people write it."""
    return f"resnapshot it: pgrepl snapshot FILE.json --tables '{table}', or PgResnapshotOperator"


def named(hint: str, table: object) -> str:
    """Return a hint with the name of its table where it says NAME."""
    return hint.replace("--tables NAME", f"--tables '{table}'").replace("--add NAME", f"--add '{table}'")


def add(table: object) -> str:
    """For a table that is not the pipeline's, or no longer."""
    return f"add {table}: pgrepl snapshot FILE.json --add '{table}', or PgAddTablesOperator"


def remove(*tables: object) -> str:
    """For tables that are not to be replicated any more, of which the command takes each as an argument."""
    quoted = " ".join(f"'{table}'" for table in tables)
    return f"pgrepl remove FILE.json {quoted}, or PgRemoveTablesOperator"


def rename_settings(table: object, new: object) -> str:
    """For a table that has another name, and settings of the pipeline file that go by its old one."""
    return (
        f"change {table} to {new} in every setting of the pipeline file that names it or a column of it"
        " (exclude_columns, per_table and so on)"
    )


def reference(page: str) -> str:
    """Where the reference has more: its place on this machine, or in a checkout."""
    folder = str(_DOCUMENTS) if _DOCUMENTS.is_dir() else "docs"
    return f"see {folder}/reference/{page}.md"


def prove_source() -> str:
    """For a source that may be another one than the lake's: no new epoch is proposed before that is clear."""
    return (
        "check the connection (conn_id, or PGREPL_DSN): the lake continues with the server that has all that"
        " the lake has. After a failover or a restore, or if the slot was dropped:"
        f" {reference('errors')}. Nothing was changed"
    )


def known_keys(unknown: Sequence[str], known: Collection[str]) -> str:
    """For keys that there are not: those that look like them, else all."""
    meant = [near[0] for key in unknown if (near := get_close_matches(key, list(known), 1))]
    if len(meant) == len(unknown):
        return f"did you mean {', '.join(map(repr, meant))}?"
    return f"known keys: {', '.join(known)}"
