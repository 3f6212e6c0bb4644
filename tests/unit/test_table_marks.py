"""lake/delta/ownership.py: a table is the pipeline's at the path and in the lake that its log names."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_nothing, commit_properties
from airflow_provider_pgrepl.replication.lake.delta.ownership import (
    Owner,
    check_former,
    check_replaceable,
    read_ownership,
)
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import open_table, relation_marks
from airflow_provider_pgrepl.replication.lake.drop import check_droppable
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.unit.test_table_ownership import ROWS, ours, tree

T, BACKUP = TableName("public", "t"), TableName("public", "t_backup")
RECORD = EpochRecord("shop", Epoch(1), "1", 1, "slot", "publication", 1, LSN(1))


def begin(lake: Path, former_lake: str = "") -> str:
    create_changelog(changelog_uri(str(lake)), RECORD, former_lake=former_lake)
    return lake_id(open_changelog(changelog_uri(str(lake))))


def copied(lake: Path, table: TableName = T) -> Path:
    commit_snapshot(f"{lake}/{table.path}", ROWS.schema, [], LSN(9), "shop", Epoch(1))
    return lake / table.path


def owner(folder: Path) -> Owner:
    return read_ownership(str(folder), "shop").owner


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_copy_of_a_tables_folder_is_not_replaced_or_dropped(tmp_path: Path, *, is_checkpointed: bool) -> None:
    table, backup = copied(tmp_path), tmp_path / BACKUP.path
    if is_checkpointed:
        DeltaTable(table).create_checkpoint()
        (table / "_delta_log" / f"{0:020d}.json").unlink()
    shutil.copytree(table, backup)
    before = tree(backup)
    with pytest.raises(LakeError, match="it is a copy of the folder of public/t"):
        copied(tmp_path, BACKUP)
    with pytest.raises(LakeError, match="it is a copy of the folder of public/t"):
        check_droppable(str(tmp_path), [BACKUP], "shop")
    assert tree(backup) == before
    check_droppable(str(tmp_path), [T], "shop")
    table.rename(tmp_path / "away")
    backup.rename(table)
    assert owner(table) is Owner.PIPELINE, "it was reverted"


def old_table_without_marks(lake: Path, table: TableName) -> None:
    """Write a table as earlier versions did, and replace its first version."""
    ours(lake / table.path, app="shop:1")
    write_deltalake(str(lake / table.path), ROWS, mode="overwrite")


def test_copy_of_a_table_without_marks_is_left_alone(tmp_path: Path) -> None:
    """State and points name the table, and no copy of it."""
    for table in (T, BACKUP):
        old_table_without_marks(tmp_path, table)
    ConsistentPoints(str(tmp_path)).append(ConsistentPoint(1, LSN(1), datetime.now(UTC), {str(T): 1}))
    nothing = timedelta(0)
    pipeline = Pipeline.from_dict({"name": "shop", "lake": str(tmp_path), "tables": ["public.*"]})
    maintenance = Maintenance(pipeline, grace=nothing, hold=nothing, log_age=nothing)
    done = maintenance.run(datetime.now(UTC) + timedelta(seconds=5))
    assert (done.files, list(done.left_alone)) == (1, ["public/t_backup", "public/t/_delta_log"])
    assert len(list((tmp_path / BACKUP.path).glob("*.parquet"))) == 2
    check_replaceable(f"{tmp_path}/{T.path}", "shop", lambda: True)
    with pytest.raises(LakeError, match="does not say which table it is"):
        check_replaceable(f"{tmp_path}/{BACKUP.path}", "shop", lambda: False)
    with pytest.raises(LakeError, match=r"t_backup \(its log does not say which table it is"):
        check_droppable(str(tmp_path), [BACKUP], "shop", [T])


def test_table_without_marks_gets_them_by_its_next_commit(tmp_path: Path) -> None:
    begin(tmp_path)
    ours(tmp_path / T.path, app="shop:1")
    table = open_table(f"{tmp_path}/{T.path}")
    assert not read_ownership(f"{tmp_path}/{T.path}", "shop").is_marked
    properties = commit_properties("shop:1", LSN(7), "changes", None, relation_marks(table, 1))
    commit_nothing(table, "shop:1", LSN(7), properties)
    assert read_ownership(f"{tmp_path}/{T.path}", "shop").is_marked
    assert relation_marks(table, 1).keys() == {"pgrepl-relation"}
    shutil.rmtree(tmp_path / "_pgrepl")
    assert owner(tmp_path / T.path) is Owner.UNKNOWN


def test_table_of_another_lake_is_not_the_pipelines(tmp_path: Path) -> None:
    """It may be that of a pipeline of the same name at another server."""
    begin(tmp_path)
    table = copied(tmp_path)
    check_droppable(str(tmp_path), [T], "shop")
    (tmp_path / "_pgrepl").rename(tmp_path / "away")
    found = read_ownership(str(table), "shop")
    assert (found.owner, found.reason) == (Owner.UNKNOWN, "it is of a lake whose changelog is not there")
    begin(tmp_path)
    before = tree(table)
    with pytest.raises(LakeError, match="it is of another lake"):
        copied(tmp_path)
    assert tree(table) == before


def test_changelog_in_the_place_of_a_lost_one_goes_on_with_its_tables(tmp_path: Path) -> None:
    former = begin(tmp_path)
    table = copied(tmp_path)
    shutil.rmtree(tmp_path / "_pgrepl")
    check_former(str(table), "shop", former, is_copied=True)
    begin(tmp_path, former)
    assert owner(table) is Owner.PIPELINE
    assert owner(copied(tmp_path)) is Owner.PIPELINE


@pytest.mark.parametrize(("is_marked", "is_copied"), [(True, True), (True, False), (False, False)])
def test_no_epoch_begins_over_tables_of_which_the_state_knows_nothing(
    tmp_path: Path, *, is_marked: bool, is_copied: bool
) -> None:
    if is_marked:
        begin(tmp_path)
        copied(tmp_path)
        shutil.rmtree(tmp_path / "_pgrepl")
    else:
        ours(tmp_path / T.path, app="shop:1")
    with pytest.raises(LakeError, match="there is no changelog in this lake"):
        check_former(f"{tmp_path}/{T.path}", "shop", "of another lake", is_copied=is_copied)
    check_former(f"{tmp_path}/{T.path}", "others", "", is_copied=False)
    check_former(f"{tmp_path}/nothing/t", "shop", "", is_copied=False)
