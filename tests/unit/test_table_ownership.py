"""lake/delta/ownership.py: whose a lake table is, and what is left alone when that cannot be known."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import LakeError, LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.ownership import (
    Owner,
    is_written_name,
    read_ownership,
)
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import forget, open_newest
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

ROWS = pa.table({"id": pa.array([1], pa.int64())})
UUID = uuid.UUID("0b29a5a2-6c1f-4f0e-9d3b-5d4e8f7a6c10")
Make = Callable[[Path], object]


def commit_file(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def checkpoint_file(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.checkpoint.parquet"


def foreign(table: Path, versions: int = 3) -> None:
    for _ in range(versions):
        write_deltalake(str(table), ROWS, mode="append")


def ours(table: Path, versions: int = 1, app: str = "shop:2") -> None:
    for number in range(versions):
        properties = CommitProperties(app_transactions=[Transaction(app, number)])
        write_deltalake(str(table), ROWS, mode="append", commit_properties=properties)


def ours_behind_a_checkpoint(table: Path) -> None:
    ours(table)
    DeltaTable(table).create_checkpoint()
    commit_file(table, 0).unlink()


def ours_torn(table: Path) -> None:
    ours(table, 2)
    commit_file(table, 1).write_text('{"add": {"path": "x')


def unfinished_copy(table: Path) -> None:
    table.mkdir(parents=True)
    (table / f"part-{UUID}.zstd.parquet").write_bytes(b"PAR1")


def plain_files(table: Path) -> None:
    table.mkdir(parents=True)
    (table / "report-2019.csv").write_text("a,b\n")


def plain_file(table: Path) -> None:
    table.parent.mkdir(parents=True)
    table.write_text("mine")


def iceberg(table: Path) -> None:
    (table / "metadata").mkdir(parents=True)
    (table / "metadata" / "v1.metadata.json").write_text("{}")


def foreign_torn(table: Path) -> None:
    foreign(table)
    commit_file(table, 2).write_text('{"add": {"path": "x')


def foreign_empty(table: Path) -> None:
    foreign(table, 1)
    commit_file(table, 0).write_text("")


def foreign_of_reader_4(table: Path) -> None:
    foreign(table, 1)
    commit_file(table, 1).write_text('{"protocol": {"minReaderVersion": 4, "minWriterVersion": 8}}\n')


def foreign_of_a_catalog(table: Path) -> None:
    foreign(table, 1)
    features = {"readerFeatures": ["catalogManaged"], "writerFeatures": ["catalogManaged"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    commit_file(table, 1).write_text(json.dumps(protocol) + "\n")


def foreign_without_first_commit(table: Path) -> None:
    foreign(table)
    commit_file(table, 0).unlink()


def foreign_with_hint_to_nothing(table: Path) -> None:
    foreign(table)
    (table / "_delta_log" / "_last_checkpoint").write_text('{"version":2,"size":5}')


def foreign_with_torn_checkpoint(table: Path) -> None:
    foreign(table)
    DeltaTable(table).create_checkpoint()
    checkpoint_file(table, 2).write_bytes(b"PAR1xxxx")
    for version in range(3):
        commit_file(table, version).unlink()


def ours_through_a_link(table: Path) -> None:
    ours(table.parent.parent / "elsewhere")
    table.parent.mkdir(parents=True)
    table.symlink_to(table.parent.parent / "elsewhere")


def ours_in_a_linked_schema(table: Path) -> None:
    ours(table.parent.parent / "big_disk" / table.name)
    table.parent.symlink_to(table.parent.parent / "big_disk")


NOT_OURS: list[Make] = [
    foreign, plain_files, plain_file, iceberg, foreign_torn, foreign_empty, foreign_of_reader_4,
    foreign_of_a_catalog, foreign_without_first_commit, foreign_with_hint_to_nothing,
    foreign_with_torn_checkpoint, ours_through_a_link, ours_in_a_linked_schema,
]  # fmt: skip


def tree(folder: Path) -> dict[str, int]:
    return {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("make", [ours, ours_behind_a_checkpoint, ours_torn])
def test_table_with_an_app_id_of_the_pipeline_is_the_pipelines(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "public" / "t")
    assert read_ownership(f"{tmp_path}/public/t", "shop").owner is Owner.PIPELINE
    for other in ("sho", "shop2", "shop:2"):
        assert read_ownership(f"{tmp_path}/public/t", other).owner is Owner.OTHER


def of_another_pipeline(table: Path) -> None:
    commit_snapshot(str(table), ROWS.schema, [], LSN(9), "other", Epoch(1))


@pytest.mark.parametrize(
    "make", [of_another_pipeline, ours, plain_files, ours_through_a_link, unfinished_copy]
)
def test_only_a_table_that_no_pipeline_has_written_is_adoptable(tmp_path: Path, make: Make) -> None:
    table = tmp_path / "public" / "t"
    foreign(table)
    assert read_ownership(str(table), "shop").is_adoptable
    table = tmp_path / "other" / "t"
    make(table)
    assert not read_ownership(str(table), "shop").is_adoptable


@pytest.mark.parametrize("make", [lambda _: None, Path.mkdir, unfinished_copy])
def test_folder_without_a_table_or_files_of_others_is_nobodys(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "t")
    assert read_ownership(f"{tmp_path}/t", "shop").owner is Owner.NOBODY


@pytest.mark.parametrize("make", NOT_OURS)
def test_folder_without_evidence_is_kept_whatever_fails_at_opening_it(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "public" / "t")
    found = read_ownership(f"{tmp_path}/public/t", "shop")
    assert found.owner in (Owner.OTHER, Owner.UNKNOWN)
    assert found.reason


@pytest.mark.parametrize("make", NOT_OURS)
def test_snapshot_into_a_folder_of_others_is_rejected_and_changes_nothing(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "public" / "t")
    before = tree(tmp_path)
    with pytest.raises(LakeError, match="has not written"):
        commit_snapshot(f"{tmp_path}/public/t", ROWS.schema, [], LSN(9), "shop", Epoch(2))
    assert tree(tmp_path) == before


def test_folder_of_a_table_in_other_letter_case_is_not_taken_for_this_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that ignores case, the paths of "Orders" and orders lead to one folder."""
    ours(tmp_path / "public" / "orders")
    real = Path.iterdir
    others = {"orders": "Orders"}
    monkeypatch.setattr(
        Path, "iterdir", lambda self: (one.with_name(others.get(one.name, one.name)) for one in real(self))
    )
    found = read_ownership(f"{tmp_path}/public/orders", "shop")
    assert (found.owner, found.reason.rpartition(" ")[2]) == (Owner.UNKNOWN, "Orders")


def out_of_sight(table: Path) -> Path:
    file = next(table.glob("*.parquet"))
    return file.rename(table.parent.parent / file.name)


def test_snapshot_renames_no_commit_of_a_foreign_table_with_a_file_out_of_sight(tmp_path: Path) -> None:
    table = tmp_path / "public" / "t"
    foreign(table)
    out_of_sight(table)
    before = tree(tmp_path)
    with pytest.raises(LakeError, match="has not written"):
        commit_snapshot(str(table), ROWS.schema, [], LSN(9), "shop", Epoch(2))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("told", [None, 0, 1])
def test_own_table_with_a_file_out_of_sight_is_whole_when_the_file_is_back(
    tmp_path: Path, told: int | None
) -> None:
    """A commit that a consistent point names, or may name, is not set aside because its file is not seen."""
    table = tmp_path / "public" / "t"
    ours(table)
    hidden = out_of_sight(table)
    ours(table)
    for _ in range(2):
        with pytest.raises(LakeTableError, match="1 of its 2 files are gone"):
            open_newest(str(table), "shop:2", told)
        forget(str(table))
    hidden.rename(table / hidden.name)
    assert DeltaTable(table).version() == 1
    assert len(DeltaTable(table).to_pandas()) == 2


def test_unreported_commit_without_its_file_is_set_aside(tmp_path: Path) -> None:
    """A power cut leaves such a commit; the position is then that of the commit before it."""
    table = tmp_path / "public" / "t"
    ours(table)
    held = set(table.glob("*.parquet"))
    ours(table)
    (set(table.glob("*.parquet")) - held).pop().unlink()
    assert open_newest(str(table), "shop:2", 0)[0].version() == 0
    forget(str(table))


def test_torn_log_of_another_pipelines_table_stays_as_it_is(tmp_path: Path) -> None:
    table = tmp_path / "public" / "t"
    ours_torn(table)
    before = tree(tmp_path)
    with pytest.raises(LakeTableError, match="this pipeline has not written the table"):
        open_newest(str(table), "other:1")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["orders-2019.parquet", "photo.bin", "part-1.zstd.parquet", "deletion_vector_x.bin",
     f"export/part-{UUID}.zstd.parquet", f"part-00000-{UUID}-c000.snappy.parquet"],
)  # fmt: skip
def test_names_of_other_programs_are_not_taken_for_ours(name: str) -> None:
    assert not is_written_name(name)


@pytest.mark.parametrize(
    "name",
    [f"part-{UUID}.zstd.parquet", f"deletion_vector_{UUID}.bin",
     f"part-{UUID}.parquet", f"2026-01-31T23/{UUID.hex}-77.parquet"],
)  # fmt: skip
def test_names_of_our_writers_are_known(name: str) -> None:
    assert is_written_name(name)
