"""A lake table keeps its position when another program lets Delta's app ids expire."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.lake.apply.table_merge import bring_forward
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, read_table_position
from airflow_provider_pgrepl.replication.lake.delta import live_files as followed
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, open_table, read_position
from airflow_provider_pgrepl.replication.lake.delta.vacuum import TableFiles
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import work_of
from tests.support.foreign_settings import Settings, clean_log, set_by_another
from tests.support.model import Change
from tests.unit.test_obstacles import APP, OF, Lake

RETENTION = Settings({"delta.setTransactionRetentionDuration": "interval 0 seconds"})
LATER = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake table at LSN 20, with a checkpoint that lacks the position."""
    lake = Lake(tmp_path)
    lake.change_at(20)
    set_by_another(lake.uri, RETENTION)
    checkpoint(lake)
    return lake


def checkpoint(lake: Lake) -> None:
    open_table(lake.uri).create_checkpoint()
    # Forget the table, as a process does not know it before it opens it.
    followed._followed.clear()


@pytest.mark.parametrize(
    "point", [None, ConsistentPoint(Epoch(1), LSN(25), None, {"public.t": 3}, {"public.t": 20})]
)
def test_position_that_status_shows_is_that_of_the_commits(lake: Lake, point: ConsistentPoint | None) -> None:
    found = read_table_position(open_table(lake.uri), APP, "public.t", point)
    assert found is not None
    assert (found.own, found.whole) == (20, 20 if point is None else 25)


def test_position_is_read_and_moved_behind_a_checkpoint_without_it(lake: Lake) -> None:
    assert open_table(lake.uri).transaction_version(APP) is None
    assert (lake.position, app_version(open_table(lake.uri), RELATION_APP)) == (20, 1)
    lake.apply(Change("D", old=("1", None), commit_lsn=30))
    checkpoint(lake)
    assert lake.position == 30


def test_table_whose_commits_are_gone_too_names_the_property(lake: Lake) -> None:
    clean_log(lake.uri)
    work = replace(work_of(OF.oid), relation=OF, lake_root=str(Path(lake.uri).parent), app=APP)
    (Path(lake.uri).parent / "public").mkdir()
    Path(lake.uri).rename(Path(work.uri))
    result = bring_forward(work, [], LSN(30))
    assert result.error_kind == "DriftError"
    assert "UNSET TBLPROPERTIES ('delta.setTransactionRetentionDuration')" in str(result.error)


def test_point_does_not_replace_the_position_of_a_table_whose_commits_are_gone(lake: Lake) -> None:
    """A folder that was restored from a copy can have the version that the point names, too."""
    clean_log(lake.uri)
    table = open_table(lake.uri)
    key, version = "public.t", int(table.version())
    point = ConsistentPoint(Epoch(1), LSN(25), None, {key: version}, {key: 20})
    assert read_table_position(table, APP, key, point) is None


def test_writer_of_an_earlier_epoch_stays_fenced(lake: Lake) -> None:
    commit_snapshot(lake.uri, lake_schema(OF, lake.options), [], LSN(40), "p", Epoch(2))
    checkpoint(lake)
    with pytest.raises(FencedError):
        read_position(open_table(lake.uri), APP)


def test_version_that_a_point_names_is_recognized(lake: Lake) -> None:
    version = int(open_table(lake.uri).version())
    assert TableVersion(TableName("public", "t"), lake.uri, version, APP, 20).open().version() == version


def test_log_is_not_cleaned_of_the_position(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    assert TableFiles(lake.uri).clean_log(None, LATER, age=timedelta(0)) == 0
    assert "UNSET TBLPROPERTIES ('delta.setTransactionRetentionDuration')" in caplog.text
    assert lake.position == 20


def test_log_is_cleaned_while_the_checkpoint_has_all_positions(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.change_at(20)
    set_by_another(lake.uri, Settings({"delta.setTransactionRetentionDuration": "interval 10 days"}))
    checkpoint(lake)
    assert TableFiles(lake.uri).clean_log(None, LATER, age=timedelta(0)) > 0
    assert lake.position == 20
