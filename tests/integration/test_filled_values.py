"""events/unchanged_values.py with a real server: who reads with values filled in needs no row of before."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import GapError
from airflow_provider_pgrepl.replication.changelog.gaps import Gap
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.publishing.formats import maker_of
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.events.typed_changes import TypedChanges
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings
from airflow_provider_pgrepl.replication.receiving.skipping import record_gap
from airflow_provider_pgrepl.replication.wire.columns import TransactionBegin
from tests.conftest import closing_connection
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute

LARGE = "select string_agg(md5(g::text || {}), '') from generate_series(1, 100) g"
"""A text that is stored outside of its row."""


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(
        dsn,
        "create table t(id int, v text, doc text, more jsonb, part text, primary key (id, part))",
        "alter table t alter doc set storage external, alter more set storage external",
        "create table other(id int primary key, doc text)",
    )
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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_reader_that_keeps_no_value_has_every_row_as_the_source_has_it(received, dsn, seed):
    chance = random.Random(seed)
    with (
        received.receiving() as receiver,
        closing_connection(dsn) as connection,
        connection.cursor() as cursor,
    ):
        for _ in range(40):
            for statement in random_statements(chance):
                cursor.execute(statement)
            connection.commit()
            time.sleep(0.02)
        wait_until_seen(receiver, received.source_lsn())
    assert len(received.changelog_files()) > 3
    assert any(change.unchanged for change in read(received, "mark"))
    changes = read(received)
    assert not any(change.unchanged for change in changes)
    rows: dict[Any, Any] = {}
    for change in changes:
        if change.op == "truncate":
            rows.clear()
        for side in (change.old, change.data):
            if side is not None and (side is change.old or change.op != "insert"):
                rows.pop((side["id"], side["part"]), None)
        if change.data is not None:
            rows[change.data["id"], change.data["part"]] = change.data
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, v, doc, more::text, part from t")
        names = ("id", "v", "doc", "more", "part")
        expected = {(row[0], row[4]): dict(zip(names, row, strict=True)) for row in cursor.fetchall()}
    assert rows == expected
    # Who begins anywhere has the same: what came before is read.
    for after in chance.sample([one.position for one in changes], 5):
        assert read(received, after=after) == [one for one in changes if one.position > after]


def test_what_may_have_been_rewritten_is_named(received, dsn):
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


def test_what_changed_while_the_table_was_not_published_is_named(received, dsn):
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


def test_what_a_skipped_transaction_may_have_changed_is_named(received, dsn):
    execute(dsn, f"insert into t select 1, 'v', ({LARGE.format(1)}), null, 'a'")
    received.receive()
    lsn = LSN(received.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select 't'::regclass::oid::int")
        (oid,) = cursor.fetchone()
    record_gap(received.pipeline, Gap(begun, frozenset({oid}), "too large"), None)
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
        settings = PublisherSettings.of("shop", "events", given)
        found = {}
        for unchanged in ("mark", settings.unchanged):
            reader = OrderedReader(received.pipeline, make=maker_of(settings), unchanged=unchanged)
            events = [event for events in reader.read() for event in events]
            found[unchanged] = len(_body(events[-1]))
        assert found["fill"] > 3_200 > found["mark"], given


def _body(event: Any) -> bytes:
    body: bytes = event.body or event.unstamped.rows
    return body
