"""The function behind the event triggers: what it says, as a logical message, of tables that DDL touched.

One message for each table, in the transaction and at the place of the DDL, with the rows that the catalog
queries of this package give there (`carried_catalog.py` reads them again). It may fail in no way that makes
the DDL fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX
from airflow_provider_pgrepl.replication.source.catalog import types
from airflow_provider_pgrepl.replication.source.catalog.publication_membership import COLUMN_LISTS_SINCE
from airflow_provider_pgrepl.replication.source.connection import PINNED_SETTINGS
from airflow_provider_pgrepl.replication.source.event_trigger.carried_catalog import (
    carried_format,
    carried_queries,
)
from airflow_provider_pgrepl.replication.source.event_trigger.seal import SEALED_SQL

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
"""Of commands that can make a table another one. ALTER VIEW and the like also take tables."""

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
"""Settings that have a say in the text of a value or a name, or in how the function's own text is read."""

_SEARCH_PATH = "pg_catalog, pg_temp"

_PLANNED = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
"""The planner cannot know that its recursive queries find a few rows: it would read whole catalogs, and sort
and compile, at each DDL."""

_MOST_TEXT_BYTES = 10_000
"""The longest text that is searched, by each of its statements, for what they do. Of a longer one anything is
assumed: 1,600 statements in a text of 250 kB took 24 s for that."""

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
"""How many columns each carried query gives. To take them from its rows would cost more than the query."""

_HEADING = re.compile(r"^--: (\w+)\n", re.MULTILINE)


def _read_pieces() -> dict[str, str]:
    text = files(__package__).joinpath("function.sql").read_text(encoding="utf-8")
    _, *parts = _HEADING.split(text)
    return {name: piece.strip("\n") for name, piece in zip(parts[::2], parts[1::2], strict=True)}


_SQL = _read_pieces()


def function_sql(
    pipeline: str, publication: str, *, identity: str, key_table: str, server_version: int
) -> str:
    """The body of a pipeline's function. `identity`: a query that says which triggers call it; `key_table`:
    what its messages are sealed with."""
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
    """The settings that the function runs under."""
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
    """A query of this package with the function's variables for parameters."""
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
