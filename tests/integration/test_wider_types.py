"""drift/columns.py against PostgreSQL: which ALTER … TYPE rewrites the table, and which text values stay."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.drift.columns import Widening, find_widening
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from tests.conftest import Connection

WIDENINGS = [
    ("smallint", "integer", "7"),
    ("smallint", "bigint", "7"),
    ("integer", "bigint", "7"),
    ("real", "double precision", "0.1"),
    ("varchar(3)", "varchar(5)", "a"),
    ("varchar(3)", "varchar", "a"),
    ("varchar(3)", "text", "a "),
    ("varchar", "text", "a "),
    ("text", "varchar", "a "),
    ("numeric(5,2)", "numeric(7,2)", "1.5"),
    ("numeric(5,2)", "numeric(7,3)", "1.5"),
    ("numeric(5,2)", "numeric", "1.5"),
    ("timestamp(3)", "timestamp(6)", "2026-01-01 00:00:00.125"),
    ("timestamp", "timestamp(6)", "2026-01-01 00:00:00.125"),
    ("timestamptz(0)", "timestamptz", "2026-01-01 00:00:00Z"),
    ("time(2)", "time(4)", "13:45:00.25"),
    ("timetz(2)", "timetz", "13:45:00.25+02"),
    ("varbit(3)", "varbit(9)", "101"),
    ("varbit(3)", "varbit", "101"),
    ("integer[]", "bigint[]", "{7,NULL}"),
    ("varchar(3)[]", "varchar(5)[]", '{a,"b "}'),
    ("varchar(3)[]", "varchar[]", '{a,"b "}'),
    ("varchar(3)[]", "text[]", '{a,"b "}'),
    ("numeric(5,2)[]", "numeric(7,2)[]", "{1.5}"),
]
DOMAINS = (
    "create domain note as text",
    "create domain notes as note",
    "create domain short as varchar(3)",
    "create domain shorter as short",
    "create domain checked as text check (value <> '')",
    "create domain sums as numeric(5,2)",
    "create domain lists as integer[]",
    "create type mood as enum ('sad')",
    "create domain moods as mood",
    "create type pair as (a int, b text)",
    "create domain pairs as pair",
)
OF_DOMAINS = [
    ("text", "note", "a "),
    ("note", "text", "a "),
    ("varchar(3)", "note", "a "),
    ("short", "text", "a "),
    ("note", "notes", "a "),
    ("checked", "text", "a "),
    ("sums", "numeric", "1.5"),
    ("lists", "integer[]", "{7,NULL}"),
    ("moods", "mood", "sad"),
    ("pairs", "pair", "(1,a)"),
]
REWRITTEN = [("short", "varchar(3)"), ("short", "shorter"), ("text", "checked"), ("short", "varchar(5)")]
"""For a limit, or for constraints, PostgreSQL rewrites the table, as for an expression (USING)."""
OTHERS = [
    ("integer", "smallint"),
    ("varchar(5)", "varchar(3)"),
    ("char(3)", "text"),
    ("numeric(5,2)", "numeric(5,3)"),
    ("timestamp", "timestamptz"),
    ("real[]", "double precision[]"),
    ("numeric(5,2)[]", "numeric(7,3)[]"),
    ("sums", "numeric(7,3)"),
    ("short", "varchar(2)"),
    ("short[]", "varchar(3)[]"),
]


def test_a_wider_type_is_known_as_one_that_rewrites_or_keeps_texts(pg: Connection) -> None:
    _create(pg, DOMAINS)
    for before, after, value in (*WIDENINGS, *OF_DOMAINS):
        widening, rewritten, kept = _altered(pg, before, after, value)
        assert widening == Widening(rewritten, kept), (before, after)


def test_a_domain_for_which_the_table_is_rewritten_is_never_said_to_need_it(pg: Connection) -> None:
    """A rewrite therefore stops the table: the catalog does not distinguish it from that of an expression."""
    _create(pg, DOMAINS)
    for before, after in REWRITTEN:
        assert _altered(pg, before, after, "a ") == (Widening(False, True), True, True), (before, after)


def test_another_type_is_no_wider_one(pg: Connection) -> None:
    _create(pg, DOMAINS)
    for before, after in OTHERS:
        with pg.cursor() as cursor:
            cursor.execute("drop table if exists public.t")
            cursor.execute(f"create table public.t (a {before}, b {after})")
        assert find_widening(*_table(pg).columns) is None, (before, after)


def _create(pg: Connection, statements: tuple[str, ...]) -> None:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _altered(pg: Connection, before: str, after: str, value: str) -> tuple[Widening | None, bool, bool]:
    """Return the widening that drift finds, True if the table was rewritten, and True if the text stayed."""
    with pg.cursor() as cursor:
        cursor.execute("drop table if exists public.t")
        cursor.execute(f"create table public.t (a {before})")
        cursor.execute("insert into public.t values (%s)", (value,))
        was, text = _table(pg), _text(cursor)
        cursor.execute(f"alter table public.t alter a type {after}")
        now, text_now = _table(pg), _text(cursor)
    widening = find_widening(was.columns[0], now.columns[0])
    return widening, was.relfilenode != now.relfilenode, text == text_now


def _table(pg: Connection) -> Relation:
    relation = find_relation(pg, TableName("public", "t"))
    assert relation is not None
    return relation


def _text(cursor: object) -> str:
    cursor.execute("select a::text from public.t")  # type: ignore[attr-defined]
    return str(cursor.fetchone()[0])  # type: ignore[attr-defined]
