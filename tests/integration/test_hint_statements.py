"""Statements of SQL that hints name: each is run on a server, or is listed as advice, with the reason.

Names in them are unusual ones: a statement that does not quote what it must is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import psycopg2
from psycopg2 import errorcodes

from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from tests.conftest import Connection
from tests.support.hint_texts import VALUE, texts_of_code

RUN_BY_US = re.compile(
    r"replication/(source/(event_trigger|copy|publication|dry_run|short_waits)|state/"
    r"|creek/table_shape|app/creek/|app/doctor/source_script|app/sequences|catalogs/spark_catalog|lake/delta/commit)"
)
"""Files whose texts that begin with a statement are run by this package, which other tests show."""
STATEMENT = re.compile(
    r"(?:(?:GRANT|REVOKE|ALTER|CREATE|DROP) (?=[A-Z{…])|select pg_|select slot_name).*?"
    r"(?=;|\.?$|\. |, (?:or|then|with|make|drop|to|and|REPLICA)\b| \(Amazon"
    r"| (?:or|has|lets|covers|where a|with every)\b|: it lacks)"
)
NO_STATEMENT = re.compile(r"ALTER TABLE.{0,4}, 'ALTER TYPE'|DROP EXPRESSION|ALTER TABLE'?|[A-Z ]+ on .*")
"""Kinds of statements, and rights, that texts name."""
OF_DELTA = re.compile(r"ALTER TABLE delta\.|DROP (FEATURE|CONSTRAINT)|ALTER COLUMN")
"""Statements of Spark for lake tables, which no PostgreSQL knows."""

PUBLICATION, ROLE = 'My "p"', 'my "role"'
SLOT = "a_slot"
TABLE, SEQUENCE = TableName("public", "My t"), TableName("public", "My seq")
VALUES = {
    "acting": "",
    "name": PUBLICATION,
    "pipeline.publication": PUBLICATION,
    "quote_identifier(name)": quote_identifier(PUBLICATION),
    "quote_identifier(pipeline.publication)": quote_identifier(PUBLICATION),
    "quote_identifier(self.publication)": quote_identifier(PUBLICATION),
    "publication": quote_identifier(PUBLICATION),  # quoted before
    "quote_identifier(role)": quote_identifier(ROLE),
    "role": quote_identifier(ROLE),  # by quote_ident, in the server
    "login": quote_identifier(ROLE),  # likewise
    "schemas": "public",
    "schema": quote_identifier("public"),
    "show_quoted(sequence.schema)": quote_identifier(SEQUENCE.schema),
    "show_quoted(sequence.name)": quote_identifier(SEQUENCE.name),
    "tables": str(TABLE),
    "missing": str(TABLE),
    "', '.join(missing)": str(TABLE),
    "table": TABLE.sql,
    "table.sql": TABLE.sql,
    "target.sql": TABLE.sql,
    "quote_identifier(column.name)": "id",
    "column.pg_type": "bigint",
    "record.name.sql": TABLE.sql,
    "relation.table": str(TABLE),
    "_ALL_CHANGES": "insert, update, delete, truncate",
    "self._name": SLOT,
    "one_line(name)": SLOT,
    "slot.active_pid": "0",
    "quote_literal(names)": "'standby1, standby2'",
    "setting": "hot_standby_feedback",
    "value": "on",
}
ADVICE = {
    "ALTER ROLE … REPLICATION": "the login failed, so that nobody has said the role",
    "GRANT CONNECT ON DATABASE … TO …": "likewise",
    "ALTER TABLE … REPLICA IDENTITY FULL": "of whichever table the event is of, which the message names",
    "ALTER FUNCTION … OWNER TO …": "the message names the function, a superuser is for the reader to say",
    "ALTER TABLE {table} ADD PRIMARY KEY (…)": "the columns are for the reader to say",
    "ALTER TABLE {table} REPLICA IDENTITY USING INDEX …": "likewise",
    "ALTER TABLE {table.sql} ADD PRIMARY KEY (…)": "likewise",
    "ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX …": "likewise",
    "ALTER PUBLICATION {quote_identifier(self.publication)} ADD TABLE {table.sql} (…)": "likewise",
    "select pg_terminate_backend(pid)": "the message names the pids",
}
SET_UP = (
    f"create role {quote_identifier(ROLE)}",
    f"create sequence {SEQUENCE.sql}",
    f"create table {TABLE.sql} (id int primary key)",
    f"create publication {quote_identifier(PUBLICATION)}",
    "create schema _pgrepl",
    "create table _pgrepl.source_tokens ()",
)
OF_MEMBERS = ("DROP TABLE",)
"""Statements about a table of the publication."""


def _statements() -> Iterator[str]:
    for file, text in texts_of_code():
        is_run = STATEMENT.match(text) or text.startswith("SET LOCAL")
        if "\n" in text or (RUN_BY_US.match(file) and is_run):
            continue
        for found in STATEMENT.finditer(text):
            statement = found[0]
            if statement.count(")") > statement.count("("):
                statement = statement.rpartition(")")[0]
            if not NO_STATEMENT.fullmatch(statement) and not OF_DELTA.match(statement):
                yield statement


@functools.cache
def statements() -> frozenset[str]:
    """Return the statements of all hints. Parses the whole package, and so not while tests are collected."""
    return frozenset(_statements())


def test_every_advice_entry_occurs_in_a_hint() -> None:
    assert not ADVICE.keys() - statements()


def test_statements_of_hints_run(pg: Connection) -> None:
    """Each in a transaction that is rolled back."""
    to_run = sorted(statements() - ADVICE.keys())
    assert len(to_run) > 20
    failed = {}
    with pg.cursor() as cursor:
        cursor.execute("select current_database()")
        (database,) = cursor.fetchone()
        values = {**VALUES, "database": database, "quote_identifier(database)": quote_identifier(database)}
        for statement in to_run:
            unknown = {name[1:-1] for name in VALUE.findall(statement)} - values.keys()
            assert not unknown, f"{statement}: give {unknown} a value, or list it as advice"
            filled = VALUE.sub(lambda found: values[found[0][1:-1]], statement)
            try:
                cursor.execute("begin")
                for prepared in SET_UP:
                    cursor.execute(prepared)
                if any(words in filled for words in OF_MEMBERS):
                    cursor.execute(f"alter publication {quote_identifier(PUBLICATION)} add table {TABLE.sql}")
                cursor.execute(filled)
            except psycopg2.Error as error:
                # It was understood, and cannot run in a transaction.
                lacks_slot = error.pgcode == errorcodes.UNDEFINED_OBJECT and SLOT in filled
                if error.pgcode != errorcodes.ACTIVE_SQL_TRANSACTION and not lacks_slot:
                    failed[filled] = str(error)
            finally:
                cursor.execute("rollback")
    assert not failed
