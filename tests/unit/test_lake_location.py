"""settings/lake.py: one place, as Delta, Arrow and Hadoop name it."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.settings.lake import (
    StoreLocation,
    canonical,
    fault_of_uri,
    hadoop_uri,
    is_object_store,
    store_location,
)


@pytest.mark.parametrize("lake", ["s3://bucket/a/b", "s3a://bucket/a/b/", "S3://bucket/a/b"])
def test_a_bucket_has_one_name_here_and_another_in_hadoop(lake):
    assert fault_of_uri(lake) == ""
    assert canonical(lake) == "s3://bucket/a/b"
    assert hadoop_uri(canonical(lake)) == "s3a://bucket/a/b"
    assert is_object_store(lake)


@pytest.mark.parametrize(
    ("lake", "kept", "place"),
    [
        (
            "gs://bu_cket.example/a/b/",
            "gs://bu_cket.example/a/b",
            StoreLocation("gs", "bu_cket.example", "a/b"),
        ),
        (
            "abfs://files@shop1.dfs.core.windows.net/a",
            "abfss://files@shop1.dfs.core.windows.net/a",
            StoreLocation("abfss", "files", "a", "shop1"),
        ),
    ],
)
def test_other_stores_have_their_names(lake, kept, place):
    assert fault_of_uri(lake) == ""
    assert canonical(lake) == hadoop_uri(kept) == kept
    assert store_location(lake) == store_location(kept) == place


def test_a_directory_stays_what_it_is():
    for path in ("/srv/lake", "lake", "file:///srv/lake"):
        assert hadoop_uri(path) == path
        assert not is_object_store(path)


@pytest.mark.parametrize(
    ("lake", "fault"),
    [
        ("hdfs://name/lake", "hdfs:// is not supported"),
        ("gs://Bucket/lake", "'Bucket' cannot be the name of a bucket"),
        ("abfss://shop/lake", "'shop' is not container@account.dfs.core.windows.net"),
        (
            "abfss://files@shop.dfs.core.chinacloudapi.cn/lake",
            "'files@shop.dfs.core.chinacloudapi.cn' is not container@account.dfs.core.windows.net",
        ),
        ("s3://BUCKET/lake", "'BUCKET' cannot be the name of a bucket"),
        ("s3://bucket", "names no folder in the bucket"),
        ("s3://bucket/a/./b", "has an empty part, . or .. in its path"),
        (
            "s3://bucket/my lake",
            "may have ASCII letters, digits and _ . ~ + = - in its path, since all else would be encoded",
        ),
        ("s3:bucket/lake", "is neither a path nor a URI with a bucket"),
    ],
)
def test_invalid_lake_uri_is_rejected_with_exact_fault(lake, fault):
    assert fault_of_uri(lake) == fault
