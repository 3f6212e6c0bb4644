"""A full lake storage: every writer reports it, leaves no files, and continues once there is space."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.errors import LakeUnavailableError, Retry
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import begin_epoch, create_changelog, mark
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import open_table, read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage.errors import (
    delta_errors,
    is_full,
    is_storage_error,
    storage_error,
)
from tests.support.announced import relation
from tests.support.changelogs import Written, epoch_record, new_changelog
from tests.support.loop_disk import Disk, disk
from tests.unit.test_lake_table import FIRST, write
from tests.unit.test_maintenance import eager, overwrite, soon

TEXTS = pa.schema([("v", pa.string())])


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path, 16 << 20) as made:
        yield made


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(LakeUnavailableError, match="the storage is full") as caught:
        act()
    assert caught.value.retry is Retry.TIMED
    assert "free space outside the lake" in caught.value.hint
    return caught.value.message


def texts(number: int) -> pa.RecordBatch:
    """Return text values that no compression makes smaller."""
    values = [Path("/dev/urandom").open("rb").read(1000).hex() for _ in range(number)]  # noqa: SIM115
    return pa.record_batch([values], schema=TEXTS)


@pytest.mark.parametrize("rows", [1, 70_000])
def test_files_of_a_copy_that_do_not_fit_are_taken_away(drive: Disk, rows: int) -> None:
    """This includes files whose footer was never written."""
    drive.fill(leaving=1 << 20 if rows > 1 else 0)

    def copy() -> None:
        with ParquetFiles(str(drive.folder), "public/t", TEXTS) as files:
            batch = texts(min(rows, 700))
            for _ in range(0, rows, 700):
                files.write(batch)
            files.finish()

    refused(copy)
    assert not list(drive.folder.rglob("*.parquet"))


def test_the_changelog_goes_on_when_there_is_space_again(drive: Disk) -> None:
    one = Written(new_changelog(drive.folder))
    one.transaction(100, r7=3)
    version = one.flush()
    durable = one.writer.durable_lsn
    drive.fill()
    one.transaction(200, r7=2000)
    refused(one.flush)
    assert one.writer.durable_lsn == durable
    assert len([file for file in Path(one.uri).rglob("*.parquet") if "-" in file.name]) == 1
    refused(lambda: mark(one.uri))
    refused(lambda: begin_epoch(one.uri, epoch_record(2, 900)))
    drive.free()
    again = Written(one.uri)
    assert again.writer.durable_lsn == durable
    again.transaction(200, r7=2000)
    again.flush()
    assert DeltaTable(one.uri).version() > version


def test_first_writes_fail_on_full_storage_and_succeed_after_space_is_freed(drive: Disk) -> None:
    drive.fill()
    refused(lambda: create_changelog(f"{drive.folder}/changelog", epoch_record()))
    refused(lambda: commit_snapshot(f"{drive.folder}/public/t", TEXTS, [], LSN(9), "p", Epoch(1)))
    refused(lambda: ConsistentPoints(str(drive.folder)).append(ConsistentPoint(1, 5, datetime.now(UTC), {})))
    record = RelationRecord.of_catalog(relation(7, "k", "v"))
    refused(lambda: RelationIndex(relations_uri(str(drive.folder))).add(Epoch(1), record))
    drive.free()
    create_changelog(f"{drive.folder}/changelog", epoch_record())
    commit_snapshot(f"{drive.folder}/public/t", TEXTS, [], LSN(9), "p", Epoch(1))
    ConsistentPoints(str(drive.folder)).append(ConsistentPoint(1, 5, datetime.now(UTC), {}))
    RelationIndex(relations_uri(str(drive.folder))).add(Epoch(1), record)


def test_a_lake_table_stays_where_it_is(drive: Disk) -> None:
    uri = f"{drive.folder}/public/t"
    commit_snapshot(uri, TEXTS, [], LSN(9), "p", Epoch(1))
    drive.fill()
    table = open_table(uri)
    rows = pa.table([texts(500).column(0)], schema=TEXTS)
    refused(lambda: write(table, rows, FIRST, LSN(20)))
    assert read_position(open_table(uri), FIRST) == 9
    drive.free()
    write(open_table(uri), rows, FIRST, LSN(20))
    assert read_position(open_table(uri), FIRST) == 20


def test_maintenance_makes_space_where_there_is_none(drive: Disk) -> None:
    points = ConsistentPoints(str(drive.folder))
    for value in range(5):
        ago = datetime.now(UTC) - timedelta(hours=3, minutes=-value)
        overwrite(drive.folder, value)
        points.append(ConsistentPoint(1, value, ago, {"public.b": value}))
    drive.fill()
    done = eager(drive.folder, consistent_point_keep_all_h=0.5, consistent_point_thinning_min=1e9).run(soon())
    assert done.files >= 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_is_told_from_away(number: int) -> None:
    words = f"Generic LocalFileSystem error: Unable to copy data to file: some words (os error {number})"
    for error in (OSError(number, "words"), DeltaError(words)):
        assert is_full(error)
        assert is_storage_error(error)
        assert (
            storage_error("it cannot be written", error).message
            == "it cannot be written: the storage is full"
        )
    for error in (OSError(errno.EIO, "Input/output error"), DeltaError(words.replace(str(number), "5"))):
        assert is_storage_error(error)
        assert not is_full(error)
    assert (
        "words"
        not in storage_error("it cannot be written", DeltaError(words.replace(str(number), "5"))).message
    )
    assert not is_storage_error(DeltaError("Generic DeltaTable error: a value of a row"))


def test_delta_error_unrelated_to_storage_is_raised_unchanged() -> None:
    with pytest.raises(DeltaError, match="a value"), delta_errors("it cannot be written"):
        raise DeltaError("a value")
