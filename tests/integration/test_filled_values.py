"""events/unchanged_toast.py with a real server: readers with values filled in need no earlier row."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import GapError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.events.changes import Change, TypedChanges
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.conftest import closing_connection
from tests.support.landed import Landed
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

LARGE = "select string_agg(md5(g::text || {}), '') from generate_series(1, 100) g"
"""A text that is stored outside of its row."""


@pytest.fixture(autouse=True)
def tables(dsn: str) -> None:
    execute(
        dsn,
        # When a table is analyzed its definition is sent again, and no value from before is filled in.
        "create table t(id int, v text, doc text, more jsonb, part text, primary key (id, part))"
        " with (autovacuum_enabled = false)",
        "alter table t alter doc set storage external, alter more set storage external",
        "create table other(id int primary key, doc text) with (autovacuum_enabled = false)",
    )


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    pipeline = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def read(received: Received, unchanged: Any = "fill", after: Any = None) -> list[Change]:
    reader = OrderedReader(received.pipeline, after=after, make=TypedChanges, unchanged=unchanged)
    return [change for changes in reader.read() for change in changes]


def random_statements(chance: random.Random) -> list[str]:
    def large() -> str:
        return f"({LARGE.format(chance.randrange(1 << 30))})"

    def key() -> str:
        return f"id = {chance.randrange(12)} and part = '{chance.choice('ab')}'"

    found = []
    for _ in range(chance.randrange(1, 8)):
        value = chance.choice([large(), large(), "'small'", "null"])
        found.append(
            chance.choice(
                [
                    f"insert into t values ({chance.randrange(12)}, 'v', {value}, to_jsonb({large()}), 'a')"
                    " on conflict do nothing",
                    f"insert into t values ({chance.randrange(12)}, 'v', {large()}, null, 'b')"
                    " on conflict do nothing",
                    f"update t set v = v || 'x' where {key()}",
                    "update t set v = 'all'",
                    f"update t set doc = {value} where {key()}",
                    f"update t set more = to_jsonb({large()}) where {key()}",
                    f"update t o set id = id + 100 where {key()} and not exists"
                    " (select from t where t.id = o.id + 100 and t.part = o.part)",
                    "update t set id = id - 100 where id >= 100 and not exists"
                    " (select from t o where o.id = t.id - 100 and o.part = t.part)",
                    f"delete from t where {key()}",
                    "truncate t" if chance.random() < 0.1 else "select",
                ]
            )
        )
    return found


def rows_after(changes: list[Change]) -> dict[tuple[int, str], Any]:
    """Return the rows by key, with the values that a change did not send taken from the row before."""
    rows: dict[tuple[int, str], Any] = {}
    for change in changes:
        if change.op == "truncate":
            rows.clear()
        before = None
        for side in (change.old, change.data):
            if side is not None and (side is change.old or change.op != "insert"):
                before = rows.pop((side["id"], side["part"]), before)
        if change.data is not None:
            row = change.data | {name: before[name] for name in change.unchanged}
            rows[row["id"], row["part"]] = row
    return rows


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_reader_that_keeps_no_value_has_every_row_as_the_source_has_it(received, dsn, seed):
    chance = random.Random(seed)
    with (
        received.receiving() as receiver,
        closing_connection(dsn) as connection,
        connection.cursor() as cursor,
    ):
        for number in range(40):
            for statement in random_statements(chance):
                cursor.execute(statement)
            connection.commit()
            if number % 8 == 7:
                wait_until_seen(receiver, received.source_lsn())
    assert len(received.changelog_files()) > 3
    assert any(change.unchanged for change in read(received, "mark"))
    changes = read(received)
    # A server whose other databases are busy may drop what a session caches, and send a definition again. The
    # receiver then forgets the table's values, and a value that was not sent is named instead of filled in.
    if len(received.changelog_rows("R")) == 1:
        assert not any(change.unchanged for change in changes)
    rows = rows_after(changes)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, v, doc, more::text, part from t")
        names = ("id", "v", "doc", "more", "part")
        expected = {(row[0], row[4]): dict(zip(names, row, strict=True)) for row in cursor.fetchall()}
    assert rows == expected
    # A reader that begins anywhere gets the same values: earlier changes are read.
    for after in chance.sample([one.position for one in changes], 5):
        assert read(received, after=after) == [one for one in changes if one.position > after]


@pytest.mark.thorough(
    "test_value_changed_while_table_unpublished_is_listed_as_unchanged; test_lake_lookup_after_ddl"
)
def test_first_update_after_ddl_lists_toast_value_as_unchanged(received, dsn):
    for ddl in (
        "alter table t alter doc type text using upper(doc)",
        "alter table t add one_more int default 4",
        "alter table t rename more to others",
    ):
        value = LARGE.format(1)
        execute(dsn, f"insert into t(id, v, doc, part) select 1, 'v', ({value}), 'a'", "update t set v = 'w'")
        execute(dsn, ddl, "update t set v = 'x'", "update t set doc = doc || 'y'", "update t set v = 'z'")
        received.receive()
        found = [change for change in read(received) if change.op == "update"][-4:]
        assert [change.unchanged for change in found] == [(), ("doc",), (), ()], ddl
        execute(dsn, "truncate t")


def test_value_changed_while_table_unpublished_is_listed_as_unchanged(received, dsn):
    execute(dsn, f"insert into t select 1, 'v', ({LARGE.format(1)}), null, 'a'", "update t set v = 'w'")
    name = received.pipeline.publication
    execute(
        dsn,
        f"alter publication {name} drop table t",
        f"update t set doc = ({LARGE.format(2)})",
        f"alter publication {name} add table t",
        "update t set v = 'x'",
    )
    received.receive()
    assert [change.unchanged for change in read(received)] == [(), (), ("doc",)]


def test_unchanged_value_is_not_filled_in_across_skipped_transaction(received, dsn):
    execute(dsn, f"insert into t select 1, 'v', ({LARGE.format(1)}), null, 'a'")
    received.receive()
    lsn = LSN(received.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select 't'::regclass::oid::int")
        (oid,) = cursor.fetchone()
    record_gap(received.pipeline.lake_root, Gap(begun, frozenset({oid}), "too large"), None)
    execute(dsn, "update t set v = 'w'")
    received.receive()
    with pytest.raises(GapError):
        read(received)
    (updated,) = read(received, after=f"1:{lsn}:end")
    assert updated.unchanged == ("doc",)


def test_every_format_has_it(received, dsn):
    execute(dsn, f"insert into other select 1, ({LARGE.format(1)})", "update other set id = 2")
    received.receive()
    for given in (
        {"target": "rabbitmq"},
        {"target": "kafka"},
        {"target": "kafka", "format": "debezium", "database": "d"},
        {"target": "kafka", "format": "avro"},
        {"target": "nats", "database": "d"},
    ):
        settings = parse_publisher("shop", "events", given)
        found = {}
        for unchanged in ("mark", settings.unchanged):
            reader = OrderedReader(received.pipeline, make=converter_factory(settings), unchanged=unchanged)
            events = [event for events in reader.read() for event in events]
            found[unchanged] = len(_body(events[-1]))
        assert found["fill"] > 3_200 > found["mark"], given


def _body(event: Any) -> bytes:
    body: bytes = event.body or event.unstamped.rows
    return body


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 20_000])
@pytest.mark.thorough(
    "the same test; a budget of 1 in test_lake_lookup_after_ddl_returns_no_outdated_value", "1-1"
)
def test_unchanged_values_beyond_memory_budget_are_read_from_lake(dsn, tmp_path, seed, budget):
    """The lake may be before the changes, in the middle of them, or beyond them."""
    landed = Landed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    landed.begin()
    landed.apply()
    chance = random.Random(seed)
    with (
        landed.receiving() as receiver,
        closing_connection(dsn) as connection,
        connection.cursor() as cursor,
    ):
        for number in range(60):
            for statement in random_statements(chance):
                cursor.execute(statement)
            connection.commit()
            if number % 10 == 9:
                wait_until_seen(receiver, landed.source_lsn())
            if number % 20 == 9:
                assert [result.error for result in landed.apply()] == [None]
    reader = OrderedReader(landed.pipeline, make=TypedChanges, unchanged="look_up")
    reader._values._budget = budget
    found = [change for changes in reader.read() for change in changes]
    filled = 0
    rows: dict[Any, Any] = {}
    for change, sent in zip(found, read(landed, "mark"), strict=True):
        before = None
        if change.op == "truncate":
            rows.clear()
        elif change.op != "insert":
            of = sent.old or sent.data
            before = rows.pop((of["id"], of["part"]))
        if sent.data is None:
            continue
        whole = {**sent.data, **{name: before[name] for name in sent.unchanged}}
        assert change.data == {name: value for name, value in whole.items() if name not in change.unchanged}
        filled += len(set(sent.unchanged) - set(change.unchanged))
        rows[whole["id"], whole["part"]] = whole
    # Values of a row that changed just before are not filled in: the budget does not hold that change.
    assert filled > 5


@pytest.mark.thorough("test_unchanged_values_beyond_memory_budget_are_read_from_lake")
def test_a_whole_table_from_before_the_changelog_is_looked_up(dsn, tmp_path):
    execute(dsn, "alter table t add texts text[]", "alter table t alter texts set storage external")
    landed = Landed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    landed.begin()
    value = f"({LARGE.format('g.g')})".replace("generate_series(1, 100) g", "generate_series(1, 100) h")
    value = value.replace("g::text ||", "h::text ||").replace("g.g", "g")
    execute(
        dsn,
        f"insert into t select g, 'v', {value}, to_jsonb({value}), 'a', array[{value}, null, g::text]"
        " from generate_series(1, 3000) g",
    )
    landed.receive()
    assert [result.error for result in landed.apply()] == [None]
    after = EventPosition.after_transaction(Epoch(1), LSN(landed.durable_lsn - 1))
    with landed.receiving() as receiver:
        # The values of the change that follows the repeated definition are not looked up.
        execute(dsn, "update t set v = 'w' where id = 1")
        wait_until_seen(receiver, landed.source_lsn())
        execute(dsn, "update t set v = 'x'", "update t set id = -id where id < 1000")
        wait_until_seen(receiver, landed.source_lsn())
    assert [result.error for result in landed.apply()] == [None]
    reader = OrderedReader(landed.pipeline, after=after, make=TypedChanges, unchanged="look_up")
    # The budget holds less than half of the table.
    reader._values._budget = 12 << 20
    changes = [change for changes in reader.read() for change in changes]
    assert len(changes) == 4_000
    assert {change.unchanged for change in changes[1:]} == {()}
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select abs(id), doc, more::text, texts from t")
        expected = {row[0]: row[1:] for row in cursor.fetchall()}
    for change in changes[1:]:
        row = change.data
        assert (row["doc"], row["more"], row["texts"]) == expected[abs(row["id"])]


@pytest.mark.parametrize(
    "is_applied",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.thorough(
                "test_unchanged_values_beyond_memory_budget_are_read_from_lake, wherever that is"
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "ddl",
    [
        ["alter table t alter doc type text using upper(doc)"],
        ["alter table t rename doc to was_doc", "alter table t rename others to doc"],
        [
            "alter table t drop doc",
            "alter table t add doc text",
            "alter table t alter doc set storage external",
        ],
        ["alter table t add one_more text default 'x'"],
        ["alter table t drop constraint t_pkey, add primary key (part, id)"],
        ["alter table t drop constraint t_pkey, add primary key (id)"],
        ["alter table t rename to renamed", "alter table renamed rename to t"],
        ["alter table t alter id type bigint"],
        ["alter table t alter doc type varchar(9000)"],
        ["begin; update t set doc = upper(doc); alter table t add one_more int; commit"],
    ],
)
@pytest.mark.thorough(
    "the same test, of a column that takes the name of another",
    "ddl0-True",
    "ddl2-True",
    "ddl3-True",
    "ddl4-True",
    "ddl5-True",
    "ddl6-True",
    "ddl7-True",
    "ddl8-True",
    "ddl9-True",
)
def test_lake_lookup_after_ddl_returns_no_outdated_value(dsn, tmp_path, ddl, is_applied):
    execute(dsn, "alter table t rename more to others", "alter table t alter others type text")
    landed = Landed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    landed.begin()
    landed.apply()

    def say(receiver: Any, *statements: str) -> None:
        execute(dsn, *statements)
        wait_until_seen(receiver, landed.source_lsn())
        if is_applied:
            landed.apply()

    value = LARGE.format(1)
    with landed.receiving() as receiver:
        say(
            receiver,
            f"insert into t select g, 'v', ({value}) || g, ({value}), 'a' from generate_series(1, 3) g",
        )
        say(receiver, *ddl, "update t set v = 'w' where id = 1")
        say(receiver, "update t set v = 'x'")
        say(receiver, f"update t set doc = ({value}) || 'new' where id = 2", "update t set v = 'y'")
        say(receiver, "update t set v = 'z'")
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select to_jsonb(t) from t")
        expected = {row[0]["id"]: row[0] for row in cursor.fetchall()}
    reader = OrderedReader(landed.pipeline, make=TypedChanges, unchanged="look_up")
    reader._values._budget = 1
    changes = [change for some in reader.read() for change in some]
    for change in changes[-3:]:
        assert change.data is not None
        assert {**expected[change.data["id"]], **change.data} == expected[change.data["id"]]
