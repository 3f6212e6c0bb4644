"""One table with every type, its lake table written by each of the ways that there are."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from tests.support import every_type
from tests.support.handed import Handed
from tests.support.replicated import execute

T = "public.t"
ALL = f"create table t (id int primary key, {every_type.declared()})"


def lake_of(dsn: str, folder: Path) -> Handed:
    return Handed(dsn, folder, (T,))


def copied(dsn: str, folder: Path) -> Handed:
    lake = lake_of(dsn, folder)
    rows = (every_type.insert(number, which) for number, which in enumerate([0, 1, None]))
    execute(dsn, every_type.CREATE_TYPE, ALL, *rows)
    lake.copy(T)
    return lake


def merged(dsn: str, folder: Path) -> Handed:
    """Merge into the low row, and append the others, one of them as a file that holds only NULL."""
    lake = lake_of(dsn, folder)
    execute(dsn, every_type.CREATE_TYPE, ALL, every_type.insert(0, 0), every_type.insert(9, 1))
    relation = lake.copy(T)
    for statement in (
        "update t set c_int32 = c_int32 - 1 where id = 0; delete from t where id = 9",
        every_type.insert(1, 1),
        every_type.insert(2, None),
    ):
        execute(dsn, statement)
        assert lake.stream(relation).error is None
    return lake


def compacted(dsn: str, folder: Path) -> Handed:
    lake = merged(dsn, folder)
    table = open_table(lake.lake_path(T))
    assert compact(table, app_id(lake.pipeline.name, Epoch(1)), at_least=3) == 3
    return lake


def widened(dsn: str, folder: Path) -> Handed:
    """Write a table whose first file lacks all columns that were added."""
    lake = lake_of(dsn, folder)
    execute(dsn, every_type.CREATE_TYPE, "create table t (id int primary key)", every_type.insert(0, None))
    relation = lake.copy(T)
    columns = ", ".join(f"add {name} {of}" for name, of in every_type.COLUMNS.items())
    execute(dsn, f"alter table t {columns}", every_type.insert(1, 0), every_type.insert(2, 1))
    assert lake.stream(relation).error is None
    return lake


WRITTEN = (copied, merged, compacted, widened)
