"""Renamed tables that a pipeline follows: every app knows them by the names that they had."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2.extensions
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables
from airflow_provider_pgrepl.replication.changelog.relation_index import SCHEMA, RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.publication import read_publication
from tests.spark.test_verify import Verified
from tests.support.received import EAGER
from tests.support.replicated import execute, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B, C = "public.a", "public.b", "public.c"
FOLLOW = {"on_rename": "follow"}


@pytest.fixture
def pipeline(spark: SparkSession, dsn: str, tmp_path: Path) -> Verified:
    for table in "abc":
        execute(
            dsn,
            f"create table {table} (id int primary key, v text, secret text)",
            f"insert into {table} values (1, 'old', 'geheim')",
        )
    options = {A: FOLLOW, B: FOLLOW, C: {"on_rename": "stop"}}
    secret = (f"{A}.secret", f"{B}.secret", f"{C}.secret")
    pipeline = Verified(spark, dsn, tmp_path, ("public.*",), per_table=options, exclude_columns=secret)
    pipeline.snapshot()
    return pipeline


def rows(pipeline: Verified, table: str) -> list[tuple[int, str]]:
    found = pipeline.lake_rows(table).select(["id", "v"]).to_pylist()
    return sorted((row["id"], row["v"]) for row in found)


def states(pipeline: Verified) -> dict[str, str]:
    return {table: record.state.value for table, record in pipeline.states().items()}


def test_renamed_table_is_followed_copied_and_compared(
    pipeline: Verified, dsn: str, pg: psycopg2.extensions.connection, capsys: pytest.CaptureFixture[str]
) -> None:
    access = Access(pipeline.pipeline, dsn, dsn)
    with pipeline.replicating(EAGER) as running:
        execute(
            dsn,
            "alter table a rename to z",
            "insert into z values (2, 'renamed', 'geheim')",
            "create schema other",
            "begin; update z set v = 'moved' where id = 1; alter table z set schema other;"
            " insert into other.z values (3, 'in other', 'geheim'); commit",
            "alter table other.z add more int default 7",
            "insert into other.z values (4, 'more', 'geheim')",
        )
        running.wait_for(pipeline.source_lsn())
        followed = [(1, "moved"), (2, "renamed"), (3, "in other"), (4, "more")]
        assert rows(pipeline, A) == followed
        assert pipeline.lake_rows(A)["more"].to_pylist() == [7] * 4
        assert not check_drift(access).found_anything

        # No run takes it for a new table, or misses it.
        execute(dsn, "alter table other.z set schema public")
        assert pipeline.run("snapshot") == 0, pipeline.log_tail()
        assert "nothing to do" in pipeline.log_tail()
        for copied in ("--tables", "--resync"):
            execute(dsn, f"insert into z values ({len(followed) + 1}, '{copied}', 'geheim')")
            followed.append((len(followed) + 1, copied))
            assert pipeline.run("snapshot", copied, A) == 0, pipeline.log_tail()
        running.wait_for(pipeline.source_lsn())
        assert rows(pipeline, A) == followed
        code, report = pipeline.report(capsys)
        assert (code, report[A]["status"]) == (0, "equal"), report
        found = pipeline.run("snapshot", "--add", "public.z")
        assert found == 78
        assert f"is replicated as {A}" in pipeline.log_tail()
        remove_tables(access, [A])
    assert states(pipeline) == {A: "removed", B: "streaming", C: "streaming"}
    published = read_publication(pg, pipeline.pipeline.publication)
    assert published is not None
    assert published.tables == {TableName.parse(B), TableName.parse(C)}
    changes = [change for batch in ChangeReader(pipeline.pipeline).read() for change in batch]
    assert {str(change.table) for change in changes} == {A}
    for file in Path(pipeline.pipeline.lake_root).rglob("*.parquet"):
        assert b"geheim" not in file.read_bytes(), file


def test_table_whose_name_another_takes_stops_and_resync_brings_its_rows(
    pipeline: Verified, dsn: str
) -> None:
    with pipeline.replicating(EAGER) as running:
        execute(dsn, "alter table a rename to former", "insert into former values (2, 'followed', '')")
        running.wait_for(pipeline.source_lsn())
        assert rows(pipeline, A) == [(1, "old"), (2, "followed")]
        execute(
            dsn,
            "create table fresh (like former including all)",
            "insert into fresh values (1, 'old', ''), (3, 'fresh', '')",
            "alter table fresh rename to a",
        )
        wait_until(lambda: states(pipeline)[A] == "errored", what="the table to stop")
        reason = pipeline.states()[A].reason
        assert reason == "the table was renamed or moved to public.former, and another one has its name"
        assert rows(pipeline, A) == [(1, "old"), (2, "followed")]
        assert pipeline.run("snapshot", "--resync", A) == 0, pipeline.log_tail()
        running.wait_for(pipeline.source_lsn())
        assert rows(pipeline, A) == [(1, "old"), (3, "fresh")]


def test_lake_of_an_earlier_version_is_followed_before_the_replication_starts(
    pipeline: Verified, dsn: str
) -> None:
    uri = relations_uri(pipeline.pipeline.lake_root)
    entries = query_delta(open_delta(uri), "select * from it").to_pylist()
    for entry in entries:
        entry["number"] = None if entry["commit_lsn"] is None else entry["number"]
    write_deltalake(uri, pa.Table.from_pylist(entries, SCHEMA), mode="overwrite")
    assert RelationIndex(uri).pipeline_names() == {}
    execute(dsn, "alter table a rename to z")
    assert pipeline.run("snapshot") == 0, pipeline.log_tail()
    assert "nothing to do" in pipeline.log_tail()
    assert states(pipeline)[A] == "catching_up"


def test_table_that_stopped_for_its_name_is_followed_after_a_comparison(pipeline: Verified, dsn: str) -> None:
    with pipeline.replicating(EAGER):
        execute(dsn, "alter table c rename to y", "insert into y values (2, 'renamed', 'geheim')")
        wait_until(lambda: states(pipeline)[C] == "errored", what="the table to stop")
    record = pipeline.states()[C]
    assert record.reason == "the table was renamed or moved to public.y"
    assert "on_rename" in record.hint
    pipeline.configure(per_table={**pipeline.pipeline.per_table, C: FOLLOW})
    (refused,) = (result.refused for result in retry_tables(Access(pipeline.pipeline, dsn, dsn)))
    assert refused is not None, "the changelog has a change that the lake table did not follow"
    with pipeline.replicating(EAGER) as running:
        assert pipeline.run("snapshot", "--resync", C) == 0, pipeline.log_tail()
        execute(dsn, "alter table y rename to x", "insert into x values (3, 'again', 'geheim')")
        running.wait_for(pipeline.source_lsn())
        assert rows(pipeline, C) == [(1, "old"), (2, "renamed"), (3, "again")]
    assert states(pipeline)[C] == "streaming"


def test_table_copied_under_its_new_name_has_no_other_one(pipeline: Verified, dsn: str) -> None:
    access = Access(pipeline.pipeline, dsn, dsn)
    with pipeline.replicating(EAGER) as running:
        # No row has followed the rename, so nothing has stopped the table yet.
        execute(dsn, "alter table c rename to y")
        pipeline.configure(per_table={A: FOLLOW, B: FOLLOW}, exclude_columns=(f"{A}.secret", f"{B}.secret"))
        assert pipeline.run("snapshot", "--add", "public.y") == 0, pipeline.log_tail()
        assert pipeline.states()[C].reason == (
            "the table was renamed or moved to public.y, and is copied under that name"
        )
        execute(dsn, "alter table y rename to c")
        (refused,) = (result.refused for result in retry_tables(access))
        assert "is replicated as public.y" in str(refused)
        execute(dsn, "insert into c values (2, 'back', '')")
        wait_until(lambda: states(pipeline)["public.y"] == "errored", what="the table to stop")
        remove_tables(access, ["public.y"])
        assert pipeline.run("snapshot", "--tables", C) == 0, pipeline.log_tail()
        running.wait_for(pipeline.source_lsn())
        assert rows(pipeline, C) == [(1, "old"), (2, "back")]
