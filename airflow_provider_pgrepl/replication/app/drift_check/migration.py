"""The trial of a migration: what it does to a pipeline's tables, in a transaction that is rolled back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import BusyError, PublicationError
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.continuity import check_publication
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RefusedChanges
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row, rows
from airflow_provider_pgrepl.replication.source.dry_run import run_on_trial, undone
from airflow_provider_pgrepl.replication.source.preflight.selection import (
    RequestedTables,
    resolve_tables,
    select_tables,
)
from airflow_provider_pgrepl.replication.source.preflight.tables import others_published, refused_tables
from airflow_provider_pgrepl.replication.source.publication import read_identity
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import SHORT_WAIT_S, with_short_waits

from .check import TableFinding, current_relations, find_drift
from .report import DriftReport, TableDrift

_HAS_ROW = "SELECT EXISTS (SELECT FROM ONLY {})"
_TABLES = "SELECT oid::bigint FROM pg_catalog.pg_class WHERE relkind = 'r'"


def check_migration(dsn: str, pipeline: Pipeline, sql: str, timeout_s: float = 300.0) -> DriftReport:
    """Run the migration on this database, compare every table of the pipeline, and roll it all back.

    Meant for a copy of the database, as CI has one: it takes the migration's locks while it runs, and numbers
    that it draws from sequences stay drawn. The publication need not exist. Raises ConfigError, with the line
    if known, if the SQL fails or cannot be tried; TableError if the database lacks tables of the pipeline;
    SourceConnectionError; BusyError if it does not get a lock within the pipeline's `lock_timeout_s`.
    """

    def attempt(wait_s: float) -> DriftReport:
        return _try(dsn, pipeline, sql, min(wait_s, SHORT_WAIT_S), timeout_s)

    # Other statements queue behind a waiting lock request, so wait only briefly at a time.
    return with_short_waits(attempt, pipeline.lock_timeout_s, BusyError)


def _try(dsn: str, pipeline: Pipeline, sql: str, wait_s: float, timeout_s: float) -> DriftReport:
    with closing(connect(dsn, f"migration {pipeline.name}")) as connection, undone(connection):
        before = resolve_tables(connection, pipeline)
        publication = read_identity(connection, pipeline.publication)
        holders = _tables_with_rows(connection)
        refused_before = _refused(connection, pipeline, before)
        run_on_trial(connection, sql, wait_s, timeout_s)
        followed = FollowedNames(pipeline, {relation.oid: relation.table for relation in before})
        planned = pipeline.publication_mode == "create"
        current = current_relations(connection, pipeline, before, followed, planned=planned)
        attached = {
            table: relation and _with_had_rows(connection, relation, holders)
            for table, relation in current.items()
        }
        findings = find_drift(pipeline, before, attached, {})
        new = _new_tables(connection, pipeline, before)
        problems = _publication_problems(connection, pipeline, publication[0] if publication else None)
        refused = _refused(connection, pipeline, filter(None, current.values()))
        problems += tuple(str(why) for oid, why in refused.items() if oid not in refused_before)
    tables = tuple(_drift(table, finding, attached) for table, finding in findings.items())
    return DriftReport(pipeline.name, len(before), tables, new, pipeline.new_tables, problems)


def _refused(
    connection: Connection, pipeline: Pipeline, relations: Iterable[Relation]
) -> dict[int, RefusedChanges]:
    """Return the tables whose changes the source would reject, by OID: of these relations and all others
    published."""
    known = list(relations)
    return refused_tables(connection, pipeline, [*known, *others_published(connection, pipeline, known)])


def _drift(
    table: TableName, finding: TableFinding, became: Mapping[TableName, Relation | None]
) -> TableDrift:
    if finding.error is None:
        return TableDrift(str(table), DriftKind.SAFE.value, finding.reason)
    return TableDrift(str(table), DriftKind.UNSAFE.value, finding.reason, _hint(table, became))


def _hint(table: TableName, tables: Mapping[TableName, Relation | None]) -> str:
    """Return the remedy for a migration that has not been run at the source: nothing there has to be
    reverted. `tables`: what became of each table of the pipeline, by its name before the migration."""
    became = tables.get(table)
    change = "change the migration into one that the lake follows, or run it and then"
    if became is None:
        return f"{change} {_remove(table)}"
    if became.persistence == "u":
        return f"PostgreSQL refuses this while the table is published: before it, {_remove(table)}"
    other = tables.get(became.table)
    if became.table != table and other is not None and other.table == table:
        return f"{change} {errors.swapped(table, became.table)}"
    if became.table != table:
        renamed = errors.rename_settings(table, became.table)
        return f"{change} {renamed}; {_remove(table)}; then {errors.add(became.table)}"
    return f"{change} {errors.resnapshot(table)}"


def _remove(table: TableName) -> str:
    return f"remove the table: {errors.remove(table)}"


def _tables_with_rows(connection: Connection) -> frozenset[int]:
    """Return the tables that exist before the migration, and so may hold rows where it will be run."""
    with source_errors("listing the tables"):
        return frozenset(oid for (oid,) in rows(connection, _TABLES))


def _with_had_rows(connection: Connection, relation: Relation, holders: frozenset[int]) -> Relation:
    """Return the relation with `had_rows` for each partition that existed before the migration or has rows.

    A copy of the database need not hold the rows that the source has.
    """
    with source_errors("checking the partitions for rows"):
        return replace(
            relation,
            partitions=tuple(
                replace(
                    part, had_rows=part.oid in holders or row(connection, _HAS_ROW.format(part.table.sql))[0]
                )
                for part in relation.partitions
            ),
        )


def _new_tables(connection: Connection, pipeline: Pipeline, before: list[Relation]) -> tuple[str, ...]:
    """Return the tables that a pattern matches, without those that existed before, also under another
    name."""
    if pipeline.new_tables == "ignore":
        return ()
    selected = select_tables(connection, pipeline, RequestedTables())
    known, names = {relation.oid for relation in before}, {relation.table for relation in before}
    return tuple(
        str(relation.table)
        for relation in selected.relations
        if relation.table in selected.matched - names and relation.oid not in known
    )


def _publication_problems(connection: Connection, pipeline: Pipeline, oid: int | None) -> tuple[str, ...]:
    if oid is None:
        return ()
    try:
        check_publication(connection, pipeline.publication, oid)
    except PublicationError as error:
        return (error.message,)
    return ()
