"""Rows of the changelog → Changes: each column's texts are typed at once, as the lake types them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, Shape, once_each
from airflow_provider_pgrepl.replication.events.change import OPERATIONS, Change
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merging.tuples import Ints, Tuples
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_column

Row = dict[str, Any]
_JSON = (114, 3802)
"""Oids of json and jsonb."""
_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "unchanged")


class TypedChanges(ByRelation[Change]):
    """Changes typed as the lake's values are."""

    def shape_of(self, record: RelationRecord) -> Shape[Change]:
        columns = {
            index: typed_column(column, record.name, self.choices_of(record.name), index)
            for index, column in self.columns_of(record)
        }
        return _Shape(record, columns)


class _Shape:
    """A relation, and how its rows become dictionaries."""

    def __init__(self, record: RelationRecord, columns: dict[int, TypedColumn]) -> None:
        self.table, self._sent, self._columns = record.name, record.message.columns, columns
        self._oid, self._name = record.message.oid, str(record.name)
        self._json = frozenset(one.name for one in self._columns.values() if one.column.type_oid in _JSON)
        whole = record.message.replica_identity == "f"
        self._identity = {i: one for i, one in self._columns.items() if whole or self._sent[i].is_identity}

    def make(self, rows: pa.Table) -> Iterator[Change]:
        is_row = np.array([op != "T" for op in rows["op"].to_pylist()], np.bool_)
        numbers, some = np.flatnonzero(is_row), rows.filter(pa.array(is_row))
        after = self._by_number(some, numbers, "new", self._columns)
        before = self._by_number(some, numbers, "old", self._identity)
        columns = zip(*(once_each(rows[name]) for name in _PLACE), strict=True)
        for number, (op, epoch, lsn, ordinal, xid, commit_ts, unchanged) in enumerate(columns):
            data, old = after.get(number), before.get(number)
            left = tuple(self._without(data, old, unchanged or ()))
            place = EventPosition(Epoch(epoch), LSN(lsn), ordinal)
            op_name = OPERATIONS[op]
            yield Change(place, self._name, op_name, data, old, left, xid, commit_ts, self._json, self._oid)

    def _without(self, data: Row | None, old: Row | None, unchanged: Sequence[int]) -> Iterator[str]:
        """Give values that the update did not send as the old row has them; those that nobody has go."""
        for index in unchanged:
            name = self._sent[index].name
            if data is None or index not in self._columns:
                continue
            if old is not None and index in self._identity:
                data[name] = old[name]
            else:
                del data[name]
                yield name

    def _by_number(
        self, rows: pa.Table, numbers: Ints, side: str, columns: dict[int, TypedColumn]
    ) -> dict[int, Row]:
        """Rows of one side, by the number of the change."""
        if rows.num_rows == 0:
            return {}
        tuples = Tuples(array_of(rows, side, TEXTS), len(self._sent), self.table)
        present = numbers[tuples.present].tolist()
        names = [column.name for column in columns.values()]
        values = [self._values(column, tuples.column(index)) for index, column in columns.items()]
        found = zip(*values, strict=True) if values else (() for _ in present)
        dictionaries = (dict(zip(names, row, strict=True)) for row in found)
        return dict(zip(present, dictionaries, strict=True))

    def _values(self, column: TypedColumn, texts: pa.Array) -> list[Any]:
        typed = column.parse(texts)
        found: list[Any] | None = None
        try:
            found = typed.to_pylist(maps_as_pydicts="strict")
        except (ValueError, OverflowError):
            found = None  # its message may hold the value
        if found is None:
            raise ValueRangeError(
                f'column "{one_line(column.name)}" of {self.table} holds a value that Python cannot',
                "read it as its text: give the column lake type string in types",
            )
        return found
