"""airflow_provider_pgrepl.lake and `pgrepl sql`, on a real server and lake, without a JVM."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.lake import Lake, open_lake
from airflow_provider_pgrepl.replication.app.query import FORMATS, MOST_SHOWN
from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.support.landed import Landed

SCHEMA = """
create schema sales;
create table orders (id int primary key, customer text, total numeric(12,2), paid bytea, tags text[]);
create table sales."Items" (id int primary key, v text);
"""


@pytest.fixture
def landed(dsn: str, pg: Connection, tmp_path: Path) -> Landed:
    """Two tables: some rows applied at a consistent point, another one only received."""
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, ("public.orders", 'sales."Items"'), history=True)
    replicated.begin()
    with pg.cursor() as cursor:
        cursor.execute("insert into orders values (1, 'ann', 1.10, '\\x00ff', '{a,\"b,c\"}')")
        cursor.execute("insert into orders values (2, null, -0.5, null, null)")
        cursor.execute("insert into sales.\"Items\" values (1, 'x')")
        replicated.receive()
        replicated.apply()
        cursor.execute("update orders set total = 7 where id = 2")
        cursor.execute("insert into sales.\"Items\" values (2, 'y')")
    replicated.receive()
    return replicated


@pytest.fixture
def lake(landed: Landed) -> Lake:
    return open_lake(landed.pipeline)


def totals(lake: Lake) -> list[Decimal]:
    return lake.sql("select total from orders order by id")["total"].to_pylist()


def test_lake_is_opened_at_its_consistent_point_and_as_of_any_moment(landed: Landed, lake: Lake) -> None:
    assert lake.tables == ("public.orders", 'sales."Items"')
    assert totals(lake) == [Decimal("1.10"), Decimal("-0.50")]
    newest = lake.at()
    assert newest.lsn == landed.durable_lsn - 1
    assert totals(newest) == [Decimal("1.10"), Decimal("7.00")]
    assert newest.table('sales."Items"').to_arrow()["id"].to_pylist() == [1, 2]
    assert totals(newest.at(lake.lsn, epoch=lake.epoch)) == totals(lake)
    assert totals(newest.at(str(lake.lsn))) == totals(lake)
    with pytest.raises(LakeError, match="may not all be received yet"):
        newest.at(datetime.now(UTC))
    assert newest.table("public.orders").is_verified()
    assert lake.table("public.orders").is_verified()


def test_lake_stays_at_the_point_at_which_it_was_opened(landed: Landed, lake: Lake) -> None:
    assert totals(lake) == [Decimal("1.10"), Decimal("-0.50")]
    landed.apply()
    assert totals(lake) == [Decimal("1.10"), Decimal("-0.50")]
    assert totals(open_lake(landed.pipeline)) == [Decimal("1.10"), Decimal("7.00")]
    assert totals(open_lake(landed.pipeline, lsn=lake.lsn)) == totals(lake)


def test_tables_of_a_query_are_named_as_in_postgresql(lake: Lake) -> None:
    joined = 'select o.customer, i.v from public.orders o join sales."Items" i on i.id = o.id'
    for moment, found in ((lake, ["x"]), (lake.at(), ["x", "y"])):
        assert moment.sql(f"{joined} order by 2")["v"].to_pylist() == found
    with pytest.raises(ConfigError, match=r"'datafusion\.public\.items' not found") as raised:
        lake.sql("select * from items")
    assert 'sales."Items"' in raised.value.hint


@pytest.mark.thorough("test_reading_as_of: history reads back as the applier has it")
def test_history_has_the_versions_up_to_the_moment(lake: Lake) -> None:
    before = lake.table("public.orders").history_to_arrow()
    after = lake.at().table("public.orders").history_to_arrow()
    assert (len(before), len(after)) == (2, 3)


def test_changes_begin_where_the_rows_end(lake: Lake) -> None:
    found = [(change.table, change.op, change.data["id"]) for change in lake.changes()]
    assert found == [("public.orders", "update", 2), ('sales."Items"', "insert", 2)]
    assert [change.data["id"] for change in lake.changes(['sales."Items"'], after=None)] == [1, 2]
    assert list(lake.changes(after=lake.at())) == []

    async def collected() -> list[int]:
        return [change.data["id"] async for change in lake.changes(["public.orders"])]

    assert asyncio.run(collected()) == [2]


def test_changes_need_no_consistent_point(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute("create table t (id int primary key)")
    replicated = Landed(dsn, tmp_path, ("public.t",))
    replicated.begin()
    pg.cursor().execute("insert into t values (1)")
    replicated.receive()
    lake = open_lake(replicated.pipeline.lake_root)
    assert [change.data for change in lake.changes(after=None)] == [{"id": 1}]
    with pytest.raises(LakeError, match="no consistent point yet"):
        lake.changes()


def test_lake_opened_by_root_rejects_pipeline_only_calls_with_hint(landed: Landed) -> None:
    lake = open_lake(landed.pipeline.lake_root)
    assert totals(lake) == [Decimal("1.10"), Decimal("-0.50")]
    for use in (lake.at, lake.table("public.orders").is_verified):
        with pytest.raises(ConfigError, match=r"settings are needed.*opened by its root") as raised:
            use()
        assert "open_lake('shop.json')" in raised.value.hint


NO_QUERIES = (
    "copy orders to '{file}'",
    "/* a */ -- b\n copy orders to '{file}'",
    "create external table t stored as csv location '/etc/passwd'",
    "insert into orders (id) values (9)",
    "with x as (select 9 as id) insert into orders (id) select id from x",
    "explain analyze insert into orders (id) values (9)",
    "delete from orders",
    "drop table orders",
    "select 1; copy orders to '{file}'",
    "",
    "--",
)


def test_statement_that_is_no_query_is_refused(lake: Lake, tmp_path: Path) -> None:
    file = tmp_path / "written.csv"
    for statement in NO_QUERIES:
        with pytest.raises(ConfigError):
            lake.sql(statement.format(file=file))
        assert not file.exists(), statement
    assert lake.sql("(select count(*) as n from orders)")["n"].to_pylist() == [2]


def test_value_that_a_query_fails_at_is_not_shown(lake: Lake) -> None:
    with pytest.raises(LakeError, match=r"the query at .* failed") as raised:
        lake.sql("select cast(customer as int) from orders")
    assert "ann" not in repr(raised.value)
    assert raised.value.__context__ is None


# --- pgrepl sql ---


Command = Callable[..., bytes]


@pytest.fixture
def pgrepl(landed: Landed, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Runs `pgrepl sql` and returns what it prints."""

    def run(*arguments: str, code: int = 0) -> bytes:
        assert main(["sql", str(landed.file), *arguments]) == code
        printed = capsysbinary.readouterr()
        return printed.err if code else printed.out

    return run


QUERY = "select id, customer, total, paid, tags from orders order by id"


def test_command_prints_a_table(pgrepl: Command) -> None:
    text = pgrepl(QUERY).decode()
    assert text == (
        " id | customer | total |  paid  |     tags   \n"
        "----+----------+-------+--------+-------------\n"
        '  1 | ann      |  1.10 | \\x00ff | ["a","b,c"]\n'
        "  2 |          | -0.50 |        |            \n"
        "(2 rows)\n"
    )


def test_command_prints_csv_json_and_parquet(pgrepl: Command, lake: Lake) -> None:
    text = pgrepl(QUERY, "--format", "csv").decode()
    assert list(csv.reader(io.StringIO(text))) == [
        ["id", "customer", "total", "paid", "tags"],
        ["1", "ann", "1.10", "\\x00ff", '["a","b,c"]'],
        ["2", "", "-0.50", "", ""],
    ]
    lines = pgrepl(QUERY, "--format", "json").decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": 1, "customer": "ann", "total": "1.10", "paid": "AP8=", "tags": ["a", "b,c"]},
        {"id": 2, "customer": None, "total": "-0.50", "paid": None, "tags": None},
    ]
    data = pgrepl(QUERY, "--format", "parquet")
    assert pyarrow.parquet.read_table(pa.BufferReader(data)).equals(lake.sql(QUERY))


@pytest.mark.thorough("test_command_prints_csv_json_and_parquet")
def test_command_prints_types_that_only_sql_makes(pgrepl: Command) -> None:
    odd = (
        "select interval '1 hour' as i, null as n, cast('2024-05-01T12:00:00.123456789' as timestamp) as t,"
        " arrow_cast('a', 'Dictionary(Int32, Utf8)') as d, make_array(1.5, null) as l,"
        " cast('12:00' as time) as c, struct(1, 'x') as s, arrow_cast(3, 'UInt64') as u"
    )
    for how in FORMATS:
        printed = pgrepl(odd, "--format", how)
        assert how == "parquet" or b"12:00:00.123456789" in printed, how


@pytest.mark.thorough("test_lake_is_opened_at_its_consistent_point_and_as_of_any_moment")
def test_command_reads_as_of_an_lsn_and_a_moment(landed: Landed, pgrepl: Command) -> None:
    def total(*arguments: str) -> Any:
        done = pgrepl("select total from orders where id = 2", "--format", "json", *arguments)
        return json.loads(done)["total"]

    assert total() == "-0.50"
    assert total("--as-of", str(landed.durable_lsn)) == "7.00"
    assert b"may not all be received yet" in pgrepl("select 1", "--as-of", "2999-01-01T00:00:00Z", code=78)
    assert b"not one of: LSN, timestamp" in pgrepl("select 1", "--as-of", "now", code=78)
    assert b"says no time zone" in pgrepl("select 1", "--as-of", "2024-01-01", code=78)


@pytest.mark.thorough("test_command_prints_a_table")
def test_command_shows_the_first_rows_of_many_and_says_so(pgrepl: Command) -> None:
    many = f"select value as n from generate_series(1, {MOST_SHOWN + 1})"
    text = pgrepl(many).decode()
    assert text.endswith(f"({MOST_SHOWN:,} rows of more: --format csv, json and parquet give all)\n")
    assert len(text.splitlines()) == MOST_SHOWN + 3
    assert len(pgrepl(many, "--format", "csv").splitlines()) == MOST_SHOWN + 2


@pytest.mark.thorough("test_statement_that_is_no_query_is_refused")
def test_command_says_what_is_wrong_with_a_statement(pgrepl: Command) -> None:
    assert b"No field named nope" in pgrepl("select nope from orders", code=78)
    assert b"begins with copy, which is no query" in pgrepl("copy orders to 'x'", code=78)
