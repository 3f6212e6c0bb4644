"""The states of tables that `pgrepl verify --repair` repairs, while operators change them. Without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.app import verify_repair
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables
from airflow_provider_pgrepl.replication.app.verify_repair import Repair, resume_interrupted
from airflow_provider_pgrepl.replication.app.verify_report import TableReport, VerifyReport
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.spark.session import LazySession
from airflow_provider_pgrepl.replication.state.tables import REPAIRING, TableState
from tests.support.kept import A, Kept, kept_tables

pytestmark = pytest.mark.slow

DIFFERENT = TableReport(TableName.parse(A), "different")


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    return kept_tables(dsn, tmp_path, trust_table_owners=True)


def _no_spark() -> Any:
    raise AssertionError("no rows are compared")


@contextmanager
def repairing(kept: Kept) -> Iterator[Repair]:
    """A repair that has read its records, and holds the lock of verifications."""
    with kept.access.state_db("verify") as state_db, kept.source() as source:
        state_db.lock(kept.pipeline.name, "verify")
        records, epoch = state_db.read_tables(kept.pipeline.name), read_epoch(kept.changelog)
        session = LazySession(_no_spark)
        yield Repair(kept.access, source, state_db, epoch, records, session, 120.0, shows_keys=False)


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen while a table is compared and repaired, instead of that."""

    def let(happen: Callable[[], object]) -> None:
        def compare_all(_: Repair, __: object, report: VerifyReport) -> None:
            happen()
            report.add(TableReport(TableName.parse(A), "equal"))

        monkeypatch.setattr(Repair, "compare_all", compare_all)

    return let


def test_a_table_is_paused_while_it_is_repaired_and_then_resumed(
    kept: Kept, during: Callable[[Callable[[], object]], None]
) -> None:
    seen = []
    during(lambda: seen.append(kept.record(A).is_paused_by_repair))
    with repairing(kept) as repair:
        assert repair.repair(DIFFERENT).status == "equal"
    assert (seen, kept.states()[A]) == ([True], "catching_up")


def test_a_table_that_was_paused_since_it_was_compared_is_not_repaired_and_stays_paused(
    kept: Kept, during: Callable[[Callable[[], object]], None]
) -> None:
    during(lambda: pytest.fail("a paused table is repaired"))
    with repairing(kept) as repair:
        pause_tables(kept.access, [A])
        found = repair.repair(DIFFERENT)
    assert (found.status, found.not_repaired) == ("different", "it is paused")
    assert (kept.states()[A], kept.record(A).reason) == ("paused", "")


def test_a_table_that_is_paused_just_before_the_repair_pauses_it_stays_paused(
    kept: Kept, during: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause(*arguments: Any, **more: Any) -> None:
        pause_tables(kept.access, [A])
        pause_tables(*arguments, **more)

    monkeypatch.setattr(verify_repair, "pause_tables", pause)
    during(lambda: pytest.fail("a paused table is repaired"))
    with repairing(kept) as repair:
        found = repair.repair(DIFFERENT)
    assert (found.status, found.not_repaired) == ("different", f"{A}: was paused meanwhile, and stays paused")
    assert (kept.states()[A], kept.record(A).reason) == ("paused", "")


def test_a_table_that_an_operator_pauses_during_its_repair_stays_paused(
    kept: Kept, during: Callable[[Callable[[], object]], None]
) -> None:
    during(lambda: pause_tables(kept.access, [A]))
    with repairing(kept) as repair:
        assert repair.repair(DIFFERENT).status == "equal"
    assert (kept.states()[A], kept.record(A).reason) == ("paused", "")


def test_a_table_that_an_operator_paused_after_its_repair_was_killed_stays_paused(kept: Kept) -> None:
    for table in kept.states():
        kept.set_states(table, TableState.PAUSED, reason=REPAIRING)
    pause_tables(kept.access, [A])
    with repairing(kept) as repair:
        resume_interrupted(repair)
    assert kept.states() == {A: "paused", "public.b": "catching_up"}


def test_a_table_that_was_forgotten_since_it_was_compared_is_not_repaired(kept: Kept) -> None:
    with repairing(kept) as repair:
        repair.state_db.remove_table(kept.pipeline.name, TableName.parse(A))
        assert repair.repair(DIFFERENT).not_repaired == "it is removed"
