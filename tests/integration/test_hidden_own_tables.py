"""A lake whose consistent points are out of sight is not continued, unless an operator gives them up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.app import replicate, snapshot
from airflow_provider_pgrepl.replication.app.operations.losses import accept_missing
from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, resync, take_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import SnapshotResult
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import RELATIONS
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.changelog.relation_index import relations_uri
from airflow_provider_pgrepl.replication.lake.consistent_points import points_uri
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.server import read_server, source_of
from airflow_provider_pgrepl.replication.source.slot import drop_slot
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
    assert f"the table of consistent points of this lake is not in {uri}" in caplog.text
    commands: tuple[Callable[[], object], ...] = (
        lambda: take_tables(kept.access),
        lambda: begin_new_epoch(kept.access),
        lambda: resync(kept.access),
        lambda: retry_tables(kept.access, [A]),
    )
    for command in commands:
        with pytest.raises(LakeError, match="is not in"):
            command()
    assert len(accept_missing(kept.access, dry_run=True)) == 1
    assert open_changelog(kept.changelog).version() == version
    assert not Path(uri).exists()
    assert len(accept_missing(kept.access, dry_run=False)) == 1
    assert accept_missing(kept.access, dry_run=False) == []
    kept.write_point(LSN(kept.begin() + 1), A, B)


@pytest.mark.thorough("the same at the end of test_lost_lake")
def test_snapshot_marks_no_lake_of_an_earlier_version_whose_points_are_out_of_sight(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mark of another table the state would not be asked for the points any more."""
    with monkeypatch.context() as earlier:
        earlier.setattr(own_tables, "record", lambda _: None)
        kept = kept_tables(dsn, tmp_path)
        kept.write_point(LSN(kept.begin()), A, B)
    with kept.access.state_db("test") as state_db:
        state_db.write_progress(kept.pipeline.name, applied_lsn=LSN(kept.begin()))
    uri = points_uri(kept.pipeline.lake_root)
    shutil.move(uri, uri + ".away")
    with pytest.raises(LakeError, match="the table of consistent points of this lake is not in"):
        take_tables(kept.access)


def test_index_that_begins_anew_at_a_start_is_marked(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGREPL_DSN", kept.dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    monkeypatch.setattr(replicate, "check_role", end)
    lake = kept.pipeline.lake_root
    shutil.rmtree(relations_uri(lake))
    accept_missing(kept.access, dry_run=False)
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    shutil.rmtree(relations_uri(lake))
    assert [one.name for one in own_tables.find_missing(lake)] == [RELATIONS]


def end(*_: object) -> None:
    raise ConfigError("the test ends here")


def lose_slot(kept: Kept) -> list[str]:
    with kept.source() as source:
        drop_slot(source, kept.pipeline.slot)
        return [source_of(read_server(source)).name]


def tear_down(kept: Kept) -> list[str]:
    teardown(kept.access)
    return []


@pytest.mark.parametrize("lose", [lose_slot, tear_down])
@pytest.mark.thorough("the same test, of a lost slot", "tear_down")
def test_epoch_that_is_given_up_takes_its_lost_points_with_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Kept], list[str]]
) -> None:
    """accept-missing refuses there: source and lake do not agree, or nothing is recorded any more."""
    names = lose(kept)
    lake = kept.pipeline.lake_root
    shutil.rmtree(points_uri(lake))
    left = []

    def begin(*_: object, **__: object) -> SnapshotResult:
        left.append(own_tables.find_missing(lake))
        return SnapshotResult()

    monkeypatch.setattr(snapshot, "begin_epoch", begin)
    if names:
        with pytest.raises(ConfigError, match="would abandon"):
            begin_new_epoch(kept.access)
        assert own_tables.find_missing(lake)
        begin_new_epoch(kept.access, names)
    else:
        take_tables(kept.access)
    assert left == [[]]
    assert own_tables.find_missing(lake) == []
