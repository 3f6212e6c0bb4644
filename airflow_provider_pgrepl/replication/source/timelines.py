"""The timelines of a server: where each earlier one ended.

A standby that is promoted continues its primary's WAL up to a switch point, and from there on a timeline of
its own. The server sends the history of its timeline over a replication connection.
https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

from contextlib import closing

import psycopg2.errors

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect_replication,
    row,
    server_dsn,
)
from airflow_provider_pgrepl.replication.source.server import Server
from airflow_provider_pgrepl.replication.source.server_errors import source_errors


def find_fork(connection: Connection, server: Server, timeline: int) -> LSN | None:
    """Return the LSN up to which the connected server has the WAL of an earlier timeline of its history.

    Returns None if the server is on `timeline`, if that timeline is no earlier one of its history, or if the
    server is a standby. Raises SourceError.
    """
    if server.in_recovery or timeline >= server.timeline:
        return None
    return parse_history(_read_history(connection, server)).get(timeline)


def _read_history(connection: Connection, server: Server) -> str:
    with (
        closing(connect_replication(server_dsn(connection), "timelines")) as replication,
        source_errors("reading the history of the server's timelines"),
    ):
        check_identity(server, *row(replication, "IDENTIFY_SYSTEM")[:2])
        try:
            content = row(replication, f"TIMELINE_HISTORY {server.timeline}")[1]
        except psycopg2.errors.UndefinedFile:
            # The first timeline has no history; without a history nothing is proven.
            return ""
    return content if isinstance(content, str) else bytes(content).decode()


def check_identity(server: Server, system_identifier: str, timeline: int) -> None:
    """Raise SourceConnectionError if a replication connection leads to another server, or to a copy of it.

    Both connections resolve the server's name, which may lead to another server in between. The timeline of a
    standby is not compared: it can change at any time.
    """
    found = (str(system_identifier), int(timeline))
    expected = (server.system_identifier, int(timeline) if server.in_recovery else server.timeline)
    if found != expected:
        raise SourceConnectionError(
            f"the replication connection has reached another server (system identifier {found[0]}, timeline"
            f" {found[1]}) than the connection for queries ({expected[0]}, timeline {expected[1]})",
            "nothing needs to be done if the source is failing over: the connection is tried again",
        )


def parse_history(text: str) -> dict[int, LSN]:
    """Return the switch point of each earlier timeline in a history file.

    A line has the timeline, the LSN at which it ended, and a reason, separated by tabs.
    """
    lines = (line.split(None, 2) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {int(fields[0]): LSN.parse(fields[1]) for fields in lines}
