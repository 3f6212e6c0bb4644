"""Rows of 100 MB, and as many columns as PostgreSQL allows: copied, received and applied, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.copy import write_range
from airflow_provider_pgrepl.replication.lake.table import app_id, commit_snapshot
from airflow_provider_pgrepl.replication.lake.table_work import TableWork, bring_forward
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source.catalog import find_relation
from airflow_provider_pgrepl.replication.source.copy_ranges import plan_ranges
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.conftest import closing_connection
from tests.support.received import Received

TEXT = b'ab,\n"cd'
BYTES = b"\x00\xff\x5c\x0a"


class Handed(Received):
    """Received, and brought into the lake by what Spark's tasks run, without Spark."""

    def copy(self, table: str) -> Relation:
        """Copy a table that nobody writes."""
        position = LSN(self.begin() - 1)
        with closing_connection(self.dsn) as keeper, keeper.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read read only")
            cursor.execute("select pg_export_snapshot()")
            snapshot = cursor.fetchone()[0]
            relation = find_relation(keeper, TableName.parse(table), self.pipeline.publication)
            assert relation is not None
            files = [
                file
                for part in plan_ranges(keeper, relation, 1 << 40)
                for file in write_range(
                    self.dsn, snapshot, part, relation, self.pipeline, position, datetime.now(UTC)
                )
            ]
        schema = lake_schema(relation, self.pipeline)
        commit_snapshot(self.lake_path(table), schema, files, position, self.pipeline.name, Epoch(1))
        return relation

    def stream(self, relation: Relation) -> None:
        self.receive()
        work = TableWork(relation, self.pipeline, app_id(self.pipeline.name, Epoch(1)), self.changelog)
        done = bring_forward(work, [file.path for file in self.changelog_files()], LSN(2**62))
        assert done.error is None


def test_rows_of_100_mb_are_copied_and_streamed(dsn, run, tmp_path):
    """Text full of quotes and newlines, which CSV writes twice; bytea, which the stream sends as hexadecimal
    digits; then an update that does not send them again, and one of the key."""
    text_times, bytes_times = 100_000_000 // len(TEXT), 50_000_000 // len(BYTES)
    run(
        "create table large (id int primary key, n int, t text, b bytea)",
        "alter table large alter t set storage external, alter b set storage external",
        f"insert into large values (1, 0, repeat(E'ab,\\n\"cd', {text_times}), null), (2, 0, 'small', null)",
    )
    handed = Handed(dsn, tmp_path, ("public.large",))
    relation = handed.copy("public.large")
    run(
        f"insert into large values (3, 0, null, decode(repeat('00ff5c0a', {bytes_times}), 'hex'))",
        "update large set n = n + 1",
        "update large set id = 10 where id = 1",
    )
    handed.stream(relation)
    rows = {row["id"]: row for row in pa.table(handed.lake_rows("public.large")).to_pylist()}
    assert {key: row["n"] for key, row in rows.items()} == {2: 1, 3: 1, 10: 1}
    # Compared outside assert: nobody wants to see the difference.
    whole = rows[10]["t"].encode() == TEXT * text_times, rows[3]["b"] == BYTES * bytes_times
    assert whole == (True, True)


def test_a_table_of_1600_columns_is_copied_and_streamed(dsn, run, tmp_path):
    columns = ", ".join(f"c{number} int" for number in range(1599))
    run(
        f"create table wide (id int primary key, {columns})",
        "insert into wide (id, c0, c1598) values (1, 1, 1), (2, 2, 2), (3, 3, 3)",
    )
    handed = Handed(dsn, tmp_path, ("public.wide",))
    relation = handed.copy("public.wide")
    run(
        "update wide set c1598 = 10 where id = 1",
        "delete from wide where id = 2",
        "insert into wide (id, c700) values (4, 4)",
    )
    handed.stream(relation)
    handed.assert_equal("public.wide")
