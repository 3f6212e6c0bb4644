"""Rows of the changelog → events whose bodies are JSON, made from columns: as `to_json` has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Shape
from airflow_provider_pgrepl.replication.events.change import OPERATIONS
from airflow_provider_pgrepl.replication.events.json_columns import TEXT, JsonRows, joined, json_texts
from airflow_provider_pgrepl.replication.events.json_format import json_string, on_one_line
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publishing.event import Event, event_of
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.events.typed_changes import Side, TypedChanges, TypedShape
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import array_of
from airflow_provider_pgrepl.replication.lake.merging.tuples import Bools, Ints, take
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.values import TypedColumn

_FEW = 32
"""A call of Arrow takes its time however few rows it is given: fewer than these are sooner made alone."""
_TRANSACTION = ("epoch", "commit_lsn", "xid", "commit_ts")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LETTERS = pa.array(OPERATIONS)
_OLD, _ID = (pa.scalar(text, TEXT) for text in (',"old":', ',"id":"'))


class JsonEvents(ByRelation[Event]):
    """Events whose bodies are JSON. `few`: fewer changes of a relation than that are made one by one."""

    def __init__(
        self, relations: KnownRelations, choices_of: ChoicesOf, wanted: TableSelection, few: int = _FEW
    ) -> None:
        super().__init__(relations, choices_of, wanted)
        self._changes, self.few = TypedChanges(relations, choices_of, wanted), few

    def shape_of(self, record: RelationRecord) -> Shape[Event]:
        return JsonShape(self._changes.shape_of(record), self.few)

    def changes_of(self, record: RelationRecord) -> TypedShape:
        """The relation's changes, typed."""
        return self._changes.shape_of(record)


@dataclass(frozen=True)
class _Transactions:
    """The transactions of some changes, and of each change which of them it is of, by `number`.

    `places` and `moments`: what Event says of them; `id_starts`: the ids up to their ordinals; `ends`: what
    comes behind the id in a body.
    """

    number: Ints
    places: list[tuple[Epoch, LSN]]
    moments: list[datetime]
    id_starts: pa.Array
    ends: pa.Array

    @classmethod
    def of(cls, rows: pa.Table) -> _Transactions:
        columns = [array_of(rows, name, ROW_SCHEMA.field(name).type) for name in _TRANSACTION]
        steps = [np.diff(column.view(pa.int64()).to_numpy()) for column in columns]
        is_first = np.append(True, np.any(steps, axis=0))[: rows.num_rows]
        of_each = [column.filter(pa.array(is_first)) for column in columns]
        epochs, lsns, xids, microseconds = (column.view(pa.int64()).to_pylist() for column in of_each)
        places = [(Epoch(epoch), LSN(lsn)) for epoch, lsn in zip(epochs, lsns, strict=True)]
        lsn_texts = [str(lsn) for _, lsn in places]
        starts = [f"{epoch}:{lsn}:" for epoch, lsn in zip(epochs, lsn_texts, strict=True)]
        texts = json_texts(of_each[-1], is_json=False).to_pylist()
        ends = [
            f'","commit_lsn":"{lsn}","commit_ts":{text},"xid":{xid}}}'
            for lsn, text, xid in zip(lsn_texts, texts, xids, strict=True)
        ]
        moments = [_EPOCH + timedelta(microseconds=one) for one in microseconds]
        number = np.cumsum(is_first, dtype=np.int64) - 1
        return cls(number, places, moments, pa.array(starts, TEXT), pa.array(ends, TEXT))


class JsonShape:
    """A relation, and how its rows become events."""

    def __init__(self, changes: TypedShape, few: int) -> None:
        self.changes, self._table, self.few = changes, str(changes.table), few
        self._after, self._before = (
            JsonRows(column.name for column in columns.values())
            for columns in (changes.columns, changes.identity)
        )
        table = on_one_line(json_string(self._table))
        heads = [f'{{"table":{table},"op":"{op}","data":' for op in OPERATIONS.values()]
        self._heads = pa.array(heads, TEXT)

    def make(self, rows: pa.Table) -> Iterator[Event]:
        if rows.num_rows < self.few:
            return self.one_by_one(rows)
        # Which columns such a row has is said by the row alone.
        lacks_values = _lacks_values(rows)
        if not lacks_values.any():
            return self._events(rows)
        whole = self._events(rows.filter(pa.array(~lacks_values)))
        others = self.one_by_one(rows.filter(pa.array(lacks_values)))
        return (next(others if lacks else whole) for lacks in lacks_values.tolist())

    def one_by_one(self, rows: pa.Table) -> Iterator[Event]:
        """By way of Changes."""
        return map(event_of, self.changes.make(rows))

    def together(self, rows: pa.Table, after: Side[pa.Array], before: Side[pa.Array]) -> Iterator[Event]:
        """By columns, given the rows' sides as JSON."""
        of = _Transactions.of(rows)
        ordinals, ops = array_of(rows, "ordinal", pa.int64()), array_of(rows, "op", pa.string())
        transactions = pa.array(of.number)
        ids = joined(of.id_starts.take(transactions), ordinals.cast(TEXT))
        bodies = joined(
            self._heads.take(pc.index_in(ops, value_set=_LETTERS)),
            of_all(self._after, after, rows.num_rows),
            _OLD,
            of_all(self._before, before, rows.num_rows),
            _ID,
            ids,
            of.ends.take(transactions),
        )
        oid, table, places, moments = self.changes.oid, self._table, of.places, of.moments
        for number, ordinal, name, op, body in zip(
            of.number.tolist(),
            ordinals.to_pylist(),
            ids.to_pylist(),
            ops.to_pylist(),
            bodies.cast(pa.large_binary()).to_pylist(),
            strict=True,
        ):
            epoch, lsn = places[number]
            position = EventPosition(epoch, lsn, ordinal)
            yield Event(position, name, oid, table, OPERATIONS[op], moments[number], body)

    def _events(self, rows: pa.Table) -> Iterator[Event]:
        return self.together(rows, *self.changes.sides(rows, self._json_texts))

    def _json_texts(self, column: TypedColumn, typed: pa.Array) -> pa.Array:
        return json_texts(typed, is_json=column.name in self.changes.json_columns)


def _lacks_values(rows: pa.Table) -> Bools:
    """Which updates left values out."""
    counts = pc.fill_null(pc.list_value_length(rows["unchanged"]), 0)
    found: Bools = pc.greater(counts, 0).to_numpy()
    return found


def of_all(objects: JsonRows, side: Side[pa.Array], count: int) -> pa.Array:
    """Of each change its row of one side; null where it has none."""
    made = objects.of(side.values, len(side.numbers))
    if len(made) == count:
        return made
    places = np.full(count, -1, np.int64)
    places[side.numbers] = np.arange(len(made))
    return take(made, places)
