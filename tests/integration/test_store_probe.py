"""A store that cannot be used is named with the cause before anything is begun, and no key is shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.delta.table import append_delta
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.drop import check_droppable, drop_lake_tables, foreign_files
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import objects, open_storage, probe
from airflow_provider_pgrepl.replication.storage.probe import check_store, storage_lead


def refused(lake: str, kind: type[LakeError] = LakeError) -> str:
    with pytest.raises(kind) as caught:
        check_store(lake)
    assert type(caught.value) is kind
    assert "pgrepl-secret" not in str(caught.value)
    assert caught.value.hint
    return caught.value.message.removeprefix(f"{lake}: ")


def test_a_store_that_can_be_used_keeps_nothing_of_the_question(s3_lake):
    check_store(s3_lake)
    filesystem, root = open_storage(s3_lake)
    assert not filesystem.get_file_info(f"{root}/_pgrepl").is_file
    assert open_storage(s3_lake)[0].get_file_info(f"{root}/_pgrepl").size is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "the store does not know the access key"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the secret access key is not the access key's"),
        ({"AWS_REGION": "eu-west-1"}, "the bucket is in another region"),
    ],
)
def test_keys_and_region(variables, said, s3_lake, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refused(s3_lake) == said


def test_a_bucket_that_is_not_there(s3_lake):
    assert refused("s3://nobodys-bucket/lake") == "there is no such bucket"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ExpiredToken", "the token has expired"),
        (
            "RequestTimeTooSkewed",
            "this host's clock differs from the store's, which therefore rejects signed requests",
        ),
        ("AccessDenied", "the store denies access"),
        ("InvalidObjectState", "the store refuses, with its code InvalidObjectState"),
    ],
)
def test_store_probe_explains_amazon_error_codes(code, said, faulty, s3_lake):
    faulty.next(code, times=100)
    assert refused(s3_lake) == said


def test_a_store_that_is_busy_is_asked_again_by_the_next_run(faulty, s3_lake, monkeypatch):
    monkeypatch.setattr(probe, "_PATIENCE", timedelta(seconds=1))
    faulty.next("throttled", times=100)
    assert refused(s3_lake, LakeUnavailableError) == "the store throttles requests"


def test_a_store_that_fails_is_asked_again_whatever_it_says_of_itself(faulty, s3_lake, monkeypatch):
    monkeypatch.setattr(probe, "_PATIENCE", timedelta(seconds=1))
    faulty.next("answer lost", times=100)
    assert refused(s3_lake, LakeUnavailableError) == "the store cannot be reached"


def test_a_table_whose_owner_is_not_told_is_not_dropped(faulty, s3_lake):
    """One denied request does not mean that the table has no owner."""
    append_delta(f"{s3_lake}/public/t", pa.table({"a": [1]}))
    faulty.next("AccessDenied")
    with pytest.raises(LakeUnavailableError, match="the store denies access"):
        check_droppable(s3_lake, [TableName("public", "t")], "p")
    with pytest.raises(LakeError, match="has not written all of it"):
        check_droppable(s3_lake, [TableName("public", "t")], "p")


def test_dropping_lake_table_deletes_all_its_s3_objects(s3_lake):
    append_delta(f"{s3_lake}/public/t", pa.table({"a": [1]}))
    append_delta(f"{s3_lake}/public/t2", pa.table({"a": [1]}))
    assert drop_lake_tables(s3_lake, [TableName("public", "t")]) == [TableName("public", "t")]
    assert drop_lake_tables(s3_lake, [TableName("public", "t")]) == []
    filesystem, root = open_storage(s3_lake)
    left = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    assert left
    assert all(info.path.startswith((f"{root}/public/t2", f"{root}/public")) for info in left)
    assert not [info for info in left if info.path.startswith(f"{root}/public/t/")]


def test_objects_of_others_in_the_place_of_a_table_stay(s3_lake):
    filesystem, root = open_storage(s3_lake)
    report = f"{root}/public/t/report-2019.csv"
    objects.put(filesystem, report, b"mine")
    with pytest.raises(LakeError, match=r"it has no Delta log, but holds report-2019.csv"):
        check_droppable(s3_lake, [TableName("public", "t")], "p")
    with pytest.raises(LakeError, match="has not written"):
        commit_snapshot(f"{s3_lake}/public/t", pa.schema([("a", pa.int64())]), [], LSN(9), "p", Epoch(1))
    objects.delete(filesystem, [report])
    commit_snapshot(f"{s3_lake}/public/t", pa.schema([("a", pa.int64())]), [], LSN(9), "p", Epoch(1))
    objects.put(filesystem, report, b"mine")
    check_droppable(s3_lake, [TableName("public", "t")], "p")
    assert foreign_files(s3_lake, [TableName("public", "t")]) == [f"{s3_lake}/public/t/report-2019.csv"]
    drop_lake_tables(s3_lake, [TableName("public", "t")])
    left = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    assert [info.path for info in left if info.is_file] == [report]


def test_clock_of_the_store_is_asked_and_leaves_nothing(s3_lake):
    append_delta(f"{s3_lake}/_pgrepl/changelog", pa.table({"a": [1]}))
    filesystem, root = open_storage(s3_lake)
    before = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    lead = storage_lead(f"{s3_lake}/_pgrepl", datetime.now(UTC) + timedelta(minutes=20))
    assert timedelta(minutes=19) < lead < timedelta(minutes=21)
    after = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    assert [info.path for info in after] == [info.path for info in before]


def test_a_store_that_is_away(faulty, s3_lake):
    faulty.close()
    said = refused(s3_lake, LakeUnavailableError)
    assert said == f"cannot connect to the store (127.0.0.1:{faulty.port})"


def test_a_store_that_takes_every_put(s3_lake, faulty):
    """A store that ignores If-None-Match keeps no two writers apart."""
    faulty.drops_conditions = True
    assert "does not support conditional puts" in refused(s3_lake)
