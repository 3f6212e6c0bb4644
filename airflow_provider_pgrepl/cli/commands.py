"""The commands of `pgrepl` other than those in `apps.py` and `reading.py`, with their options.

The parser of all commands is built at every start. Therefore each command imports the modules of its
operation only when it runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import ConfigError, ToolError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import MAINTENANCE_LIMIT_S
from airflow_provider_pgrepl.replication.catalogs.unity_client import TOKEN_VARIABLE
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

from .apps import APPS
from .command import Arguments, Command, Option, flag
from .output import JSON, say, until_reader_ends
from .reading import READING

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport

YES = flag("--yes", "make the change; without it, the command only prints what it would do")
YES_TO_DROP = flag(
    "--yes",
    "confirm --drop-lake-tables, which otherwise only prints what it would drop; without --drop-lake-tables,"
    " tables are removed at once",
)
YES_TO_SKIP = flag(
    "--yes",
    "skip the transaction; without it, the command receives all earlier transactions and prints what a skip"
    " would cost",
)
TABLES = Option(
    "tables", {"nargs": "+", "metavar": "TABLE", "help": """as public.orders or '"My Schema"."T"'"""}
)
ANY_TABLES = Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "default: all errored tables"})
TIMEOUT = Option(
    "--timeout",
    {
        "type": float,
        "default": 60.0,
        "metavar": "SECONDS",
        "help": "seconds to wait for a running app; after that, the command ends with 75",
    },
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
        "help": "start no further compaction after this many seconds; a running one is finished",
    },
)
LSN = Option(
    "--lsn",
    {"required": True, "metavar": "X/X", "help": "the LSN of the transaction, as UnsendableError prints it"},
)
UNCHANGED_TABLES = Option(
    "--unchanged-tables",
    {
        "nargs": "+",
        "default": [],
        "metavar": "TABLE",
        "help": "tables that the transaction did not change; they continue without a resnapshot",
    },
)
DROP_TABLES = flag("--drop-lake-tables", "also drop the lake tables and their histories")
DROP_LAKE = flag("--drop-lake", "also drop the pipeline's lake tables and changelog")
GIVE_UP = Option(
    "--give-up",
    {
        "metavar": "NAME",
        "help": "drop objects at a source that may be a copy of the pipeline's; the error without this option"
        " prints NAME",
    },
)
SOURCE_NAME = Option(
    "name",
    {
        "metavar": "NAME",
        "help": "the name of the source; with any other name, the error prints the right one",
    },
)
NO_MARK_ERRORED = flag(
    "--no-mark-errored", "only report: mark no table errored, and drop none from the publication"
)
MIGRATION = Option(
    "migration", {"metavar": "MIGRATION.sql", "help": "the file; its SQL locks tables as it runs"}
)

ONE_TABLE = Option(
    "table", {"nargs": "?", "metavar": "TABLE", "help": "only this table; default: pipeline and tables"}
)
SINCE = Option(
    "--since",
    {
        "metavar": "TIME",
        "help": "an age (30m, 24h, 7d), or a timestamp such as 2026-01-31T12:00:00Z (UTC without an offset)",
    },
)
LIMIT_ROWS = Option(
    "--limit", {"type": int, "default": 100, "metavar": "N", "help": "print the newest N rows at most"}
)
SAMPLES = flag("--samples", "samples of lag, WAL and throughput instead of events")
CHECK = flag("--check", "print only the problems, and exit with 1 for a failure")
SCRIPT = Option(
    "--script",
    {
        "nargs": "?",
        "const": "self-hosted",
        "choices": ("self-hosted", "rds", "aurora", "cloud-sql", "azure", "supabase", "neon"),
        "help": "print the statements and steps that prepare the source at a provider, and check nothing",
    },
)
UNITY = Option(
    "--unity",
    {
        "metavar": "URL",
        "help": f"register them in Unity Catalog there (token: {TOKEN_VARIABLE}), and print their names",
    },
)
UNITY_CATALOG = Option(
    "--unity-catalog", {"metavar": "NAME", "help": "an existing catalog of that Unity Catalog server"}
)
REMOVE = flag("--remove", "print the SQL that removes it")

_PROBLEMS = 1
"""The exit code of a check that has found problems."""


def _status(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.status.status import read_status
    from airflow_provider_pgrepl.replication.app.status.text import to_json, to_text

    status = read_status(pipeline)
    if arguments.check:
        from airflow_provider_pgrepl.replication.app.status.health import HealthLimits, find_health_problems

        report = find_health_problems(status, HealthLimits())
        say(json.dumps(report.to_dict(), indent=2) if arguments.json else report.to_text())
        return _PROBLEMS if report.has_failed else process.DONE
    return say(to_json(status) if arguments.json else to_text(status))


def _history(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.history import read_history, to_json, to_text

    found = read_history(
        pipeline, arguments.table, arguments.since, arguments.limit, samples=arguments.samples
    )
    with until_reader_ends():
        say(to_json(found) if arguments.json else to_text(found))
    return process.DONE


def _doctor(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.doctor.diagnosis import diagnose
    from airflow_provider_pgrepl.replication.app.doctor.source_script import source_script

    if arguments.script is not None:
        return say(source_script(pipeline, arguments.script))
    found = diagnose(Access.from_environment(pipeline))
    say(json.dumps(found.to_dict(), indent=2) if arguments.json else found.to_text())
    return _PROBLEMS if found.has_problems else process.DONE


def _pause(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables

    pause_tables(Access.from_environment(pipeline), arguments.tables)
    return say(*(f"{table}: paused" for table in arguments.tables))


def _resume(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import resume_tables

    states = resume_tables(Access.from_environment(pipeline), arguments.tables)
    return say(*(f"{table}: {state}" for table, state in states.items()))


def _retry(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables

    retried = retry_tables(Access.from_environment(pipeline), arguments.tables or None)
    if not retried:
        return say("none of these tables is errored" if arguments.tables else "no table is errored")
    overtaken = "changed by another process during the retry; see pgrepl status FILE.json"
    done = (found for found in retried if found.refused is None)
    say(*(f"{found.table}: {overtaken if found.is_overtaken else 'catching_up'}" for found in done))
    refused = [found.refused for found in retried if found.refused is not None]
    sys.stderr.write("".join(f"stays errored: {error}\n" for error in refused))
    codes = {process.exit_code(error) for error in refused}
    return max(codes, default=process.DONE)


def _remove(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.removal import check_removable, remove_tables

    access = Access.from_environment(pipeline)
    if arguments.drop_lake_tables and not arguments.yes:
        check_removable(access, arguments.tables, drop_lake_tables=True)
        return _refuse_without_yes(
            access,
            f"this would drop the lake tables of {', '.join(arguments.tables)}, with their histories, in"
            f" {pipeline.lake_root}",
        )
    remove_tables(access, arguments.tables, arguments.drop_lake_tables, arguments.timeout)
    lake = "lake table dropped" if arguments.drop_lake_tables else "lake table kept"
    return say(*(f"{table}: removed, {lake}" for table in arguments.tables))


def _teardown(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.teardown import teardown

    access = Access.from_environment(pipeline)
    done = teardown(
        access,
        arguments.drop_lake,
        arguments.timeout,
        dry_run=not arguments.yes,
        give_up=[arguments.give_up] if arguments.give_up else (),
    )
    if arguments.yes or not done.dropped:
        return say(done.to_text())
    return _refuse_without_yes(access, f"with --yes, teardown would do this:\n{done.to_text()}")


def _accept_source(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.losses import accept_source

    accepted = accept_source(Access.from_environment(pipeline), arguments.name)
    return say(f"{arguments.name}: accepted" if accepted else "nothing to accept: the source has the token")


def _accept_missing(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.losses import accept_missing

    access = Access.from_environment(pipeline)
    lost = accept_missing(access, dry_run=not arguments.yes)
    if not lost:
        return say("nothing is missing")
    if arguments.yes:
        return say(*(f"given up: {reason}" for reason in lost))
    return _refuse_without_yes(access, "\n".join(("with --yes the lake goes on without:", *lost)))


def _maintain(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.maintain import maintain

    with process.StopSignal() as stop:
        done = maintain(
            Access.from_environment(pipeline),
            [name for name in arguments.tables.split(",") if name.strip()],
            arguments.limit_s,
            wait=stop.wait,
            on_table=lambda table: None if arguments.json else say(table.to_text()),
        )
    say(json.dumps(done.to_report(), indent=2) if arguments.json else done.to_text())
    return done.exit_code


def _skip(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction

    access = Access.from_environment(pipeline)
    skipped = skip_transaction(access, arguments.lsn, arguments.unchanged_tables, dry_run=not arguments.yes)
    if arguments.yes:
        return say(skipped.to_text())
    done = "nothing was skipped; the changelog has all transactions before this one now"
    return _refuse_without_yes(access, f"with --yes:\n{skipped.to_text()}", done)


def _refuse_without_yes(access: Access, what: str, done: str = "nothing was changed") -> int:
    """Print what the command would do with `--yes`, and return the exit code."""
    sys.stderr.write(f"{access.describe()}\n{what}\n{done}: run the same with --yes to do it\n")
    return process.WILL_NOT_HELP


def _drift(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift

    access = Access.from_environment(pipeline)
    return _report(check_drift(access, mark_errored=not arguments.no_mark_errored), arguments)


def _check_migration(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration
    from airflow_provider_pgrepl.replication.runtime.process_io import read_text

    sql = read_text("migration", arguments.migration)
    return _report(check_migration(process.source_dsn(), pipeline, sql), arguments)


def _catalog(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.epoch import refuse_without_lake
    from airflow_provider_pgrepl.replication.catalogs.spark_catalog import catalog_sql
    from airflow_provider_pgrepl.replication.catalogs.unity import register_in_unity
    from airflow_provider_pgrepl.replication.catalogs.unity_client import TOKEN_VARIABLE

    refuse_without_lake(pipeline, "catalog", "there is nothing to register")
    url, catalog = arguments.unity, arguments.unity_catalog
    if url is None and catalog is None:
        return say(*catalog_sql(pipeline))
    if url is None or catalog is None:
        raise ConfigError(
            "to register in Unity Catalog, its address and a catalog of it are needed",
            "give both: --unity http://localhost:8080 --unity-catalog NAME",
        )
    names = register_in_unity(pipeline, url, catalog, os.environ.get(TOKEN_VARIABLE))
    return say(*sorted(names.values()))


def _schema(_: Arguments) -> int:
    from airflow_provider_pgrepl.replication.settings.schema import pipeline_schema

    return say(json.dumps(pipeline_schema(), indent=2))


def _event_trigger_sql(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.source.connection import connect
    from airflow_provider_pgrepl.replication.source.event_trigger import sql, trigger

    if arguments.remove:
        return say(sql.removal_script(pipeline.name).rstrip())
    with closing(connect(process.source_dsn(), f"event trigger {pipeline.name}")) as source:
        return say(trigger.install_sql(source, pipeline).rstrip())


def _report(report: DriftReport, arguments: Arguments) -> int:
    say(json.dumps(report.to_dict(), indent=2) if arguments.json else report.to_text())
    return process.WILL_NOT_HELP if report.is_unsafe else process.DONE


def _try_events(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app import try_events

    return try_events.run(pipeline, arguments)


def _publish_snapshot(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import publish_snapshot

    return publish_snapshot.run(pipeline, arguments)


def _consume(arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import consume

    return consume.run(arguments)


def _creek(arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import service

    return service.run(arguments)


def _warm_up(_: Arguments) -> int:
    from airflow_provider_pgrepl.replication.runtime import compiled_loops
    from airflow_provider_pgrepl.replication.runtime.spark_submit import make_class_archive

    logging.getLogger(compiled_loops.__name__).setLevel(logging.INFO)
    compiled_loops.ensure_compiled()
    sys.stdout.write(f"all functions are compiled, in {compiled_loops.folder()}\n")
    try:
        archive = make_class_archive()
    except ToolError as error:
        sys.stdout.write(f"Spark's classes are not archived: {error.message}\n")
    else:
        sys.stdout.write(f"Spark's classes are archived: {archive or 'no'}\n")
    return process.DONE


COMMANDS: tuple[Command, ...] = (
    *APPS,
    Command(
        "history",
        "print the recorded events or samples of a pipeline or of one of its tables, the newest last",
        _history,
        (ONE_TABLE, SINCE, LIMIT_ROWS, SAMPLES, JSON),
    ),
    Command("status", "tables, states, positions and lag of a pipeline", _status, (CHECK, JSON)),
    Command("doctor", "check source, lake, state and this host, and say what to do", _doctor, (SCRIPT, JSON)),
    Command("pause", "stop merging into tables; their changes are kept", _pause, (TABLES,)),
    Command("resume", "continue paused tables from the changelog", _resume, (TABLES,)),
    Command("retry", "continue errored tables whose cause is fixed, without a copy", _retry, (ANY_TABLES,)),
    Command(
        "remove",
        "take tables out of the pipeline",
        _remove,
        (TABLES, DROP_TABLES, TIMEOUT, YES_TO_DROP),
    ),
    Command(
        "maintain",
        "compact lake tables and changelog, delete old points, and files that no reader needs",
        _maintain,
        (TABLES_TO_COMPACT, LIMIT, JSON),
    ),
    Command(
        "teardown",
        "drop the slot, publication and event trigger that the pipeline created, and its records; without"
        " --drop-lake, the lake stays",
        _teardown,
        (DROP_LAKE, GIVE_UP, TIMEOUT, YES),
    ),
    Command(
        "skip",
        "skip a transaction that the server cannot send: its changes are lost, and tables that it may have"
        " changed are marked errored; stop the replication app first",
        _skip,
        (LSN, UNCHANGED_TABLES, YES_TO_SKIP),
    ),
    *READING,
    Command("schema", "print the JSON Schema of pipeline files", _schema, has_pipeline=False),
    Command(
        "drift",
        "compare tables with the source's catalog, and mark those errored that cannot continue",
        _drift,
        (NO_MARK_ERRORED, JSON),
    ),
    Command(
        "check-migration",
        "run SQL on the database of PGREPL_DSN, which should be a copy of the source and not in production,"
        " roll it back, and report how it affects the pipeline",
        _check_migration,
        (MIGRATION, JSON),
    ),
    Command(
        "catalog",
        "print the SQL that registers lake tables where readers look, or register them in Unity Catalog",
        _catalog,
        (UNITY, UNITY_CATALOG),
    ),
    Command(
        "accept-source",
        "continue with a source that lost its token, because its schema _pgrepl was dropped or restored; stop"
        " the replication app first",
        _accept_source,
        (SOURCE_NAME,),
    ),
    Command(
        "accept-missing",
        "continue although the lake has lost its consistent points or its index of relations; stop the"
        " replication app first",
        _accept_missing,
        (YES,),
    ),
    Command(
        "event-trigger-sql",
        "print the statements with which a superuser installs or removes the event trigger",
        _event_trigger_sql,
        (REMOVE,),
    ),
    Command(
        "events try",
        "print the events that a publisher would send, from recorded changes, without its target",
        _try_events,
        add=process.of_try_events,
    ),
    Command(
        "publish-snapshot",
        "send a table's rows to NATS, as a snapshot on creek's wire",
        _publish_snapshot,
        add=process.of_publish_snapshot,
    ),
    Command(
        "consume",
        "copy tables of other databases into PostgreSQL, and keep them current from NATS",
        _consume,
        add=process.of_consume,
        has_pipeline=False,
    ),
    Command(
        "creek",
        "replace creek: replicate and publish as creek's environment variables (PG_URI, NATS_URI) describe",
        _creek,
        has_pipeline=False,
    ),
    Command(
        "warm-up",
        "compile functions and archive Spark's classes now, so that later starts are faster",
        _warm_up,
        has_pipeline=False,
    ),
)
GROUPS = {"events": "inspect the events of a publisher"}
