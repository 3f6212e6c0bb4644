"""The SQL that makes and removes a pipeline's event triggers, run by a role that may, or by hand."""

from __future__ import annotations

from collections.abc import Iterable

from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.event_trigger.sql import (
    ENDED_TAGS,
    function_sql,
    settings_sql,
)

SCHEMA = "_pgrepl"

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


_PLAIN_STRINGS = "SET LOCAL standard_conforming_strings = on"

# A random UUID has 122 random bits, from the source that PostgreSQL makes its secrets with.
_MAKE_KEY = """INSERT INTO <key> SELECT pg_catalog.sha256(pg_catalog.convert_to(
    pg_catalog.gen_random_uuid()::text || pg_catalog.gen_random_uuid()::text, 'UTF8'))
WHERE NOT EXISTS (SELECT FROM <key>)"""

# A name is no evidence: a person may have made an event trigger of this name.
_CHECK_TRIGGERS = """DO $$BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
            JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
            WHERE e.evtname IN (<names>) AND n.nspname <> '_pgrepl') THEN
        RAISE EXCEPTION 'an event trigger of this name calls a function outside of schema _pgrepl';
    END IF;
END$$"""

# A publication FOR ALL TABLES would send the key to subscribers that lack its table, and stop.
_CHECK_PUBLICATIONS = """DO $$BEGIN
    IF pg_catalog.to_regclass('<key>') IS NULL AND EXISTS (SELECT FROM pg_catalog.pg_publication
            WHERE puballtables AND pubname <> '<used>') THEN
        RAISE EXCEPTION 'a publication FOR ALL TABLES would send table <key> to subscribers that lack it';
    END IF;
END$$"""

# Who may create schemas could have been first.
_CHECK_OWNERS = """DO $$BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
            JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
            WHERE n.nspname = '_pgrepl' AND (r.rolsuper OR r.rolname IN ('<role>', current_user))
            AND c.relname = '<key>' AND c.relkind = 'r' AND o.rolname = current_user) THEN
        RAISE EXCEPTION 'schema _pgrepl, or table <key> in it, belongs to somebody else';
    END IF;
END$$"""


# A statement whose event triggers are firing has looked the function up by its oid: it would fail without it.
# A statement that takes longer than this looks its event triggers up again at its end.
AWAIT_DDL = """DO $$DECLARE
    running text[] := ARRAY(SELECT l.virtualxid FROM pg_catalog.pg_locks l
        JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
        WHERE l.locktype = 'virtualxid' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()
            AND a.datname = pg_catalog.current_database());
BEGIN
    FOR i IN 1..50 LOOP
        EXIT WHEN NOT EXISTS (SELECT FROM pg_catalog.pg_locks
            WHERE locktype = 'virtualxid' AND granted AND virtualxid = ANY (running));
        PERFORM pg_catalog.pg_sleep(0.1);
    END LOOP;
END$$"""


def trigger_names(pipeline: str) -> tuple[str, str]:
    """The names of its two event triggers, for DDL that ended and for what was dropped."""
    return f"pgrepl_{pipeline}", f"pgrepld_{pipeline}"


def function_name(pipeline: str) -> str:
    """The event trigger's function, in the schema `_pgrepl`."""
    return f"ddl_{pipeline}"


def key_table(pipeline: str) -> str:
    """The table of the key that seals the function's messages."""
    return f"ddl_key_{pipeline}"


def install_script(pipeline: Pipeline, server_version: int, role: str) -> str:
    """What a superuser runs once, for `role` to replicate with the event triggers that it makes."""
    check = _CHECK_PUBLICATIONS.replace("<key>", in_schema(key_table(pipeline.name)).replace("'", "''"))
    check = check.replace("<used>", pipeline.used_publication.replace("'", "''"))
    return _script([check, *install_statements(pipeline.name, body_of(pipeline, server_version), role)])


def removal_script(pipeline: str) -> str:
    """What a superuser runs to take them away; it fails if a trigger of their names is another one."""
    dropping = [_check_triggers(pipeline), *drop_triggers(trigger_names(pipeline))]
    return _script(dropping) + f"{AWAIT_DDL};\n" + _script(drop_function(pipeline))


def _script(statements: list[str]) -> str:
    return "".join(f"{statement};\n" for statement in ("BEGIN", _PLAIN_STRINGS, *statements, "COMMIT"))


def body_of(pipeline: Pipeline, server_version: int) -> str:
    """The function's PL/pgSQL, for a server of this version."""
    return function_sql(
        pipeline.name,
        pipeline.publication,
        identity=IDENTITY % {"names": f"'{{{','.join(trigger_names(pipeline.name))}}}'"},
        key_table=in_schema(key_table(pipeline.name)),
        server_version=server_version,
    )


def _check_triggers(pipeline: str) -> str:
    names = ", ".join(f"'{name}'" for name in trigger_names(pipeline))
    return _CHECK_TRIGGERS.replace("<names>", names)


def drop_triggers(triggers: Iterable[str]) -> list[str]:
    """What takes these triggers away."""
    return [f"DROP EVENT TRIGGER IF EXISTS {quote_identifier(name)}" for name in triggers]


def drop_function(pipeline: str) -> list[str]:
    """What takes the key and the function away, when the triggers are gone."""
    return [
        f"DROP TABLE IF EXISTS {in_schema(key_table(pipeline))}",
        f"DROP FUNCTION IF EXISTS {in_schema(function_name(pipeline))}()",
    ]


def install_statements(pipeline: str, body: str, role: str) -> list[str]:
    """What makes them anew, for messages that `role` reads. The key stays: messages of before are to come."""
    function, key = in_schema(function_name(pipeline)), in_schema(key_table(pipeline))
    ended, dropped = map(quote_identifier, trigger_names(pipeline))
    tags, reader = ", ".join(f"'{tag}'" for tag in ENDED_TAGS), quote_identifier(role)
    # Escaped, so that it is the same however the session reads backslashes in plain strings.
    text, name = body.replace("\\", "\\\\").replace("'", "''"), role.replace("'", "''")
    return [
        f"CREATE SCHEMA IF NOT EXISTS {SCHEMA} AUTHORIZATION {reader}",
        _check_triggers(pipeline),
        *drop_triggers(trigger_names(pipeline)),
        f"CREATE TABLE IF NOT EXISTS {key} (key bytea NOT NULL)",
        _CHECK_OWNERS.replace("<role>", name).replace("<key>", key_table(pipeline)),
        f"REVOKE ALL ON {key} FROM PUBLIC",
        f"GRANT SELECT ON {key} TO {reader}",
        f"GRANT USAGE ON SCHEMA {SCHEMA} TO {reader}",
        _MAKE_KEY.replace("<key>", key),
        # Replaced and not dropped: DDL that runs at this time may have looked it up by its oid.
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER"
        f" {settings_sql()} AS E'{text}'",
        f"ALTER FUNCTION {function}() OWNER TO CURRENT_USER",
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        f"CREATE EVENT TRIGGER {ended} ON ddl_command_end WHEN TAG IN ({tags}) EXECUTE FUNCTION {function}()",
        f"CREATE EVENT TRIGGER {dropped} ON sql_drop EXECUTE FUNCTION {function}()",
        # Also for DDL that is itself replicated: session_replication_role would silence it.
        *(f"ALTER EVENT TRIGGER {trigger} ENABLE ALWAYS" for trigger in (ended, dropped)),
    ]


def in_schema(name: str) -> str:
    """A name of ours, quoted, with its schema."""
    return f"{SCHEMA}.{quote_identifier(name)}"
