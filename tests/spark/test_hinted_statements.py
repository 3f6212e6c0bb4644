"""Statements of hints that remove other programs' settings from a lake table, run by Spark as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.live_files import has_retention
from airflow_provider_pgrepl.replication.lake.delta.ownership import TRANSACTION_RETENTION
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import (
    app_id,
    no_position,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import column, relation, table_of
from tests.support.foreign_settings import Settings, set_by_another
from tests.support.model import Change

OF = relation(column("id", "bigint", key=True), column("v`"))
APP = app_id("p", Epoch(1))
SET_BY_SPARK = {
    "several": "SET TBLPROPERTIES ('delta.appendOnly' = 'true', 'delta.enableRowTracking' = 'true',"
    " 'delta.enableInCommitTimestamps' = 'true')",
    "constraint": "ADD CONSTRAINT `no one` CHECK (`v``` IS NOT NULL)",
}
NOT_NULL = Settings(not_null=["v`"])
"""Spark sets NOT NULL only when it creates a table."""


class Lake:
    """A table with two rows at LSN 10, in a folder whose name Delta percent-encodes."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder / "a lake" / "t")
        pipeline = Pipeline(name="p", lake=str(folder), tables=("public.t",))
        self.options = pipeline.options(OF.table)
        commit_snapshot(self.uri, lake_schema(OF, self.options), [], LSN(1), "p", Epoch(1))
        self.apply(Change("I", new=("1", "old"), commit_lsn=10), Change("I", new=("2", "old"), commit_lsn=10))

    def apply(self, *changes: Change) -> None:
        apply_changes(open_table(self.uri), table_of(changes), OF, self.options, APP, 1 << 20)


@pytest.mark.thorough("unit/test_obstacles, which compares the text of the statements")
@pytest.mark.parametrize("settings", [*SET_BY_SPARK.values(), NOT_NULL], ids=[*SET_BY_SPARK, "not null"])
def test_printed_statements_remove_the_setting_that_prevents_commits(
    spark: SparkSession, tmp_path: Path, settings: str | Settings
) -> None:
    lake = Lake(tmp_path)
    if isinstance(settings, Settings):
        set_by_another(lake.uri, settings)
    else:
        spark.sql(f"ALTER TABLE delta.`{lake.uri}` {settings}")
    changes = Change("U", new=("1", None), commit_lsn=20), Change("D", old=("2", None), commit_lsn=20)
    with pytest.raises(LakeTableError, match="another program has set") as raised:
        lake.apply(*changes)
    *printed, retry = raised.value.hint.split("; ")
    assert retry == "then retry the table: pgrepl retry FILE.json NAME, or PgRetryTablesOperator"
    for statement in printed:
        spark.sql(statement)
    lake.apply(*changes)
    assert read_position(open_table(lake.uri), APP) == 20
    rows = spark.read.format("delta").load(lake.uri).select("id", "`v```").collect()
    assert [tuple(row) for row in rows] == [(1, None)]


@pytest.mark.thorough("unit/test_expired_apps, which compares the text of the statement")
def test_printed_statement_removes_the_retention_of_positions(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    property_ = f"'{TRANSACTION_RETENTION}' = 'interval 1 hour'"
    spark.sql(f"ALTER TABLE delta.`{lake.uri}` SET TBLPROPERTIES ({property_})")
    assert has_retention(open_table(lake.uri))
    spark.sql(no_position(open_table(lake.uri)).partition("Remove that: ")[2])
    assert not has_retention(open_table(lake.uri))
