"""app/source_ownership.py: with what an epoch begins in a lake whose changelog was lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.app.source_ownership import NextEpoch, find_next_epoch
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase

T = TableName("public", "t")


def record(epoch: int) -> EpochRecord:
    return EpochRecord("shop", Epoch(epoch), "7", 1, "pgrepl_shop", "pgrepl_shop", 5, LSN(5))


def beginning(lake: str, lake_of_state: str = "", last: EpochRecord | None = None) -> NextEpoch:
    recorded = SimpleNamespace(lake=lake, lake_id=lake_of_state)
    table = SimpleNamespace(position_lsn=LSN(5))
    state_db = SimpleNamespace(read_pipeline=lambda _: recorded, read_tables=lambda _: {T: table})
    pipeline = cast(Pipeline, SimpleNamespace(name="shop", lake_root=lake))
    return find_next_epoch(cast(StateDatabase, state_db), pipeline, [T], last)


def point(epoch: int) -> ConsistentPoint:
    return ConsistentPoint(epoch, LSN(10), None, {str(T): 1})


def test_no_epoch_has_the_number_of_one_that_is_still_believed_in_the_lake(tmp_path: Path) -> None:
    lake = str(tmp_path)
    assert beginning(lake) == NextEpoch(Epoch(1))
    ConsistentPoints(lake).append(point(2))
    assert beginning(lake).epoch == 3
    RelationIndex(relations_uri(lake)).begin_source(Epoch(4))
    assert beginning(lake).epoch == 5
    about = CommitProperties(app_transactions=[Transaction("shop:7", 5), Transaction("shopping:9", 5)])
    write_deltalake(f"{lake}/{T.path}", pa.table({"n": [1]}), commit_properties=about)
    assert beginning(lake).epoch == 8
    assert beginning(lake, last=record(2)).epoch == 5, "a changelog that was put back"
    assert beginning(lake, last=record(6)).epoch == 7


def test_points_of_another_lake_do_not_stand_beside_a_new_changelog(tmp_path: Path) -> None:
    lake = str(tmp_path)
    create_changelog(changelog_uri(lake), record(1))
    known = lake_id(open_changelog(changelog_uri(lake)))
    ConsistentPoints(lake).append(point(1))
    shutil.rmtree(changelog_uri(lake))
    assert beginning(lake, known) == NextEpoch(Epoch(2), known)
    with pytest.raises(LakeError, match=r"consistent_points .* of another lake") as caught:
        beginning(lake, "another")
    assert "move" in caught.value.hint
