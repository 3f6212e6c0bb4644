"""The rate of converting text values to Arrow columns, by type. psycopg's loaders are the peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import psycopg
import psycopg2.extensions
import pyarrow as pa
from psycopg.pq import Format
from psycopg.types.composite import CompositeInfo, register_composite

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_columns
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source

_VALUES = 500_000
_PEER_VALUES = 100_000
_REPEAT = 3
_LIMIT = 1.0
_EXPRESSIONS = {
    "integer": "g",
    "bigint": "g::bigint * 1000000007",
    "double precision": "g / 7.0",
    "numeric(12,2)": "(g %% 1000000) / 100.0",
    "numeric": "g / 1000.0",
    "boolean": "g %% 2 = 0",
    "text": "'value of the row ' || g",
    "bytea": "decode(md5(g::text), 'hex')",
    "uuid": "md5(g::text)::uuid",
    "jsonb": "jsonb_build_object('id', g, 'name', 'row ' || g)",
    "date": "date '2000-01-01' + g %% 20000",
    "timestamp": "timestamp '2024-01-01' + g * interval '1.234567 second'",
    "timestamptz": "timestamptz '2024-01-01' + g * interval '1.234567 second'",
    "money": "g::money",
    "integer[]": "array[g, g + 1, null, g + 3]",
    "text[]": "array['a' || g, 'two words', null]",
    "numeric(12,2)[]": "array[g / 100.0, 1]",
    "int4range": "int4range(g, g + 10)",
    "tstzrange": "tstzrange(timestamptz '2024-01-01' + g * interval '1 second', null)",
    "public.point_in_shop": "(g, 'shelf ' || g)::public.point_in_shop",
}
_TABLE = TableName("public", "typed")


def run(folder: Path, scale: float) -> Figure:
    """Measure the conversion of whole columns, as in a batch. The type with the lowest ratio counts."""
    rows = int(_VALUES * scale)
    rates: dict[str, list[float]] = {}
    with running_source() as source:
        source.execute("create type public.point_in_shop as (number integer, place text)")
        columns = ", ".join(f"c{number} {name}" for number, name in enumerate(_EXPRESSIONS))
        values = ", ".join(_EXPRESSIONS.values())
        source.execute(f"create table public.typed ({columns})")
        source.execute(f"insert into public.typed select {values} from generate_series(1, %s) g", rows)
        with closing(connect(source.dsn, "benchmark")) as connection, psycopg.connect(source.dsn) as peer:
            info = CompositeInfo.fetch(peer, "public.point_in_shop")
            assert info is not None
            register_composite(info, peer)
            relation = find_relation(connection, _TABLE)
            assert relation is not None
            pipeline = Pipeline(name="values", lake=str(folder), tables=(str(_TABLE),))
            for name, typed in zip(
                _EXPRESSIONS, typed_columns(relation, pipeline.options(relation.table)), strict=True
            ):
                rates[name] = _rates(typed, _texts(connection, typed), peer)
    ratios = {name: ours / theirs for name, (ours, theirs) in rates.items()}
    slowest = min(ratios, key=lambda name: ratios[name])
    ours, theirs = rates[slowest]
    return Figure(
        f"typing: {len(rates)} families, {rows:,} values each; the one least ahead, {slowest}",
        f"{thousands(ours)} values/s",
        f"psycopg's loaders: {thousands(theirs)} values/s",
        f"{ratios[slowest]:.1f}",
        f"≥ {_LIMIT:g} × peer",
        ratios[slowest] >= _LIMIT,
        {name: [round(rate) for rate in found] for name, found in rates.items()},
    )


def _texts(connection: Connection, typed: TypedColumn) -> list[str | None]:
    """Return the texts of the type's output function. A cast to text does not always return the same."""
    raw = psycopg2.extensions.new_type((typed.column.type_oid,), "RAW", lambda value, _: value)
    with connection.cursor() as cursor:
        psycopg2.extensions.register_type(raw, cursor)
        cursor.execute(f"select {typed.name} from public.typed")
        return [text for (text,) in cursor.fetchall()]


def _rates(typed: TypedColumn, texts: list[str | None], peer: psycopg.Connection[object]) -> list[float]:
    """Return the values per second of this package, and of psycopg for the same type."""
    array = pa.array(texts, pa.large_string())
    some = [None if text is None else text.encode() for text in texts[:_PEER_VALUES]]
    loader = psycopg.adapt.Transformer.from_context(peer).get_loader(typed.column.type_oid, Format.TEXT)
    # psycopg has no loader for money: it returns the text, which a program must convert.
    peers_load = _money if typed.column.type_name == "money" else loader.load

    def load() -> None:
        for text in some:
            if text is not None:
                peers_load(text)

    return [
        len(texts) / _seconds(lambda: typed.parse(array)),
        len(some) / _seconds(load),
    ]


def _money(text: bytes) -> Decimal:
    return Decimal(text.decode().replace("$", "").replace(",", ""))


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEAT):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
