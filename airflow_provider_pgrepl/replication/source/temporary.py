"""Temporary slots of snapshots: the server drops them with the session that made them; nobody else can."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

PREFIX = "pgrepl_tmp_"
"""Followed by the pid of a session of ours: the snapshot app's, or that which makes a slot."""


def temporary_name(connection: Connection) -> str:
    """Of the one temporary slot that this session makes at a time."""
    return f"{PREFIX}{connection.info.backend_pid}"


_LINGERING = """
SELECT s.slot_name::text, s.active_pid
FROM pg_catalog.pg_replication_slots s
    LEFT JOIN pg_catalog.pg_stat_activity a
        ON a.pid::text = pg_catalog.substr(s.slot_name::text, pg_catalog.length(%(prefix)s) + 1)
WHERE s.temporary AND pg_catalog.starts_with(s.slot_name::text, %(prefix)s)
    AND s.database = pg_catalog.current_database()
    AND NOT (coalesce(a.application_name, '') LIKE 'pgrepl snapshot %%' AND a.application_name <> %(app)s)
ORDER BY 1
"""


def check_none_lingers(connection: Connection, pipeline: str) -> None:
    """Raises BusyError while there is a temporary slot that is not known to be another pipeline's."""
    wanted = {"prefix": PREFIX, "app": f"pgrepl snapshot {pipeline}"[:63]}
    with source_errors("looking for temporary slots"):
        found = rows(connection, _LINGERING, wanted)
    if found:
        listed = ", ".join(f"{name} (of pid {pid})" for name, pid in found)
        raise BusyError(
            f"temporary slots of a snapshot are still there: {listed}",
            "they go with their sessions: run the same again when these have ended",
        )
