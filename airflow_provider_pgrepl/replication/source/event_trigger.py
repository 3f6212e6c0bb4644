"""The event triggers at the source by which DDL has an exact place in the stream.

Two triggers (DDL that ended, objects that were dropped) and their function in schema `_pgrepl` belong to one
pipeline. `ddl_function.py` has the function, `ddl_message.py` what it says.
"""

from __future__ import annotations

import psycopg2.errors

from airflow_provider_pgrepl.errors import PrivilegeError, ServerSettingError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows, source_errors
from airflow_provider_pgrepl.replication.source.ddl_function import ENDED_TAGS, function_sql, settings_sql

_SCHEMA = "_pgrepl"

_FUNCTION = """
SELECT p.prosrc, p.proconfig, p.oid::bigint FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = %s AND p.proname = %s AND p.pronargs = 0
"""

IDENTITY = """
SELECT pg_catalog.string_agg(e.oid || '.' || e.xmin || '.' || p.oid || '.' || p.xmin, '-' ORDER BY e.oid)
    || (SELECT '-' || pg_catalog.string_agg(emit.xmin::text, '.' ORDER BY emit.oid)
        FROM pg_catalog.pg_proc emit WHERE emit.proname = 'pg_logical_emit_message')
FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
WHERE e.evtname = ANY (%(names)s::text[]) AND e.evtenabled = 'A'
HAVING pg_catalog.count(*) = 2
"""
"""Changes whenever somebody alters a trigger, the function, or the right to send messages, even if it is
altered back; null when the trigger does not fire. While it stays the same, no DDL goes unmarked."""


def trigger_names(pipeline: str) -> tuple[str, str]:
    """The names of its two event triggers, for DDL that ended and for what was dropped."""
    return f"pgrepl_{pipeline}", f"pgrepld_{pipeline}"


def function_name(pipeline: str) -> str:
    return f"ddl_{pipeline}"


def install(connection: Connection, pipeline: Pipeline) -> None:
    """Have the event triggers there, as this program wants them; nothing is written when they are.

    Raises PrivilegeError when the role may not create them, ServerSettingError on a standby.
    """
    body = function_sql(
        pipeline.name,
        pipeline.publication,
        identity=IDENTITY % {"names": f"'{{{','.join(trigger_names(pipeline.name))}}}'"},
        server_version=connection.server_version,
    )
    with source_errors("installing the event trigger"):
        if _is_current(connection, pipeline.name, body):
            return
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                # Several may do so at once; and what this does itself need not be told.
                cursor.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
                _drop(connection, pipeline.name)
                _create(connection, pipeline.name, body)
                cursor.execute("COMMIT")
        except psycopg2.errors.InsufficientPrivilege as error:
            connection.cursor().execute("ROLLBACK")
            role = row(connection, "SELECT current_user::text")[0]
            raise PrivilegeError(
                f"role {role} may not create the event trigger of pipeline {pipeline.name}:"
                f" {error.diag.message_primary}",
                "let a superuser run the snapshot app once, or set event_trigger: false (DDL is then noticed"
                " early rather than at its exact place)",
            ) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            connection.cursor().execute("ROLLBACK")
            raise ServerSettingError(
                "the event trigger cannot be installed: the source is read-only",
                "run the snapshot app once with the primary's connection, or set event_trigger: false",
            ) from None
        except BaseException:
            if not connection.closed:
                connection.cursor().execute("ROLLBACK")
            raise


def keep_installed(connection: Connection, pipeline: Pipeline) -> None:
    """Install or uninstall, as the pipeline wants it. Raises as those do."""
    if pipeline.event_trigger:
        install(connection, pipeline)
    elif is_present(connection, pipeline.name):
        uninstall(connection, pipeline.name)


def uninstall(connection: Connection, pipeline: str) -> None:
    """Take away what `install` made, the schema too when nothing else is in it. May be called again.

    Raises PrivilegeError when the role may not.
    """
    if not is_present(connection, pipeline):
        return
    with source_errors("removing the event trigger"), connection.cursor() as cursor:
        _drop(connection, pipeline)
        if rows(connection, _EMPTY_SCHEMA, (_SCHEMA,)):
            cursor.execute(f"DROP SCHEMA IF EXISTS {_SCHEMA}")


def is_installed(connection: Connection, pipeline: str) -> bool:
    """Whether the event triggers are there and fire."""
    return _read_identity(connection, pipeline) is not None


def is_present(connection: Connection, pipeline: str) -> bool:
    """Whether there is anything for `uninstall` to take away, whether it fires or not."""
    names = list(trigger_names(pipeline))
    with source_errors("looking for the event trigger"):
        triggers = rows(
            connection, "SELECT 1 FROM pg_catalog.pg_event_trigger WHERE evtname = ANY (%s::text[])", (names,)
        )
        return bool(triggers or rows(connection, _FUNCTION, (_SCHEMA, function_name(pipeline))))


def read_watching(connection: Connection, pipeline: Pipeline) -> str | None:
    """Which event trigger tells of DDL; None without one, and for a pipeline that wants none."""
    return _read_identity(connection, pipeline.name) if pipeline.event_trigger else None


def _read_identity(connection: Connection, pipeline: str) -> str | None:
    with source_errors("reading the event trigger"):
        found = rows(connection, IDENTITY, {"names": list(trigger_names(pipeline))})
    return found[0][0] if found else None


_LOCK_KEY = 0x706772657071

_EMPTY_SCHEMA = """
SELECT 1 FROM pg_catalog.pg_namespace n WHERE n.nspname = %s
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
        WHERE d.refclassid = 'pg_catalog.pg_namespace'::regclass AND d.refobjid = n.oid)
"""


def _is_current(connection: Connection, pipeline: str, body: str) -> bool:
    found = rows(connection, _FUNCTION, (_SCHEMA, function_name(pipeline)))
    return bool(found) and found[0][0] == body and is_installed(connection, pipeline)


def _drop(connection: Connection, pipeline: str) -> None:
    with connection.cursor() as cursor:
        for name in trigger_names(pipeline):
            cursor.execute(f"DROP EVENT TRIGGER IF EXISTS {quote_identifier(name)}")
        if rows(connection, _FUNCTION, (_SCHEMA, function_name(pipeline))):
            cursor.execute(f"DROP FUNCTION {_SCHEMA}.{quote_identifier(function_name(pipeline))}()")


def _create(connection: Connection, pipeline: str, body: str) -> None:
    function = f"{_SCHEMA}.{quote_identifier(function_name(pipeline))}"
    ended, dropped = map(quote_identifier, trigger_names(pipeline))
    tags = ", ".join(f"'{tag}'" for tag in ENDED_TAGS)
    with connection.cursor() as cursor:
        if not rows(connection, "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s", (_SCHEMA,)):
            cursor.execute(f"CREATE SCHEMA {_SCHEMA}")
        cursor.execute(
            f"CREATE FUNCTION {function}() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER"
            f" {settings_sql()} AS %s",
            (body,),
        )
        cursor.execute(f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC")
        cursor.execute(
            f"CREATE EVENT TRIGGER {ended} ON ddl_command_end WHEN TAG IN ({tags})"
            f" EXECUTE FUNCTION {function}()"
        )
        cursor.execute(f"CREATE EVENT TRIGGER {dropped} ON sql_drop EXECUTE FUNCTION {function}()")
        for trigger in (ended, dropped):
            # Also for DDL that is itself replicated: session_replication_role would silence it.
            cursor.execute(f"ALTER EVENT TRIGGER {trigger} ENABLE ALWAYS")
