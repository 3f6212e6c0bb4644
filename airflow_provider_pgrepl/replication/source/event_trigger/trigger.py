"""The event triggers at the source, which give DDL an exact position in the stream.

Two triggers (DDL that ended, objects that were dropped), their function and its key in schema `_pgrepl`
belong to one pipeline. `sql.py` has the function, `message.py` the content and the seal of its messages.
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
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import execute_within, with_short_waits

from .sql import (
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

_FUNCTION = """
SELECT p.prosrc, p.proconfig, p.oid::bigint FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = %s AND p.proname = %s AND p.pronargs = 0
"""

# Two pipelines of one database may have the same name, if their states are in different databases. A function
# names its publication; a function whose publication no longer exists belongs to no pipeline.
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
# DROP needs the privileges of the owner, or of the owner of the object's schema.
_NOT_REMOVABLE = """
SELECT found.name FROM (
    SELECT e.evtname::text, e.evtowner, e.evtowner FROM pg_catalog.pg_event_trigger e
    WHERE e.evtname = ANY (%(triggers)s::text[])
    UNION ALL
    SELECT p.proname::text, p.proowner, n.nspowner
    FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = %(schema)s AND p.proname = %(function)s AND p.pronargs = 0
    UNION ALL
    SELECT c.relname::text, c.relowner, n.nspowner
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(key)s
) AS found (name, owner, schema_owner)
WHERE NOT pg_catalog.pg_has_role(found.owner, 'USAGE')
    AND NOT pg_catalog.pg_has_role(found.schema_owner, 'USAGE')
LIMIT 1
"""
_REMOVAL = "let a superuser run the SQL that `pgrepl event-trigger-sql FILE.json --remove` prints"
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
    """Install the current version of the event triggers. Writes nothing if it is installed.

    DDL that runs at that time neither fails nor waits. `former`: earlier publications of the pipeline. Raises
    PrivilegeError if the role may not create the triggers, ServerSettingError on a standby,
    SourceConnectionError if another session is installing them, and ConfigError if an event trigger with one
    of their names belongs to another program or pipeline.
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
                "let a superuser run, once, the SQL that `pgrepl event-trigger-sql FILE.json` prints, or set"
                " event_trigger to false: then DDL has no exact position, and a table may stop before changes"
                " that could still be applied",
            ) from None
        except _MADE_BY_ANOTHER:
            connection.cursor().execute("ROLLBACK")
            raise SourceConnectionError(
                f"the event trigger of pipeline {pipeline.name} is being created by another session",
                "try again",
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
    """Return the script that a superuser runs to install them, for this server and this connection's role."""
    with source_errors("asking who will replicate"):
        role = row(connection, "SELECT current_user::text")[0]
    return install_script(pipeline, connection.server_version, role)


def keep_installed(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Call `install` or `uninstall`, according to the pipeline's settings. Raises as they do."""
    if pipeline.event_trigger:
        install(connection, pipeline, former)
    elif is_present(connection, pipeline, former):
        uninstall(connection, pipeline, former)


def uninstall(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Remove everything that `install` created, and the schema if it is empty then. May be called again.

    Triggers of other programs or pipelines stay (see `read_foreign`). DDL that runs at that time neither
    fails nor waits. Raises PrivilegeError if the role may not remove them, BusyError if transactions with
    DDL, which have read the key, do not end in time.
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
                _REMOVAL,
            ) from None
        if rows(connection, _EMPTY_SCHEMA, (SCHEMA,)):
            cursor.execute(f"DROP SCHEMA IF EXISTS {SCHEMA}")


def check_removable(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> None:
    """Raise PrivilegeError if the role may not drop an object that `uninstall` would drop."""
    if not is_present(connection, pipeline, former):
        return
    values = {
        "triggers": _own_names(connection, pipeline, former),
        "schema": SCHEMA,
        "function": function_name(pipeline.name),
        "key": key_table(pipeline.name),
    }
    with source_errors("looking who may remove the event trigger"):
        held = rows(connection, _NOT_REMOVABLE, values)
    if held:
        raise PrivilegeError(
            f"the event trigger of pipeline {pipeline.name} cannot be removed: must be owner of {held[0][0]}",
            _REMOVAL,
        )


def _drop(connection: Connection, statement: str, wait_s: float) -> None:
    try:
        execute_within(connection, statement, wait_s)
    except psycopg2.errors.LockNotAvailable:
        raise BusyError(
            "the event trigger is removed, but not its function: a transaction that ran DDL is still open",
            "run the same again when it has ended",
        ) from None


def is_installed(connection: Connection, pipeline: str) -> bool:
    """Return True if both event triggers exist and are enabled."""
    return _read_identity(connection, pipeline) is not None


def is_present(connection: Connection, pipeline: Pipeline, former: Collection[str] = ()) -> bool:
    """Return True if `uninstall` has anything to remove, enabled or not."""
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
    """Return other event triggers that have this pipeline's names, each with the function that it calls.

    The function is outside of schema `_pgrepl`, or is for a publication of another pipeline. `former`:
    earlier publications of this pipeline.
    """
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
    """Return the identity of the active event triggers; None without them, or if the pipeline uses none."""
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
    """Return the key that seals the event trigger's messages; None if it is missing or may not be read.

    A key table with another owner than the triggers is not trusted: the result is None as well.
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
