"""A lake table with V2 checkpoints, which Spark writes once delta.checkpointPolicy is v2, stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.delta.recovery import find_torn
from airflow_provider_pgrepl.replication.lake.delta import live_files as followed
from airflow_provider_pgrepl.replication.lake.delta.live_files import check_files, live_files
from airflow_provider_pgrepl.replication.lake.delta.ownership import Owner, read_ownership
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.delta.vacuum import TableFiles
from tests.support.foreign_settings import clean_log, write_v2_checkpoint
from tests.support.model import Change
from tests.unit.test_obstacles import Lake

SUFFIXES = pytest.mark.parametrize("suffix", ["json", "parquet"])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """With files and deletion vectors."""
    lake = Lake(tmp_path)
    lake.change_at(20)
    return lake


@SUFFIXES
def test_hint_to_a_sound_checkpoint_stays(lake: Lake, suffix: str) -> None:
    write_v2_checkpoint(lake.uri, suffix)
    assert not find_torn(lake.uri)
    clean_log(lake.uri)
    assert not find_torn(lake.uri)


@SUFFIXES
def test_table_is_read_and_written_once_older_commits_are_gone(lake: Lake, suffix: str) -> None:
    before = {path: file.action["size"] for path, file in live_files(open_table(lake.uri)).items()}
    vectors = [file.vector for file in live_files(open_table(lake.uri)).values()]
    write_v2_checkpoint(lake.uri, suffix)
    clean_log(lake.uri)
    followed._followed.clear()
    table = open_table(lake.uri)
    check_files(table)
    assert {path: file.action["size"] for path, file in live_files(table).items()} == before
    assert [file.vector for file in live_files(table).values()] == vectors
    assert lake.position == 20
    assert read_ownership(lake.uri, "p").owner is Owner.PIPELINE
    lake.apply(Change("D", old=("1", None), commit_lsn=30))
    assert lake.position == 30
    assert TableFiles(lake.uri).measure().live > 0


def test_checkpoint_without_its_sidecar_is_set_aside_when_the_commits_are_there(lake: Lake) -> None:
    top = write_v2_checkpoint(lake.uri, "json")
    (sidecar,) = (top.parent / "_sidecars").iterdir()
    sidecar.unlink()
    torn = find_torn(lake.uri)
    assert torn.checkpoints == (int(top.name[:20]),)
    torn.set_aside()
    assert not top.exists()
    assert not (top.parent / "_last_checkpoint").exists()
    assert not find_torn(lake.uri)
    assert lake.position == 20
