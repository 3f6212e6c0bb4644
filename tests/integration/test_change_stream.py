"""events/stream.py: every committed change once and in order, typed, from any place on; or why not."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    ConfigError,
    GapError,
    LakeUnavailableError,
    NoChangelogError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.changelog import maintenance
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.changelog.writer import begin_epoch
from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.events.stream import stream
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.values import TypedColumn
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

LARGE = "select string_agg(md5(g::text || {}), '') from generate_series(1, 2000) g"
"""A text that is stored outside its row, and not compressed to nothing."""


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(
        dsn,
        "create table t"
        "(id int primary key, v text, price numeric(10,2), at timestamptz, doc text, raw bytea)",
        "alter table t alter doc set storage external",
        "create table whole(id int primary key, v text, doc text)",
        "alter table whole replica identity full",
        "alter table whole alter doc set storage external",
    )
    pipeline = Received(dsn, tmp_path, ("public.t", "public.whole"), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def changes(received: Received, *tables: str, after: Any = None) -> list[Change]:
    reader = ChangeReader(received.pipeline, tables or None, after=after)
    return [change for batch in reader.read() for change in batch]


def test_changes_are_typed_and_say_what_was_before(received, dsn):
    execute(dsn, "insert into t values (1, 'a', 1.50, '2024-05-01 12:00:00+02', null, '\\x00ff')")
    execute(dsn, "update t set v = null where id = 1", "update t set id = 2 where id = 1")
    execute(dsn, "insert into whole values (1, 'a', null)", "update whole set v = 'b'", "delete from whole")
    execute(dsn, "delete from t", "truncate t, whole")
    received.receive()
    found = changes(received)
    row = {
        "id": 1,
        "v": "a",
        "price": Decimal("1.50"),
        "at": datetime(2024, 5, 1, 10, tzinfo=UTC),
        "doc": None,
        "raw": b"\x00\xff",
    }
    assert [(one.table, one.op, one.data, one.old) for one in found] == [
        ("public.t", "insert", row, None),
        ("public.t", "update", {**row, "v": None}, None),
        ("public.t", "update", {**row, "v": None, "id": 2}, {"id": 1}),
        ("public.whole", "insert", {"id": 1, "v": "a", "doc": None}, None),
        ("public.whole", "update", {"id": 1, "v": "b", "doc": None}, {"id": 1, "v": "a", "doc": None}),
        ("public.whole", "delete", None, {"id": 1, "v": "b", "doc": None}),
        ("public.t", "delete", None, {"id": 2}),
        ("public.t", "truncate", None, None),
        ("public.whole", "truncate", None, None),
    ]
    assert [one.position for one in found] == sorted({one.position for one in found})
    assert all(one.xid > 0 and abs(one.commit_ts - datetime.now(UTC)) < timedelta(hours=1) for one in found)
    assert [one.op for one in changes(received, "public.whole")] == ["insert", "update", "delete", "truncate"]


def test_a_large_value_that_an_update_left_is_named_or_taken_from_the_old_row(received, dsn):
    for table, columns in (("t", "id, v, doc"), ("whole", "id, v, doc")):
        execute(dsn, f"insert into {table}({columns}) select 1, 'a', ({LARGE.format(1)})")
        execute(dsn, f"update {table} set v = 'b'")
    received.receive()
    inserted, updated, whole_inserted, whole_updated = changes(received)
    assert len(inserted.data["doc"]) == 64_000
    assert (updated.unchanged, "doc" in updated.data, updated.data["v"]) == (("doc",), False, "b")
    assert (whole_updated.unchanged, whole_updated.data["doc"]) == ((), whole_inserted.data["doc"])
    execute(dsn, "update t set doc = 'short'")
    received.receive()
    assert changes(received, "public.t")[-1].data["doc"] == "short"


@pytest.mark.thorough(
    "any change in test_a_transaction_of_many_files_comes_in_order; times where changes are gone"
)
def test_any_change_can_be_gone_on_after(received, dsn):
    for number in range(4):
        execute(dsn, *(f"insert into t(id) values ({number * 10 + n})" for n in range(3)))
        received.receive()
    execute(dsn, "begin; insert into t(id) values (100); insert into t(id) values (101); commit")
    received.receive()
    found = changes(received)
    assert len(found) == 14
    for number, change in enumerate(found):
        assert EventPosition.parse(change.id) == change.position
        assert changes(received, after=change.id) == found[number + 1 :]
        later = [one for one in found if one.commit_lsn > change.commit_lsn]
        assert (
            changes(received, after=change.commit_lsn)
            == changes(received, after=str(change.commit_lsn))
            == later
        )
    assert changes(received, after=found[5].commit_ts) == [
        one for one in found if one.commit_ts > found[5].commit_ts
    ]
    assert changes(received, after=datetime.now(UTC)) == []
    assert [one.data["id"] for one in found[-2:]] == [100, 101]
    assert found[-1].commit_lsn == found[-2].commit_lsn


def test_a_transaction_of_many_files_comes_in_order(dsn, tmp_path):
    execute(dsn, "create table a(id int primary key, v text)", "create table b(id int primary key, v text)")
    received = Received(dsn, tmp_path, ("public.a", "public.b"), part_bytes=1 << 20)
    received.begin()
    execute(
        dsn,
        "do $$ begin for n in 1..300 loop"
        " insert into a select n * 1000 + g, repeat('x', 1000) from generate_series(1, 50) g;"
        " insert into b select n * 1000 + g, repeat('y', 1000) from generate_series(1, 50) g;"
        " end loop; end $$",
    )
    received.receive()
    assert len(received.changelog_files()) > 3, "the transaction is in several files"
    found = changes(received)
    expected = [
        (f"public.{table}", n * 1000 + g) for n in range(1, 301) for table in "ab" for g in range(1, 51)
    ]
    assert [(one.table, one.data["id"]) for one in found] == expected
    middle = len(found) // 2
    assert changes(received, after=found[middle].id) == found[middle + 1 :]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_applied_changes_reproduce_source_tables_across_reader_restarts(received, dsn, seed):
    chance = random.Random(seed)
    reader = ChangeReader(received.pipeline)
    tables: dict[str, dict[int, dict[str, Any]]] = {"public.t": {}, "public.whole": {}}
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        for _ in range(6):
            for _ in range(chance.randint(1, 12)):
                cursor.execute("begin")
                for _ in range(chance.randint(1, 6)):
                    cursor.execute(_statement(chance))
                cursor.execute(chance.choice(["commit", "commit", "commit", "rollback"]))
            received.receive()
            for batch in reader.read():
                for change in batch:
                    _apply(tables[change.table], change)
            reader = ChangeReader(received.pipeline, after=str(reader.position))
            for table, rows in tables.items():
                assert rows == _rows(cursor, table)


def _statement(chance: random.Random) -> str:
    table, key = chance.choice(["t", "whole"]), chance.randint(1, 20)
    doc = f"({LARGE.format(chance.randint(1, 9))})" if chance.random() < 0.2 else "'short'"
    return chance.choice(
        [
            f"insert into {table}(id, v, doc) values ({key}, 'i{chance.random()}', {doc})"
            " on conflict do nothing",
            f"update {table} set v = 'u{chance.random()}' where id <= {key}",
            f"update {table} set doc = {doc} where id = {key}",
            f"update {table} set id = -id where id = {key}",
            f"delete from {table} where id = {key}",
            f"delete from {table} where id < 0",
            "truncate t" if chance.random() < 0.1 else "select",
        ]
    )


def _apply(rows: dict[int, dict[str, Any]], change: Change) -> None:
    if change.op == "truncate":
        rows.clear()
        return
    before = None
    if change.op != "insert":
        before = rows.pop((change.old or change.data)["id"])
    if change.data is not None:
        kept = {name: before[name] for name in change.unchanged}
        assert change.data["id"] not in rows
        rows[change.data["id"]] = {**change.data, **kept}


def _rows(cursor: Any, table: str) -> dict[int, dict[str, Any]]:
    cursor.execute(f"select * from {table}")
    names = [column.name for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return {
        row["id"]: {name: bytes(v) if isinstance(v, memoryview) else v for name, v in row.items()}
        for row in rows
    }


def test_a_table_has_the_columns_of_then_and_the_name_of_when_it_was_received(received, dsn):
    execute(dsn, "insert into whole values (1, 'a')", "alter table whole add n int default 7")
    execute(dsn, "update whole set v = 'b'", "alter table whole drop doc", "alter table whole rename v to w")
    execute(dsn, "update whole set w = 'c'")
    received.receive()
    execute(dsn, "alter table whole rename to renamed", "update renamed set w = 'd'")
    received.receive()
    assert [(one.table, one.data) for one in changes(received)] == [
        ("public.whole", {"id": 1, "v": "a", "doc": None}),
        ("public.whole", {"id": 1, "v": "b", "doc": None, "n": 7}),
        ("public.whole", {"id": 1, "w": "c", "n": 7}),
        ("public.renamed", {"id": 1, "w": "d", "n": 7}),
    ]
    assert [one.data["id"] for one in changes(received, "public.whole")] == [1, 1, 1]
    assert [one.data["w"] for one in changes(received, "public.renamed")] == ["d"]
    assert len(changes(received, "public.renamed", "public.whole")) == 4
    execute(dsn, "insert into renamed values (2)", "alter table renamed rename to again")
    received.receive()
    assert changes(received, "public.renamed")[-1].data["id"] == 2, "a rename that the receiver saw late"
    assert changes(received, "public.again") == changes(received, "public.renamed")[-1:]


def test_one_that_follows_gets_what_comes(received, dsn):
    async def first(count: int) -> list[Any]:
        found = []
        async for change in stream(received.pipeline.lake_root, ["public.t"], poll_s=0.02):
            found.append(change.data["id"])
            if len(found) == count:
                return found
            if len(found) % 2 == 0:
                await asyncio.to_thread(
                    execute, dsn, f"insert into t(id) values ({len(found) + 1}), ({len(found) + 2})"
                )
        raise AssertionError("it ended")

    execute(dsn, "insert into t(id) values (1), (2)")
    received.receive()
    with received.receiving():
        assert asyncio.run(asyncio.wait_for(first(6), 60)) == [1, 2, 3, 4, 5, 6]

    async def those_there() -> list[Any]:
        return [change.data["id"] async for change in stream(received.pipeline, follow=False)]

    assert asyncio.run(those_there()) == [1, 2, 3, 4, 5, 6]


def test_change_reader_rejects_missing_changelog_unknown_table_and_bad_position(received, dsn, tmp_path):
    with pytest.raises(NoChangelogError):
        ChangeReader(str(tmp_path / "nowhere"))
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    for tables, says in ((["public.tt"], r"never had public\.tt"), (["t"], "tables: ")):
        with pytest.raises(ConfigError, match=says):
            ChangeReader(received.pipeline, tables)
    for after, says in (
        ("yesterday", "neither the id of a change nor an LSN"),
        ("1:0/0", "not the id"),
        ("x:0/0:1", "not the id"),
        ("2:0/16B3748:1", "is of epoch 2"),
        ("1:FFFF/0:1", "up to which the changelog holds everything"),
        ("1:0/1:99999999999999999999", "not the id"),
        (1.5, "a float is no place"),
        (datetime(2024, 5, 1), "no time zone"),  # noqa: DTZ001 - this is the mistake
    ):
        with pytest.raises(ConfigError, match=says):
            ChangeReader(received.pipeline, after=after)


def test_an_lsn_that_the_changelog_has_yet_to_reach_is_warned_of(received, dsn, caplog):
    execute(dsn, "insert into t values (1)")
    received.receive()
    assert changes(received, after=1 << 62) == []
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "up to which the changelog holds everything: nothing is read until it has come there" in warning


def test_changes_that_are_gone_are_not_passed_over(received, dsn):
    for number in range(3):
        execute(dsn, f"insert into t(id) values ({number})")
        received.receive()
    first, second, third = changes(received)
    reader = ChangeReader(received.pipeline)
    list(reader.read())
    drop_up_to(received, second.commit_lsn)
    for after, says in (
        (first.id, "changes up to"),
        (first.commit_lsn, "changes up to"),
        (second.id, "if that was its last change nothing is missing"),
        (first.commit_ts - timedelta(hours=1), "no transaction is kept that committed at or before"),
    ):
        with pytest.raises(ChangelogError) as caught:
            changes(received, after=after)
        assert says in str(caught.value)
    assert changes(received) == changes(received, after=second.commit_lsn) == [third]
    assert [change for batch in reader.read() for change in batch] == [], "one that waited goes on"


def drop_up_to(received: Received, lsn: LSN) -> None:
    """Remove the changelog files that end at `lsn` or before it, as retention does."""
    table = open_changelog(received.changelog)
    files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    maintenance._remove(table, [file for file in files if file["max.commit_lsn"] <= lsn])


def test_a_new_epoch_stops_it_when_all_of_the_old_one_is_read(received, dsn):
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    reader = ChangeReader(received.pipeline)
    begin_epoch(received.changelog, replace(read_epoch(received.changelog), epoch=Epoch(2)))
    found: list[Change] = []
    with pytest.raises(ChangelogError, match="epoch 1 is over, the changelog is in epoch 2"):
        for batch in reader.read():
            found.extend(batch)
    assert [change.data["id"] for change in found] == [1]
    assert changes(received) == []


@pytest.mark.thorough("test_a_gap_stops_only_who_wants_a_table_that_it_may_concern")
def test_a_skipped_transaction_stops_it_before_that(received, dsn):
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    lsn = LSN(received.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    record_gap(received.pipeline.lake_root, Gap(begun, frozenset({1}), "too large"), None)
    reader, found = ChangeReader(received.pipeline), []
    with pytest.raises(GapError, match=f"the transaction at {lsn}") as caught:
        for batch in reader.read():
            found.extend(batch)
    assert [change.data["id"] for change in found] == [1]
    assert f"after='1:{lsn}:end'" in caught.value.hint
    with pytest.raises(GapError):
        list(reader.read())
    assert changes(received, after=f"1:{lsn}:end") == []


def test_a_value_that_cannot_be_held_stops_it_before_its_change(received, dsn):
    execute(dsn, *(f"insert into t(id, at) values ({n}, now())" for n in (1, 2)))
    execute(dsn, "insert into t(id, at) values (3, 'infinity')", "insert into whole values (1)")
    execute(dsn, "insert into t(id) values (4)")
    received.receive()
    reader, found = ChangeReader(received.pipeline), []
    with pytest.raises(ValueRangeError) as caught:
        for batch in reader.read():
            found.extend(batch)
    assert [change.data["id"] for change in found] == [1, 2]
    (place,) = re.findall(r"after='(.*)'", caught.value.hint)
    assert [one.data["id"] for one in changes(received, after=place)] == [1, 4]
    assert len(changes(received, "public.whole")) == 1, "what nobody asked for stops nothing"


def test_a_type_is_the_same_whether_the_catalog_was_asked_in_time_or_not(received, dsn):
    execute(dsn, "create type mood as enum ('sad')", "create domain code as int")
    execute(dsn, "alter table whole add tags text[], add m mood, add c code")
    execute(dsn, "insert into whole(id, tags, m, c) values (1, '{a,b}', 'sad', 7)")
    received.receive()
    execute(
        dsn, "insert into whole(id, tags, m, c) values (2, '{a,b}', 'sad', 7)", "alter table whole drop v"
    )
    received.receive()
    first, second = changes(received, "public.whole")
    assert first.data == {"id": 1, "v": None, "doc": None, "tags": ["a", "b"], "m": "sad", "c": 7}
    assert second.data == {**first.data, "id": 2}


def test_a_reader_of_a_quiet_table_goes_on_from_its_position(received, dsn):
    execute(dsn, "insert into t(id) values (1)", "insert into whole(id) values (1)")
    received.receive()

    async def looked_through() -> tuple[str, str]:
        quiet = stream(received.pipeline.lake_root, ["public.t"])
        change = await anext(quiet)
        execute(dsn, "insert into whole(id) values (2)")
        received.receive()
        # The caller can wait for a change with a time limit, and continue afterwards.
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(quiet), 1.5)
        execute(dsn, "insert into t(id) values (2)")
        place = str(quiet.position)
        received.receive()
        assert (await asyncio.wait_for(anext(quiet), 30)).data["id"] == 2
        return change.id, place

    last, place = asyncio.run(looked_through())
    drop_up_to(received, changes(received, "public.whole")[1].commit_lsn)
    with pytest.raises(ChangelogError):
        changes(received, "public.t", after=last)
    assert [one.data["id"] for one in changes(received, "public.t", after=place)] == [2]


def test_storage_that_cannot_be_read_is_said_without_what_it_says(received, dsn):
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    file = Path(received.changelog) / received.changelog_files()[-1].path
    whole = file.read_bytes()
    file.write_bytes(b"")
    reader = ChangeReader(received.pipeline)
    with pytest.raises(LakeUnavailableError, match="ArrowInvalid"):
        list(reader.read())
    file.write_bytes(whole)
    assert [one.data["id"] for batch in reader.read() for one in batch] == [1]


def test_one_that_is_cancelled_again_and_again_misses_nothing(received, dsn):
    execute(dsn, "insert into t(id) select g from generate_series(1, 3000) g")
    received.receive()

    async def impatiently() -> list[int]:
        found, changes = [], stream(received.pipeline.lake_root, ["public.t"], poll_s=0.001)
        while len(found) < 3000:
            try:
                found.append((await asyncio.wait_for(anext(changes), 0.002)).data["id"])
            except TimeoutError:
                continue
        return found

    assert asyncio.run(asyncio.wait_for(impatiently(), 120)) == list(range(1, 3001))


@pytest.mark.thorough("test_one_that_is_cancelled_again_and_again_misses_nothing")
def test_a_reader_that_is_interrupted_goes_on_where_it_was(received, dsn, monkeypatch):
    for number in range(3):
        execute(dsn, f"insert into t(id) values ({number})")
        received.receive()
    reader, found, parse = ChangeReader(received.pipeline), [], TypedColumn.parse
    found += list(reader.read_next() or ())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TypedColumn, "parse", interrupt)
    with pytest.raises(KeyboardInterrupt):
        while True:
            found += reader.read_next() or ()
    monkeypatch.setattr(TypedColumn, "parse", parse)
    found += [one for batch in reader.read() for one in batch]
    assert [one.data["id"] for one in found] == [0, 1, 2]


def test_a_moment_is_refused_whose_changes_may_be_gone_or_are_of_an_epoch_before(received, dsn):
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    (change,) = changes(received)
    before = change.commit_ts - timedelta(hours=1)
    assert changes(received, after=before) == [change]
    begin_epoch(received.changelog, replace(read_epoch(received.changelog), epoch=Epoch(2)))
    with pytest.raises(ChangelogError, match="epoch 1, which is over, committed later"):
        changes(received, after=before)
    assert changes(received, after=change.commit_ts) == []


def test_a_moment_is_refused_when_all_since_then_is_gone(received, dsn):
    execute(dsn, "insert into t(id) values (1)")
    received.receive()
    (change,) = changes(received)
    drop_up_to(received, change.commit_lsn)
    with pytest.raises(ChangelogError, match="no transaction is kept that committed at or before"):
        changes(received, after=change.commit_ts - timedelta(hours=1))


def test_a_gap_stops_only_who_wants_a_table_that_it_may_concern(received, dsn, pg):
    execute(dsn, "insert into t(id) values (1)", "insert into whole(id) values (1)")
    received.receive()
    with pg.cursor() as cursor:
        cursor.execute("select 't'::regclass::oid")
        ((oid,),) = cursor.fetchall()
    begun = TransactionBegin(
        LSN(received.durable_lsn + 8), 99, int(datetime.now(UTC).timestamp() * 1_000_000)
    )
    record_gap(received.pipeline.lake_root, Gap(begun, frozenset({oid}), "too large"), None)
    assert len(changes(received, "public.whole")) == 1
    for tables in (("public.t",), ()):
        with pytest.raises(GapError):
            changes(received, *tables)
