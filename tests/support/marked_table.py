"""A table with deletion vectors that is large enough for readers to divide it, and questions about it.

Readers that apply a vector to the wrong rows do so above 8,192 rows a file, the size of DataFusion's batches,
and where a file is read by several partitions, a predicate leaves out pages or a limit ends the scan early.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles, WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import column, commit_ts, relation, table_of
from tests.support.model import Change

FILES, ROW_GROUPS, ROWS = 3, 3, 12_000
"""Files, row groups of each, rows of each of these."""
GROUPS = 97
SOME = 20_000
"""The number of rows that `SOME_ROWS` requests, in any order."""
SOME_ROWS = f"select id from t limit {SOME}"
OF = relation(column("id", "bigint", key=True), column("g", "bigint"), column("v"))

Row = tuple[int, ...]
Read = Callable[[str], list[Row]]
"""Rows of an SQL query, in which the table is `t`."""


class MarkedTable:
    """A merge-on-read table with marked rows: deleted ones, and the old states of updated ones."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder / "t")
        options = Pipeline(name="p", lake=str(folder), tables=("public.t",), merge="merge_on_read").options(
            OF.table
        )
        schema = lake_schema(OF, options)
        count = FILES * ROW_GROUPS * ROWS
        self.rows = {number: number % GROUPS for number in range(count)}
        files = [self._file(folder, schema, start) for start in range(0, count, count // FILES)]
        commit_snapshot(self.uri, schema, files, LSN(1), "p", Epoch(1))
        deleted, updated = range(0, count, 401), range(7, count, 1009)
        changes = [Change("D", old=(str(number), None, None), commit_lsn=10) for number in deleted]
        for number in deleted:
            del self.rows[number]
        for number in (number for number in updated if number in self.rows):
            changes.append(Change("U", new=(str(number), str(GROUPS), "new"), commit_lsn=20))
            self.rows[number] = GROUPS
        apply_changes(open_table(self.uri), table_of(changes), OF, options, app_id("p", Epoch(1)), 1 << 26)

    def _file(self, folder: Path, schema: pa.Schema, start: int) -> WrittenFile:
        with ParquetFiles(str(folder), "t", schema) as files:
            for first in range(start, start + ROW_GROUPS * ROWS, ROWS):
                ids = range(first, first + ROWS)
                columns = {
                    "id": pa.array(ids, pa.int64()),
                    "g": pa.array([number % GROUPS for number in ids], pa.int64()),
                    "v": pa.array([f"v{number % 11}" for number in ids]),
                    "_pgrepl_commit_lsn": pa.array([1] * ROWS, pa.int64()),
                    "_pgrepl_commit_ts": pa.array([commit_ts(1)] * ROWS, pa.timestamp("us", tz="UTC")),
                }
                files.write(pa.table(columns).cast(schema).combine_chunks().to_batches()[0])
                files.write_waiting()
            (written,) = files.finish()
        return written

    def marked_files(self) -> int:
        return sum(file.vector is not None for file in live_files(open_table(self.uri)).values())

    @cached_property
    def answers(self) -> dict[str, list[Row]]:
        """Return the exact rows of each query."""
        ids = sorted(self.rows)
        of_group = {
            group: [number for number in ids if self.rows[number] == group] for group in range(GROUPS + 1)
        }
        low = [number for number in ids if self.rows[number] < 10]
        return {
            "select count(*) from t": [(len(ids),)],
            "select count(*), sum(id) from t where g = 5": [(len(of_group[5]), sum(of_group[5]))],
            f"select id from t where g = {GROUPS} order by id": [(number,) for number in of_group[GROUPS]],
            "select id from t where id >= 11000 and id < 13000 order by id": [
                (number,) for number in ids if 11_000 <= number < 13_000
            ],
            "select count(*) from t where id >= 50000": [(sum(number >= 50_000 for number in ids),)],
            "select count(*), min(id), max(id) from t where v = 'v3' and id > 70000": [
                self._range_of([n for n in ids if n > 70_000 and n % 11 == 3 and self.rows[n] < GROUPS])
            ],
            "select id from t order by id limit 500": [(number,) for number in ids[:500]],
            "select id from t order by id desc limit 500": [(number,) for number in ids[:-501:-1]],
            "select id from t where g = 5 order by id desc limit 9": [
                (number,) for number in of_group[5][:-10:-1]
            ],
            "select g, count(*) from t group by g order by g": [
                (key, len(found)) for key, found in of_group.items()
            ],
            "select count(*), sum(a.id) from t a join t b on a.id = b.id where b.g < 10": [
                (len(low), sum(low))
            ],
        }

    @staticmethod
    def _range_of(ids: list[int]) -> Row:
        return len(ids), ids[0], ids[-1]

    def wrong(self, read: Read) -> list[str]:
        """Return the queries that a reader answers wrongly."""
        wrong = [
            query for query, expected in self.answers.items() if list(map(tuple, read(query))) != expected
        ]
        some = [row[0] for row in read(SOME_ROWS)]
        if not (len(some) == len(set(some)) == SOME and set(some) <= self.rows.keys()):
            wrong.append(SOME_ROWS)
        return wrong
