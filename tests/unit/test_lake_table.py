"""The commits of one lake table: who may write it, and what a snapshot's commit does."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from airflow_provider_pgrepl.errors import FencedError, LakeChangedError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    commit_nothing,
    commit_properties,
    fenced,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import check_writers, commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import CLOSED, app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName

PLAIN = pa.schema([("id", pa.int64())])
WITH_TIMESTAMP = pa.schema([("id", pa.string()), ("at", pa.timestamp("us"))])
FIRST, SECOND, THIRD = (app_id("p", Epoch(number)) for number in (1, 2, 3))


class Root:
    """The folder of a lake table, with files for a snapshot to add."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uri = folder, str(folder)

    def file(self, rows: pa.Table) -> WrittenFile:
        self.folder.mkdir(exist_ok=True)
        name = f"part-{uuid.uuid4()}.zstd.parquet"
        pq.write_table(rows, self.folder / name)
        size = (self.folder / name).stat().st_size
        return WrittenFile(name, size, len(rows), json.dumps({"numRecords": len(rows)}))

    def snapshot(self, position: int, *ids: int, epoch: int = 1, name: str = "p") -> int:
        files = [self.file(pa.table({"id": pa.array([i], pa.int64())})) for i in ids]
        return commit_snapshot(self.uri, PLAIN, files, LSN(position), name, Epoch(epoch))

    def append(self, table: DeltaTable, position: int, *ids: int, app: str = FIRST) -> None:
        rows = pa.table({"id": pa.array(ids, pa.int64())})
        write(table, rows, app, LSN(position))

    def ids(self) -> list[int]:
        found = QueryBuilder().register("t", open_table(self.uri)).execute("select id from t").read_all()
        return sorted(pa.table(found)["id"].to_pylist())


def write(table: DeltaTable, rows: pa.Table, app: str, position: LSN) -> None:
    properties = commit_properties(app, position, "changes")
    fenced(
        table,
        app,
        position,
        lambda: write_deltalake(table, rows, mode="append", commit_properties=properties),
    )


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "t")


def test_a_snapshot_creates_the_table_with_its_files_and_position(root: Root) -> None:
    assert root.snapshot(10, 1, 2) == 0
    assert root.ids() == [1, 2]
    assert read_position(open_table(root.uri), FIRST) == 10


def test_a_snapshot_of_an_empty_table_creates_an_empty_lake_table(root: Root) -> None:
    assert root.snapshot(10) == 0
    assert root.ids() == []
    assert read_position(open_table(root.uri), FIRST) == 10


def test_a_snapshots_commit_says_its_position_and_time(root: Root) -> None:
    exported_at = datetime(2024, 5, 1, tzinfo=UTC)
    commit_snapshot(root.uri, PLAIN, [], LSN(10), "p", Epoch(1), exported_at)
    about = json.loads(open_table(root.uri).history(1)[0]["pgrepl"])
    assert about == {"kind": "snapshot", "position": 10, "commit_ts": exported_at.isoformat()}


def test_a_table_that_nobody_wrote_has_no_position(root: Root) -> None:
    root.snapshot(10)
    assert read_position(open_table(root.uri), SECOND) is None
    with pytest.raises(LakeTableError, match="no lake table"):
        open_table(root.uri + "-not-there")


def test_a_second_snapshot_replaces_rows_and_columns_in_one_commit(root: Root) -> None:
    root.snapshot(10, 1, 2)
    rows = pa.table({"id": ["x"], "n": pa.array([7], pa.int32())})
    assert commit_snapshot(root.uri, rows.schema, [root.file(rows)], LSN(20), "p", Epoch(1)) == 1
    table = open_table(root.uri)
    found = QueryBuilder().register("t", table).execute("select id, n from t").read_all()
    assert pa.table(found).to_pylist() == [{"id": "x", "n": 7}]
    assert read_position(table, FIRST) == 20


def test_a_column_of_timestamps_without_time_zone_may_join_later(root: Root) -> None:
    root.snapshot(10, 1)
    assert open_table(root.uri).protocol().min_reader_version == 1
    rows = pa.table({"id": ["x"], "at": pa.array([5], pa.timestamp("us"))}, schema=WITH_TIMESTAMP)
    version = commit_snapshot(root.uri, WITH_TIMESTAMP, [root.file(rows)], LSN(20), "p", Epoch(1))
    table = open_table(root.uri)
    assert table.protocol().reader_features == ["timestampNtz"]
    found = QueryBuilder().register("t", table).execute("select * from t").read_all()
    assert pa.table(found).to_pylist() == rows.to_pylist()
    # The version before declares the feature and still reads as before.
    table.load_as_version(version - 1)
    found = QueryBuilder().register("t", table).execute("select * from t").read_all()
    assert pa.table(found).to_pylist() == [{"id": 1}]
    assert read_position(table, FIRST) == 10


def test_a_table_created_with_timestamps_without_time_zone_declares_them(root: Root) -> None:
    commit_snapshot(root.uri, WITH_TIMESTAMP, [], LSN(10), "p", Epoch(1))
    protocol = open_table(root.uri).protocol()
    assert (protocol.reader_features, protocol.writer_features) == (["timestampNtz"], ["timestampNtz"])


def test_a_new_epoch_closes_all_before_it(root: Root) -> None:
    root.snapshot(1000, 1)
    stale = open_table(root.uri)
    root.snapshot(20, 2, epoch=3)
    table = open_table(root.uri)
    assert read_position(table, THIRD) == 20
    assert [table.transaction_version(app) for app in (FIRST, SECOND)] == [CLOSED, CLOSED]
    with pytest.raises(FencedError):
        read_position(table, FIRST)
    with pytest.raises(FencedError):
        root.append(stale, 1010, 9)
    for epoch in (1, 2):
        with pytest.raises(FencedError, match="later epoch"):
            root.snapshot(2000, 9, epoch=epoch)
    assert root.ids() == [2]


def test_a_snapshot_older_than_the_table_is_refused(root: Root) -> None:
    root.snapshot(10, 1)
    root.append(open_table(root.uri), 30, 2)
    with pytest.raises(FencedError, match="0/1E"):
        root.snapshot(20, 9)
    assert root.ids() == [1, 2]


@pytest.mark.parametrize("owner", ["other", None])
def test_a_delta_table_of_somebody_else_is_refused(root: Root, owner: str | None) -> None:
    if owner:
        root.snapshot(10, 1, name=owner)
    else:
        write_deltalake(root.uri, pa.table({"id": [1]}))
    with pytest.raises(LakeError, match="has not written"):
        root.snapshot(20, 2)
    assert root.ids() == [1]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LakeError, match="cannot create"):
        Root(tmp_path / "file" / "t").snapshot(10)


def test_moving_only_the_position_keeps_handle_and_rows(root: Root) -> None:
    root.snapshot(10, 1)
    table = open_table(root.uri)
    commit_nothing(table, FIRST, LSN(20), commit_properties(FIRST, LSN(20), "changes"))
    assert (read_position(table, FIRST), table.version()) == (20, 1)
    root.append(table, 30, 2)
    assert root.ids() == [1, 2]


def test_moving_only_the_position_through_a_stale_handle_is_refused(root: Root) -> None:
    root.snapshot(10, 1)
    stale = open_table(root.uri)
    root.append(open_table(root.uri), 30, 2)
    with pytest.raises(FencedError):
        commit_nothing(stale, FIRST, LSN(40), commit_properties(FIRST, LSN(40), "changes"))
    assert read_position(open_table(root.uri), FIRST) == 30


def test_a_failure_of_delta_is_told_without_its_words(root: Root) -> None:
    root.snapshot(10, 1)
    table = open_table(root.uri)
    with pytest.raises(LakeError, match="nothing was committed") as refused:
        write(table, pa.table({"id": ["secret"]}), FIRST, LSN(20))
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None


def test_a_fault_of_the_table_is_not_taken_for_one_of_the_storage(root: Root) -> None:
    root.snapshot(10, 1)
    table = open_table(root.uri)
    twice = pa.table({"id": pa.array([1, 1], pa.int64())})
    merger = table.merge(twice, "t.id = s.id", source_alias="s", target_alias="t")
    merger.when_matched_update({"id": "s.id"})
    with pytest.raises(LakeTableError, match="nothing was committed"):
        fenced(table, FIRST, LSN(20), merger.execute)


def test_a_table_that_lost_a_file_is_said_to_be_damaged(root: Root) -> None:
    root.snapshot(10, 1, 2)
    table = open_table(root.uri)
    next(root.folder.glob("*.parquet")).unlink()
    with pytest.raises(LakeTableError, match="files is gone"):
        compact(table, FIRST, at_least=2)


def test_many_small_files_become_one_without_changing_rows_or_position(root: Root) -> None:
    root.snapshot(10, 1, 2, 3)
    table = open_table(root.uri)
    assert compact(table, FIRST, at_least=4) == 0
    assert compact(table, FIRST, at_least=3) == 3
    assert len(table.file_uris()) == 1
    assert root.ids() == [1, 2, 3]
    assert read_position(table, FIRST) == 10
    root.append(table, 20, 4)
    assert root.ids() == [1, 2, 3, 4]


def test_a_stale_compaction_cannot_bring_rows_back(root: Root) -> None:
    root.snapshot(10, 1, 2, 3)
    stale = open_table(root.uri)
    root.snapshot(20, 7)
    with pytest.raises(FencedError):
        compact(stale, FIRST, at_least=2)
    assert root.ids() == [7]
    assert read_position(open_table(root.uri), FIRST) == 20


def test_a_compaction_of_a_closed_epoch_is_refused(root: Root) -> None:
    root.snapshot(10, 1, 2, 3)
    root.snapshot(20, 7, 8, epoch=2)
    with pytest.raises(FencedError):
        compact(open_table(root.uri), FIRST, at_least=1)


def test_rows_of_another_program_are_named_before_a_snapshot_replaces_them(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.snapshot(10)
    for _ in range(2):
        write_deltalake(root.uri, pa.table({"id": pa.array([7], pa.int64())}), mode="append")
    with pytest.raises(LakeChangedError) as caught:
        check_writers(open_table(root.uri), TableName("public", "t"), 1)
    assert "version 2 of the lake table was not written by this pipeline" in caught.value.message
    for text in ("(versions 1, 2)", "copy the table out of the lake", "version 2 can be read until"):
        assert text in caught.value.hint
    root.snapshot(20)
    assert "the snapshot replaces rows that another program wrote (versions 1, 2)" in caplog.text
    caplog.clear()
    root.snapshot(30)
    assert "another program" not in caplog.text
