"""Rows of the changelog → Changes: each column's texts are typed at once, as the lake types them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, once_each
from airflow_provider_pgrepl.replication.events.change import OPERATIONS, Change
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lake.merge.changes import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merge.tuples import Ints, Tuples
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.values import TypedColumn

Row = dict[str, Any]
Values = TypeVar("Values")
Read = Callable[[TypedColumn, pa.Array], Values]
"""Makes something of a typed column; a ValueError or OverflowError says that Python has no such value."""
_JSON = (114, 3802)
"""Oids of json and jsonb."""
_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "unchanged")


class TypedChanges(ByRelation[Change]):
    """Changes typed as the lake's values are."""

    def shape_of(self, record: RelationRecord) -> TypedShape:
        choices = self.choices_of(record.name)
        columns = {
            index: one.typed(record.name, choices, index) for index, one in self.columns_of(record).items()
        }
        return TypedShape(record, columns)


@dataclass(frozen=True)
class Side(Generic[Values]):
    """The rows before, or after, of some changes: `numbers` says of which, `values` what was made of each
    column."""

    numbers: Ints
    values: Sequence[Values]


class TypedShape:
    """A relation, and how its rows become dictionaries.

    `columns`, and those of the replica identity, `identity`: by place in the stream. `json_columns`: the
    names of those whose texts are JSON.
    """

    def __init__(self, record: RelationRecord, columns: Mapping[int, TypedColumn]) -> None:
        self._sent = record.message.columns
        self.table, self.oid, self.columns = record.name, record.message.oid, columns
        self.json_columns = frozenset(one.name for one in columns.values() if one.column.type_oid in _JSON)
        whole = record.message.replica_identity == "f"
        self.identity = {i: one for i, one in columns.items() if whole or self._sent[i].is_identity}

    def make(self, rows: pa.Table) -> Iterator[Change]:
        new, old_side = self.sides(rows, lambda _, typed: python_values(typed))
        after, before = _by_number(new, self.columns), _by_number(old_side, self.identity)
        columns = zip(*(once_each(rows[name]) for name in _PLACE), strict=True)
        table = str(self.table)
        for number, (op, epoch, lsn, ordinal, xid, commit_ts, unchanged) in enumerate(columns):
            data, old = after.get(number), before.get(number)
            left = tuple(self._without(data, old, unchanged or ()))
            place = EventPosition(Epoch(epoch), LSN(lsn), ordinal)
            op_name = OPERATIONS[op]
            yield Change(place, table, op_name, data, old, left, xid, commit_ts, self.json_columns, self.oid)

    def sides(self, rows: pa.Table, read: Read[Values]) -> tuple[Side[Values], Side[Values]]:
        """The rows after and those before, of the latter the columns of the replica identity.

        Raises ValueRangeError for a value that its type, or Python, cannot hold, DriftError.
        """
        is_row = pc.not_equal(rows["op"], "T")
        numbers, some = np.flatnonzero(is_row.to_numpy()), rows.filter(is_row)
        return (
            self._side(some, numbers, "new", self.columns, read),
            self._side(some, numbers, "old", self.identity, read),
        )

    def _side(
        self,
        rows: pa.Table,
        numbers: Ints,
        name: str,
        columns: Mapping[int, TypedColumn],
        read: Read[Values],
    ) -> Side[Values]:
        if rows.num_rows == 0:
            return Side(numbers, [])
        tuples = Tuples(array_of(rows, name, TEXTS), len(self._sent), self.table)
        if tuples.count == 0:
            return Side(numbers[:0], [])
        values = [self._read(column, tuples.column(index), read) for index, column in columns.items()]
        return Side(numbers[tuples.present], values)

    def _read(self, column: TypedColumn, texts: pa.Array, read: Read[Values]) -> Values:
        typed = column.parse(texts)
        found: Values | None = None
        try:
            found = read(column, typed)
        except (ValueError, OverflowError):
            found = None  # its message may hold the value
        if found is None:
            raise ValueRangeError(
                f'column "{one_line(column.name)}" of {self.table} holds a value that Python cannot',
                "read it as its text: give the column lake type string in types",
            )
        return found

    def _without(self, data: Row | None, old: Row | None, unchanged: Sequence[int]) -> Iterator[str]:
        """Give values that the update did not send as the old row has them; those that nobody has go."""
        for index in unchanged:
            if data is None or index not in self.columns:
                continue
            name = self.columns[index].name
            if old is not None and index in self.identity:
                data[name] = old[name]
            else:
                del data[name]
                yield name


def python_values(typed: pa.Array) -> list[Any]:
    """As Change has them. Raises ValueError or OverflowError for a value that Python has not."""
    values: list[Any] = typed.to_pylist(maps_as_pydicts="strict")
    return values


def _by_number(side: Side[list[Any]], columns: Mapping[int, TypedColumn]) -> dict[int, Row]:
    """Rows of one side, by the number of the change."""
    names = [column.name for column in columns.values()]
    found = zip(*side.values, strict=True) if side.values else (() for _ in side.numbers)
    dictionaries = (dict(zip(names, row, strict=True)) for row in found)
    return dict(zip(side.numbers.tolist(), dictionaries, strict=True))
