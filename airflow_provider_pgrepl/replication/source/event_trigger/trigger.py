"""The event triggers at the source by which DDL has an exact place in the stream.

Two triggers (DDL that ended, objects that were dropped), their function and its key in schema `_pgrepl`
belong to one pipeline. `ddl_function.py` has the function, `ddl_message.py` what it says, `ddl_seal.py` how
it is known to have said it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    PrivilegeError,
    ServerSettingError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.event_trigger.sql import (
    AWAIT_DDL,
    IDENTITY,
    SCHEMA,
    body_of,
    drop_function,
    drop_triggers,
    function_name,
    has_settings,
    in_schema,
    install_script,
    install_statements,
    key_table,
    trigger_names,
)
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import execute_within, with_short_waits

_FUNCTION = """
SELECT p.prosrc, p.proconfig, p.oid::bigint FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = %s AND p.proname = %s AND p.pronargs = 0
"""

# Two pipelines of one database may have one name, if their states are in other ones. A function names the
# publication that it is for; one whose publication is gone is nobody's.
_FOR_ANOTHER = """
SELECT o.pubname FROM pg_catalog.pg_publication o WHERE o.pubname <> ALL (%(own)s::text[])
    AND pg_catalog.strpos(p.prosrc, 'pubname = ' || pg_catalog.quote_literal(o.pubname) || ';') > 0 LIMIT 1
"""

_FOREIGN = """
SELECT e.evtname::text, pg_catalog.format('%%s.%%s', n.nspname, p.proname), another.pubname::text
FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace LEFT JOIN LATERAL (<another>) another ON true
WHERE e.evtname = ANY (%(names)s::text[]) AND (n.nspname <> %(schema)s OR another.pubname IS NOT NULL)
ORDER BY 1
""".replace("<another>", _FOR_ANOTHER)

_FOREIGN_FUNCTION = """
SELECT 1 FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace,
    LATERAL (<another>) another
WHERE n.nspname = %(schema)s AND p.proname = %(function)s
""".replace("<another>", _FOR_ANOTHER)

_KEY_TABLE = """
SELECT c.relkind = 'r' AND NOT c.relhasrules AND NOT c.relrowsecurity,
    c.relowner = ALL (SELECT e.evtowner FROM pg_catalog.pg_event_trigger e
        WHERE e.evtname = ANY (%s::text[])),
    pg_catalog.has_table_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
"""

_KEY = "SELECT key FROM <key>"
_LOCK_WAIT_S = 10.0
_MADE_BY_ANOTHER = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.DuplicateObject,
    psycopg2.errors.DuplicateFunction,
    psycopg2.errors.DuplicateTable,
    psycopg2.errors.InternalError_,
)


def install(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Have the event triggers there, as this program wants them; nothing is written when they are.

    DDL that runs at that time neither fails nor waits. `former`: publications that the pipeline had. Raises
    PrivilegeError when the role may not create them, ServerSettingError on a standby, ConfigError when an
    event trigger of one of these names is another program's, or another pipeline's.
    """
    for name, function in read_foreign(connection, pipeline, former):
        raise ConfigError(
            f"event trigger {name} calls {function}, and was not made for pipeline {pipeline.name}",
            "rename that trigger, or give this pipeline another name, or set event_trigger: false",
        )
    body = body_of(pipeline, connection.server_version)
    with source_errors("installing the event trigger"):
        if _is_current(connection, pipeline.name, body):
            return
        role = row(connection, "SELECT current_user::text")[0]
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(f"SET LOCAL lock_timeout = {int(_LOCK_WAIT_S * 1000)}")
                for statement in install_statements(pipeline.name, body, role):
                    cursor.execute(statement)
                cursor.execute("COMMIT")
        except psycopg2.errors.InsufficientPrivilege as error:
            connection.cursor().execute("ROLLBACK")
            raise PrivilegeError(
                f"role {role} may not create the event trigger of pipeline {pipeline.name}:"
                f" {error.diag.message_primary}",
                "let a superuser run, once, the SQL that `pgrepl event-trigger-sql"
                " FILE.json` prints, or set event_trigger: false (DDL is then noticed early)",
            ) from None
        except _MADE_BY_ANOTHER:
            connection.cursor().execute("ROLLBACK")
            raise SourceConnectionError(
                f"the event trigger of pipeline {pipeline.name} is being made by somebody else", "try again"
            ) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            connection.cursor().execute("ROLLBACK")
            raise ServerSettingError(
                "the event trigger cannot be installed: the source is read-only",
                "install it on the primary (event-trigger-sql prints the SQL), or set event_trigger: false",
            ) from None
        except BaseException:
            if not connection.closed:
                connection.cursor().execute("ROLLBACK")
            raise


def install_sql(connection: Connection, pipeline: Pipeline) -> str:
    """The script by which a superuser makes them, for this server, and for the role of this connection."""
    with source_errors("asking who will replicate"):
        role = row(connection, "SELECT current_user::text")[0]
    return install_script(pipeline, connection.server_version, role)


def keep_installed(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Install or uninstall, as the pipeline wants it. Raises as those do."""
    if pipeline.event_trigger:
        install(connection, pipeline, former)
    elif is_present(connection, pipeline, former):
        uninstall(connection, pipeline, former)


def uninstall(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Take away what `install` made, the schema too when nothing else is in it. May be called again.

    What is not the pipeline's stays (see `read_foreign`). DDL that runs at that time neither fails nor waits.
    Raises PrivilegeError when the role may not; BusyError when transactions with DDL, which have read the
    key, do not end in time.
    """
    if not is_present(connection, pipeline, former):
        return
    own = _own_names(connection, pipeline, former)
    with source_errors("removing the event trigger"), connection.cursor() as cursor:
        try:
            for statement in (*drop_triggers(own), AWAIT_DDL):
                cursor.execute(statement)
            for statement in drop_function(pipeline.name):
                with_short_waits(partial(_drop, connection, statement), _LOCK_WAIT_S, BusyError)
        except psycopg2.errors.InsufficientPrivilege as error:
            raise PrivilegeError(
                f"the event trigger of pipeline {pipeline.name} cannot be removed:"
                f" {error.diag.message_primary}",
                "let a superuser run the SQL that `pgrepl event-trigger-sql FILE.json --remove` prints",
            ) from None
        if rows(connection, _EMPTY_SCHEMA, (SCHEMA,)):
            cursor.execute(f"DROP SCHEMA IF EXISTS {SCHEMA}")


def _drop(connection: Connection, statement: str, wait_s: float) -> None:
    try:
        execute_within(connection, statement, wait_s)
    except psycopg2.errors.LockNotAvailable:
        raise BusyError(
            "the event trigger is removed, but not its function: a transaction that ran DDL is still open",
            "run the same again when it has ended",
        ) from None


def is_installed(connection: Connection, pipeline: str) -> bool:
    """Whether the event triggers are there and fire."""
    return _read_identity(connection, pipeline) is not None


def is_present(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> bool:
    """Whether there is anything for `uninstall` to take away, whether it fires or not."""
    own, function = _own_names(connection, pipeline, former), function_name(pipeline.name)
    values = {"schema": SCHEMA, "function": function, "own": [pipeline.publication, *former]}
    with source_errors("looking for the event trigger"):
        if rows(connection, _FOREIGN_FUNCTION, values):
            return False
        triggers = rows(
            connection, "SELECT 1 FROM pg_catalog.pg_event_trigger WHERE evtname = ANY (%s::text[])", (own,)
        )
        return bool(triggers or rows(connection, _FUNCTION, (SCHEMA, function)))


def _own_names(connection: Connection, pipeline: Pipeline, former: Collection[str]) -> list[str]:
    foreign = {name for name, _ in read_foreign(connection, pipeline, former)}
    return [name for name in trigger_names(pipeline.name) if name not in foreign]


def read_foreign(
    connection: Connection, pipeline: Pipeline, former: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Return the event triggers of this pipeline's names that call a function outside of our schema, or one
    for a publication of another pipeline, and that function. `former`: publications that this one had."""
    values = {
        "names": list(trigger_names(pipeline.name)),
        "schema": SCHEMA,
        "own": [pipeline.publication, *former],
    }
    with source_errors("looking for the event trigger"):
        return [
            (name, function if another is None else f"{function} for publication {another}")
            for name, function, another in rows(connection, _FOREIGN, values)
        ]


def read_watching(connection: Connection, pipeline: Pipeline) -> str | None:
    """Which event trigger tells of DDL; None without one, and for a pipeline that wants none."""
    return _read_identity(connection, pipeline.name) if pipeline.event_trigger else None


def _read_identity(connection: Connection, pipeline: str) -> str | None:
    with source_errors("reading the event trigger"):
        found = rows(connection, IDENTITY, {"names": list(trigger_names(pipeline))})
    return found[0][0] if found else None


_EMPTY_SCHEMA = """
SELECT 1 FROM pg_catalog.pg_namespace n WHERE n.nspname = %s
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
        WHERE d.refclassid = 'pg_catalog.pg_namespace'::regclass AND d.refobjid = n.oid)
"""


def read_key(connection: Connection, pipeline: str) -> bytes | None:
    """What the event trigger's messages are sealed with; None when it is not there or may not be read.

    A table that does not belong to whom the triggers belong to holds nothing that is worth believing.
    """
    with source_errors("reading the event trigger's key"):
        found = rows(connection, _KEY_TABLE, (list(trigger_names(pipeline)), SCHEMA, key_table(pipeline)))
        if not found or not all(found[0]):
            return None
        keys = rows(connection, _KEY.replace("<key>", in_schema(key_table(pipeline))))
    return bytes(keys[0][0]) if len(keys) == 1 else None


def _is_current(connection: Connection, pipeline: str, body: str) -> bool:
    found = rows(connection, _FUNCTION, (SCHEMA, function_name(pipeline)))
    if not found or found[0][0] != body or not has_settings(found[0][1] or ()):
        return False
    if not is_installed(connection, pipeline):
        return False
    return read_key(connection, pipeline) is not None
