"""The documents of the page, read from a real state database."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg2.errors
import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError, StateError
from airflow_provider_pgrepl.replication.app.page.documents import read_pipelines, read_table, read_tables
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.overview import OverviewRecords
from airflow_provider_pgrepl.replication.state.reports import CopyProgress
from tests.support.page_state import HOSTILE, HOSTILE_ERROR, record_pipeline


def test_documents_show_what_is_recorded(dsn, pg):
    record_pipeline(dsn, pg, "shop", 5)
    record_pipeline(dsn, pg, "billing", 0)
    verified = "update _pgrepl.tables set verified_through = '0/64', verified_at = now()"
    rows(pg, f"{verified} where table_name = 'customers' returning 1")
    [billing, shop] = json.loads(json.dumps(read_pipelines(dsn)))["pipelines"]
    assert (billing["name"], shop["name"], shop["state"]) == ("billing", "shop", "running")
    assert shop["tables"] == {"errored": 1, "paused": 1, "snapshotting": 1, "streaming": 5}
    assert shop["last_error"]["reason"] == HOSTILE_ERROR
    assert (shop["run"]["kind"], shop["run"]["task"]["dag"]) == ("started", "pgrepl_replicate")
    assert shop["sample"]["wal_limit_bytes"] == 1 << 30
    assert len([lag for lag in shop["lags"] if lag is not None]) > 80

    tables = {one["table"]: one for one in json.loads(json.dumps(read_tables(dsn, "shop")))["tables"]}
    assert len(tables) == 8
    assert (tables[str(HOSTILE)]["state"], tables[str(HOSTILE)]["hint"]) == ("errored", HOSTILE_ERROR)
    order = tables["sales.orders_2"]
    assert (order["rows_copied"], order["live_bytes"], order["kept_bytes"]) == (2000, 2 << 18, 2 << 19)
    assert order["lag_seconds"] == 1.5
    assert order["moved_at"] is not None
    assert (order["verified_through"], order["verified_at"]) == (None, None)
    assert tables["public.customers"]["verified_through"] == "0/64"
    assert tables["public.customers"]["verified_at"]
    assert read_tables(dsn, "nothing") == {"tables": []}

    one = json.loads(json.dumps(read_table(dsn, "shop", HOSTILE)))
    assert [column["name"] for column in one["columns"]] == ["id", "<b>total</b>", "placed_at"]
    assert (one["events"][0]["to_state"], one["events"][0]["error"]) == ("errored", "ValueRangeError")
    assert any(event["kind"] == "snapshot_taken" for event in one["events"])
    [publisher] = one["publishers"]
    assert (publisher["name"], publisher["published_lsn"], publisher["holder"]) == (
        "events",
        "0/78",
        "worker-1:72",
    )
    assert (publisher["stopped"]["after"], publisher["stopped"]["reason"]) == ("1:0/6E:2", HOSTILE_ERROR)
    [publisher] = read_table(dsn, "shop", TableName("public", "customers"))["publishers"]
    assert publisher["stopped"] is None
    nothing = {"columns": [], "events": [], "lags": [], "publishers": []}
    assert read_table(dsn, "shop", TableName("no", "table")) == nothing


def test_document_of_a_table_that_is_copied_has_its_progress(dsn, pg):
    record_pipeline(dsn, pg, "shop", 1)
    copied = next(
        one["table"] for one in read_tables(dsn, "shop")["tables"] if one["state"] == "snapshotting"
    )
    with StateDatabase(dsn, "test") as state_db:
        state_db.record_copies("shop", {TableName.parse(copied): CopyProgress(10, 20, 1, 4)})
    tables = {one["table"]: one["copying"] for one in read_tables(dsn, "shop")["tables"]}
    assert json.loads(json.dumps(tables[copied])) == {"text": "10 of 20 rows", "done": 0.25}
    assert [name for name, copying in tables.items() if copying] == [copied]


def test_table_that_has_not_moved_for_a_day_has_no_time_of_change(dsn, pg, run):
    record_pipeline(dsn, pg, "shop", 1)
    run("update _pgrepl.table_samples set position_lsn = '0/1'")
    assert {one["moved_at"] for one in read_tables(dsn, "shop")["tables"]} == {None}


def test_database_without_state_is_an_error_only_if_it_was_named(dsn):
    assert read_pipelines(dsn, must_have_state=False) == {"pipelines": []}
    with pytest.raises(StateError, match="does not exist"):
        read_pipelines(dsn)


def test_schema_of_older_version_is_reported(dsn, pg, run):
    record_pipeline(dsn, pg, "shop", 1)
    run("drop table _pgrepl.samples")
    with pytest.raises(StateError, match="older version"):
        read_pipelines(dsn)


def test_session_cannot_write(dsn, pg):
    record_pipeline(dsn, pg, "shop", 1)
    with OverviewRecords(dsn, 2) as records, pytest.raises(psycopg2.errors.ReadOnlySqlTransaction):
        rows(records._connection, "delete from _pgrepl.pipelines returning 1")


def test_locked_table_is_no_answer(dsn, pg, run):
    record_pipeline(dsn, pg, "shop", 1)
    with OverviewRecords(dsn, 0.2) as records:
        run("begin", "lock table _pgrepl.tables in access exclusive mode")
        with pytest.raises(SourceConnectionError, match="no answer within"):
            records.read_pipelines()
        run("rollback")


def test_reading_loads_neither_pyarrow_nor_deltalake():
    """Airflow's API server would take seconds longer to start."""
    script = (
        "import sys, airflow_provider_pgrepl.replication.app.page.documents as _;"
        "print([name for name in ('pyarrow', 'deltalake', 'numba') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
