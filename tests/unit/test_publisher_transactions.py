"""events/publish/publisher.py: consumers see no part of a transaction of which a change makes no event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ValueRangeError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.events import reader
from airflow_provider_pgrepl.replication.events.changelog_rows import ordered_rows
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, PublisherRecord
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_rows import VersionTagger
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.announced import look_up
from tests.support.changelogs import Written, epoch_record

Row = tuple[int, str]
"""The oid of a table, and a key."""
BEGIN = PublisherRecord(EventPosition.after_transaction(Epoch(1), LSN(50)))


class Transactional:
    """A target that keeps transactions, as KafkaLink does, and shows what is committed."""

    address = "nowhere"
    stamp, is_connected, keeps_transactions = 0, True, True

    def __init__(self) -> None:
        self._open: list[PendingEvents] = []
        self._taken: list[Event] = []
        self._is_whole = True
        self.seen: list[list[Event]] = []

    def connect(self) -> None:
        self.close()

    def send(self, sending: PendingEvents) -> None:
        if self._is_whole:
            self.commit()
        self._is_whole = sending.ends_transaction
        if sending.count:
            sending.waits_for_commit = True
            self._open.append(sending)
            self._taken += sending.events
            for index in range(sending.count):
                sending.settle(index)

    def commit(self) -> None:
        if self._open:
            for sending in self._open:
                sending.commit()
            self.seen.append(self._taken)
        self._open, self._taken = [], []

    def close(self) -> None:
        self._open, self._taken, self._is_whole = [], [], True


class Published:
    """A publisher over a changelog, in which a key that begins with `bad` makes no event."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(name="shop", tables=("public.*",), lake=str(folder))
        self.record, self.bad, self.on_error = BEGIN, "bad", "stop_table"
        uri = changelog_uri(self.pipeline.lake_root)
        create_changelog(uri, epoch_record())
        self._index = RelationIndex(relations_uri(self.pipeline.lake_root))
        self._written, self._lsn = Written(uri), 100
        self._written.tagger = VersionTagger(Epoch(1), self._look_up)

    def transaction(self, *rows: Row) -> None:
        inserts = [message for oid, key in rows for message in self._written.insert(oid, key)]
        self._written.take(self._written.begin(self._lsn), *inserts, self._written.commit(self._lsn))
        self._written.flush()
        self._lsn += 100

    def _look_up(self, message: RelationMessage, lsn: int, xid: int) -> RelationRecord:
        record = look_up(message, lsn, xid)
        self._index.add(Epoch(1), record)
        return record

    def run(self) -> list[list[Row]]:
        """Publish everything, and return the rows of each source transaction in each of the target's."""
        settings = parse_publisher(
            "shop", "events", {"target": "kafka", "transactions": True, "on_error": self.on_error}
        )
        log, target = PublisherLog(self.pipeline.lake_root, "events"), Transactional()
        record, make = log.take(self.record, "test"), partial(self._converter, converter_factory(settings))
        publisher = Publisher(self.pipeline, settings, log, record, target, lambda _: False, make)
        assert publisher.run(LSN(self._lsn - 100))
        self.record = publisher.record
        return [rows for events in target.seen for rows in by_transaction(events)]

    def _converter(self, make: Any, *given: Any) -> Any:
        converter = make(*given)
        convert = converter.of

        def of(rows: Any) -> list[Event]:
            events: list[Event] = convert(rows)
            if any(row_of(event)[1].startswith(self.bad) for event in events):
                raise ValueRangeError("a value that is bad", "")
            return events

        converter.of = of
        return converter


def row_of(event: Event) -> Row:
    return event.relation_id, json.loads(event.body)["data"]["k"]


def by_transaction(events: Sequence[Event]) -> list[list[Row]]:
    found: dict[LSN, list[Row]] = {}
    for event in events:
        found.setdefault(event.position.commit_lsn, []).append(row_of(event))
    return list(found.values())


@pytest.fixture(params=[1, 2, 10_000], ids="{} rows at a time".format)
def published(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setattr(reader, "ordered_rows", partial(ordered_rows, most=request.param))
    return Published(tmp_path)


def test_table_that_stops_is_left_out_of_its_transaction_and_of_no_earlier_one(published):
    published.transaction((8, "a"), (7, "b"))
    published.transaction((8, "c"), (7, "d"), (8, "bad"), (7, "e"), (8, "f"))
    published.transaction((7, "g"), (8, "h"))
    assert published.run() == [[(8, "a"), (7, "b")], [(7, "d"), (7, "e")], [(7, "g")]]
    assert list(published.record.stopped) == [8]
    assert published.record.stopped[8].reason.startswith("a value that is bad, in the change 1:0/C8:")
    published.bad = "none"
    assert published.run() == [[(8, "c"), (8, "bad"), (8, "f")], [(8, "h")]]
    assert not published.record.stopped


def test_tables_that_stop_in_one_transaction_are_all_left_out_of_it(published):
    published.transaction((7, "a"), (8, "b"), (9, "bad"), (7, "c"), (8, "bad"), (7, "d"))
    published.transaction((7, "e"), (8, "f"))
    assert published.run() == [[(7, "a"), (7, "c"), (7, "d")], [(7, "e")]]
    assert set(published.record.stopped) == {8, 9}
    published.bad = "none"
    assert published.run() == [[(8, "b"), (9, "bad"), (8, "bad")], [(8, "f")]]


def test_table_that_stops_again_while_it_catches_up_is_left_out_of_that_transaction(published):
    published.transaction((7, "a"), (8, "bad"), (9, "bad"))
    published.transaction((8, "b"), (9, "c"), (8, "bad again"), (9, "d"))
    published.transaction((7, "e"), (8, "f"))
    assert published.run() == [[(7, "a")], [(7, "e")]]
    published.bad = "bad again"
    assert published.run() == [[(8, "bad"), (9, "bad")], [(9, "c"), (9, "d")]]
    assert list(published.record.stopped) == [8]
    assert published.run() == []
    published.bad = "none"
    assert published.run() == [[(8, "b"), (8, "bad again")], [(8, "f")]]


def test_change_that_is_skipped_does_not_cut_its_transaction(published):
    published.on_error = "skip_and_record"
    published.transaction((8, "bad"), (7, "a"), (8, "bad"), (7, "b"), (8, "bad"))
    published.transaction((7, "c"))
    assert published.run() == [[(7, "a"), (7, "b")], [(7, "c")]]
    assert published.record.skipped == 3
    assert published.run() == []
    assert published.record.skipped == 3


def test_transaction_in_which_all_is_skipped_is_recorded(published):
    published.on_error = "skip_and_record"
    published.transaction((7, "bad"), (8, "bad"))
    assert published.run() == []
    assert published.record.skipped == 2
