"""Two pipelines from one database, each with some of the tables, show whole transactions at one LSN."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import ArrowAsOf, arrow_view_as_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support import bank
from tests.support.bank import transfers
from tests.support.landed import Landed
from tests.support.replicated import execute

HALVES = (bank.TABLES[:3], bank.TABLES[3:])
CREATE, FILL = ([one for one in bank.SETUP if one.startswith(what)] for what in ("create", "insert"))


@pytest.fixture
def pipelines(dsn: str, tmp_path: Path) -> list[Landed]:
    execute(dsn, *CREATE)
    made = []
    for number, tables in enumerate(HALVES):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.append(Landed(dsn, folder, tables, name=f"half_{dsn.split('dbname=t_')[1][:8]}_{number}"))
        made[-1].begin()
    execute(dsn, *FILL)
    for one in made:
        one.receive()
        assert all(result.error is None for result in one.apply())
    return made


def views_at(pipelines: list[Landed], lsn: LSN | None = None) -> list[ArrowAsOf]:
    return [arrow_view_as_of(one.pipeline, lsn=lsn) for one in pipelines]


@pytest.mark.thorough("spark/test_streaming_scenarios: two pipelines are independent")
def test_both_show_the_same_transactions_at_an_lsn_that_both_have(dsn, pipelines):
    """One merges after each step and the other never again; each has received more or less than the other."""
    with transfers(dsn, seed=3) as running:
        for step in range(6):
            running.make(40)
            ahead = pipelines[step % 2]
            for one in pipelines:
                one.receive()
            running.make(10)
            ahead.receive()
            assert all(result.error is None for result in pipelines[0].apply())
            assert len({view.lsn for view in views_at(pipelines)}) == 2
            check_whole(pipelines, LSN(min(view.lsn for view in views_at(pipelines))))
    last = LSN(min(view.lsn for view in views_at(pipelines)))
    with pytest.raises(LakeError):
        views_at(pipelines, LSN(max(view.lsn for view in views_at(pipelines)) + 1))
    check_whole(pipelines, last)


def check_whole(pipelines: list[Landed], lsn: LSN) -> None:
    """No money is missing, and no account has a transaction that the ledger has not."""
    tables = {
        table: view.table(table)
        for view, half in zip(views_at(pipelines, lsn), HALVES, strict=True)
        for table in half
    }
    accounts = [tables[table] for table in bank.ACCOUNTS]
    assert sum(sum(table["balance"].to_pylist()) for table in accounts) == bank.TOTAL
    seen = {number for table in accounts for number in table["tx"].to_pylist()} - {None}
    assert seen <= set(tables["public.ledger"]["tx"].to_pylist())
