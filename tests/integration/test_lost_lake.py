"""The lake of a pipeline that has begun is not there (not mounted, say): nothing takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.app import replicate
from airflow_provider_pgrepl.replication.app.snapshot import add_tables, begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.lake.consistent_points import points_uri
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute

T = "public.t"


def unmounted(kept: Kept) -> None:
    lake = Path(kept.pipeline.lake_root)
    lake.rename(lake.with_name("away"))
    lake.mkdir()


def without_changelog(kept: Kept) -> None:
    changelog = Path(kept.changelog)
    changelog.rename(changelog.with_name("away"))


@pytest.fixture(params=[unmounted, without_changelog])
def kept(dsn, tmp_path, monkeypatch, request) -> Kept:
    execute(dsn, "create table t (id int primary key)", "insert into t values (1)")
    kept = Kept(dsn, tmp_path, (T,), trust_table_owners=True)
    kept.take(T)
    lose: Callable[[Kept], None] = request.param
    lose(kept)
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    return kept


def test_a_snapshot_does_not_begin_again_and_leaves_the_slot(kept: Kept) -> None:
    before = kept.slot()
    for take in (take_tables, add_tables):
        with pytest.raises(LakeError, match="not mounted") as caught:
            take(kept.access)
        assert "--new-epoch" in caught.value.hint
    assert kept.slot() == before


def test_new_epoch_in_a_missing_lake_needs_its_name_and_leaves_the_slot(kept: Kept) -> None:
    before, lake = kept.slot(), kept.pipeline.lake_root
    with pytest.raises(ConfigError, match=r"would abandon.*not mounted") as caught:
        begin_new_epoch(kept.access)
    assert f"--new-epoch --give-up {lake}," in caught.value.hint
    assert kept.slot() == before


@pytest.mark.thorough("the same test, of a lake that is not mounted", "without_changelog")
def test_replication_says_that_it_is_away(kept: Kept, caplog) -> None:
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert "is not mounted on this host" in caplog.text
    with kept.access.state_db("test") as state_db:
        last = state_db.read_run(kept.pipeline.name)
    assert last is not None
    assert (last.kind, last.error) == ("failed", "LakeError")
    assert "is not mounted on this host" in last.reason


@pytest.mark.thorough("the same test, of a lake that is not mounted", "without_changelog")
def test_status_says_so(kept: Kept) -> None:
    shown = " ".join(to_text(read_status(kept.pipeline)).split())
    assert "is not mounted on this host" in shown
    assert "--new-epoch" in shown


def test_a_snapshot_marks_no_lake_of_an_earlier_version_whose_points_are_away(
    dsn, tmp_path, monkeypatch
) -> None:
    kept = kept_tables(dsn, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(own_tables, "record", lambda _: None)
        kept.write_point(kept.begin(), A, B)
    with kept.access.state_db("test") as state_db:
        state_db.write_progress(kept.pipeline.name, applied_lsn=kept.begin())
    points = Path(points_uri(kept.pipeline.lake_root))
    points.rename(points.with_name("away"))
    with pytest.raises(LakeError, match="the table of consistent points of this lake is not in"):
        take_tables(kept.access)
