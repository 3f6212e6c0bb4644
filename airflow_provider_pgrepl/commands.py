"""The commands of `pgrepl` that look at a pipeline, or mend it: their options, and what they do."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.errors import ConfigError, escaped
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.drift_check.migration_check import check_migration
from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport
from airflow_provider_pgrepl.replication.app.operations.maintain import LIMIT_S, maintain
from airflow_provider_pgrepl.replication.app.operations.removal import check_removable
from airflow_provider_pgrepl.replication.app.operations.skip import skip_transaction
from airflow_provider_pgrepl.replication.app.operations.tables import (
    pause_tables,
    remove_tables,
    resume_tables,
    retry_tables,
)
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.status.reading import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_json, to_text
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.events.json_lines import json_lines
from airflow_provider_pgrepl.replication.lake.catalog import catalog_sql
from airflow_provider_pgrepl.replication.lake.unity_catalog import register_in_unity
from airflow_provider_pgrepl.replication.lake.unity_server import TOKEN_VARIABLE
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.ddl_capture import event_trigger, event_trigger_sql
from airflow_provider_pgrepl.replication.text_file import read_text

Arguments = argparse.Namespace
Work = Callable[[Pipeline, Arguments], int]


def _say(*lines: str) -> int:
    sys.stdout.write("".join(f"{escaped(line)}\n" for line in lines))
    return process.DONE


def _status(pipeline: Pipeline, arguments: Arguments) -> int:
    status = read_status(pipeline)
    return _say(to_json(status) if arguments.json else to_text(status))


def _pause(pipeline: Pipeline, arguments: Arguments) -> int:
    pause_tables(Access.from_environment(pipeline), arguments.tables)
    return _say(*(f"{table}: paused" for table in arguments.tables))


def _resume(pipeline: Pipeline, arguments: Arguments) -> int:
    resume_tables(Access.from_environment(pipeline), arguments.tables)
    return _say(*(f"{table}: catching up" for table in arguments.tables))


def _retry(pipeline: Pipeline, arguments: Arguments) -> int:
    retried = retry_tables(Access.from_environment(pipeline), arguments.tables or None)
    if not retried:
        return _say("no table is errored")
    _say(*(f"{found.table}: catching up" for found in retried if found.refused is None))
    refused = [found.refused for found in retried if found.refused is not None]
    sys.stderr.write("".join(f"stays errored: {error}\n" for error in refused))
    codes = {process.exit_code(error) for error in refused}
    return max(codes, default=process.DONE)


def _remove(pipeline: Pipeline, arguments: Arguments) -> int:
    access = Access.from_environment(pipeline)
    if arguments.drop_lake_tables and not arguments.yes:
        check_removable(access, arguments.tables, drop_lake_tables=True)
        return _ask(
            f"this would drop the lake tables of {', '.join(arguments.tables)}, with their histories, in"
            f" {pipeline.lake_root}"
        )
    remove_tables(access, arguments.tables, arguments.drop_lake_tables, arguments.timeout)
    lake = "lake table dropped" if arguments.drop_lake_tables else "lake table kept"
    return _say(*(f"{table}: removed, {lake}" for table in arguments.tables))


def _teardown(pipeline: Pipeline, arguments: Arguments) -> int:
    access = Access.from_environment(pipeline)
    done = teardown(access, arguments.drop_lake, arguments.timeout, dry_run=not arguments.yes)
    if arguments.yes or not done.dropped:
        return _say(done.to_text())
    return _ask(f"with --yes it would end with this:\n{done.to_text()}")


def _maintain(pipeline: Pipeline, arguments: Arguments) -> int:
    with process.StopSignal() as stop:
        done = maintain(
            Access.from_environment(pipeline),
            [name for name in arguments.tables.split(",") if name.strip()],
            arguments.limit_s,
            wait=stop.wait,
            tell=lambda table: None if arguments.json else _say(table.to_text()),
        )
    _say(json.dumps(done.to_report(), indent=2) if arguments.json else done.to_text())
    return done.exit_code


def _skip(pipeline: Pipeline, arguments: Arguments) -> int:
    access = Access.from_environment(pipeline)
    skipped = skip_transaction(access, arguments.lsn, arguments.untouched, dry_run=not arguments.yes)
    return _say(skipped.to_text()) if arguments.yes else _ask(f"with --yes:\n{skipped.to_text()}")


def _ask(what: str) -> int:
    sys.stderr.write(f"{what}\nnothing was changed: run the same with --yes to do it\n")
    return process.WILL_NOT_HELP


def _drift(pipeline: Pipeline, arguments: Arguments) -> int:
    access = Access.from_environment(pipeline)
    return _report(check_drift(access, mark_errored=not arguments.look_only), arguments)


def _check_migration(pipeline: Pipeline, arguments: Arguments) -> int:
    sql = read_text("migration", arguments.migration)
    return _report(check_migration(process.source_dsn(), pipeline, sql), arguments)


def _catalog(pipeline: Pipeline, arguments: Arguments) -> int:
    url, catalog = arguments.unity, arguments.unity_catalog
    if url is None and catalog is None:
        return _say(*catalog_sql(pipeline))
    if url is None or catalog is None:
        raise ConfigError(
            "to register in Unity Catalog, its address and a catalog of it are needed",
            "give both: --unity http://localhost:8080 --unity-catalog NAME",
        )
    names = register_in_unity(pipeline, url, catalog, os.environ.get(TOKEN_VARIABLE))
    return _say(*sorted(names.values()))


def _event_trigger_sql(pipeline: Pipeline, arguments: Arguments) -> int:
    if arguments.remove:
        return _say(event_trigger_sql.removal_script(pipeline.name).rstrip())
    with closing(connect(process.source_dsn(), f"event trigger {pipeline.name}")) as source:
        return _say(event_trigger.install_sql(source, pipeline).rstrip())


def _changes(pipeline: Pipeline, arguments: Arguments) -> int:
    given: str | None = arguments.after
    after = given if given is None or "/" in given else _moment(given)
    try:
        for lines in json_lines(pipeline, arguments.tables or None, after, follow=arguments.follow):
            # JSON is UTF-8, whatever the terminal's encoding.
            sys.stdout.buffer.write(lines.encode())
            sys.stdout.buffer.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        # Whoever read has enough; Python's own flush at the end must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return process.DONE


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--after: {text!r} is no id of a change, no LSN and no moment",
            "give it as 1:0/16B3748:4, 0/16B3748 or 2026-01-31T12:00:00Z",
        ) from None


def _report(report: DriftReport, arguments: Arguments) -> int:
    _say(json.dumps(report.to_dict(), indent=2) if arguments.json else report.to_text())
    return process.WILL_NOT_HELP if report.is_unsafe else process.DONE


@dataclass(frozen=True)
class _Option:
    """An argument of a command: what argparse is told."""

    name: str
    how: dict[str, object]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(self.name, **self.how)  # type: ignore[arg-type]


_JSON = _Option("--json", {"action": "store_true", "help": "for programs"})
_YES = _Option("--yes", {"action": "store_true", "help": "do it; without, it is only said"})
_YES_TO_DROP = _Option(
    "--yes", {"action": "store_true", "help": "needed with --drop-lake-tables; without, it is only said"}
)
_TABLES = _Option("tables", {"nargs": "+", "metavar": "TABLE", "help": 'public.orders, "My Schema"."T"'})
_ANY_TABLES = _Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "all errored ones, if none"})
_TIMEOUT = _Option(
    "--timeout",
    {"type": float, "default": 60.0, "metavar": "SECONDS", "help": "how long to wait for who is in the way"},
)
_TABLES_TO_COMPACT = _Option(
    "--tables", {"default": "", "metavar": "a.b,c.d", "help": "compact these lake tables, and no others"}
)
_LIMIT = _Option(
    "--limit-s",
    {
        "type": float,
        "default": LIMIT_S,
        "metavar": "SECONDS",
        "help": "begin to join no more files after that",
    },
)
_LSN = _Option("--lsn", {"required": True, "metavar": "X/X", "help": "as the error names it"})
_UNTOUCHED = _Option(
    "--untouched",
    {
        "nargs": "+",
        "default": [],
        "metavar": "TABLE",
        "help": "tables that, as you know, it has not changed: they go on without a new copy",
    },
)
_DROP_TABLES = _Option("--drop-lake-tables", {"action": "store_true", "help": "with their histories, too"})
_DROP_LAKE = _Option("--drop-lake", {"action": "store_true", "help": "also lake tables and changelog"})
_LOOK_ONLY = _Option("--look-only", {"action": "store_true", "help": "mark no table errored"})
_MIGRATION = _Option("migration", {"metavar": "MIGRATION.sql", "help": "is applied, and rolled back"})

_SOME_TABLES = _Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "all, if none"})
_AFTER = _Option(
    "--after",
    {
        "metavar": "PLACE",
        "help": "a change's id, an LSN or a moment; else the oldest change that is kept",
    },
)
_FOLLOW = _Option("--follow", {"action": "store_true", "help": "go on with what comes, until Ctrl-C"})
_UNITY = _Option(
    "--unity",
    {
        "metavar": "URL",
        "help": f"register them in Unity Catalog there (token: {TOKEN_VARIABLE}), and print their names",
    },
)
_UNITY_CATALOG = _Option(
    "--unity-catalog", {"metavar": "NAME", "help": "the catalog of it, which must be there"}
)
_REMOVE = _Option("--remove", {"action": "store_true", "help": "the SQL that takes it away again"})

COMMANDS: tuple[tuple[str, str, Work, tuple[_Option, ...]], ...] = (
    ("status", "tables, states, positions and lag of a pipeline", _status, (_JSON,)),
    ("pause", "let tables stand still; their changes are kept", _pause, (_TABLES,)),
    ("resume", "have paused tables catch up", _resume, (_TABLES,)),
    ("retry", "have errored tables catch up, when the cause is gone", _retry, (_ANY_TABLES,)),
    ("remove", "take tables out of the pipeline", _remove, (_TABLES, _DROP_TABLES, _TIMEOUT, _YES_TO_DROP)),
    (
        "maintain",
        "compact lake tables and changelog, let old points go, delete what nobody needs",
        _maintain,
        (_TABLES_TO_COMPACT, _LIMIT, _JSON),
    ),
    ("teardown", "drop slot, publication and records", _teardown, (_DROP_LAKE, _TIMEOUT, _YES)),
    ("skip", "go on without a transaction that the server cannot send", _skip, (_LSN, _UNTOUCHED, _YES)),
    ("changes", "print changes as lines of JSON", _changes, (_SOME_TABLES, _AFTER, _FOLLOW)),
    ("drift", "compare the tables with the catalog as it is now", _drift, (_LOOK_ONLY, _JSON)),
    ("check-migration", "say what SQL would do to a pipeline", _check_migration, (_MIGRATION, _JSON)),
    (
        "catalog",
        "print the SQL that registers lake tables where readers look, or register them in Unity Catalog",
        _catalog,
        (_UNITY, _UNITY_CATALOG),
    ),
    (
        "event-trigger-sql",
        "print what a superuser runs once",
        _event_trigger_sql,
        (_REMOVE,),
    ),
)
