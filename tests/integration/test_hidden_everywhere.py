"""Hidden values are in no byte of any format, also if the catalog is read after everything has changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.avro.codec import long
from airflow_provider_pgrepl.replication.creek.events import CreekEvent
from airflow_provider_pgrepl.replication.events.formats.avro import AvroEvent
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

CANARY = "canary"
FORMATS: dict[str, dict[str, Any]] = {
    "json": {"target": "rabbitmq"},
    "keyed json": {"target": "kafka"},
    "debezium": {"target": "kafka", "format": "debezium", "database": "d", "schemas": True},
    "avro": {"target": "kafka", "format": "avro"},
    "creek": {"target": "nats", "database": "d"},
}
RULES: dict[str, dict[str, Any]] = {
    "excluded": {"exclude_columns": ["public.t.secret"]},
    "hashed": {"hash_columns": ["public.t.secret"]},
    "masked": {"mask_columns": ["public.t.secret"], "rename_columns": {"public.t.secret": "other"}},
}


BEHIND = {
    # All happens before the receiver asks the catalog.
    "renamed": [
        "insert into t values (1, 'plain', 'canary', 'plain')",
        "alter table t rename secret to tmp",
        "insert into t values (2, 'plain', 'canary', 'plain')",
    ],
    "renamed, with another of its name": [
        "insert into t values (1, 'plain', 'canary', 'plain')",
        "alter table t rename secret to tmp; alter table t add secret text",
        "insert into t values (2, 'plain', 'canary', 'plain', 'canary')",
    ],
    "renamed, and others dropped": [
        "insert into t values (1, 'plain', 'canary', 'plain')",
        "alter table t rename secret to tmp; alter table t add c text",
        "insert into t values (2, 'plain', 'canary', 'plain', 'plain')",
        "alter table t drop a; alter table t drop c",
        "insert into t values (3, 'canary', 'plain')",
    ],
    "in another table": [
        "insert into t values (1, 'plain', 'canary', 'plain')",
        "alter table t rename to u; alter table u rename secret to tmp",
        "insert into u values (2, 'plain', 'canary', 'plain')",
        "update u set tmp = 'canary2' where id = 1; update u set id = 5 where id = 2",
    ],
}


def sent(received: Received, given: dict[str, Any]) -> Iterator[bytes]:
    """All bytes of all events, of each table until it stops."""
    settings = parse_publisher("p", "events", given)
    make = converter_factory(settings, b"salt")
    reader = OrderedReader(received.pipeline, TableSelection.parse(None), make=make)
    while True:
        try:
            events = reader.read_next()
        except PgReplError as error:
            if reader.fault is None:
                raise
            yield str(error).encode()
            reader.pass_fault()
            continue
        if events is None:
            return
        for event in events:
            yield repr(event).encode()
            yield event.body
            yield from event.left or ()
            if isinstance(event, CreekEvent):
                yield event.unstamped.stamped(1, long(0))
            if isinstance(event, AvroEvent):
                yield event.schema.text.encode()


def received_late(dsn: str, folder: Path, statements: Sequence[str], **options: Any) -> Received:
    execute(dsn, "create table t(id int primary key, a text, secret text, b text)")
    received = Received(dsn, folder, ("public.*",), flush_interval_s=0.05, **options)
    received.begin()
    execute(dsn, *statements)
    received.receive()
    return received


@pytest.mark.parametrize("what", BEHIND)
@pytest.mark.thorough(
    "the same test, of a column with another of its name; test_no_byte_of_an_excluded_column_is_kept",
    "renamed",
    "renamed, and others dropped",
    "in another table",
)
def test_no_byte_of_a_hidden_column_is_sent(dsn, tmp_path, what):
    received = received_late(dsn, tmp_path, BEHIND[what])
    for rule, (name, given) in itertools.product(RULES, FORMATS.items()):
        found = list(sent(received, {**given, **RULES[rule]}))
        assert not any(CANARY.encode() in data for data in found), (rule, name)
        assert any(b"plain" in data for data in found), (rule, name)


@pytest.mark.parametrize("what", BEHIND)
@pytest.mark.thorough("the same test, of a column with another of its name", "renamed")
def test_no_byte_of_an_excluded_column_is_kept(dsn, tmp_path, what):
    received = received_late(dsn, tmp_path, BEHIND[what], exclude_columns=("public.t.secret",))
    kept = [str(row) for row in received.changelog_rows()]
    assert any("plain" in row for row in kept)
    assert not any(CANARY in row for row in kept)


HARMLESS = {
    "retyped": ["alter table t alter b type varchar(40)"],
    "added and renamed": ["alter table t add c text; alter table t rename a to d"],
    "dropped and retyped": ["alter table t drop a", "alter table t alter b type varchar(40)"],
}


def known_then_altered(dsn: str, folder: Path, statements: Sequence[str], **options: Any) -> Received:
    """The catalog was asked before, and is asked again when all is altered."""
    received = received_late(dsn, folder, ["insert into t values (1, 'p', 'canary', 'plain')"], **options)
    more = [f"insert into t(id, secret, b) values ({number}, 'canary', 'plain')" for number in range(2, 9)]
    both = [one for pair in zip(more, [*statements, "", "", "", "", "", ""], strict=False) for one in pair]
    execute(dsn, *filter(None, both))
    received.receive()
    return received


@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.thorough(
    "test_other_columns_are_kept_whatever_became_of_them; test_no_byte_of_a_hidden_column_is_sent"
)
def test_other_columns_are_sent_whatever_became_of_them(dsn, tmp_path, what):
    received = known_then_altered(dsn, tmp_path, HARMLESS[what])
    for rule, (name, given) in itertools.product(RULES, FORMATS.items()):
        found = [data for data in sent(received, {**given, **RULES[rule]}) if b"plain" in data]
        assert not any(CANARY.encode() in data for data in found), (rule, name)
        made = [data for data in found if data.startswith((b"Event(", b"AvroEvent(", b"CreekEvent("))]
        assert len(made) == 8, (rule, name)


@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.thorough(
    "the same test, of a column that was dropped and retyped", "retyped", "added and renamed"
)
def test_other_columns_are_kept_whatever_became_of_them(dsn, tmp_path, what):
    received = known_then_altered(dsn, tmp_path, HARMLESS[what], exclude_columns=("public.t.secret",))
    rows = received.changelog_rows("I")
    assert [row["new"].count("plain") for row in rows] == [1] * 8
    assert [row["new"][0] for row in rows] == [str(number) for number in range(1, 9)]
    assert not any(CANARY in str(row) for row in rows)
