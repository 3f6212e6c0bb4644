"""Changelog rows for tests: legal histories of a table, as pgoutput would send them, and their Arrow form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import TABLE_SCHEMA
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableContext
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from tests.support.model import Change, Model, Row

TYPES = {
    "text": 25,
    "integer": 23,
    "bigint": 20,
    "boolean": 16,
    "uuid": 2950,
    "timestamp with time zone": 1184,
}
TYPES |= {"double precision": 701, "date": 1082, "timestamp without time zone": 1114, "bytea": 17}
_START = datetime(2024, 5, 1, tzinfo=UTC)


def commit_ts(commit_lsn: int) -> datetime:
    return _START + timedelta(seconds=commit_lsn)


def table_of(changes: Iterable[Change]) -> pa.Table:
    rows = [
        (
            1,
            c.commit_lsn,
            n,
            c.commit_lsn,
            commit_ts(c.commit_lsn),
            7,
            1,
            c.op,
            c.new,
            c.old,
            c.unchanged or None,
            "",
        )
        for n, c in enumerate(changes)
    ]
    columns = zip(*rows, strict=True) if rows else [[] for _ in TABLE_SCHEMA]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, TABLE_SCHEMA, strict=True)], schema=TABLE_SCHEMA
    )


def column(name: str, type_name: str = "text", *, key: bool = False) -> Column:
    oid = 1700 if type_name.startswith("numeric") else TYPES[type_name]
    typmod = -1
    if type_name.startswith("numeric("):
        precision, scale = map(int, type_name[8:-1].split(","))
        typmod = ((precision << 16) | scale) + 4
    return Column(name, 1, oid, typmod, type_name, is_key=key, not_null=key)


def work_of(oid: int) -> TableContext:
    """The work of a table with this relation id."""
    of = relation(column("id", "bigint", key=True))
    return TableContext(replace(of, oid=oid), TableOptions(), "p:1", "/lake", 1)


def relation(*columns: Column, identity: str = "d") -> Relation:
    return Relation(oid=7, table=TableName("public", "t"), columns=columns, replica_identity=identity)


class History:
    """Builds changes that a real server could send, by keeping the table they are about."""

    def __init__(self, width: int, key: Sequence[int], *, full: bool) -> None:
        self.model = Model(tuple(key), full)
        self.width = width
        self.changes: list[Change] = []
        self.lsn = 100

    def commit(self) -> None:
        self.lsn += 10

    def insert(self, row: Row) -> None:
        self._add(Change("I", new=row, commit_lsn=self.lsn))

    def delete(self, row: Row) -> None:
        self._add(Change("D", old=self._old(row), commit_lsn=self.lsn))

    def truncate(self) -> None:
        self.changes.append(Change("T", new=("0",), commit_lsn=self.lsn))
        self.model.apply(self.changes[-1])

    def update(self, row: Row, new: Row, unchanged: Sequence[int] = ()) -> None:
        unchanged = tuple(i for i in unchanged if row[i] == new[i])
        moved = any(row[i] != new[i] or i in unchanged for i in self.model.key)
        sent = tuple(None if i in unchanged else text for i, text in enumerate(new))
        old = self._old(row) if moved or self.model.full else None
        self._add(Change("U", new=sent, old=old, unchanged=unchanged, commit_lsn=self.lsn))

    def _old(self, row: Row) -> Row:
        return (
            row if self.model.full else tuple(t if i in self.model.key else None for i, t in enumerate(row))
        )

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        self.model.apply(change)
