"""check_directory: a check that a lake's directory can be made, before anything relies on it."""

from __future__ import annotations

import json
import os
from errno import EACCES, EIO
from pathlib import Path

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError, PgReplError
from airflow_provider_pgrepl.replication.storage.errors import storage_errors
from airflow_provider_pgrepl.replication.storage.probe import check_directory


def test_directory_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    check_directory(str(tmp_path / "new" / "lake"))
    check_directory(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_lake_inside_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LakeError, match=r"cannot write under .*/file/lake: Not a directory") as caught:
        check_directory(str(tmp_path / "file" / "lake"))
    assert caught.value.hint


def test_lake_whose_changelog_cannot_be_made_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "_pgrepl").touch()
    with pytest.raises(LakeError, match="cannot write under"):
        check_directory(str(tmp_path))


def test_lake_where_the_system_makes_no_folders_is_rejected() -> None:
    with pytest.raises(LakeUnavailableError, match="cannot write under /proc/lake") as caught:
        check_directory("/proc/lake")
    assert caught.value.hint.startswith("check the rights of the process there")


def test_command_checks_lake_before_it_starts_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setenv("PGREPL_DSN", "host=127.0.0.1 port=1 user=app")
    (tmp_path / "file").touch()
    fields = {"name": "shop", "lake": str(tmp_path / "file" / "lake"), "tables": ["public.a"]}
    pipeline = tmp_path / "pipeline.json"
    pipeline.write_text(json.dumps(fields), encoding="utf-8")
    assert main(["snapshot", str(pipeline)]) == 78
    assert "cannot write under" in capsys.readouterr().err


def test_store_is_not_asked() -> None:
    check_directory("s3://bucket/lake")


@pytest.mark.parametrize("error", [PermissionError(EACCES, "no"), OSError(EIO, "no")])
def test_place_that_cannot_be_read_is_not_called_unwritable(error: OSError) -> None:
    with (
        pytest.raises(PgReplError, match="cannot read /lake/t: ") as caught,
        storage_errors("/lake/t", "read"),
    ):
        raise error
    assert "write" not in caught.value.message + caught.value.hint
