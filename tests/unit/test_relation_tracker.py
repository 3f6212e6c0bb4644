"""The receiver's assumptions about a relation after the event trigger's function has failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX, LogicalMessage
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.relation_tracker import RelationTracker
from airflow_provider_pgrepl.replication.source.event_trigger.message import seal_of
from tests.support.announced import relation

KEY = b"k" * 32
XID = 7
NARROW = relation(5, "id", "v")
WIDE = replace(
    NARROW, columns=(NARROW.columns[0], replace(NARROW.columns[1], type_oid=20, type_name="bigint"))
)


def sealed(said: bytes) -> LogicalMessage:
    head = b'{"pipeline": "p", "xid": "%d", "seal": "%s"}\n' % (XID, seal_of(KEY, XID, said).encode())
    return LogicalMessage(True, 0, DDL_PREFIX, head + said)


FAILED = sealed(b"{}")


class Source:
    """A catalog that the test changes, watched by an event trigger."""

    def __init__(self, folder: str) -> None:
        self.now: Relation = NARROW
        self.trigger: str | None = "trigger"
        self.uri = relations_uri(folder)
        copied = EffectiveFrom(10, "trigger")
        RelationIndex(self.uri).add(Epoch(1), RelationRecord.of_catalog(NARROW), copied)

    def session(self, **more: Any) -> RelationTracker:
        return RelationTracker(
            "p",
            "publication",
            Epoch(1),
            RelationIndex(self.uri),
            lambda _oid, _xid: self.now,
            lambda: self.trigger,
            lambda: KEY,
            **more,
        )


def announced(tracker: RelationTracker, found: Relation, commit_lsn: int) -> RelationRecord:
    record = tracker.received(RelationRecord.of_catalog(found).message, commit_lsn, XID)
    assert record is not None
    return record


@pytest.fixture
def source(tmp_path):
    return Source(str(tmp_path))


@pytest.mark.parametrize("known", [True, False], ids=["announced before", "not announced"])
@pytest.mark.parametrize("after", ["in the transaction", "in the next one", "after a restart"])
def test_type_sent_after_a_failure_may_have_had_using(source, known, after):
    tracker = source.session()
    if known:
        announced(tracker, NARROW, 20)
    source.now = WIDE
    assert tracker.look_at_ddl(FAILED, 30, XID) is not None
    tracker = source.session() if after == "after a restart" else tracker
    record = announced(tracker, WIDE, 30 if after == "in the transaction" else 40)
    assert record.using
    assert not announced(tracker, WIDE, 50).using


def test_using_of_a_failure_stays_known_over_ddl_that_is_told_of(source):
    tracker = source.session()
    announced(tracker, NARROW, 20)
    source.now = WIDE
    tracker.look_at_ddl(FAILED, 30, XID)
    told = tracker.look_at_ddl(sealed(b'{"oid": 5}'), 40, XID)
    assert told is not None
    assert told.record is not None
    assert told.record.using


def test_type_sent_after_a_failure_may_have_had_using_though_the_trigger_is_gone(source):
    tracker = source.session()
    tracker.look_at_ddl(FAILED, 30, XID)
    source.now, source.trigger = WIDE, None
    assert announced(tracker, WIDE, 40).using


def test_using_of_a_message_without_the_catalog_is_that_of_the_type_sent_next(source):
    """So it is in a transaction of another isolation level than READ COMMITTED."""
    tracker = source.session()
    announced(tracker, NARROW, 20)
    source.now = WIDE
    tracker.look_at_ddl(sealed(b'{"oid": 5, "trigger": "trigger", "using": true}'), 30, XID)
    assert announced(tracker, WIDE, 40).using


def test_before_a_failure_no_type_has_had_using(source):
    tracker = source.session()
    tracker.look_at_ddl(FAILED, 30, XID)
    assert not announced(source.session(), NARROW, 20).using


def test_table_is_not_followed_any_more_although_the_trigger_reported_its_new_name(source):
    moved = replace(NARROW, table=TableName("public", "moved"))
    source.now = moved
    reported = RelationRecord.of_catalog(moved.followed_as(NARROW.table))
    RelationIndex(source.uri).add(Epoch(1), reported, EffectiveFrom(20, "trigger"))
    following = announced(source.session(name_of=lambda _oid, _now: NARROW.table), moved, 30)
    assert (following.names, following.catalog) == ({NARROW.table}, reported.catalog)
    record = announced(source.session(), moved, 40)
    assert (record.names, record.catalog) == ({moved.table}, moved)
