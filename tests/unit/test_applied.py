"""Completeness of tables as of a time, and the consistent points that are announced."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.applied import TablePoint, TablePoints, missing_as_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.applied import Applied, AppliedTable

NINE = datetime(2026, 1, 31, 9, tzinfo=UTC)
ORDERS, ITEMS = TableName("public", "orders"), TableName("public", "items")


def applied(lsn: int, position: int, state: str = "streaming") -> Applied:
    tables = {ORDERS: AppliedTable(state, LSN(position)), ITEMS: AppliedTable("paused", LSN(1))}
    return Applied(LSN(lsn), NINE, NINE + timedelta(seconds=60), tables)


def test_tables_are_complete_only_once_commit_records_of_earlier_commit_times_are_written():
    now = applied(100, 50)
    assert missing_as_of(now, [ORDERS], NINE, 60) is None
    assert "2026-01-31T09:01:00+00:00" in (missing_as_of(now, [ORDERS], NINE, 60.5) or "")
    assert "has not reported" in (missing_as_of(replace(now, complete_at=None), [ORDERS], NINE, 0) or "")


@pytest.mark.parametrize("state", ["pending", "snapshotting", "catching_up", "errored", "paused"])
def test_table_that_does_not_stream_is_not_complete(state):
    assert missing_as_of(applied(100, 50, state), [ORDERS], NINE, 0) == f"public.orders is {state}"


def test_table_that_streams_only_since_the_lake_was_complete_may_lack_changes():
    """Points of other tables go on while it catches up, also past the end of its last merge."""
    now, minute = applied(100, 50), timedelta(seconds=60)
    for since, missing in ((NINE + minute, True), (NINE + minute * 0.9, False)):
        table = AppliedTable("streaming", LSN(50), since)
        found = missing_as_of(replace(now, tables={ORDERS: table}), [ORDERS], NINE, 60)
        assert (found == "no point since they began to stream: public.orders") is missing
        assert (found is None) is not missing


def test_unknown_table_and_time_without_zone_are_rejected():
    with pytest.raises(ConfigError, match=r"does not have the tables public\.order"):
        missing_as_of(applied(1, 1), [TableName("public", "order")], NINE, 0)
    with pytest.raises(ConfigError, match="no time zone"):
        missing_as_of(applied(1, 1), [ORDERS], NINE.replace(tzinfo=None), 0)


def test_point_is_announced_once_it_reaches_changes_of_the_table():
    points = TablePoints(ORDERS, LSN(0))
    assert points.look(applied(100, 50)) == TablePoint(LSN(100), NINE)
    assert points.look(applied(200, 50)) is None, "only other tables have changed"
    assert points.look(applied(200, 250)) is None, "the merge is ahead of the point"
    assert points.look(applied(240, 270)) is None
    assert points.look(applied(260, 290)) == TablePoint(LSN(260), NINE)
    assert points.look(applied(290, 290)) == TablePoint(LSN(290), NINE)
    assert points.look(applied(300, 50)) is None, "a restarted app knows only the snapshot"


def test_changes_are_announced_that_a_table_takes_after_a_point_that_lacks_it():
    points = TablePoints(ORDERS, LSN(0))
    assert points.look(applied(100, 50)) == TablePoint(LSN(100), NINE)
    assert points.look(applied(100, 80)) == TablePoint(LSN(100), NINE)
    assert points.look(applied(100, 80)) is None
    assert points.look(applied(140, 120)) == TablePoint(LSN(140), NINE)
    assert points.look(applied(140, 120)) is None


def test_no_point_is_announced_of_a_table_that_does_not_stream():
    points = TablePoints(ORDERS, LSN(0))
    assert points.look(applied(100, 50, "errored")) is None
    assert TablePoints(TableName("public", "gone"), LSN(0)).look(applied(100, 50)) is None


def test_point_is_not_announced_again_after_a_restart_of_the_application():
    points = TablePoints(ORDERS, LSN(0))
    assert points.look(applied(100, 50)) is not None
    assert points.look(applied(0, 50)) is None, "it has no point yet"
    assert points.look(applied(100, 50)) is None
    assert points.look(applied(110, 105)) == TablePoint(LSN(110), NINE)


def test_announcing_begins_again_in_a_new_epoch():
    points = TablePoints(ORDERS, LSN(1000))
    assert points.look(applied(1000, 900)) is None
    assert points.look(applied(100, 50)) == TablePoint(LSN(100), NINE)
