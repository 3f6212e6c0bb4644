"""The tables that a run of the snapshot app copies, and messages about those that it leaves out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.tables import file_differences, left_out
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState


def record(table: str, state: TableState = TableState.STREAMING, **more: Any) -> TableRecord:
    unset: Any = {"error": "", "reason": "", "hint": "", "lsn": None, "relation": None, "position_lsn": None}
    unset |= {"snapshot_at": None, "rows_copied": None, "since": datetime(2026, 1, 1, tzinfo=UTC)}
    return TableRecord(TableName.parse(table), state, **{**unset, **more})


def test_the_hint_names_new_tables_as_the_command_takes_them() -> None:
    pipeline = Pipeline(name="p", lake="/lake", tables=("public.*",), new_tables="error")
    new = [TableName("public", "z"), TableName("public", "Order lines")]
    with pytest.raises(ConfigError) as caught:
        left_out(pipeline, new)
    assert """--add 'public."Order lines",public.z'""" in caught.value.hint


def test_tables_missing_from_pipeline_file_or_records_are_named_with_remedy() -> None:
    pipeline = Pipeline(name="p", lake="/lake", tables=("public.a", "public.new", "public.left", "s.*"))
    records = {
        one.table: one
        for one in (
            record("public.a"),
            record("public.gone"),
            record("public.added", membership="added"),
            record("public.left", membership="removed", state=TableState.REMOVED),
            record("s.any"),
        )
    }
    gone, absent = file_differences(pipeline, records)
    assert gone.startswith("no longer in the pipeline file, but still replicated: public.gone; add them")
    assert "pgrepl remove FILE.json 'public.gone'" in gone
    assert absent.startswith(
        "in the pipeline file, and not replicated: public.new; add them: pgrepl snapshot"
    )
    assert file_differences(pipeline, {TableName("public", "a"): record("public.a")})[0] == absent.replace(
        "public.new; add", "public.left, public.new; add"
    ).replace("'public.new'", "'public.left,public.new'")
