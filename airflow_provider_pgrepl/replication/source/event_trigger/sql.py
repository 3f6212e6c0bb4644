"""The function of the event triggers, which reports tables that DDL changed in logical messages.

It emits one message for each table, in the transaction and at the position of the DDL, with the rows that
this package's catalog queries return there (`message.py` reads them). Its failures must not make the DDL
fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog import types
from airflow_provider_pgrepl.replication.source.catalog.relations import COLUMN_LISTS_SINCE
from airflow_provider_pgrepl.replication.source.connection import PINNED_SETTINGS

from .message import SEALED_SQL, carried_format, carried_queries

ENDED_TAGS = (
    "CREATE TABLE",
    "CREATE TABLE AS",
    "SELECT INTO",
    "ALTER TABLE",
    "ALTER VIEW",
    "ALTER INDEX",
    "ALTER SEQUENCE",
    "ALTER TYPE",
    "ALTER DOMAIN",
    "CREATE SCHEMA",
    "ALTER SCHEMA",
    "CREATE EXTENSION",
    "ALTER EXTENSION",
    "CREATE PUBLICATION",
    "ALTER PUBLICATION",
)
"""The tags of commands that can change a table. ALTER VIEW and the like also accept tables."""

_PINNED = (
    "standard_conforming_strings",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "extra_float_digits",
    "bytea_output",
    "lc_monetary",
    "quote_all_identifiers",
)
"""The settings that affect the text of a value or a name, or how the server reads the function's text."""

_SEARCH_PATH = "pg_catalog, pg_temp"

_PLANNED = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
"""Planner settings. The planner does not know that the recursive queries find few rows: by default it would
read whole catalogs, and sort and compile, at each DDL."""

_MOST_TEXT_BYTES = 10_000
"""The longest command text, in bytes, that each of its statements searches for USING.

A longer text counts as having USING: searching 250 kB for each of 1,600 statements took 24 s.
"""

_COLUMNS = {
    "publication": 4,
    "members": 5,
    "schemas": 4,
    "tables": 9,
    "columns": 12,
    "keys": 2,
    "leaves": 10,
    "types": 10,
    "fields": 4,
    "labels": 3,
    "missing": 4,
}
"""The number of columns of each carried query. Reading it from the rows would cost more than the query."""

_HEADING = re.compile(r"^--: (\w+)\n", re.MULTILINE)
SCHEMA = "_pgrepl"
IDENTITY = """
SELECT pg_catalog.string_agg(e.oid || '.' || e.xmin || '.' || p.oid || '.' || p.xmin, '-' ORDER BY e.oid)
    || (SELECT '-' || pg_catalog.string_agg(emit.xmin::text, '.' ORDER BY emit.oid)
        FROM pg_catalog.pg_proc emit WHERE emit.proname = 'pg_logical_emit_message')
FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
WHERE e.evtname = ANY (%(names)s::text[]) AND e.evtenabled = 'A'
HAVING pg_catalog.count(*) = 2
"""
"""The identity of the event triggers; no row if a trigger is missing or disabled.

It changes when a trigger, the function, or the right to send messages is altered, even if it is altered back.
While it stays the same, every DDL is reported.
"""
_PLAIN_STRINGS = "SET LOCAL standard_conforming_strings = on"
# A random UUID has 122 random bits, from the random source that PostgreSQL uses for its secrets.
_MAKE_KEY = """INSERT INTO <key> SELECT pg_catalog.sha256(pg_catalog.convert_to(
    pg_catalog.gen_random_uuid()::text || pg_catalog.gen_random_uuid()::text, 'UTF8'))
WHERE NOT EXISTS (SELECT FROM <key>)"""
# A name proves nothing: a user may have created an event trigger with this name.
_CHECK_TRIGGERS = """DO $$BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
            JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
            WHERE e.evtname IN (<names>) AND n.nspname <> '_pgrepl') THEN
        RAISE EXCEPTION 'an event trigger of this name calls a function outside of schema _pgrepl';
    END IF;
END$$"""
# A publication FOR ALL TABLES would send the key to subscribers. Those that lack its table would stop.
_CHECK_PUBLICATIONS = """DO $$BEGIN
    IF pg_catalog.to_regclass('<key>') IS NULL AND EXISTS (SELECT FROM pg_catalog.pg_publication
            WHERE puballtables AND pubname <> '<used>') THEN
        RAISE EXCEPTION 'a publication FOR ALL TABLES would send table <key> to subscribers that lack it';
    END IF;
END$$"""
# Another role that may create schemas could have created this schema or table first.
_CHECK_OWNERS = """DO $$BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
            JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
            WHERE n.nspname = '_pgrepl' AND (r.rolsuper OR r.rolname IN ('<role>', current_user))
            AND c.relname = '<key>' AND c.relkind = 'r' AND o.rolname = current_user) THEN
        RAISE EXCEPTION 'schema _pgrepl, or table <key> in it, belongs to somebody else';
    END IF;
END$$"""
# A statement whose event triggers are firing refers to the function by its oid, and would fail without it. A
# statement that takes longer than this wait looks its event triggers up again at its end.
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


def _read_pieces() -> dict[str, str]:
    text = files(__package__).joinpath("function.sql").read_text(encoding="utf-8")
    _, *parts = _HEADING.split(text)
    return {name: piece.strip("\n") for name, piece in zip(parts[::2], parts[1::2], strict=True)}


_SQL = _read_pieces()


def function_sql(
    pipeline: str, publication: str, *, identity: str, key_table: str, server_version: int
) -> str:
    """Return the body of a pipeline's function.

    `identity`: the query for the identity of the event triggers. `key_table`: the table with the key that
    seals the messages.
    """
    by_schema = server_version >= COLUMN_LISTS_SINCE
    return _put(
        _SQL["body"],
        emit=SEALED_SQL,
        key_table=key_table,
        dropped=_put(_SQL["dropped"], or_schemas=_SQL["or_schemas"] if by_schema else ""),
        ended=_put(_SQL["ended"], namespaces=_SQL["namespaces"] if by_schema else ""),
        reached=_SQL["reached"],
        moved=_SQL["moved"] if by_schema else "",
        published=_put(_SQL["published"], schemas=_SQL["schemas"] if by_schema else ""),
        facts=_facts(server_version),
        identity=f"({identity.strip()})",
        format=_literal(carried_format(server_version)),
        by_alter="('ALTER TABLE', 'ALTER TYPE')",
        may_rewrite="('ALTER TABLE')",
        most_text=str(_MOST_TEXT_BYTES),
        prefix=_literal(DDL_PREFIX),
        pipeline=_literal(pipeline),
        publication=_literal(publication),
    )


def settings_sql() -> str:
    """Return the SET clauses of the function, with the settings that it runs with."""
    pinned = " ".join(f"SET {name} = '{value}'" for name, value in _settings().items())
    return f"SET search_path = {_SEARCH_PATH} {pinned}"


def has_settings(found: Iterable[str]) -> bool:
    """Return True if these, as `proconfig` has them, are the function's settings."""
    settings = {"search_path": _SEARCH_PATH, **_settings()}
    return set(found) == {f"{name}={value}" for name, value in settings.items()}


def _settings() -> dict[str, str]:
    return {name: PINNED_SETTINGS[name] for name in _PINNED} | _PLANNED


def _facts(server_version: int) -> str:
    queries = carried_queries(server_version)
    arrays = {"types": "_types", "fields": "_types", "missing": "_leaves"}
    texts = {name: _bound(query, arrays.get(name, "_oids")) for name, query in queries.items()}
    rows = {
        name: _put(_SQL["rows"], query=text, columns=", ".join(f"c{i}" for i in range(_COLUMNS[name])))
        for name, text in texts.items()
    }
    return _put(
        _SQL["facts"],
        enums=_bound(types.PARTS + _put(_SQL["of_kind"], kind="e"), "_types"),
        made_of_rows=_bound(types.PARTS + _put(_SQL["of_kind"], kind="c"), "ARRAY[_type]"),
        leaves=rows.pop("leaves"),
        rows=", ".join(f"{_literal(name)}, {found}" for name, found in rows.items()),
    )


def _bound(query: str, oids: str) -> str:
    """Return a query of this package with the function's variables in place of its parameters."""
    variables = {
        "publication": "_publication.pubname",
        "publication_oid": "_publication.oid",
        "oids": oids,
        "row_types": "_row_types",
        "enums": "_enums",
    }
    return query.strip() % variables


def _put(text: str, **pieces: str) -> str:
    for name, piece in pieces.items():
        text = text.replace(f"<{name}>", piece)
    return text


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def trigger_names(pipeline: str) -> tuple[str, str]:
    """Return the names of a pipeline's two event triggers: for DDL that ended, and for dropped objects."""
    return f"pgrepl_{pipeline}", f"pgrepld_{pipeline}"


def function_name(pipeline: str) -> str:
    """Return the name of the event triggers' function, in schema `_pgrepl`."""
    return f"ddl_{pipeline}"


def key_table(pipeline: str) -> str:
    """Return the name of the table with the key that seals the function's messages, in schema `_pgrepl`."""
    return f"ddl_key_{pipeline}"


def install_script(pipeline: Pipeline, server_version: int, role: str) -> str:
    """Return the script that a superuser runs once, so that `role` can replicate with the event triggers."""
    check = _CHECK_PUBLICATIONS.replace("<key>", in_schema(key_table(pipeline.name)).replace("'", "''"))
    check = check.replace("<used>", pipeline.used_publication.replace("'", "''"))
    return _script([check, *install_statements(pipeline.name, body_of(pipeline, server_version), role)])


def removal_script(pipeline: str) -> str:
    """Return the script that a superuser runs to remove the event triggers, their function and key.

    The script fails if a trigger with one of their names calls a function outside of schema `_pgrepl`.
    """
    dropping = [_check_triggers(pipeline), *drop_triggers(trigger_names(pipeline))]
    return _script(dropping) + f"{AWAIT_DDL};\n" + _script(drop_function(pipeline))


def _script(statements: list[str]) -> str:
    return "".join(f"{statement};\n" for statement in ("BEGIN", _PLAIN_STRINGS, *statements, "COMMIT"))


def body_of(pipeline: Pipeline, server_version: int) -> str:
    """Return the function's PL/pgSQL body for a server of this version."""
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
    """Return the statements that drop these event triggers."""
    return [f"DROP EVENT TRIGGER IF EXISTS {quote_identifier(name)}" for name in triggers]


def drop_function(pipeline: str) -> list[str]:
    """Return the statements that drop the key table and the function. Run them after `drop_triggers`."""
    return [
        f"DROP TABLE IF EXISTS {in_schema(key_table(pipeline))}",
        f"DROP FUNCTION IF EXISTS {in_schema(function_name(pipeline))}()",
    ]


def install_statements(pipeline: str, body: str, role: str) -> list[str]:
    """Return the statements that recreate triggers and function, for messages that `role` reads.

    They keep an existing key: messages sealed with it may still be in the stream.
    """
    function, key = in_schema(function_name(pipeline)), in_schema(key_table(pipeline))
    ended, dropped = map(quote_identifier, trigger_names(pipeline))
    tags, reader = ", ".join(f"'{tag}'" for tag in ENDED_TAGS), quote_identifier(role)
    # Use an escape string: it does not depend on how the session reads backslashes in plain strings.
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
        # Replace the function and do not drop it: running DDL may refer to it by its oid.
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER"
        f" {settings_sql()} AS E'{text}'",
        f"ALTER FUNCTION {function}() OWNER TO CURRENT_USER",
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        f"CREATE EVENT TRIGGER {ended} ON ddl_command_end WHEN TAG IN ({tags}) EXECUTE FUNCTION {function}()",
        f"CREATE EVENT TRIGGER {dropped} ON sql_drop EXECUTE FUNCTION {function}()",
        # ENABLE ALWAYS also reports replicated DDL, for which session_replication_role disables triggers.
        *(f"ALTER EVENT TRIGGER {trigger} ENABLE ALWAYS" for trigger in (ended, dropped)),
    ]


def in_schema(name: str) -> str:
    """Return a name in this package's schema, quoted and with the schema."""
    return f"{SCHEMA}.{quote_identifier(name)}"
