"""Tables are copied a few at a time: what stops the copying also ends the waiting for those in the queue."""

from __future__ import annotations

import threading

import pytest

from airflow_provider_pgrepl.errors import (
    LakeUnavailableError,
    PgReplError,
    SnapshotError,
    TableError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.lake.snapshot import table_queue
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import copy_tables
from airflow_provider_pgrepl.replication.postgres.names import TableName

TABLES = [TableName("public", f"t{number}") for number in range(9)]
LIMIT_S = 120


class Copies:
    """Copies of which t1 fails; the others that began continue once `copy_tables` has seen that."""

    def __init__(self, failure: PgReplError) -> None:
        self._failure = failure
        self.seen = threading.Event()
        self.begun = list[str]()

    def copy(self, table: TableName) -> int:
        self.begun.append(table.name)
        if table.name == "t1":
            raise self._failure
        assert self.seen.wait(LIMIT_S), "the failure of t1 was never seen"
        return 7


def run(copies: Copies, **handlers):
    """Return the result or error of `copy_tables`. A wait without end fails the test."""
    result: list[object] = []
    cancel, failed = table_queue._cancel, handlers.pop("failed")

    def seen_and_cancelled(futures):
        cancel(futures)
        copies.seen.set()

    def seen_and_failed(*of):
        copies.seen.set()
        failed(*of)

    def work() -> None:
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(table_queue, "_cancel", seen_and_cancelled)
                result.append(copy_tables(TABLES, copies.copy, **handlers, failed=seen_and_failed))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "still waiting for tables that nobody copies"
    return result[0]


@pytest.fixture
def handlers():
    return {"finished": lambda _, rows: rows, "failed": lambda *_: None}


def test_a_lost_snapshot_ends_the_wait_for_the_tables_in_the_queue(handlers):
    copies = Copies(SnapshotError("lost"))
    copied = run(copies, **handlers)
    assert isinstance(copied.lost, SnapshotError)
    assert {table.name for table in copied.done} == set(copies.begun) - {"t1"}
    assert len(copies.begun) < len(TABLES)


def test_table_that_gave_way_leaves_the_others_alone(handlers):
    copies = Copies(TableSnapshotError("t1: the copy was given up"))
    copies.seen.set()
    copied = run(copies, **handlers)
    assert set(copied.displaced) == {TABLES[1]}
    assert copied.unusable is copied.displaced[TABLES[1]]
    assert len(copied.done) == len(TABLES) - 1
    assert not copied.failed


def test_unavailable_lake_cancels_copies_waiting_in_queue(handlers):
    copies = Copies(LakeUnavailableError("the disk is full"))
    assert isinstance(run(copies, **handlers), LakeUnavailableError)
    assert len(copies.begun) < len(TABLES)


def test_the_trouble_of_one_table_leaves_the_others_alone(handlers):
    copies = Copies(TableError("t1 is no table"))
    copied = run(copies, **handlers)
    assert set(copied.failed) == {TABLES[1]}
    assert len(copied.done) == len(TABLES) - 1


@pytest.mark.parametrize("failing", ["finished", "failed"])
def test_an_outcome_that_cannot_be_recorded_ends_the_wait_too(handlers, failing):
    def lost(*_: object) -> int:
        raise LakeUnavailableError("the state database is gone")

    copies = Copies(TableError("t1 is no table"))
    assert isinstance(run(copies, **handlers | {failing: lost}), LakeUnavailableError)
