"""Whether the server takes a pipeline's walsender for a synchronous standby.

`synchronous_standby_names` names standbys by application name, or all by `*`, and walsenders of logical slots
count: then commits of the application wait until the pipeline has confirmed them, and without end while it is
stopped. The role may not see sync_state in pg_stat_replication, but everyone sees the setting.
https://www.postgresql.org/docs/current/runtime-config-replication.html#GUC-SYNCHRONOUS-STANDBY-NAMES
"""

from __future__ import annotations

import re

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    application_name,
    row,
    stream_role,
)
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

_SETTING = "SELECT pg_catalog.current_setting('synchronous_standby_names')"
_METHOD = re.compile(r"\s*(?:(?:first|any)\s+)?\d+\s*\((.*)\)\s*$", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r'"((?:[^"]|"")*)"|([^\s,"]+)')


def names_standby(setting: str, application: str) -> bool:
    """Return True if a value of `synchronous_standby_names` covers a walsender of this application name."""
    method = _METHOD.match(setting)
    for quoted, plain in _NAME.findall(method[1] if method else setting):
        # A quoted * is a name to people; the server takes it for the wildcard, too.
        name = quoted.replace('""', '"') or plain
        if name == "*" or name.lower() == application.lower():
            return True
    return False


def is_synchronous(connection: Connection, slot: str) -> bool:
    """Return True if commits at the source may wait for the walsender of this slot."""
    return names_standby(_read(connection), application_name(stream_role(slot)))


def synchronous_problem(connection: Connection, slot: str) -> str | None:
    """Return what the setting does to the source's commits, and what to set; None if it does nothing."""
    setting = _read(connection)
    application = application_name(stream_role(slot))
    if not names_standby(setting, application):
        return None
    return (
        f"synchronous_standby_names of the source ({one_line(setting)}) covers this pipeline's walsender"
        f" (application name {application!r}): commits at the source may wait until it has confirmed"
        " them, and without end while it is stopped. Name the standbys that are meant: ALTER SYSTEM SET"
        " synchronous_standby_names = 'ANY 1 (standby1, standby2)'; SELECT pg_reload_conf()"
    )


def _read(connection: Connection) -> str:
    with source_errors("asking for synchronous_standby_names"):
        setting: str = row(connection, _SETTING)[0]
    return setting
