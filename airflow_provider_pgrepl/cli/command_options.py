"""The options of the commands of `pgrepl`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.app.app_arguments import MAINTENANCE_LIMIT_S
from airflow_provider_pgrepl.replication.catalogs.unity_client import TOKEN_VARIABLE


@dataclass(frozen=True)
class Option:
    """An argument of a command: what argparse is told."""

    name: str
    how: dict[str, object]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(self.name, **self.how)  # type: ignore[arg-type]


JSON = Option("--json", {"action": "store_true", "help": "for programs"})
YES = Option("--yes", {"action": "store_true", "help": "do it; without, it is only said"})
YES_TO_DROP = Option(
    "--yes", {"action": "store_true", "help": "needed with --drop-lake-tables; without, it is only said"}
)
TABLES = Option("tables", {"nargs": "+", "metavar": "TABLE", "help": 'public.orders, "My Schema"."T"'})
ANY_TABLES = Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "all errored ones, if none"})
TIMEOUT = Option(
    "--timeout",
    {"type": float, "default": 60.0, "metavar": "SECONDS", "help": "how long to wait for who is in the way"},
)
TABLES_TO_COMPACT = Option(
    "--tables", {"default": "", "metavar": "a.b,c.d", "help": "compact these lake tables, and no others"}
)
LIMIT = Option(
    "--limit-s",
    {
        "type": float,
        "default": MAINTENANCE_LIMIT_S,
        "metavar": "SECONDS",
        "help": "begin to join no more files after that",
    },
)
LSN = Option("--lsn", {"required": True, "metavar": "X/X", "help": "as the error names it"})
UNTOUCHED = Option(
    "--untouched",
    {
        "nargs": "+",
        "default": [],
        "metavar": "TABLE",
        "help": "tables that, as you know, it has not changed: they go on without a new copy",
    },
)
DROP_TABLES = Option("--drop-lake-tables", {"action": "store_true", "help": "with their histories, too"})
DROP_LAKE = Option("--drop-lake", {"action": "store_true", "help": "also lake tables and changelog"})
GIVE_UP = Option(
    "--give-up",
    {"metavar": "NAME", "help": "the source, if it has another history than the lake; the error names it"},
)
SOURCE_NAME = Option("name", {"metavar": "NAME", "help": "the source's; the error for another one says it"})
LOOK_ONLY = Option("--look-only", {"action": "store_true", "help": "mark no table errored"})
MIGRATION = Option("migration", {"metavar": "MIGRATION.sql", "help": "is applied, and rolled back"})

SOME_TABLES = Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "all, if none"})
AFTER = Option(
    "--after",
    {
        "metavar": "PLACE",
        "help": "a change's id, an LSN or a moment; else the oldest change that is kept",
    },
)
FOLLOW = Option("--follow", {"action": "store_true", "help": "go on with what comes, until Ctrl-C"})
UNITY = Option(
    "--unity",
    {
        "metavar": "URL",
        "help": f"register them in Unity Catalog there (token: {TOKEN_VARIABLE}), and print their names",
    },
)
UNITY_CATALOG = Option(
    "--unity-catalog", {"metavar": "NAME", "help": "the catalog of it, which must be there"}
)
REMOVE = Option("--remove", {"action": "store_true", "help": "the SQL that takes it away again"})
