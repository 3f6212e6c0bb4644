"""events/debezium: the same changes as Debezium's own engine reads them, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import TransformError, ValueRangeError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.debezium import Debezium, DebeziumEvent, running_debezium
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

SOURCE = "shop"
TYPES = """
create type mood as enum ('sad', 'ok');
create domain positive as int check (value > 0);
create domain short_time as time(3);
"""
COLUMNS = {
    # Of each column its type, and values.
    "s": ("smallint", "-2", "7"),
    "b": ("bigint", "9007199254740993"),
    "bo": ("bool", "true", "false"),
    "n102": ("numeric(10,2)", "12.5", "-0.01", "-1.28", "1.27", "0", "99999999.99"),
    "n50": ("numeric(5,0)", "12345", "-128"),
    "n24": ("numeric(2,4)", "0.0012"),
    "n": ("numeric", "1.500", "-12345678901234567890.123", "0", "1e30"),
    "f4": ("real", "1.1", "1e20", "'NaN'", "'-Infinity'"),
    "f8": ("float8", "0.1", "1e-7", "1e300", "'NaN'", "'Infinity'"),
    "tx": ("text", "'té\"x\\ \u2028'", "''"),
    "vc": ("varchar(10)", "'v'"),
    "ch": ("char(5)", "'ab'"),
    "cc": ('"char"', "'c'"),
    "by": ("bytea", r"'\x00ff'", "''"),
    "d": ("date", "'2024-02-03'", "'0044-03-15 BC'", "'1969-12-31'", "'12024-01-01'"),
    "ti": ("time", "'12:34:56.123456'", "'24:00:00'"),
    "ti3": ("time(3)", "'12:34:56.123'"),
    "ti0": ("time(0)", "'12:34:56'"),
    "tiz": ("timetz", "'12:34:56.5+02'", "'00:00:00+00'", "'23:59:59.25-03:30'", "'12:00:00.000001+02'"),
    "ts": (
        "timestamp",
        "'2024-02-03 12:34:56.123456'",
        "'0044-03-15 BC'",
        "'infinity'",
        "'1969-12-31 23:59:59.9'",
    ),
    "ts3": ("timestamp(3)", "'2024-02-03 12:34:56.123'", "'1969-12-31 23:59:59.9'", "'-infinity'"),
    "ts0": ("timestamp(0)", "'2024-02-03 12:34:56'"),
    "tz": ("timestamptz", "'2024-02-03 12:34:56.123456+02'", "'infinity'", "'-infinity'", "'2024-01-01+00'"),
    "tz3": ("timestamptz(3)", "'2024-02-03 12:34:56.123+02'"),
    "tz0": ("timestamptz(0)", "'2024-02-03 12:34:56+02'"),
    "iv": (
        "interval",
        "'1 year 2 mons 3 days 04:05:06.789'",
        "'-1 mon +2 days -03:04:05.5'",
        "'1 microsecond'",
        "'0'",
    ),
    "u": ("uuid", "'46145d05-8bc7-403b-8098-1baf99e97b56'"),
    "j": ("json", "'{\"a\":  1}'"),
    "jb": ("jsonb", "'{\"a\": [1, 2]}'"),
    "m": ("mood", "'ok'"),
    "po": ("positive", "5"),
    "st": ("short_time", "'12:34:56.123'"),
    "mo": ("money", "'1234.5'", "'-0.01'"),
    "ine": ("inet", "'10.0.0.1/24'"),
    "ci": ("cidr", "'10.0.0.0/24'"),
    "mac": ("macaddr", "'08:00:2b:01:02:03'"),
    "ma8": ("macaddr8", "'08:00:2b:01:02:03:04:05'"),
    "b1": ("bit(1)", "b'1'", "b'0'"),
    "b3": ("bit(3)", "b'101'"),
    "b16": ("bit(16)", "b'0000000000000001'", "b'1000000000000000'"),
    "vb": ("varbit", "b'10111'"),
    "vb9": ("varbit(9)", "b'100000001'"),
    "r": ("int4range", "'[1,5)'", "'empty'"),
    "tzr": ("tstzrange", "'[2024-01-01 00:00:00+00,)'"),
    "p": ("point", "'(1,2)'", "'(-1.5,1e10)'"),
    "o": ("oid", "4000000000"),
    "tv": ("tsvector", "'a b'"),
    "ia": ("int[]", "'{1,NULL,3}'", "'{}'"),
    "sa": ("smallint[]", "'{1,2}'"),
    "ba": ("bigint[]", "'{9007199254740993}'"),
    "boa": ("bool[]", "'{t,f}'"),
    "fa": ("float8[]", "'{1.5,2.5}'"),
    "ta": ("text[]", "'{a,\"b c\",NULL}'"),
    "vca": ("varchar(3)[]", "'{a}'"),
    "na": ("numeric(10,2)[]", "'{1.50,2.25}'"),
    "fna": ("numeric[]", "'{1.5,2,NULL}'"),
    "da": ("date[]", "'{2024-02-03}'"),
    "tsa": ("timestamp[]", "'{\"2024-02-03 12:34:56.123456\"}'"),
    "tza": ("timestamptz[]", "'{\"2024-02-03 12:34:56.123456+05\",NULL}'"),
    "tia": ("time[]", "'{12:34:56.123}'"),
    "bya": ("bytea[]", r"""'{"\\x01"}'"""),
    "ua": ("uuid[]", "'{46145d05-8bc7-403b-8098-1baf99e97b56}'"),
    "ja": ("jsonb[]", "array['{\"a\":1}'::jsonb]"),
    "moa": ("mood[]", "'{ok,sad}'"),
}
UNKNOWN_TO_DEBEZIUM = {
    "nm": ("name", "'n'"),
    "co": ("pair", "'(1,x)'"),
    "l": ("pg_lsn", "'0/16B3748'"),
    "x8": ("xid8", "'77'"),
    "bx": ("box", "'(1,2),(0,0)'"),
    "mr": ("int4multirange", "'{[1,3)}'"),
}
"""It leaves such columns out, or sends no value; here they are texts."""
NOW = ("ts_ms", "ts_us", "ts_ns")
WHERE = ("version", "lsn", "sequence")
"""What says when a program made an event, which it is, and where in the WAL the change stands."""


class Compared(Received):
    """A pipeline whose changes Debezium reads, too."""

    def compared(
        self, debezium: Debezium, *statements: str
    ) -> tuple[list[DebeziumEvent], list[DebeziumEvent]]:
        """Return the events of statements as Debezium sends them, and as this package does."""
        with debezium.reading(self.dsn, self.pipeline.publication, SOURCE) as theirs:
            execute(self.dsn, *statements)
            self.receive()
            ours = self.made()
            wait_until(lambda: len(theirs) >= len(ours), 150, "Debezium's events")
        return theirs, ours

    def made(self) -> list[DebeziumEvent]:
        found = []
        for event in self.events():
            for key, body in messages_of(event):
                found.append(DebeziumEvent(f"{SOURCE}.{event.table}", key and json.loads(key), body))
        return found

    def events(self, **given: Any) -> list[Event]:
        database = psycopg2.extensions.parse_dsn(self.dsn)["dbname"]
        said = {
            "target": "kafka",
            "format": "debezium",
            "source": SOURCE,
            "database": database,
            "schemas": True,
        }
        settings = parse_publisher("shop", "p", {**said, **given})
        reader = OrderedReader(self.pipeline, make=converter_factory(settings))
        return [event for batch in reader.read() for event in batch]


def messages_of(event: Event) -> list[tuple[bytes | None, Any]]:
    """Return an event's messages in Debezium's order: the old row of a changed key first, and tombstones."""
    found: list[tuple[bytes | None, Any]] = []
    if event.left is not None:
        found += [(event.left[0], json.loads(event.left[1])), (event.left[0], None)]
    found.append((event.key, json.loads(event.body)))
    return [*found, (event.key, None)] if event.op == "delete" else found


def plain(event: DebeziumEvent, without: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return the parts of an event that must be equal."""
    if event.value is None:
        return event.topic, event.key, None
    payload, schema = event.value["payload"], event.value["schema"]
    source = {name: value for name, value in payload["source"].items() if name not in WHERE}
    rows = {
        side: payload[side] and {name: value for name, value in payload[side].items() if name not in without}
        for side in ("before", "after")
    }
    rest = {name: value for name, value in payload.items() if name not in (*NOW, "source", "before", "after")}
    return event.topic, event.key, source, rows, rest, described(schema, without)


def described(schema: Any, without: tuple[str, ...]) -> Any:
    """A schema, without what a default is, which the stream does not tell."""
    if isinstance(schema, list):
        return [
            described(one, without)
            for one in schema
            if not (isinstance(one, dict) and one.get("field") in without)
        ]
    if not isinstance(schema, dict):
        return schema
    return {name: described(value, without) for name, value in schema.items() if name != "default"}


def assert_equal(
    theirs: list[DebeziumEvent], ours: list[DebeziumEvent], without: tuple[str, ...] = ()
) -> None:
    assert [(one.topic, one.key) for one in ours] == [(one.topic, one.key) for one in theirs]
    found = [
        difference
        for our, their in zip(ours, theirs, strict=True)
        for difference in differences(plain(our, without), plain(their, without), our.topic)
    ]
    assert not found, "\n".join(found)


def differences(our: Any, their: Any, path: str) -> list[str]:
    if isinstance(our, dict) and isinstance(their, dict):
        names = sorted({*our, *their})
        pairs = [(our.get(name, "nothing"), their.get(name, "nothing"), f"{path}.{name}") for name in names]
    elif isinstance(our, list | tuple) and isinstance(their, list | tuple) and len(our) == len(their):
        pairs = [(one, other, f"{path}[{n}]") for n, (one, other) in enumerate(zip(our, their, strict=True))]
    else:
        return [] if our == their else [f"{path}: {our!r} is {their!r} of Debezium"]
    return [one for pair in pairs for one in differences(*pair)]


@pytest.fixture(scope="module")
def debezium() -> Iterator[Debezium]:
    with running_debezium() as running:
        yield running


@pytest.fixture
def compared(dsn: str, tmp_path: Path) -> Compared:
    columns = ", ".join(f"{name} {kind}" for name, (kind, *_) in COLUMNS.items())
    more = ", ".join(f"{name} {kind}" for name, (kind, *_) in UNKNOWN_TO_DEBEZIUM.items())
    execute(
        dsn,
        f"{TYPES}create type pair as (a int, b text); create table t(id int primary key, {columns}, {more})",
        "create table whole(a int, b text)",
        "alter table whole replica identity full",
        "create table keyed(id int primary key, v text not null, w text)",
        "alter table keyed replica identity full",
        "create table pairs(a int, b text, v numeric(5,1), primary key (a, b))",
    )
    made = Compared(dsn, tmp_path, tuple(f"public.{name}" for name in ("t", "whole", "keyed", "pairs")),
                    flush_interval_s=0.05, insert_only=())  # fmt: skip
    made.begin()
    return made


def test_each_value_is_what_debezium_makes_of_it(compared, debezium):
    known = {**COLUMNS, **UNKNOWN_TO_DEBEZIUM}
    most = max(len(values) for _, *values in known.values())
    inserts = []
    for number in range(most):
        given = {name: values[number] for name, (_, *values) in known.items() if number < len(values)}
        inserts.append(
            f"insert into t(id, {', '.join(given)}) values ({number}, {', '.join(given.values())})"
        )
    theirs, ours = compared.compared(debezium, *inserts, "insert into t(id) values (-1)")
    assert len(ours) == most + 1
    assert_equal(theirs, ours, tuple(UNKNOWN_TO_DEBEZIUM))


def test_each_operation_is_what_debezium_makes_of_it(compared, debezium):
    theirs, ours = compared.compared(
        debezium,
        "begin; insert into whole values (1, 'a'), (2, null); update whole set b = 'c';"
        " delete from whole; commit",
        "insert into keyed values (1, 'a', 'w'), (2, 'b', null)",
        "update keyed set v = 'c' where id = 1",
        "update keyed set id = 5 where id = 1",
        "delete from keyed where id = 5",
        "insert into pairs values (1, 'x', 1.5)",
        "update pairs set v = 2",
        "update pairs set b = 'y'",
        "delete from pairs",
        "truncate keyed, pairs",
        "alter table keyed add column x int",
        "insert into keyed values (7, 'z', null, 3)",
    )
    assert_equal(theirs, ours)


def test_before_a_change_columns_that_may_not_be_null_have_what_debezium_sends(dsn, tmp_path, debezium):
    """The server sends only the key of an old row, and Kafka Connect reads no null in the other columns."""
    columns = ", ".join(f"{name} {type_} not null" for name, (type_, *_) in COLUMNS.items())
    values = ", ".join(first for _, first, *_ in COLUMNS.values())
    execute(dsn, TYPES, f"create table t(id int primary key, {columns})")
    found = Compared(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    found.begin()
    assert_equal(
        *found.compared(
            debezium, f"insert into t values (1, {values})", "update t set id = 2", "delete from t"
        )
    )


def test_large_values_that_were_not_sent_are_said_as_debezium_does(compared, debezium):
    columns = ("tx", "by", "ia", "ba", "ta", "jb", "bya", "vc", "moa", "ja")
    storage = ", ".join(f"alter {name} set storage external" for name in columns if name != "moa")
    theirs, ours = compared.compared(
        debezium,
        f"alter table t {storage}",
        "insert into t(id, tx, by, ia, ba, ta, jb, bya, ja) values (1, repeat('x', 9000),"
        " decode(repeat('ff', 9000), 'hex'), array_fill(1, array[4000]), array_fill(1::bigint, array[4000]),"
        " array_fill('xyz'::text, array[3000]), to_jsonb(repeat('z', 9000)),"
        " array_fill(decode(repeat('ff', 90), 'hex'), array[300]),"
        " array_fill('1'::jsonb, array[3000]))",
        "update t set s = 1",
    )
    assert_equal(theirs, ours, tuple(UNKNOWN_TO_DEBEZIUM))
    body = ours[-1].value
    assert body is not None
    assert body["payload"]["after"]["tx"] == "__debezium_unavailable_value"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (["insert into t(id, n) values (1, 'NaN')"], "n.* a number that is none"),
        (["insert into t(id, d) values (1, 'infinity')"], "d"),
        (["insert into t(id, ia) values (1, '{{1,2},{3,4}}')"], "ia.* more dimensions"),
        (
            [
                "alter table t alter fna set storage external",
                "insert into t(id, fna) values (1, array_fill(1.5::numeric, array[3000]))",
                "update t set s = 1",
            ],
            "fna.* a large value that an update left",
        ),
    ],
)  # fmt: skip
@pytest.mark.thorough(
    "the same test, of numbers and large values", "statements1-d", "statements2-ia.* more dimensions"
)
def test_debezium_format_rejects_values_debezium_would_lose(compared, statements, says):
    execute(compared.dsn, *statements)
    compared.receive()
    with pytest.raises((ValueRangeError, TransformError), match=says):
        compared.events()


def test_without_schemas_and_for_rabbitmq_bodies_are_the_payloads(compared):
    rows = ("insert into pairs values (1, 'x', 1.5)", "update pairs set b = 'y'", "delete from pairs")
    execute(compared.dsn, *rows)
    compared.receive()
    bare = compared.events(schemas=False)
    assert [event.key for event in bare] == [b'{"a":1,"b":"x"}', *[b'{"a":1,"b":"y"}'] * 2]
    assert without_now(bare) == [one["payload"] for one in without_now(compared.events())]
    codes = [json.loads(event.body)["op"] for event in compared.events(target="rabbitmq", schemas=False)]
    assert codes == ["c", "u", "d"]


def without_now(events: list[Event]) -> list[Any]:
    found = [json.loads(event.body) for event in events]
    for one in found:
        for name in NOW:
            del one.get("payload", one)[name]
    return found
