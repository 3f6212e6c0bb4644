"""The apps set aside what a crash of the machine tore, before they read it, and only while nobody writes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.app import replicate, snapshot
from airflow_provider_pgrepl.replication.app.torn_commits import settle_idle_lake
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.state.store import Store
from tests.support.received import Received
from tests.support.replicated import execute


@pytest.fixture
def torn(dsn, tmp_path, monkeypatch) -> Received:
    """A pipeline whose last changelog commit and point are half there; the slot was told of neither."""
    execute(dsn, "create table t (id int primary key)")
    one = Received(dsn, tmp_path, ("public.t",))
    one.begin()
    points = Points(one.pipeline.lake_root)
    for lsn in (1, 2):
        points.append(ConsistentPoint(1, lsn, datetime.now(UTC), {"public.t": 0}))
    execute(dsn, "insert into t values (1)")
    told = one.slot().confirmed_flush_lsn
    monkeypatch.setattr(
        "airflow_provider_pgrepl.replication.receiving.receiver.Receiver._send_status", lambda *_: None
    )
    one.receive()
    monkeypatch.undo()
    assert one.slot().confirmed_flush_lsn == told
    half(newest(one.changelog))
    half(newest(f"{one.pipeline.lake_root}/_pgrepl/consistent_points"))
    monkeypatch.setenv("PGREPL_DSN", dsn)
    return one


def newest(uri: str) -> Path:
    return max((Path(uri) / "_delta_log").glob("0*.json"))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def is_torn(one: Received) -> bool:
    return newest(one.changelog).stat().st_size == 60


def test_what_was_torn_comes_again(torn: Received, caplog) -> None:
    with Store(torn.dsn, "test") as store:
        settle_idle_lake(store, torn.pipeline, torn.dsn)
    assert "Set aside: 1 commits" in caplog.text
    assert [point.lsn for point in Points(torn.pipeline.lake_root).all()] == [1]
    torn.receive()
    assert [row["new"] for row in torn.changelog_rows("I")] == [["1"]]


def test_nothing_is_touched_while_a_replication_runs(torn: Received) -> None:
    with Store(torn.dsn, "other") as other, Store(torn.dsn, "test") as store:
        other.lock(torn.pipeline.name, "replicate")
        settle_idle_lake(store, torn.pipeline, torn.dsn)
        assert is_torn(torn)
    with Store(torn.dsn, "test") as store:
        settle_idle_lake(store, torn.pipeline, torn.dsn)
    assert not is_torn(torn)


def test_the_replicate_app_does_it_before_it_reads(torn: Received, caplog) -> None:
    torn.configure(slot="another")
    assert replicate.main(["--pipeline", str(torn.file)]) == 78
    assert "knows nothing of the pipeline" in caplog.text, "what comes next"
    assert not is_torn(torn)
    assert open_changelog(torn.changelog)


def test_the_snapshot_app_does_it_before_it_reads(torn: Received) -> None:
    torn.configure(name="another")
    assert snapshot.main(["--pipeline", str(torn.file)]) == 78
    assert not is_torn(torn)


@pytest.fixture
def told(dsn, tmp_path) -> Received:
    """A pipeline whose slot was told of the last changelog commit."""
    execute(dsn, "create table t (id int primary key)")
    one = Received(dsn, tmp_path, ("public.t",))
    one.begin()
    execute(dsn, "insert into t values (1)")
    one.receive()
    assert one.slot().confirmed_flush_lsn == one.durable_lsn
    return one


def settle(one: Received, dsn: str | None) -> None:
    with Store(one.dsn, "test") as store:
        settle_idle_lake(store, one.pipeline, dsn)


def test_what_the_slot_was_told_of_stays_where_it_is_though_a_file_is_out_of_sight(
    told: Received, tmp_path: Path
) -> None:
    """As on a network file system that shows a file late, or a copy that is under way."""
    file = max(Path(told.changelog).rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    commits = sorted(path.name for path in (Path(told.changelog) / "_delta_log").iterdir())
    away = file.rename(tmp_path / "away")
    with pytest.raises(LakeError, match=r"was told .*Nothing changed") as raised:
        settle(told, told.dsn)
    assert "--new-epoch" in raised.value.hint
    assert sorted(path.name for path in (Path(told.changelog) / "_delta_log").iterdir()) == commits
    away.rename(file)
    settle(told, told.dsn)
    execute(told.dsn, "insert into t values (2)")
    told.receive()
    assert [row["new"] for row in told.changelog_rows("I")] == [["1"], ["2"]]


@pytest.mark.parametrize("table", ["consistent_points", "relations"])
def test_points_and_relations_stay_where_they_are_though_a_file_is_out_of_sight(
    told: Received, tmp_path: Path, table: str
) -> None:
    """Points were reported to readers, and what a relation was called decides which columns are hidden."""
    Points(told.pipeline.lake_root).append(ConsistentPoint(1, 1, datetime.now(UTC), {"public.t": 0}))
    folder = Path(told.pipeline.lake_root) / "_pgrepl" / table
    file = max(folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    commits = sorted(path.name for path in (folder / "_delta_log").iterdir())
    away = file.rename(tmp_path / "away")
    for dsn in (told.dsn, None):
        with pytest.raises(LakeError, match=f"{file.name}, which is not there. Nothing was changed"):
            settle(told, dsn)
    assert sorted(path.name for path in (folder / "_delta_log").iterdir()) == commits
    away.rename(file)
    settle(told, told.dsn)


def test_a_new_epoch_leads_out_of_it(told: Received, caplog) -> None:
    half(newest(told.changelog))
    with pytest.raises(LakeError, match="was told"):
        settle(told, told.dsn)
    settle(told, None)
    assert "Set aside: 1 commits" in caplog.text


def test_without_a_slot_there_is_nobody_who_was_told(told: Received) -> None:
    half(newest(told.changelog))
    execute(told.dsn, f"select pg_drop_replication_slot('{told.pipeline.slot}')")
    settle(told, told.dsn)
    assert not is_torn(told)
