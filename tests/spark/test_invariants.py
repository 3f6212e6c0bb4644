"""Invariants of whole transactions hold at every consistent point that is recorded while they run.

Each point shows a prefix of the transactions in commit order.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator

import pytest

from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import ArrowView
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support import bank
from tests.support.bank import transfers
from tests.support.in_process import InProcess
from tests.support.replicated import execute, wait_until

BRANCHES, TELLERS, ACCOUNTS, HISTORY = TPC_B = tuple(
    f"public.pgbench_{name}" for name in ("branches", "tellers", "accounts", "history")
)


def points_of(replicated: InProcess, tables: Iterable[str]) -> Iterator[tuple[ConsistentPoint, ArrowView]]:
    """Every recorded point that names these tables, with a view of the lake there."""
    for point in ConsistentPoints(replicated.pipeline.lake_root).all():
        if set(tables) <= set(point.tables):
            yield point, ArrowView(point, replicated.pipeline.lake_root)


def committed_at(replicated: InProcess, dsn: str, table: str) -> list[tuple[int, str | None]]:
    """Return the commit LSN of each insert into a table, and its row's first value, in commit order."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select %s::regclass::oid::bigint", (table,))
        relation = cursor.fetchone()[0]
    rows = replicated.changelog_rows("I")
    return [(row["commit_lsn"], row["new"][0]) for row in rows if row["relation_id"] == relation]


def test_transfers_are_seen_whole_and_in_commit_order_at_every_point(spark, dsn, tmp_path):
    """Interleaved sessions over many tables: atomic in all of them, rollbacks and savepoints never seen.

    Slices are so small that the lake tables have versions between the points.
    """
    execute(dsn, *bank.SETUP)
    replicated = InProcess(spark, dsn, tmp_path, bank.TABLES, slice_bytes=4096)
    with transfers(dsn, seed=1) as running:
        running.make(30)
        replicated.snapshot()
        with replicated.replicating() as replicating:
            for _ in range(6):
                running.make(50)
                replicated.wait_for_points(1, *bank.TABLES)
            running.stop()
            replicating.wait_for(replicated.source_lsn())
    replicated.catch_up()

    commits = [(lsn, int(number)) for lsn, number in committed_at(replicated, dsn, "public.ledger")]
    in_snapshot = running.committed - {number for _, number in commits}
    seen = []
    for point, view in points_of(replicated, bank.TABLES):
        visible = set(view.table("public.ledger")["tx"].to_pylist())
        assert visible == in_snapshot | {number for lsn, number in commits if lsn <= point.lsn}
        accounts = [view.table(table) for table in bank.ACCOUNTS]
        assert sum(sum(table["balance"].to_pylist()) for table in accounts) == bank.TOTAL
        last = {number for table in accounts for number in table["tx"].to_pylist()} - {None}
        assert last <= visible
        seen.append(len(visible))
    assert len(seen) >= 5
    assert seen[-1] == len(running.committed) >= 330
    replicated.assert_equal(*bank.TABLES)


def pgbench(server: Server, dsn: str, *options: str) -> subprocess.Popen[bytes]:
    database = dsn.split("dbname=")[1].split(maxsplit=1)[0]
    where = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres"]
    command = [str(server.bin / "pgbench"), *where, *options, database]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pgbench_sessions(dsn: str) -> int:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where application_name = 'pgbench'")
        return int(cursor.fetchone()[0])


SUMS = f"""
select (select sum(bbalance) from {BRANCHES}) as branches,
    (select sum(tbalance) from {TELLERS}) as tellers,
    (select sum(abalance) from {ACCOUNTS}) as accounts,
    (select coalesce(sum(delta), 0) from {HISTORY}) as history,
    (select count(*) from {HISTORY}) as transactions
"""


@pytest.mark.thorough("transfers between accounts, above")
def test_the_sums_of_tpc_b_are_equal_at_every_point(spark, server, dsn, tmp_path):
    assert pgbench(server, dsn, "-i", "-q", "-s", "1").wait() == 0
    assert pgbench(server, dsn, "-n", "-c", "2", "-t", "20").wait() == 0
    replicated = InProcess(spark, dsn, tmp_path, TPC_B, insert_only=(HISTORY,))
    replicated.snapshot()
    with replicated.replicating() as running:
        writing = pgbench(server, dsn, "-n", "-c", "4", "-R", "100", "-T", "600")
        try:
            replicated.wait_for_points(5, *TPC_B)
        finally:
            writing.terminate()
            writing.wait()
        # A server process may still commit what its client has sent.
        wait_until(lambda: not pgbench_sessions(dsn), what="pgbench's sessions to end")
        running.wait_for(replicated.source_lsn())
    commits = [lsn for lsn, _ in committed_at(replicated, dsn, HISTORY)]
    rows = []
    for point, view in points_of(replicated, TPC_B):
        (row,) = view.sql(SUMS).to_pylist()
        assert row["branches"] == row["tellers"] == row["accounts"] == row["history"], row
        assert row["transactions"] == 40 + sum(lsn <= point.lsn for lsn in commits)
        rows.append(row)
    assert len({row["transactions"] for row in rows}) >= 3
    assert rows[-1]["transactions"] == 40 + len(commits)
    replicated.assert_equal(*TPC_B)
