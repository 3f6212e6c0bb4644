"""A publisher tells of some rows: who applies what it sends has those that the source has, and no others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, DriftError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.conftest import closing_connection
from tests.support.received import Received
from tests.support.replicated import execute

TABLES = ("public.whole", "public.keyed", "public.log", "public.short")
FILTER = {
    "public.whole": {"state": ["paid", None], "open": True},
    "public.keyed": {"region": "eu"},
    "public.log": {"level": [1, 2]},
    "public.short": {"v": "a"},
}
WHERE = {
    "whole": "(state = 'paid' or state is null) and open",
    "keyed": "region = 'eu'",
    "log": "level in (1, 2)",
}


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(
        dsn,
        "create table whole(id int primary key, state text, open bool, big text)",
        "alter table whole replica identity full",
        "alter table whole alter big set storage external",
        "create table keyed(region text, id int, v int, primary key (region, id))",
        "create table log(id int primary key, level int)",
        "create table short(id int primary key, v text)",
    )
    pipeline = Received(dsn, tmp_path, TABLES, flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def statement(chance: random.Random) -> str:
    id_, state = chance.randint(1, 12), chance.choice(["'paid'", "'new'", "null"])
    open_, region = chance.choice(["true", "false", "null"]), chance.choice(["eu", "us"])
    return chance.choice(
        [
            f"insert into whole values ({id_}, {state}, {open_}, repeat('{id_}', 3000))"
            " on conflict do nothing",
            f"update whole set state = {state} where id = {id_}",
            f"update whole set open = {open_}, id = id where id < {id_}",
            f"update whole set id = {id_ + 20} where id = {id_} and not exists"
            f" (select from whole where id = {id_ + 20})",
            f"delete from whole where id in ({id_}, {id_ + 20})",
            f"insert into keyed values ('{region}', {id_}, 1)"
            " on conflict (region, id) do update set v = keyed.v + 1",
            f"update keyed set region = '{region}' where id = {id_} and not exists"
            f" (select from keyed where id = {id_} and region = '{region}')",
            f"delete from keyed where id = {id_} and region = '{region}'",
            f"insert into log values ({id_ * 1000 + chance.randrange(1000)}, {chance.randint(0, 3)})"
            " on conflict do nothing",
            *(["truncate whole"] if chance.random() < 0.1 else []),
        ]
    )


def events(received: Received, target: str = "rabbitmq", **more: Any) -> list[Event]:
    given = {"target": target, "row_filter": FILTER, **more}
    settings = parse_publisher("shop", "events", given)
    reader = OrderedReader(
        received.pipeline,
        TableSelection.parse(TABLES[:3]),
        make=converter_factory(settings),
        unchanged="mark" if target == "rabbitmq" else "fill",
    )
    return [event for batch in reader.read() for event in batch]


def applied(found: list[Event], *keys: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for event in found:
        change = json.loads(event.body)
        if event.op == "truncate":
            rows.clear()
        if event.op in ("update", "delete"):
            said = change.get("old") or change["data"]
            assert str([said[key] for key in keys]) in rows, "of a row that nobody was told of"
        for gone in (change.get("old"), change["data"]) if event.op != "insert" else ():
            if gone is not None and all(key in gone for key in keys):
                rows.pop(str([gone[key] for key in keys]), None)
        if change["data"] is not None and event.op != "delete":
            place = str([change["data"][key] for key in keys])
            assert event.op == "update" or place not in rows, "inserted twice"
            rows[place] = change["data"]
    return rows


@pytest.mark.parametrize("target", ["rabbitmq", "kafka"])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.thorough("the same test, with rabbitmq", "1-kafka")
def test_applying_filtered_events_reproduces_filtered_source_rows(received, seed, target):
    chance = random.Random(seed)
    for _ in range(3):
        execute(
            received.dsn,
            *("; ".join(statement(chance) for _ in range(chance.randint(1, 4))) for _ in range(60)),
        )
        received.receive()
        found = events(received, target)
        for table, where in WHERE.items():
            keys = ("region", "id") if table == "keyed" else ("id",)
            of_table = [one for one in found if one.table == f"public.{table}"]
            if target == "kafka":
                # An update that changes the key says by itself that the old one is gone.
                of_table = [part for one in of_table for part in _parts(one)]
            with closing_connection(received.dsn) as connection, connection.cursor() as cursor:
                cursor.execute(f"select to_jsonb(t) from {table} t where {where}")
                wanted = [row for (row,) in cursor.fetchall()]
            rows = applied(of_table, *keys)
            assert sorted(map(_text, rows.values())) == sorted(map(_text, wanted)), table


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def _parts(event: Event) -> list[Event]:
    if event.left is None:
        return [event]
    gone = Event(
        event.position, f"{event.id}:old", event.relation_id, event.table, "delete", None, event.left[1]
    )
    return [gone, event]


def test_a_table_whose_updates_do_not_say_what_was_stops_at_the_first(received):
    execute(
        received.dsn,
        "insert into short values (1, 'a'), (2, 'b')",
        "update short set v = 'b' where id = 1",
    )
    received.receive()
    settings = parse_publisher("shop", "events", {"target": "rabbitmq", "row_filter": FILTER})
    reader = OrderedReader(received.pipeline, ["public.short"], make=converter_factory(settings))
    found: list[int] = []
    with pytest.raises(DriftError, match="do not say what a row had before in v") as caught:
        for batch in reader.read():
            found += (json.loads(one.body)["data"]["id"] for one in batch)
    assert found == [1]
    assert "REPLICA IDENTITY FULL" in caught.value.hint


def test_a_filter_stays_with_a_column_that_is_renamed(received):
    execute(received.dsn, "insert into log values (1, 1), (2, 3)")
    received.receive()
    execute(received.dsn, "alter table log rename level to depth", "insert into log values (3, 2), (4, 0)")
    received.receive()
    found = [json.loads(one.body)["data"]["id"] for one in events(received) if one.table == "public.log"]
    assert found == [1, 3]


def test_a_column_that_there_never_was_stops_its_table(received):
    execute(received.dsn, "insert into log values (1, 1)", "insert into keyed values ('eu', 1, 1)")
    received.receive()
    with pytest.raises(DriftError, match=r"which column of public\.log is nope"):
        events(received, row_filter={"public.log": {"nope": 1}})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"public.log": {}}, 'row_filter["public.log"]: names no column'),
        ({"public.log": {"level": []}}, "no value is given"),
        ({"public.log": {"level": 1.5}}, "1.5 must be a string, a whole number, true or false"),
        ({"log": {"level": 1}}, "row_filter: 'log' is not"),
        ({"public.log": {"level": 1}, '"public"."log"': {"level": 1}}, "are the same"),
    ],
)
def test_filters_that_cannot_be_are_refused(given, says):
    with pytest.raises(ConfigError) as caught:
        parse_publisher("shop", "events", {"target": "rabbitmq", "row_filter": given})
    assert says in str(caught.value)


def test_creeks_format_has_none_since_its_snapshots_have_all_rows():
    with pytest.raises(ConfigError, match="row_filter: is not of creek's format"):
        parse_publisher("shop", "events", {"target": "nats", "database": "d", "row_filter": FILTER})
