"""Hints that name a costly step say what it costs, and name the step that costs nothing first."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.app.status.health import _FREE_WAL
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.lake.delta import snapshot_commit
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import forbidden_truncate
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RefusedChanges
from tests.support.hint_texts import texts_of_code
from tests.unit.test_drift import RECORDED

T = TableName("public", "t")
HARMFUL = {
    "SET TABLE …": "replaces the list of tables, so that the others leave the publication",
    "(standby1, ": "every commit waits for standbys of these names once the statement has run",
    "accept-missing FILE.json --yes": "gives up time travel before the command has printed that",
    "drop it by hand": "the slot of another program",
    "delete what": "the files of a history, which nothing else has",
    "drop the pipeline's slot and the lake": "a new epoch keeps the lake",
    "created it, drop it": "the schema with the records of all pipelines",
    "slot_name = 'SLOT'": "a name that the code knows",
}


@pytest.mark.parametrize("words", HARMFUL)
def test_no_text_of_the_package_proposes_a_statement_that_harms(words: str) -> None:
    assert not [text for _, text in texts_of_code() if words in text], HARMFUL[words]


def test_truncated_table_is_retried_because_a_copy_replaces_the_protected_rows() -> None:
    pipeline = Pipeline(name="p", lake="/lake", tables=(str(RECORDED.table),), truncate="error")
    changes = pa.table({"op": ["I", "T"], "commit_lsn": [7, 9]})
    stopped = forbidden_truncate(changes, RECORDED, pipeline.options(RECORDED.table))
    assert stopped is not None
    hint = stopped[1].hint
    assert f"pgrepl retry FILE.json '{RECORDED.table}'" in hint
    assert hint.index("ignore") < hint.index("retry") < hint.index("resnapshot")
    assert "pgrepl snapshot" not in hint


def test_hint_of_a_resnapshot_names_the_rows_that_it_loses() -> None:
    assert "rows that only the lake has" in errors.resnapshot(T)


def test_hint_of_a_new_epoch_says_that_it_drops_the_slot() -> None:
    assert "drops the slot" in errors.NEW_EPOCH


def test_retained_wal_alone_is_no_reason_to_drop_the_slot() -> None:
    assert "Do not drop the slot" in _FREE_WAL
    assert "--new-epoch" not in _FREE_WAL


def test_refused_changes_are_cured_by_the_fix_or_by_leaving_the_publication() -> None:
    assert RefusedChanges(T, "UPDATE", "why", "ALTER a", "ALTER b").cure == "ALTER a; or ALTER b"
    assert RefusedChanges(T, "UPDATE", "why", "", "ALTER b").cure == "ALTER b"


def test_unexpected_error_of_a_table_keeps_its_trace_and_proposes_a_retry_before_a_copy() -> None:
    hint = TableResult(1, error="unexpected KeyError", trace="KeyError at x.py:1").to_error(T).hint
    assert hint.index("save the trace") < hint.index("pgrepl retry") < hint.index("pgrepl snapshot")
    assert TableResult(1, error="known").to_error(T).hint == errors.resnapshot(T)


def test_missing_lake_table_is_mounted_or_restored_before_a_copy(tmp_path: Path) -> None:
    with pytest.raises(errors.LakeTableError) as caught:
        open_table(str(tmp_path / "away"))
    hint = caught.value.hint
    assert hint.index("mounted") < hint.index("retry the table") < hint.index("pgrepl snapshot")


@pytest.mark.parametrize(
    ("settings", "exists", "warns"),
    [(["deletes: soft", "insert_only"], True, True), ([], True, False), (["deletes: soft"], False, False)],
)
def test_snapshot_warns_before_it_replaces_rows_that_only_the_lake_has(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: Collection[str],
    exists: bool,
    warns: bool,
) -> None:
    uri = str(tmp_path / "t")
    if exists:
        DeltaTable.create(uri, pa.schema([("id", pa.int32())]))
    with caplog.at_level(logging.WARNING):
        snapshot_commit.warn_of_rows_of_lake(uri, T, settings)
    assert bool(caplog.messages) == warns
    if warns:
        assert "rows that only the lake has (deletes: soft, insert_only). Version 0" in caplog.text
