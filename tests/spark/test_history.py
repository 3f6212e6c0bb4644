"""History mode with a real source: every version there ever was, though the app dies between two commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.errors import LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableContext
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history import apply as history_apply
from airflow_provider_pgrepl.replication.lake.history.table import history_uri
from airflow_provider_pgrepl.replication.lake.snapshot import snapshot_copy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.replicated import execute

T = TableName.parse("public.t")
SETUP = (
    "create table t(id int primary key, v text, doc text)",
    "alter table t alter doc set storage external",
    "insert into t select g, 'old', repeat(g::text, 3000) from generate_series(1, 6) g",
)
CHANGES = (
    "update t set v = 'new' where id = 1",
    "update t set v = v where id = 1",
    "update t set id = 10 where id = 2",
    "begin; insert into t values (11, 'never seen'); delete from t where id = 11; commit",
    "begin; update t set v = 'half' where id = 3; update t set v = 'whole', doc = '3' where id = 3; commit",
    "begin; update t set id = 99 where id = 4; update t set id = 4 where id = 5; update t set id = 5"
    " where id = 99; commit",
    "begin; delete from t where id = 6; insert into t values (6, 'again'); commit",
    "delete from t where id = 1",
    "insert into t values (1, 'another')",
)
MORE_CHANGES = (
    "update t set v = 'later'",
    "begin; truncate t; insert into t values (1, 'after', repeat('x', 3000)); commit",
    "update t set id = 2, v = 'last'",
)


class Watched:
    """A table that keeps its history, and what its source showed at recorded LSNs."""

    def __init__(self, spark: Any, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.replicated = InProcess(spark, dsn, folder, (str(T),), history=True)
        self.moments: list[tuple[LSN, list[tuple]]] = []

    def execute(self, *statements: str) -> None:
        for statement in statements:
            execute(self.dsn, statement)
            self.look()

    def look(self) -> None:
        with closing_connection(self.dsn) as connection, connection.cursor() as cursor:
            cursor.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
            (lsn,) = cursor.fetchone()
            cursor.execute("select id, v, doc from t order by id")
            self.moments.append((LSN(int(lsn)), cursor.fetchall()))

    @property
    def history(self) -> DeltaTable:
        return DeltaTable(history_uri(self.replicated.pipeline.lake_root, T))

    def ended(self) -> list[dict[str, Any]]:
        return rows_of(self.history)

    def versions_at(self, lsn: LSN) -> list[tuple]:
        """Return the rows that were valid then: ended later, or not yet."""
        ended = [(row, row["_pgrepl_from_lsn"]) for row in self.ended() if lsn <= row["_pgrepl_to_lsn"]]
        current = rows_of(DeltaTable(self.replicated.lake_path(str(T))))
        rows = [*ended, *((row, row["_pgrepl_commit_lsn"]) for row in current)]
        return sorted((row["id"], row["v"], row["doc"]) for row, since in rows if since < lsn)

    def assert_right_at_every_moment(self) -> None:
        for lsn, shown in self.moments:
            assert self.versions_at(lsn) == shown
        found = [(row["id"], row["_pgrepl_from_lsn"]) for row in self.ended()]
        assert len(found) == len(set(found))

    def die_between_the_commits(self) -> None:
        """Apply what was received, up to the history's commit and no further."""
        pipeline, changelog = self.replicated.pipeline, reader.open_changelog(self.replicated.changelog)
        record = reader.read_epoch(self.replicated.changelog)
        relation = self.replicated.states()[str(T)].relation
        work = TableContext(
            relation,
            pipeline.options(relation.table),
            app_id(pipeline.name, record.epoch),
            pipeline.lake_root,
            pipeline.slice_bytes,
        )
        files = reader.live_files(changelog, record.epoch, LSN(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history_apply, "apply_changes", die)
            MergeJob.plan(work, LSN(0), files, (0, LSN(2**63 - 1)), 1 << 30).run()


def die(*_: object, **__: object) -> None:
    raise LakeUnavailableError("the test wants it so")


def rows_of(table: DeltaTable) -> list[dict[str, Any]]:
    return pa.table(QueryBuilder().register("t", table).execute("select * from t").read_all()).to_pylist()


@pytest.fixture
def watched(spark, dsn, tmp_path: Path) -> Watched:
    execute(dsn, *SETUP)
    watched = Watched(spark, dsn, tmp_path)
    watched.replicated.snapshot()
    watched.look()
    return watched


@pytest.mark.thorough("property/test_history, however cut and whenever a writer died")
def test_history_and_table_show_every_moment_of_the_source_though_a_writer_died(watched: Watched) -> None:
    watched.execute(*CHANGES)
    watched.replicated.catch_up()
    watched.assert_right_at_every_moment()
    assert [(row["id"], row["_pgrepl_to_op"]) for row in watched.ended() if row["v"] == "old"] == [
        *((number, "U") for number in (1, 2, 3, 4, 5, 6)),
    ]

    watched.execute(*MORE_CHANGES)
    watched.replicated.receive()
    before, position = len(watched.ended()), watched.replicated.position(str(T))
    watched.die_between_the_commits()
    assert len(watched.ended()) > before
    assert watched.replicated.position(str(T)) == position
    watched.replicated.configure(slice_bytes=1)
    watched.execute("update t set v = 'after the death'")
    watched.replicated.catch_up()
    watched.assert_right_at_every_moment()
    point = ConsistentPoints(watched.replicated.pipeline.lake_root).latest()
    assert point.tables["public.t~history"] == watched.history.version()


def test_a_table_taken_anew_ends_what_it_held_once_though_a_snapshot_died(watched: Watched) -> None:
    watched.execute(*CHANGES[:3])
    watched.replicated.catch_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_copy, "commit_snapshot", die)
        assert watched.replicated.run("snapshot", "--tables", str(T)) != 0
    watched.replicated.resnapshot(str(T))
    watched.look()
    execute(watched.dsn, "alter table t add w int", "update t set v = 'with w', w = 7 where id = 3")
    watched.replicated.snapshot("--new-epoch")
    watched.look()
    watched.execute("delete from t where id = 3")
    watched.replicated.catch_up()
    watched.assert_right_at_every_moment()
    snapshots = [row for row in watched.ended() if row["_pgrepl_to_op"] == "S"]
    assert [row["_pgrepl_to_epoch"] - row["_pgrepl_from_epoch"] for row in snapshots].count(0) == 6
    assert len(snapshots) == 12
    assert [row["w"] for row in watched.ended() if row["_pgrepl_to_op"] == "D"] == [7]


def test_a_history_that_was_moved_away_begins_anew_under_replication_that_goes_on(
    watched: Watched, tmp_path: Path
) -> None:
    with watched.replicated.replicating() as running:

        def update(*values: str) -> None:
            for value in values:
                watched.execute(f"update t set v = '{value}'")
                running.wait_for(watched.moments[-1][0])

        update("a", "b", "c")
        Path(history_uri(watched.replicated.pipeline.lake_root, T)).rename(tmp_path / "kept")
        watched.replicated.resnapshot(str(T))
        update("d", "e", "f")
        assert watched.replicated.states()[str(T)].state.value == "streaming"
    assert {row["v"] for row in watched.ended()} == {"c", "d", "e"}
