"""Errors for Spark's failures to read a lake table, recognized by their text: Spark raises many classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import LakeError, ToolError
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.postgres.names import TableName

NAME = TableName("public", "t")


def failing(said: str) -> Any:
    def load(_: str) -> None:
        raise RuntimeError(said)

    reader = SimpleNamespace(load=load)
    reader.format = reader.option = lambda *_: reader
    return SimpleNamespace(read=reader)


@pytest.mark.parametrize(
    ("uri", "said", "kind", "told"),
    [
        ("s3://lake/t", "Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", ToolError, "make s3a"),
        ("s3://lake/t", "NoAuthWithAWSException", LakeError, "Spark cannot read public.t from its store"),
        ("/lake/t", "no such version", LakeError, "version 3 of public.t cannot be read any more"),
    ],
)
def test_spark_read_failure_becomes_tool_or_lake_error_with_cause(
    uri: str, said: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableVersion, "open", lambda _: None)
    with pytest.raises(kind, match=told):
        TableVersion(NAME, uri, 3).frame(failing(said))


def test_a_version_that_nobody_can_read_is_gone_in_a_store_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(version: TableVersion) -> None:
        raise version._unreadable()

    monkeypatch.setattr(TableVersion, "open", gone)
    with pytest.raises(LakeError, match="cannot be read any more"):
        TableVersion(NAME, "s3://lake/t", 3).frame(failing("DELTA_VERSION_NOT_FOUND"))
