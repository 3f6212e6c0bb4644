"""What Spark runs of a batch: shares of work items, and the catching up of tables that are behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.reader import ChangelogFile
from airflow_provider_pgrepl.replication.lake.applying.table_work import TableResult, TableWork, bring_forward
from airflow_provider_pgrepl.replication.lake.applying.work_item import MARK, WorkItem
from airflow_provider_pgrepl.replication.lake.merging.collapse import collapse
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.relation import Column, Relation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULT = "result string"

_END = LSN(2**63 - 1)


def apply_items(
    works: dict[int, TableWork], through: dict[int, int]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a Spark task does with its items: brings forward the tables that are where an item begins.

    Its rows are texts: the batch's end (M) and the results of tables (R), see `read_results`.
    """

    def apply(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            items = [WorkItem.from_json(text) for text in batch.column(0).to_pylist()]
            mark = [f"M{item.to_json()}" for item in items if item.relation_id == MARK]
            results = [
                "R" + bring_forward(works[item.relation_id], item.paths, _END).to_json()
                for item in items
                if item.relation_id in works and through.get(item.relation_id) == item.from_version
            ]
            yield pa.RecordBatch.from_pydict({"result": pa.array([*mark, *results], pa.string())})

    return apply


def warm_up(spark: SparkSession, tasks: int) -> None:
    """Have the Python workers load what merging needs, before the first changes wait for it."""
    spark.sparkContext.parallelize(range(tasks), tasks).foreach(_load)


def _load(_number: int) -> None:
    relation = Relation(0, TableName("none", "none"), (Column("key", 1, 23, -1, "integer", is_key=True),))
    change = {"commit_lsn": 1, "ordinal": 0, "relation_id": 0, "op": "I", "new": ["1"]}
    collapse(pa.Table.from_pylist([change], schema=ROW_SCHEMA), relation)


def read_results(texts: Iterable[str]) -> tuple[WorkItem, list[TableResult]]:
    """What `apply_items` gave: the batch's own item, and the result of each table."""
    lines = list(texts)
    mark = next(WorkItem.from_json(text[1:]) for text in lines if text[0] == "M")
    return mark, [TableResult.from_json(text[1:]) for text in lines if text[0] == "R"]


@dataclass(frozen=True)
class CatchUp:
    """A table that is behind, and the next files it needs, in LSN order; `is_last` when these are all.

    `reach_lsn`: all up to it is in them, or in the table already.
    """

    work: TableWork
    paths: tuple[str, ...]
    upto_lsn: LSN
    reach_lsn: LSN
    is_last: bool

    @classmethod
    def plan(cls, work: TableWork, files: list[ChangelogFile], upto_lsn: LSN, limit: int) -> CatchUp:
        """At most `limit` bytes of values, but never parting files that may share a transaction."""
        wanted = [file for file in files if file.may_hold(work.relation.oid) and file.min_lsn <= upto_lsn]
        taken = take_bytes(wanted, limit)
        reach = max((file.max_lsn for file in taken), default=LSN(0))
        return cls(work, tuple(file.path for file in taken), upto_lsn, reach, len(taken) == len(wanted))

    def run(self) -> TableResult:
        return bring_forward(self.work, self.paths, self.upto_lsn)


def take_bytes(files: list[ChangelogFile], limit: int) -> list[ChangelogFile]:
    """The first files up to a size, never parting files that may share a transaction."""
    taken: list[ChangelogFile] = []
    size, reach = 0, LSN(0)
    for file in files:
        if size >= limit and file.min_lsn > reach:
            break
        taken.append(file)
        size += file.value_bytes
        reach = max(reach, file.max_lsn)
    return taken
