"""Everything about the source that would make a pipeline fail, found before anything is created."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.inherited_children import inherited_warnings
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables, resolve_tables
from airflow_provider_pgrepl.replication.source.preflight.server_problems import (
    replication_problems,
    role_problems,
    server_problems,
    slot_problems,
)
from airflow_provider_pgrepl.replication.source.preflight.server_warnings import server_warnings
from airflow_provider_pgrepl.replication.source.preflight.tables import (
    code_problems,
    lock_problems,
    publication_problems,
    right_problems,
)
from airflow_provider_pgrepl.replication.source.server import Server, read_server

log = logging.getLogger(__name__)


def check_server(dsn: str, slot: str | None = None) -> Server:
    """Check what does not depend on tables: version, wal_level, free slots and sender, replication right.

    A pipeline needs two free slots, or one beside its own `slot`, when that exists already. Raises one error
    that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*server_problems(connection, server, slot), *replication_problems(dsn, server)])
        return server
    finally:
        connection.close()


def check_source(
    dsn: str,
    pipeline: Pipeline,
    requested: RequestedTables | None = None,
    *,
    new_epoch: bool = False,
    makes_slot: bool = False,
) -> list[Relation]:
    """Check all that the pipeline needs of its source; nothing is created. The tables it will replicate.

    `makes_slot`: a slot is to be made, also in the place of one that exists. Raises one error of the first
    problem's kind that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        problems = [
            *_surroundings(connection, dsn, pipeline, server, new_epoch=new_epoch, makes_slot=makes_slot)
        ]
        relations: list[Relation] = []
        try:
            relations = resolve_tables(connection, pipeline, requested)
        except PgReplError as error:
            problems.append(error)
        problems += right_problems(connection, relations)
        problems += lock_problems(connection, dsn, relations)
        problems += publication_problems(connection, pipeline, server, relations)
        problems += code_problems(connection, pipeline, relations)
        _raise(problems)
        for warning in server_warnings(connection, pipeline.slot):
            log.warning("%s", warning)
        if requested is None:
            for warning in inherited_warnings(connection, [relation.oid for relation in relations]):
                log.warning("%s", warning)
        return relations
    finally:
        connection.close()


def check_surroundings(dsn: str, pipeline: Pipeline) -> None:
    """Check what concerns every table of a pipeline that has begun: server, replication right, slot."""
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*_surroundings(connection, dsn, pipeline, server, new_epoch=False, makes_slot=False)])
    finally:
        connection.close()


def check_role(dsn: str, pipeline: Pipeline) -> None:
    """Check that the role is none whose rights are too great to be lent to tables' owners."""
    connection = connect(dsn, "preflight")
    try:
        _raise([*role_problems(connection, pipeline)])
    finally:
        connection.close()


def table_faults(
    connection: Connection, pipeline: Pipeline, relations: Sequence[Relation]
) -> dict[TableName, PgReplError]:
    """What keeps single tables from being read or published, though they could be replicated, by table."""
    server = read_server(connection)

    def faults(some: list[Relation]) -> list[PgReplError]:
        return [
            *right_problems(connection, some),
            *publication_problems(connection, pipeline, server, some),
            *code_problems(connection, pipeline, some),
        ]

    if not faults(list(relations)):
        return {}
    by_table = {relation.table: faults([relation]) for relation in relations}
    return {table: _joined(found) for table, found in by_table.items() if found}


def _surroundings(
    connection: Connection, dsn: str, pipeline: Pipeline, server: Server, *, new_epoch: bool, makes_slot: bool
) -> Iterator[PgReplError]:
    yield from server_problems(connection, server, pipeline.slot, makes_slot=makes_slot)
    yield from replication_problems(dsn, server)
    yield from slot_problems(connection, pipeline, new_epoch=new_epoch)
    yield from role_problems(connection, pipeline)


def _raise(problems: list[PgReplError]) -> None:
    if problems:
        raise _joined(problems)


def _joined(problems: list[PgReplError]) -> PgReplError:
    first = problems[0]
    if len(problems) == 1:
        return first
    hints = [problem.hint for problem in problems if problem.hint]
    return type(first)("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))
