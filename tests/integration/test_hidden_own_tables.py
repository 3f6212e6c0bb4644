"""A lake whose consistent points are out of sight is not gone on with, unless somebody gives them up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.app import replicate
from airflow_provider_pgrepl.replication.app.operations.acceptance import accept_missing
from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.lake.points import points_uri
from airflow_provider_pgrepl.replication.lsn import LSN
from tests.support.kept import A, B, Kept, kept_tables


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    found = kept_tables(dsn, tmp_path)
    found.receive()
    found.write_point(LSN(found.begin()), A, B)
    return found


def test_apps_end_until_the_points_are_back_or_given_up(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    kept.fail(A)
    uri = points_uri(kept.pipeline.lake_root)
    shutil.move(uri, uri + ".away")
    version = open_changelog(kept.changelog).version()
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert f"the consistent points of this lake are not in {uri}" in caplog.text
    commands: tuple[Callable[[], object], ...] = (
        lambda: take_tables(kept.access),
        lambda: begin_new_epoch(kept.access),
        lambda: retry_tables(kept.access, [A]),
    )
    for command in commands:
        with pytest.raises(LakeError, match="are not in"):
            command()
    assert len(accept_missing(kept.access, dry_run=True)) == 1
    assert open_changelog(kept.changelog).version() == version
    assert not Path(uri).exists()
    assert len(accept_missing(kept.access, dry_run=False)) == 1
    assert accept_missing(kept.access, dry_run=False) == []
    kept.write_point(LSN(kept.begin() + 1), A, B)
