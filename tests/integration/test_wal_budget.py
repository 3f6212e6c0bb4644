"""`on_wal_budget`: a slot is dropped only beyond the budget, by choice, and if it is the pipeline's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.app.health_check import check_health
from airflow_provider_pgrepl.replication.app.status.health import HealthLimits, HealthReport
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded

MIB = 1 << 20
Make = Callable[..., Recorded]


@pytest.fixture
def make(dsn: str, pg: Any, tmp_path: Path) -> Make:
    """Makes a pipeline whose slot retains about 2 MiB of WAL; the slot is dropped with the database."""

    def make(**options: Any) -> Recorded:
        pg.cursor().execute("create table a (id int primary key, x text)")
        shop = Recorded(dsn, lake=str(tmp_path), name=f"shop_{os.urandom(4).hex()}", **options)
        server = read_server(pg)
        with pg.cursor() as cursor:
            cursor.execute(
                "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')",
                (shop.pipeline.slot,),
            )
            at = LSN.parse(cursor.fetchone()[0])
            cursor.execute("select pg_logical_emit_message(false, 'test', repeat('x', 2000000))")
        record = EpochRecord(
            shop.pipeline.name,
            Epoch(1),
            server.system_identifier,
            server.timeline,
            shop.pipeline.slot,
            shop.pipeline.publication,
            5,
            at,
            database=server.database,
            database_oid=server.database_oid,
        )
        create_changelog(changelog_uri(shop.pipeline.lake_root), record)
        return shop

    return make


def check(shop: Recorded) -> HealthReport:
    return check_health(shop.access, HealthLimits(is_continuous=False))


def kinds(report: HealthReport) -> list[tuple[str, str]]:
    return [(str(problem.severity), str(problem.kind)) for problem in report.problems]


def is_kept(shop: Recorded, pg: Any) -> bool:
    """Return True if slot, record and tables are as before."""
    with shop.access.state_db("test") as state_db:
        recorded = state_db.read_pipeline(shop.pipeline.name)
    is_streaming = shop.record("public.a").state is TableState.STREAMING
    return read_slot(pg, shop.pipeline.slot) is not None and bool(recorded.slot_owned) and is_streaming


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"wal_budget": 3 * MIB}, [("warning", "wal_retained")]),
        ({"wal_budget": 3 * MIB, "on_wal_budget": "drop_slot"}, [("warning", "wal_retained")]),
        ({"wal_budget": 1 * MIB}, [("failure", "wal_retained")]),
        ({"wal_budget": 1 * MIB, "on_wal_budget": "alert"}, [("failure", "wal_retained")]),
    ],
)
@pytest.mark.thorough(
    "the same test, with other choices", "options0-expected0", "options1-expected1", "options4-expected4"
)
def test_slot_is_kept_within_budget_and_without_choice(
    make: Make, pg: Any, options: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    shop = make(**options)
    assert kinds(check(shop)) == expected
    assert is_kept(shop, pg)


def test_slot_beyond_budget_is_dropped_by_choice_and_record_names_way_back(make: Make, pg: Any) -> None:
    shop = make(wal_budget=1 * MIB, on_wal_budget="drop_slot")
    report = check(shop)
    assert read_slot(pg, shop.pipeline.slot) is None
    assert kinds(report)[0] == ("failure", "slot_dropped")
    assert "--new-epoch" in report.problems[0].hint
    record = shop.record("public.a")
    assert (record.state, record.error) == (TableState.ERRORED, "SlotError")
    assert f"slot {shop.pipeline.slot} was dropped" in record.reason
    assert "--new-epoch" in record.hint
    with shop.access.state_db("test") as state_db:
        assert not state_db.read_pipeline(shop.pipeline.name).slot_owned
    assert ("failure", "slot_missing") in kinds(check(shop))


def test_slot_that_nothing_shows_to_be_the_pipelines_is_kept(make: Make, dsn: str, pg: Any) -> None:
    shop = make(wal_budget=1 * MIB, on_wal_budget="drop_slot")
    with StateDatabase(dsn, "test") as state_db:
        state_db.record_slot(shop.pipeline.name, is_owned=False)
    assert kinds(check(shop)) == [("failure", "wal_retained"), ("failure", "slot_kept")]
    assert read_slot(pg, shop.pipeline.slot) is not None
    assert shop.record("public.a").state is TableState.STREAMING


def test_slot_that_another_program_has_advanced_is_kept(make: Make, pg: Any) -> None:
    """A slot that was recreated or advanced retains changes of another reader."""
    shop = make(wal_budget=1 * MIB, on_wal_budget="drop_slot")
    slot = shop.pipeline.slot
    pg.cursor().execute("select pg_drop_replication_slot(%s)", (slot,))
    pg.cursor().execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    pg.cursor().execute("select pg_logical_emit_message(false, 'test', repeat('x', 2000000))")
    assert ("failure", "slot_kept") in kinds(check(shop))
    assert is_kept(shop, pg)


def test_slot_that_a_process_reads_is_kept(make: Make, dsn: str, pg: Any) -> None:
    shop = make(wal_budget=1 * MIB, on_wal_budget="drop_slot")
    from psycopg2.extras import LogicalReplicationConnection

    reader = psycopg2.connect(dsn, connection_factory=LogicalReplicationConnection)
    try:
        reader.cursor().start_replication(
            slot_name=shop.pipeline.slot,
            options={"proto_version": "1", "publication_names": shop.pipeline.publication},
        )
        report = check(shop)
        assert kinds(report) == [("failure", "wal_retained"), ("failure", "slot_kept")]
        assert "is read by pid" in report.problems[1].reason
        assert is_kept(shop, pg)
    finally:
        reader.close()


def test_slot_is_kept_while_its_app_starts_and_while_an_epoch_begins(make: Make, dsn: str, pg: Any) -> None:
    """The app that has taken its lock is about to read the slot; a new epoch drops and creates it itself."""
    shop = make(wal_budget=1 * MIB, on_wal_budget="drop_slot")
    with shop.access.state_db("replicate") as app:
        app.lock(shop.pipeline.name, "replicate")
        report = check(shop)
        assert kinds(report) == [("failure", "wal_retained"), ("failure", "slot_kept")]
        assert "another process is at it already (replicate)" in report.problems[1].reason
    assert is_kept(shop, pg)
    pg.cursor().execute("update _pgrepl.pipelines set database_oid = %s, database = %s", database_of(pg))
    with shop.access.state_db("snapshot") as app:
        app.lock(shop.pipeline.name, "snapshot")
        report = check(shop)
        assert "another process is at it already (snapshot)" in report.problems[1].reason
        assert is_kept(shop, pg)
        with StateDatabase(dsn, "test") as state_db:
            at = {"database": "", "database_oid": 0}
            state_db.record_evidence(shop.pipeline.name, lake=shop.pipeline.lake_root, lake_id="", **at)
        assert kinds(check(shop))[0] == ("failure", "slot_dropped"), "a copy under way frees no WAL"


def database_of(pg: Any) -> tuple[int, str]:
    server = read_server(pg)
    return server.database_oid, server.database
