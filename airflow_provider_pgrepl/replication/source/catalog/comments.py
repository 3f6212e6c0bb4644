"""Comments of tables and columns: what COMMENT ON has said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from airflow_provider_pgrepl.replication.source.connection import Connection, rows

MOST_CHARACTERS = 4000
"""Of one comment: readers of the lake get all of them whenever they open the table."""

_COMMENTS = """
SELECT d.objoid::bigint, a.attname, d.description
FROM pg_catalog.pg_description d LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND NOT a.attisdropped
WHERE d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objoid = ANY (%(oids)s::oid[])
    AND (d.objsubid = 0 OR a.attname IS NOT NULL)
"""


@dataclass(frozen=True)
class Comments:
    """Of one table, empty where there is none, and of its columns by their names."""

    table: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)


def read_comments(connection: Connection, oids: Iterable[int]) -> dict[int, Comments]:
    """Of those of these tables that have any. Raises psycopg2.Error.

    https://www.postgresql.org/docs/current/catalog-pg-description.html
    """
    found: dict[int, dict[str | None, str]] = {}
    for oid, column, text in rows(connection, _COMMENTS, {"oids": list(oids)}):
        found.setdefault(oid, {})[column] = _shortened(text)
    return {
        oid: Comments(texts.get(None, ""), {name: text for name, text in texts.items() if name is not None})
        for oid, texts in found.items()
    }


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
