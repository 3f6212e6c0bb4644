"""The apps set aside what a crash of the host tore, before they read it, and only while no writer runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import LakeError, PgReplError, StateError
from airflow_provider_pgrepl.replication.app import replicate, snapshot
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.recovery import settle_idle_lake
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.conftest import fresh_database
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.slow


def begun(dsn: str, folder: Path) -> Received:
    """A pipeline that has begun, and that the state knows."""
    one = Received(dsn, folder, ("public.t",))
    one.begin()
    with one.source() as source, StateDatabase(dsn, "test") as state_db:
        server = read_server(source)
        state_db.migrate()
        state_db.register(
            one.pipeline,
            server.system_identifier,
            slot_owned=True,
            publication_owned=True,
            database=server.database,
            database_oid=server.database_oid,
        )
    return one


@pytest.fixture
def torn(dsn, tmp_path, monkeypatch) -> Received:
    """A pipeline whose last changelog commit and point are half there; neither was confirmed to the slot."""
    execute(dsn, "create table t (id int primary key)")
    one = begun(dsn, tmp_path)
    points = ConsistentPoints(one.pipeline.lake_root)
    for lsn in (1, 2):
        points.append(ConsistentPoint(1, lsn, datetime.now(UTC), {"public.t": 0}))
    execute(dsn, "insert into t values (1)")
    confirmed = one.slot().confirmed_flush_lsn
    monkeypatch.setattr(
        "airflow_provider_pgrepl.replication.receiver.receiver.Receiver._send_status", lambda *_: None
    )
    one.receive()
    monkeypatch.undo()
    assert one.slot().confirmed_flush_lsn == confirmed
    forget_end(one)
    half(newest(one.changelog))
    half(newest(f"{one.pipeline.lake_root}/_pgrepl/consistent_points"))
    monkeypatch.setenv("PGREPL_DSN", dsn)
    return one


def newest(uri: str) -> Path:
    return max((Path(uri) / "_delta_log").glob("0*.json"))


def forget_end(one: Received) -> None:
    """Take back that the receiver has ended by itself, as if it had been killed."""
    newest(one.changelog).unlink()


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def is_torn(one: Received) -> bool:
    return newest(one.changelog).stat().st_size == 60


def test_torn_unconfirmed_commit_is_set_aside_and_received_again(torn: Received, caplog) -> None:
    settle(torn)
    assert "set aside 1 unconfirmed commits" in caplog.text
    assert [point.lsn for point in ConsistentPoints(torn.pipeline.lake_root).all()] == [1]
    torn.receive()
    assert [row["new"] for row in torn.changelog_rows("I")] == [["1"]]


def test_nothing_is_touched_while_a_replication_runs(torn: Received) -> None:
    with StateDatabase(torn.dsn, "other") as other:
        other.lock(torn.pipeline.name, "replicate")
        settle(torn)
        assert is_torn(torn)
    settle(torn)
    assert not is_torn(torn)


def test_the_replicate_app_does_it_before_it_reads(torn: Received, caplog) -> None:
    torn.configure(slot="another")
    assert replicate.main(["--pipeline", str(torn.file)]) == 78
    assert "this lake was begun with" in caplog.text, "what comes next"
    assert not is_torn(torn)
    assert open_changelog(torn.changelog)


@pytest.mark.thorough("test_the_replicate_app_does_it_before_it_reads")
def test_the_snapshot_app_does_it_before_it_reads(torn: Received) -> None:
    execute(torn.dsn, "drop table t")
    assert snapshot.main(["--pipeline", str(torn.file)]) == 78
    assert not is_torn(torn)


def log_names(one: Received) -> list[str]:
    folder = Path(one.pipeline.lake_root) / "_pgrepl"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("_delta_log/*"))


def test_another_pipeline_sets_nothing_aside(torn: Received, caplog) -> None:
    owner = torn.pipeline.name
    torn.configure(name="another")
    before = log_names(torn)
    for app in (snapshot, replicate):
        assert app.main(["--pipeline", str(torn.file)]) == 78
        assert f"belongs to the pipeline {owner!r}" in caplog.text
        caplog.clear()
        assert log_names(torn) == before


@pytest.fixture
def elsewhere(server: Server) -> Iterator[str]:
    """Another database of the same server, with the same table."""
    with fresh_database(server) as dsn:
        execute(dsn, "create table t (id int primary key)")
        yield dsn


def out_of_sight(one: Received) -> None:
    newest(one.changelog).with_name(f"{1:020d}.json").unlink()


@pytest.mark.parametrize("damage", [None, out_of_sight])
@pytest.mark.parametrize("command", [take_tables, begin_new_epoch])
@pytest.mark.thorough(
    "the same test, of a new epoch",
    "take_tables-None",
    "take_tables-out_of_sight",
    "begin_new_epoch-out_of_sight",
)
def test_a_source_that_is_another_one_sets_nothing_aside(
    torn: Received, elsewhere: str, command: Callable[[Access], object], damage
) -> None:
    """Its server has no slot of the pipeline, and its state no record: that says nothing about the lake."""
    if damage:
        damage(torn)
    before = log_names(torn)
    with pytest.raises(PgReplError, match="leads to another database of that server"):
        command(Access(torn.pipeline, elsewhere, elsewhere))
    assert log_names(torn) == before


def test_a_source_that_is_another_one_replicates_nothing(torn: Received, elsewhere: str, monkeypatch) -> None:
    before = log_names(torn)
    monkeypatch.setenv("PGREPL_DSN", elsewhere)
    assert replicate.main(["--pipeline", str(torn.file)]) == 78
    assert log_names(torn) == before


def test_a_state_that_is_another_one_sets_nothing_aside(torn: Received, elsewhere: str) -> None:
    """The lock of replication is in the right one."""
    before = log_names(torn)
    with pytest.raises(StateError, match="has no record of pipeline"):
        take_tables(Access(torn.pipeline, torn.dsn, elsewhere))
    assert log_names(torn) == before


@pytest.fixture
def confirmed(dsn, tmp_path) -> Received:
    """A pipeline whose last changelog commit was confirmed to the slot."""
    execute(dsn, "create table t (id int primary key)")
    one = begun(dsn, tmp_path)
    execute(dsn, "insert into t values (1)")
    one.receive()
    assert one.slot().confirmed_flush_lsn == one.durable_lsn
    forget_end(one)
    return one


def settle(one: Received, give_up: tuple[str, ...] | None = None) -> None:
    with StateDatabase(one.dsn, "test") as state_db, one.source() as source:
        evidence = gather(one.pipeline, state_db, source, lake_may_fail=True)
        settle_idle_lake(state_db, evidence, one.dsn, give_up)


def test_confirmed_commit_with_missing_file_is_not_set_aside(confirmed: Received, tmp_path: Path) -> None:
    """A network file system may show a file late, or a copy may be under way."""
    file = max(Path(confirmed.changelog).rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    commits = sorted(path.name for path in (Path(confirmed.changelog) / "_delta_log").iterdir())
    away = file.rename(tmp_path / "away")
    with pytest.raises(LakeError, match=r"has confirmed .*Nothing was changed") as raised:
        settle(confirmed)
    assert "--new-epoch" in raised.value.hint
    assert sorted(path.name for path in (Path(confirmed.changelog) / "_delta_log").iterdir()) == commits
    away.rename(file)
    settle(confirmed)
    execute(confirmed.dsn, "insert into t values (2)")
    confirmed.receive()
    assert [row["new"] for row in confirmed.changelog_rows("I")] == [["1"], ["2"]]


@pytest.mark.parametrize("table", ["consistent_points", "relations"])
@pytest.mark.thorough("the same test, of relations", "consistent_points")
def test_points_and_relations_stay_where_they_are_though_a_file_is_out_of_sight(
    confirmed: Received, tmp_path: Path, table: str
) -> None:
    """Points were reported to readers, and what a relation was called decides which columns are hidden."""
    ConsistentPoints(confirmed.pipeline.lake_root).append(
        ConsistentPoint(1, 1, datetime.now(UTC), {"public.t": 0})
    )
    folder = Path(confirmed.pipeline.lake_root) / "_pgrepl" / table
    file = max(folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    commits = sorted(path.name for path in (folder / "_delta_log").iterdir())
    away = file.rename(tmp_path / "away")
    for give_up in (None, ()):
        with pytest.raises(LakeError, match=f"{file.name}, which is not there. Nothing was changed"):
            settle(confirmed, give_up)
    assert sorted(path.name for path in (folder / "_delta_log").iterdir()) == commits
    away.rename(file)
    settle(confirmed)


def test_a_new_epoch_leads_out_of_it(confirmed: Received, caplog) -> None:
    # The newest says only that the receiver has ended.
    for file in sorted((Path(confirmed.changelog) / "_delta_log").glob("0*.json"))[-2:]:
        half(file)
    with pytest.raises(LakeError, match="has confirmed"):
        settle(confirmed)
    settle(confirmed, ())
    assert "set aside 2 unconfirmed commits" in caplog.text


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.thorough("the same test, of the next commit", "1")
def test_a_log_file_that_is_out_of_sight_takes_no_later_commit_away(
    confirmed: Received, tmp_path: Path, version: int
) -> None:
    """The commit right before those that would go says nothing then of what was durable."""
    execute(confirmed.dsn, "insert into t values (2)")
    confirmed.receive()
    log_file = newest(confirmed.changelog).with_name(f"{version:020d}.json")
    away = log_file.rename(tmp_path / "away")
    before = log_names(confirmed)
    with pytest.raises(
        LakeError, match=rf"commit {version} of the changelog.*has confirmed .*Nothing was changed"
    ):
        settle(confirmed)
    assert log_names(confirmed) == before
    away.rename(log_file)
    settle(confirmed)


def test_without_its_slot_nobody_knows_what_was_told(confirmed: Received) -> None:
    half(newest(confirmed.changelog))
    execute(confirmed.dsn, f"select pg_drop_replication_slot('{confirmed.pipeline.slot}')")
    with pytest.raises(LakeError, match=r"does not exist\. Nothing was changed"):
        settle(confirmed)
    assert is_torn(confirmed)
    settle(confirmed, ())
    assert not is_torn(confirmed)


def test_a_changelog_of_which_nothing_can_be_read_stays_unless_it_was_never_whole(torn: Received) -> None:
    log = newest(torn.changelog).parent
    for file in log.glob("0*.json"):
        half(file)
    for give_up in (None, ()):
        with pytest.raises(LakeError, match=r"no commit of the changelog .* Nothing was changed"):
            settle(torn, give_up)
    shutil.rmtree(log.parents[1] / "consistent_points")
    for file in sorted(log.glob("0*.json"))[1:]:
        file.unlink()
    settle(torn)
    assert not list(log.glob("0*.json"))
