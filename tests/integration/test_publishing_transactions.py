"""A function that is given whole transactions: of each, what it makes is sent, once, in order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import pytest

from airflow_provider_pgrepl.__main__ import main as pgrepl
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.events.business import BusinessEvent
from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.published import Published
from tests.support.rabbitmq import Message
from tests.support.replicated import execute

HERE = __name__


def counted(changes: Sequence[Change]) -> Iterator[BusinessEvent]:
    """One event of each transaction: how many changes of which tables, and their sum."""
    tables = sorted({change.table for change in changes})
    rows = [(change.data or change.old or {})["id"] for change in changes]
    yield BusinessEvent({"tables": tables, "count": len(changes), "ids": sorted(rows)[:3]}, type="done")


def one_for_each_table(changes: Sequence[Change]) -> Iterator[BusinessEvent]:
    for table in sorted({change.table for change in changes}):
        ids = [change.data["id"] for change in changes if change.table == table and change.data]
        yield BusinessEvent(ids, route=table.split(".")[1], type="ids", key=table)


def raising_at_13(changes: Sequence[Change]) -> Iterator[BusinessEvent]:
    for change in changes:
        if change.data and change.data["id"] == 13:
            raise ValueError(f"secret {change.data}")
    yield BusinessEvent(len(changes))


def changed(published: Published, *statements: str, code: int = process.DONE) -> list[Message]:
    execute(published.dsn, *statements)
    published.receive()
    return published.publish(code=code)


def test_a_function_is_given_each_transaction_whole_and_in_order(published):
    published.publisher(tables=["public.t", "public.other"], transform_transaction=f"{HERE}:counted")
    found = changed(
        published,
        "begin; insert into t select g from generate_series(1, 25000) g;"
        " insert into other values (3); delete from t where id = 1; commit",
        'insert into "S.1"."a#b" values (1)',
        "insert into other values (4)",
    )
    assert [one.event for one in found] == [
        {"tables": ["public.other", "public.t"], "count": 25_002, "ids": [1, 1, 2]},
        {"tables": ["public.other"], "count": 1, "ids": [4]},
    ]
    assert [one.routing_key for one in found] == ["transactions.done"] * 2
    last = [change.id for batch in ChangeReader(published.pipeline).read() for change in batch]
    assert [one.properties.message_id for one in found] == [last[25_001], last[-1]]
    assert published.publish() == []


def test_several_events_of_one_transaction_have_ids_of_their_own(published):
    published.publisher(transform_transaction=f"{HERE}:one_for_each_table", route="{route}")
    found = changed(published, "begin; insert into t values (1); insert into other values (2); commit")
    assert [(one.routing_key, one.event) for one in found] == [("other", [2]), ("t", [1])]
    first, second = (one.properties.message_id for one in found)
    assert second == f"{first}.1"


@pytest.mark.thorough("test_a_function_is_given_each_transaction_whole_and_in_order")
def test_any_transactions_read_in_any_runs_are_given_once_each(published):
    """Large ones are written ahead, in files between which others' stand."""
    published.publisher(tables=["public.t", "public.other"], transform_transaction=f"{HERE}:counted")
    chance, found, sizes, next_id = random.Random(11), [], [], 0
    for _ in range(4):
        statements = []
        for _ in range(chance.randrange(1, 6)):
            some = chance.choice((1, 2, 700, 12_000))
            statements.append(
                f"begin; insert into t select g from generate_series({next_id}, {next_id + some - 1}) g;"
                f" insert into other values ({next_id}); commit"
            )
            next_id += some
            sizes.append(some + 1)
        found += changed(published, *statements)
    assert [one.event["count"] for one in found] == sizes
    assert [one.position for one in found] == sorted({one.position for one in found})


def test_one_that_raises_holds_the_publisher_and_shows_no_value(published, caplog):
    published.publisher(transform_transaction=f"{HERE}:raising_at_13")
    found = changed(
        published,
        "insert into t values (1)",
        "begin; insert into t values (12); insert into t values (13); commit",
        "insert into t values (14)",
        code=process.WILL_NOT_HELP,
    )
    assert [one.event for one in found] == [1]
    assert "the transform of transactions failed: ValueError" in published.record.reason
    assert "secret" not in caplog.text
    assert published.publish(code=process.WILL_NOT_HELP) == []
    published.publisher(transform_transaction=f"{HERE}:raising_at_13", on_error="skip_and_record")
    assert [one.event for one in published.publish()] == [1]
    assert published.record.skipped == 1


def test_a_transaction_with_more_changes_than_allowed_is_an_error_that_says_so(published):
    settings = {"transform_transaction": f"{HERE}:counted", "transaction_changes": 10}
    published.publisher(**settings)
    found = changed(
        published,
        "insert into t values (1)",
        "insert into t select g from generate_series(2, 12) g",
        "insert into t values (13)",
        code=process.WILL_NOT_HELP,
    )
    assert [one.event["ids"] for one in found] == [[1]]
    assert "has more than 10 changes" in published.record.reason
    published.publisher(**settings, on_error="skip_and_record")
    assert [one.event["ids"] for one in published.publish()] == [[13]]


@pytest.mark.thorough("test_a_function_is_given_each_transaction_whole_and_in_order")
def test_a_large_transaction_of_other_tables_counts_for_nothing(published):
    published.publisher(
        tables=["public.other"], transform_transaction=f"{HERE}:counted", transaction_changes=2
    )
    found = changed(
        published,
        "begin; insert into t select g from generate_series(1, 30000) g;"
        " insert into other values (1); commit",
    )
    assert [one.event["count"] for one in found] == [1]


def test_a_skipped_transaction_holds_the_publisher(published):
    published.publisher(transform_transaction=f"{HERE}:counted")
    assert len(changed(published, "insert into t values (1)")) == 1
    lsn = LSN(published.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    record_gap(published.pipeline.lake_root, Gap(begun, frozenset(), "too large"), None)
    assert changed(published, "insert into t values (2)", code=process.WILL_NOT_HELP) == []
    assert "was skipped" in published.record.reason


def test_an_event_that_is_refused_holds_the_publisher(published):
    published.publisher(transform_transaction=f"{HERE}:counted", max_event_bytes=20)
    assert changed(published, "insert into t values (1)", code=process.WILL_NOT_HELP) == []
    assert "rejected event" in published.record.reason


def test_tables_that_stopped_before_are_not_given_without_the_others(published, caplog):
    published.publisher(max_event_bytes=200)
    code = process.WILL_NOT_HELP
    changed(published, "insert into t values (1, repeat('x', 1000)); insert into other values (1)", code=code)
    published.publisher(transform_transaction=f"{HERE}:counted")
    assert published.publish(code=code) == []
    assert "publish again from the position where the first table stopped: pgrepl publish" in caplog.text
    after = str(published.record.needed_after)
    assert [one.event["count"] for one in published.publish("--after", after)] == [2]


def test_resuming_inside_transaction_passes_whole_transaction_to_transform(published):
    published.publisher()
    found = changed(published, "begin; insert into t select generate_series(1, 3); commit")
    published.publisher(transform_transaction=f"{HERE}:counted")
    again = published.publish("--after", str(found[1].properties.message_id))
    assert [one.event["count"] for one in again] == [3]


def test_it_can_be_tried(published, capsys):
    published.publisher(transform_transaction=f"{HERE}:counted")
    execute(published.dsn, "begin; insert into t values (1); insert into other values (2); commit")
    published.receive()
    assert pgrepl(["events", "try", str(published.file), "--publisher", "events"]) == process.DONE
    assert '"count": 2' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"messages": ["x"]}, "messages would make others"),
        ({"outbox": {"table": "public.t"}}, "outbox would make others"),
        ({"format": "debezium", "database": "d"}, "format would make others"),
        ({"transaction_changes": 0}, "must be greater than 0"),
        ({"transform_transaction": "no place"}, "is not the location of a function"),
        ({"target": "nats", "database": "d"}, "is not of creek's format"),
    ],
)
def test_settings_that_do_not_go_together(given, says):
    with pytest.raises(ConfigError, match=says):
        parse_publisher(
            "p", "events", {"target": "rabbitmq", "transform_transaction": f"{HERE}:counted", **given}
        )
