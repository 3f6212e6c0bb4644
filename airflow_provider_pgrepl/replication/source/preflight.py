"""Everything about the source that would make a pipeline fail, found before anything is created."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog import Server, read_server, resolve_tables
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server_problems import (
    replication_problems,
    server_problems,
    slot_problems,
)
from airflow_provider_pgrepl.replication.source.table_problems import publication_problems, right_problems


def check_server(dsn: str, slot: str | None = None) -> Server:
    """Check what does not depend on tables: version, wal_level, free slot and sender, replication right.

    A slot named `slot` that exists already needs no free one. Raises one error that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*server_problems(connection, server, slot), *replication_problems(dsn, server)])
        return server
    finally:
        connection.close()


def check_source(dsn: str, pipeline: Pipeline, *, new_epoch: bool = False) -> list[Relation]:
    """Check all that the pipeline needs of its source; nothing is created. The tables it will replicate.

    Raises one error of the first problem's kind that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        problems = [
            *server_problems(connection, server, pipeline.slot),
            *replication_problems(dsn, server),
            *slot_problems(connection, pipeline, new_epoch=new_epoch),
        ]
        relations: list[Relation] = []
        try:
            relations = resolve_tables(connection, pipeline)
        except PgReplError as error:
            problems.append(error)
        problems += right_problems(connection, relations)
        problems += publication_problems(connection, pipeline, server, relations)
        _raise(problems)
        return relations
    finally:
        connection.close()


def _raise(problems: list[PgReplError]) -> None:
    if not problems:
        return
    first = problems[0]
    if len(problems) == 1:
        raise first
    hints = [problem.hint for problem in problems if problem.hint]
    raise type(first)("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))
