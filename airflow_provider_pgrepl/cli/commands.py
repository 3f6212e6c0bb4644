"""The commands of `pgrepl` that look at a pipeline, or mend it: their options, and what they do.

The parser of all commands is made at every start. So each command imports what it does its work with only
when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.cli import command_options as options
from airflow_provider_pgrepl.errors import ConfigError, escaped
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport

Arguments = argparse.Namespace
Work = Callable[[Pipeline, Arguments], int]


def _say(*lines: str) -> int:
    sys.stdout.write("".join(f"{escaped(line)}\n" for line in lines))
    return process.DONE


def _status(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.status.status import read_status
    from airflow_provider_pgrepl.replication.app.status.text import to_json, to_text

    status = read_status(pipeline)
    return _say(to_json(status) if arguments.json else to_text(status))


def _pause(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables

    pause_tables(Access.from_environment(pipeline), arguments.tables)
    return _say(*(f"{table}: paused" for table in arguments.tables))


def _resume(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import resume_tables

    resume_tables(Access.from_environment(pipeline), arguments.tables)
    return _say(*(f"{table}: catching up" for table in arguments.tables))


def _retry(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables

    retried = retry_tables(Access.from_environment(pipeline), arguments.tables or None)
    if not retried:
        return _say("no table is errored")
    _say(*(f"{found.table}: catching up" for found in retried if found.refused is None))
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
        return _ask(
            access,
            f"this would drop the lake tables of {', '.join(arguments.tables)}, with their histories, in"
            f" {pipeline.lake_root}",
        )
    remove_tables(access, arguments.tables, arguments.drop_lake_tables, arguments.timeout)
    lake = "lake table dropped" if arguments.drop_lake_tables else "lake table kept"
    return _say(*(f"{table}: removed, {lake}" for table in arguments.tables))


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
        return _say(done.to_text())
    return _ask(access, f"with --yes it would end with this:\n{done.to_text()}")


def _accept_source(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.acceptance import accept_source

    accepted = accept_source(Access.from_environment(pipeline), arguments.name)
    return _say(f"{arguments.name}: accepted" if accepted else "nothing to accept: the source has the token")


def _accept_missing(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.acceptance import accept_missing

    access = Access.from_environment(pipeline)
    lost = accept_missing(access, dry_run=not arguments.yes)
    if not lost:
        return _say("nothing is missing")
    if arguments.yes:
        return _say(*(f"given up: {reason}" for reason in lost))
    return _ask(access, "\n".join(("with --yes the lake goes on without:", *lost)))


def _maintain(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.maintain import maintain

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
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.operations.skip import skip_transaction

    access = Access.from_environment(pipeline)
    skipped = skip_transaction(access, arguments.lsn, arguments.untouched, dry_run=not arguments.yes)
    if arguments.yes:
        return _say(skipped.to_text())
    done = "nothing was skipped; the changelog has all transactions before this one now"
    return _ask(access, f"with --yes:\n{skipped.to_text()}", done)


def _ask(access: Access, what: str, done: str = "nothing was changed") -> int:
    sys.stderr.write(f"{access.describe()}\n{what}\n{done}: run the same with --yes to do it\n")
    return process.WILL_NOT_HELP


def _drift(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.access import Access
    from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift

    access = Access.from_environment(pipeline)
    return _report(check_drift(access, mark_errored=not arguments.look_only), arguments)


def _check_migration(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration
    from airflow_provider_pgrepl.replication.runtime.text_file import read_text

    sql = read_text("migration", arguments.migration)
    return _report(check_migration(process.source_dsn(), pipeline, sql), arguments)


def _catalog(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.lake_choice import refuse_without_lake
    from airflow_provider_pgrepl.replication.catalogs.spark_catalog import catalog_sql
    from airflow_provider_pgrepl.replication.catalogs.unity_catalog import register_in_unity
    from airflow_provider_pgrepl.replication.catalogs.unity_client import TOKEN_VARIABLE

    refuse_without_lake(pipeline, "catalog", "there is nothing to register")
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
    from airflow_provider_pgrepl.replication.source.connection import connect
    from airflow_provider_pgrepl.replication.source.event_trigger import event_trigger_sql, trigger

    if arguments.remove:
        return _say(event_trigger_sql.removal_script(pipeline.name).rstrip())
    with closing(connect(process.source_dsn(), f"event trigger {pipeline.name}")) as source:
        return _say(trigger.install_sql(source, pipeline).rstrip())


def _changes(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.events.json_lines import json_lines

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


COMMANDS: tuple[tuple[str, str, Work, tuple[options.Option, ...]], ...] = (
    ("status", "tables, states, positions and lag of a pipeline", _status, (options.JSON,)),
    ("pause", "let tables stand still; their changes are kept", _pause, (options.TABLES,)),
    ("resume", "have paused tables catch up", _resume, (options.TABLES,)),
    ("retry", "have errored tables catch up, when the cause is gone", _retry, (options.ANY_TABLES,)),
    (
        "remove",
        "take tables out of the pipeline",
        _remove,
        (options.TABLES, options.DROP_TABLES, options.TIMEOUT, options.YES_TO_DROP),
    ),
    (
        "maintain",
        "compact lake tables and changelog, let old points go, delete what nobody needs",
        _maintain,
        (options.TABLES_TO_COMPACT, options.LIMIT, options.JSON),
    ),
    (
        "teardown",
        "drop slot, publication and records",
        _teardown,
        (options.DROP_LAKE, options.GIVE_UP, options.TIMEOUT, options.YES),
    ),
    (
        "skip",
        "go on without a transaction that the server cannot send",
        _skip,
        (options.LSN, options.UNTOUCHED, options.YES),
    ),
    (
        "changes",
        "print changes as lines of JSON",
        _changes,
        (options.SOME_TABLES, options.AFTER, options.FOLLOW),
    ),
    ("drift", "compare the tables with the catalog as it is now", _drift, (options.LOOK_ONLY, options.JSON)),
    (
        "check-migration",
        "say what SQL would do to a pipeline",
        _check_migration,
        (options.MIGRATION, options.JSON),
    ),
    (
        "catalog",
        "print the SQL that registers lake tables where readers look, or register them in Unity Catalog",
        _catalog,
        (options.UNITY, options.UNITY_CATALOG),
    ),
    (
        "accept-source",
        "go on with a source whose schema _pgrepl was lost or restored",
        _accept_source,
        (options.SOURCE_NAME,),
    ),
    (
        "accept-missing",
        "go on without consistent points, or an index of relations, that the lake has lost",
        _accept_missing,
        (options.YES,),
    ),
    (
        "event-trigger-sql",
        "print what a superuser runs once",
        _event_trigger_sql,
        (options.REMOVE,),
    ),
)
