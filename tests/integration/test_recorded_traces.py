"""The trace of an unexpected exception in a table's record, and in `pgrepl status --json`."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import DriftError, LakeTableError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state import schema
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.trace import trace_of, traced
from tests.integration.test_state_schema import AN_EARLIER_PIPELINE
from tests.integration.test_status import Shop
from tests.support.canary import CANARY, check, raise_unexpected

T = TableName("public", "t")
BROKEN = TableName("public", "broken")


def cause() -> Exception:
    try:
        raise_unexpected()
    except Exception as error:
        return error


@pytest.fixture
def state_db(dsn):
    with StateDatabase(dsn, "test") as found:
        found.migrate()
        found.register(Pipeline(name="shop", tables=("public.*",), lake="/lake/shop"), "123", True, True)
        for state in (TableState.PENDING, TableState.SNAPSHOTTING, TableState.CATCHING_UP):
            found.set_state("shop", T, state)
        yield found


def test_trace_is_recorded_with_the_error_and_goes_with_it(state_db):
    read = lambda: state_db.read_tables("shop")[T]  # noqa: E731
    assert read().trace == ""
    error = traced(LakeTableError("unexpected KeyError"), cause())
    assert state_db.mark_errored("shop", read(), error)
    check(read().trace, " in cause")
    # Another error has another trace, or none.
    state_db.set_state("shop", T, TableState.ERRORED, error="TableError", reason="r", trace="KeyError")
    assert read().trace == "KeyError"
    state_db.set_state("shop", T, TableState.ERRORED, error="TableError", reason="r")
    assert read().trace == ""
    assert state_db.mark_errored("shop", read(), error)
    # Moving the table to another state removes the trace, as it removes the error.
    assert state_db.move("shop", read(), TableState.CATCHING_UP)
    assert (read().error, read().trace) == ("", "")
    assert state_db.mark_errored("shop", read(), DriftError("r", "h"))
    assert read().trace == ""


def test_records_of_the_version_before_have_no_trace(monkeypatch, pg, dsn):
    with StateDatabase(dsn, "test") as state_db:
        monkeypatch.setattr(schema, "_VERSIONS", schema._VERSIONS[:8])
        state_db.migrate()
        monkeypatch.undo()
        with pg.cursor() as cursor:
            cursor.execute(AN_EARLIER_PIPELINE)
            cursor.execute(
                "insert into _pgrepl.tables (pipeline, schema_name, table_name, state, error, reason)"
                " values ('shop', 'public', 't', 'errored', 'LakeTableError', 'unexpected KeyError')"
            )
        state_db.migrate()
        found = state_db.read_tables("shop")[T]
        assert (found.state, found.reason, found.trace) == (TableState.ERRORED, "unexpected KeyError", "")


def test_status_as_json_shows_the_trace(dsn, pg, tmp_path):
    shop = Shop(dsn, pg, tmp_path)
    shop.set_up()
    by_name = {table["table"]: table for table in shop.json()["tables"]}
    assert by_name["public.broken"]["trace"] == by_name["public.orders"]["trace"] == []
    trace = trace_of(cause())
    with StateDatabase(dsn, "test") as state_db:
        state_db.set_state(shop.pipeline.name, BROKEN, TableState.ERRORED, error="TableError", trace=trace)
    by_name = {table["table"]: table for table in shop.json()["tables"]}
    assert by_name["public.broken"]["trace"] == trace.splitlines()
    check("\n".join(by_name["public.broken"]["trace"]), " in cause")
    found = shop.status()
    assert found.returncode == 0
    assert CANARY not in found.stdout
