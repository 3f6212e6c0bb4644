"""The states of tables that `pgrepl verify --repair` repairs, while operators change them. Without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import BusyError, Retry, SnapshotError, StateError
from airflow_provider_pgrepl.replication.app import snapshot_tables, verify_repair
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.app.verification import TableReport, VerifyReport
from airflow_provider_pgrepl.replication.app.verify_repair import Repair, resume_interrupted
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables
from airflow_provider_pgrepl.replication.spark.session import LazySession
from airflow_provider_pgrepl.replication.state.tables import REPAIRING, TableState
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import wait_until

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
    assert kept.states() == {A: "paused", B: "catching_up"}


def test_a_table_that_was_forgotten_since_it_was_compared_is_not_repaired(kept: Kept) -> None:
    with repairing(kept) as repair:
        repair.state_db.remove_table(kept.pipeline.name, TableName.parse(A))
        assert repair.repair(DIFFERENT).not_repaired == "it is removed"


def _copy(kept: Kept, *tables: str) -> None:
    """Begin to copy tables, as `pgrepl snapshot --tables` does."""
    with kept.access.state_db("snapshot") as state_db, kept.source() as source:
        snapshot = TableSnapshotter(kept.access, source, state_db, _no_spark)
        snapshot.take(map(TableName.parse, tables), RequestedTables(), read_epoch(kept.changelog))


def test_a_table_is_not_copied_while_it_is_repaired(
    kept: Kept, during: Callable[[Callable[[], object]], None]
) -> None:
    caught = []

    def copy() -> None:
        with pytest.raises(BusyError, match=rf"{A}: not copied, .*\(verify\): pgrepl verify") as busy:
            _copy(kept, A, B)
        caught.append((busy.value.retry, kept.record(A).is_paused_by_repair, kept.states()[B]))

    during(copy)
    with repairing(kept) as repair:
        assert repair.repair(DIFFERENT).status == "equal"
    assert caught == [(Retry.TIMED, True, "streaming")]
    assert kept.states() == {A: "catching_up", B: "streaming"}


def test_a_table_whose_repair_was_killed_is_copied(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def export(*_: object, **__: object) -> None:
        states.append(kept.states()[A])
        raise SnapshotError("the test exports no snapshot")

    monkeypatch.setattr(snapshot_tables, "export_snapshot", export)
    kept.set_states(A, TableState.PAUSED, reason=REPAIRING)
    with pytest.raises(SnapshotError):
        _copy(kept, A)
    assert states == ["snapshotting"]


def test_a_repair_does_not_pause_a_table_that_a_snapshot_begins_to_copy(
    kept: Kept, during: Callable[[Callable[[], object]], None]
) -> None:
    """Between its look at the states and its record, a snapshot holds the lock of the publication."""
    during(lambda: pytest.fail("a table that is copied is repaired"))
    found: list[TableReport] = []
    with repairing(kept) as repair, kept.access.state_db("snapshot") as snapshot:
        with snapshot.locked(kept.pipeline.name, "publication", 0):
            repairer = threading.Thread(target=lambda: found.append(repair.repair(DIFFERENT)), daemon=True)
            repairer.start()
            wait_until(lambda: _asks_for(kept, "publication") or not repairer.is_alive())
            kept.set_states(A, TableState.SNAPSHOTTING)
        repairer.join(120)
    assert [report.not_repaired for report in found] == [f"{A}: is snapshotting, and cannot be paused"]
    assert kept.states()[A] == "snapshotting"


def _asks_for(kept: Kept, purpose: str) -> bool:
    """Return True if another session than the holder's has asked for the pipeline's lock."""
    with kept.source() as source, source.cursor() as cursor:
        name = f"pgrepl {purpose} {kept.pipeline.name} %"
        cursor.execute("select count(*) from pg_stat_activity where application_name like %s", (name,))
        return bool(cursor.fetchone()[0] > 1)


def test_a_table_that_another_process_takes_from_a_repair_is_not_brought_forward(kept: Kept) -> None:
    """An operator has paused it, too, and so a snapshot may have begun to copy it."""
    with repairing(kept) as repair:
        kept.set_states(A, TableState.SNAPSHOTTING)
        with pytest.raises(StateError, match="is snapshotting now"):
            repair._bring_forward(TableName.parse(A), kept.source_lsn())
