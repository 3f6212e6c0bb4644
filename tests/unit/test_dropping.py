"""lake/drop.py: only the pipeline's own tables are dropped, whatever is at their paths."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_files, commit_properties
from airflow_provider_pgrepl.replication.lake.delta.ownership import ADOPTED_APP
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import (
    ADOPTION,
    commit_snapshot,
    snapshot_marks,
)
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.drop import check_droppable, drop_lake_tables, foreign_files
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import delete_files
from tests.unit.test_table_ownership import (
    NOT_OURS,
    ROWS,
    Make,
    commit_file,
    foreign,
    ours_torn,
    tree,
    unfinished_copy,
)

T = TableName("public", "t")


def ours(table: Path, versions: int = 1) -> None:
    for number in range(versions):
        properties = CommitProperties(
            custom_metadata={"pgrepl": '{"kind": "changes"}'},
            app_transactions=[Transaction("shop:1", number)],
        )
        write_deltalake(str(table), ROWS, mode="append", commit_properties=properties)


def as_replicated(table: Path, versions: int = 3) -> None:
    """Write a snapshot, and changes after it, by the writers of replication."""
    uri, path = str(table), f"{table.parent.name}/{table.name}"
    if not DeltaTable.is_deltatable(uri):
        commit_snapshot(uri, ROWS.schema, [], LSN(1), "shop", Epoch(1))
    for _ in range(1, versions):
        with ParquetFiles(str(table.parents[1]), path, ROWS.schema) as files:
            files.write(ROWS.to_batches()[0])
            written = files.finish()
        opened = open_table(uri)
        position = LSN(opened.version() + 2)
        commit_files(opened, "shop:1", position, written, commit_properties("shop:1", position, "changes"))


def ours_with_a_cleaned_log(table: Path) -> None:
    """Write a table whose log was cleaned, as one that replication has written for a long time."""
    as_replicated(table)
    clean_log(table)


def inserts_behind_a_cleaned_log(table: Path) -> None:
    """Write a table whose changes since its snapshot were inserts only, and clean its log."""
    as_replicated(table)
    opened = open_table(str(table))
    position = LSN(opened.version() + 2)
    SliceCommit(opened, "shop:1", position, None, 0).write(ROWS, "append")
    clean_log(table)


def adopted_with_a_cleaned_log(table: Path) -> None:
    """Write a table by another program, adopt it, and clean its log."""
    foreign(table)
    opened = open_table(str(table))
    marks = {**snapshot_marks(str(table), "shop", Epoch(1)), ADOPTED_APP: 1}
    properties = commit_properties("shop:1", LSN(7), ADOPTION, None, marks)
    commit_files(opened, "shop:1", LSN(7), (), properties)
    clean_log(table)


def clean_log(table: Path) -> None:
    """Delete the commits that a checkpoint of the newest version covers."""
    DeltaTable(table).create_checkpoint()
    for version in range(int(DeltaTable(table).version())):
        commit_file(table, version).unlink(missing_ok=True)


def others_behind_a_cleaned_log(table: Path) -> None:
    """Append, compact and checkpoint by another program, and clean the log."""
    ours_with_a_cleaned_log(table)
    foreign(table)
    DeltaTable(table).optimize.compact()
    clean_log(table)


def ours_and_others(table: Path) -> None:
    ours(table)
    foreign(table, 1)


@pytest.mark.parametrize("make", [*NOT_OURS, ours_and_others, ours_torn, others_behind_a_cleaned_log])
@pytest.mark.parametrize("path", ["public/t", "public/t~history"])
def test_folder_that_is_not_shown_to_be_ours_is_named_and_not_dropped(
    tmp_path: Path, make: Make, path: str
) -> None:
    make(tmp_path / path)
    with pytest.raises(LakeError, match=rf"nothing was dropped.*{path} \("):
        check_droppable(str(tmp_path), [T], "shop")


@pytest.mark.parametrize(
    "make",
    [
        lambda _: None,
        unfinished_copy,
        ours,
        ours_with_a_cleaned_log,
        inserts_behind_a_cleaned_log,
        adopted_with_a_cleaned_log,
    ],
)
def test_table_of_the_pipeline_goes_whole(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "public" / "t")
    check_droppable(str(tmp_path), [T], "shop")
    assert foreign_files(str(tmp_path), [T]) == []
    drop_lake_tables(str(tmp_path), [T])
    assert list(tmp_path.iterdir()) == []


def test_adopted_table_that_was_copied_again_has_no_files_of_others(tmp_path: Path) -> None:
    table = tmp_path / "public" / "t"
    adopted_with_a_cleaned_log(table)
    commit_snapshot(str(table), ROWS.schema, [], LSN(8), "shop", Epoch(1))
    foreign(table, 2)
    DeltaTable(table).optimize.compact()
    clean_log(table)
    with pytest.raises(LakeError, match="another program may have written"):
        check_droppable(str(tmp_path), [T], "shop")


def test_files_links_and_tables_of_others_in_its_folder_stay(tmp_path: Path) -> None:
    table = tmp_path / "public" / "t"
    ours(table, 3)
    foreign(table / "sales" / "x")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "y.parquet").write_bytes(b"x")
    (table / "archive").symlink_to(tmp_path / "archive")
    (table / f"part-{uuid.uuid4()}.zstd.parquet").symlink_to(tmp_path / "archive" / "y.parquet")
    (table / "orders-2019.parquet").write_bytes(b"mine")
    others = tree(table / "sales")
    kept = foreign_files(str(tmp_path), [T])
    assert len([path for path in kept if "/sales/" in path]) == len(others)
    assert len(kept) == len(others) + 3
    check_droppable(str(tmp_path), [T], "shop")
    assert drop_lake_tables(str(tmp_path), [T]) == [T]
    assert tree(table / "sales") == others
    assert sorted(path.name for path in table.iterdir() if path.is_symlink() or path.is_file()) == sorted(
        Path(path).name for path in kept if "/sales/" not in path
    )
    assert (tmp_path / "archive" / "y.parquet").exists()
    assert drop_lake_tables(str(tmp_path), [T]) == [T]


def test_drop_that_was_interrupted_anywhere_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step the remaining files show the owner: the log is deleted last, newest version first."""
    table = tmp_path / "public" / "t"
    as_replicated(table)
    DeltaTable(table).create_checkpoint()
    as_replicated(table)
    place = "airflow_provider_pgrepl.replication.lake.drop.delete_files"

    def one_by_one(filesystem: fs.FileSystem, paths: list[str]) -> None:
        for path in paths:
            delete_files(filesystem, [path])
            check_droppable(str(tmp_path), [T], "shop")

    monkeypatch.setattr(place, one_by_one)
    drop_lake_tables(str(tmp_path), [T])
    assert not table.exists()


def test_file_that_is_written_while_its_folder_goes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file appears in the schema's folder right before that is deleted."""
    late, real = tmp_path / "public" / "precious", Path.rmdir

    def rmdir(folder: Path) -> None:
        if folder == late.parent:
            late.write_text("x")
        real(folder)

    as_replicated(tmp_path / "public" / "t")
    monkeypatch.setattr(Path, "rmdir", rmdir)
    drop_lake_tables(str(tmp_path), [T])
    assert [path.name for path in late.parent.iterdir()] == ["precious"]
