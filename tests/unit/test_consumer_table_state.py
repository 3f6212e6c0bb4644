"""ConsumerTableState: changes that the stream rejected at first, and that arrive after later ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.creek.copy_database import ConsumerTableState
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

NAME = TableName("public", "t")
Arrived = tuple[int, int]
"""The numbers of a change and of the one that was sent before it; 0 if no earlier one was sent in the run."""


def applied(begin: int, *arrived: Arrived) -> tuple[list[int], ConsumerTableState]:
    """Return the changes that a table does not have yet when they arrive, and the table after all."""
    table, found = ConsumerTableState(NAME, NAME, LSN(begin), id_of(begin)), []
    for stamp, (number, previous) in enumerate(arrived, 100):
        change: Any = SimpleNamespace(id=id_of(number), previous=id_of(previous), lsn=LSN(stamp))
        if not table.has(change):
            found.append(number)
            table = table.with_change(change)
    return found, table


def id_of(number: int) -> str:
    return f"1:0/{number:X}:0" if number else ""


REJECTED = [(6, 5), (7, 6)]
"""What the stream has of 5, 6 and 7 if it rejected 5."""
RESENT = [(5, 4), (6, 5), (7, 6)]


@pytest.mark.parametrize(
    ("arrived", "new"),
    [
        ([*RESENT, *RESENT, (8, 7)], [5, 6, 7, 8]),
        ([*REJECTED, *RESENT, (8, 7)], [6, 7, 5, 6, 7, 8]),
        ([*REJECTED, (5, 0), (6, 5), (7, 6), (8, 7)], [6, 7, 5, 6, 7, 8]),
        ([*REJECTED, (3, 0), (4, 3), *RESENT], [6, 7, 5, 6, 7]),
        ([*REJECTED, *REJECTED, *RESENT, *RESENT], [6, 7, 6, 7, 5, 6, 7]),
        ([*REJECTED, (5, 4), *REJECTED, *RESENT], [6, 7, 5, 6, 7]),
        ([(5, 4), (7, 6), (6, 5), (7, 6)], [5, 7, 6, 7]),
    ],
    ids=["all arrived", "resent", "by a new run", "from earlier", "rejected twice", "late buffer", "later"],
)
def test_change_that_arrives_after_later_ones_is_applied_with_them(arrived, new):
    found, table = applied(4, *arrived)
    assert found == new
    assert table.change == id_of(max(new))
    assert table.missing_after == ""


def test_change_that_is_still_missing_is_recorded():
    _, table = applied(4, *REJECTED)
    assert (table.change, table.missing_after) == (id_of(7), id_of(4))
    resent: Any = SimpleNamespace(id=id_of(5))
    assert table.may_have(resent)
    new: Any = SimpleNamespace(id=id_of(8))
    assert not table.may_have(new)


def test_change_that_was_skipped_is_missing_until_the_next_run():
    found, table = applied(4, *REJECTED, (8, 7), (9, 0), (9, 0))
    assert found == [6, 7, 8, 9]
    assert table.missing_after == ""


def test_messages_without_ids_are_told_by_their_stamps():
    table = ConsumerTableState(NAME, NAME, LSN(100), "")
    old: Any = SimpleNamespace(id="", previous="", lsn=LSN(100))
    new: Any = SimpleNamespace(id="", previous="", lsn=LSN(101))
    assert table.has(old)
    assert not table.has(new)
    after = table.with_change(new)
    assert after.has(new)
    assert (after.change, after.missing_after) == ("", "")
