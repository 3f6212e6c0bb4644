"""Conversion of changelog rows to events with JSON bodies, by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changes import (
    LETTERS,
    OPERATIONS,
    Change,
    ChangeConverter,
    ChangeSide,
    OptionsOf,
    Row,
    TypedShape,
)
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.lake.merge.changes import Bools, Ints, array_of, take
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn

from .json_text import TEXT, JsonRows, joined, json_string, json_texts, on_one_line, to_json, to_json_object

_TRANSACTION = ("epoch", "commit_lsn", "xid", "commit_ts")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OLD, _ID = (pa.scalar(text, TEXT) for text in (',"old":', ',"id":"'))
_FEW = 32
"""Below this number of rows, converting them one by one is faster: each Arrow call has a fixed cost."""


@dataclass(frozen=True)
class ChangeTransactions:
    """The transactions of some changes. `number`: the index of each change's transaction.

    The other fields have one entry per transaction. `places`: epoch and commit LSN. `moments`,
    `microseconds`: the commit time, the latter since 1970. `id_starts`: the ids of changes up to the ordinal.
    `xids`: transaction ids.
    """

    number: Ints
    places: list[tuple[Epoch, LSN]]
    moments: list[datetime]
    id_starts: pa.Array
    xids: list[int]
    microseconds: pa.Array

    @classmethod
    def of(cls, rows: pa.Table) -> ChangeTransactions:
        columns = [array_of(rows, name, ROW_SCHEMA.field(name).type) for name in _TRANSACTION]
        steps = [np.diff(column.view(pa.int64()).to_numpy()) for column in columns]
        is_first = np.append(True, np.any(steps, axis=0))[: rows.num_rows]
        of_each = [column.filter(pa.array(is_first)) for column in columns]
        epochs, lsns, xids = (column.view(pa.int64()).to_pylist() for column in of_each[:3])
        places = [(Epoch(epoch), LSN(lsn)) for epoch, lsn in zip(epochs, lsns, strict=True)]
        starts = pa.array([f"{epoch}:{lsn}:" for epoch, lsn in places], TEXT)
        microseconds = of_each[3].view(pa.int64())
        moments = [_EPOCH + timedelta(microseconds=one) for one in microseconds.to_pylist()]
        number = np.cumsum(is_first, dtype=np.int64) - 1
        return cls(number, places, moments, starts, xids, microseconds)

    def spread(self, texts: Sequence[str]) -> pa.Array:
        """Return, for each change, the text of its transaction."""
        return pa.array(texts, TEXT).take(pa.array(self.number))


@dataclass(frozen=True)
class RelationRows:
    """Changes of one relation, in order. `after` and `before`: the columns of their rows as JSON."""

    ops: pa.Array
    ordinals: pa.Array
    ids: pa.Array
    transactions: ChangeTransactions
    after: ChangeSide[pa.Array]
    before: ChangeSide[pa.Array]

    @classmethod
    def of(cls, rows: pa.Table, after: ChangeSide[pa.Array], before: ChangeSide[pa.Array]) -> RelationRows:
        of = ChangeTransactions.of(rows)
        ordinals = array_of(rows, "ordinal", pa.int64())
        ids = joined(of.id_starts.take(pa.array(of.number)), ordinals.cast(TEXT))
        return cls(array_of(rows, "op", pa.string()), ordinals, ids, of, after, before)

    def objects(self, made: JsonRows, side: ChangeSide[pa.Array]) -> pa.Array:
        """Return, for each change, its row on one side as a JSON object; null if it has none."""
        return of_all(made, side, len(self.ops))


class BodyFormat(Protocol):
    """Makes the bodies of a relation's events, and the keys of their messages."""

    def texts(self, column: TypedColumn, typed: pa.Array) -> pa.Array:
        """Return a typed column as JSON."""

    def bodies(self, rows: RelationRows) -> pa.Array:
        """Return the bodies of all changes, as text."""

    def body(self, change: Change) -> bytes:
        """Return the body of one change."""

    def key_frame(self, names: Sequence[str]) -> tuple[str, str]:
        """Return the text before and after a key's object. `names`: the names of the object's members."""

    def key(self, change: Change, values: Row) -> str:
        """Return the object of one change's key."""


def of_all(objects: JsonRows, side: ChangeSide[pa.Array], count: int) -> pa.Array:
    """Return, for each change, its row on one side as a JSON object; null if it has none."""
    made = objects.of(side.values, len(side.numbers))
    if len(made) == count:
        return made
    places = np.full(count, -1, np.int64)
    places[side.numbers] = np.arange(len(made))
    return take(made, places)


class PlainEnvelope:
    """The envelope of one relation in the format of `to_json`."""

    def __init__(self, changes: TypedShape) -> None:
        self._json_columns = changes.json_columns
        self._after, self._before = (
            JsonRows(column.name for column in columns.values())
            for columns in (changes.columns, changes.identity)
        )
        table = on_one_line(json_string(str(changes.table)))
        heads = [f'{{"table":{table},"op":"{op}","data":' for op in OPERATIONS.values()]
        self._heads = pa.array(heads, TEXT)

    def texts(self, column: TypedColumn, typed: pa.Array) -> pa.Array:
        return json_texts(typed, is_json=column.name in self._json_columns)

    def bodies(self, rows: RelationRows) -> pa.Array:
        of = rows.transactions
        moments = json_texts(of.microseconds.view(pa.timestamp("us", "UTC")), is_json=False).to_pylist()
        ends = [
            f'","commit_lsn":"{lsn}","commit_ts":{moment},"xid":{xid}}}'
            for (_, lsn), moment, xid in zip(of.places, moments, of.xids, strict=True)
        ]
        return joined(
            self._heads.take(pc.index_in(rows.ops, value_set=letters(LETTERS))),
            rows.objects(self._after, rows.after),
            _OLD,
            rows.objects(self._before, rows.before),
            _ID,
            rows.ids,
            of.spread(ends),
        )

    def body(self, change: Change) -> bytes:
        return to_json(change).encode()

    def key_frame(self, names: Sequence[str]) -> tuple[str, str]:  # noqa: ARG002 - of others
        return "", ""

    def key(self, change: Change, values: Row) -> str:
        return to_json_object(values, change.json_columns)


Enveloped = Callable[
    [RelationRecord, Mapping[int, PublishedColumn], TableOptions], tuple[TypedShape, BodyFormat]
]
"""Returns the typed shape and the envelope of a relation, given its columns."""


class JsonEvents(ChangeConverter[Event]):
    """Makes events with JSON bodies.

    `few`: fewer changes of a relation than this are converted one by one.
    """

    def __init__(
        self,
        relations: KnownRelations,
        options_of: OptionsOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
        few: int = _FEW,
        enveloped: Enveloped | None = None,
    ) -> None:
        super().__init__(relations, options_of, wanted, published)
        self.few, self._enveloped = few, enveloped or _plain

    def shape_of(self, record: RelationRecord) -> JsonShape:
        return JsonShape(*self.enveloped(record), self.few)

    def enveloped(self, record: RelationRecord) -> tuple[TypedShape, BodyFormat]:
        """Return the typed shape and the envelope of a relation."""
        return self._enveloped(record, self.columns_of(record), self.options_of(record.name))


def _plain(
    record: RelationRecord, columns: Mapping[int, PublishedColumn], options: TableOptions
) -> tuple[TypedShape, BodyFormat]:
    typed = {index: one.typed(record.name, options, index) for index, one in columns.items()}
    changes = TypedShape(record, typed)
    return changes, PlainEnvelope(changes)


class JsonShape:
    """A relation, and the conversion of its rows to events."""

    def __init__(self, changes: TypedShape, envelope: BodyFormat, few: int) -> None:
        self.changes, self.envelope, self.few = changes, envelope, few

    def make(self, rows: pa.Table) -> Iterator[Event]:
        if rows.num_rows < self.few:
            return self.one_by_one(rows)
        # Rows that lack values have different columns, so they are converted one by one.
        lacks_values = _lacks_values(rows)
        if not lacks_values.any():
            return self._events(rows)
        whole = self._events(rows.filter(pa.array(~lacks_values)))
        others = self.one_by_one(rows.filter(pa.array(lacks_values)))
        return (next(others if lacks else whole) for lacks in lacks_values.tolist())

    def key_of(self, change: Change) -> bytes | None:  # noqa: ARG002 - of those that have keys
        """Return the key by which a target keeps the order of a change's events, or None."""
        return None

    def one_by_one(self, rows: pa.Table) -> Iterator[Event]:
        """Yield the events of rows, converted to Changes one by one."""
        return map(self.event_of, self.changes.make(rows))

    def event_of(self, change: Change) -> Event:
        """Return the event of one change."""
        return Event(
            change.position,
            change.id,
            change.relation_id,
            change.table,
            change.op,
            change.commit_ts,
            self.envelope.body(change),
        )

    def together(self, rows: RelationRows) -> Iterator[Event]:
        """Yield the events of changes that are converted by columns."""
        bodies = self.envelope.bodies(rows).cast(pa.large_binary()).to_pylist()
        oid, table, of = self.changes.oid, str(self.changes.table), rows.transactions
        places, moments = of.places, of.moments
        for number, ordinal, name, op, body in zip(
            of.number.tolist(),
            rows.ordinals.to_pylist(),
            rows.ids.to_pylist(),
            rows.ops.to_pylist(),
            bodies,
            strict=True,
        ):
            epoch, lsn = places[number]
            position = EventPosition(epoch, lsn, ordinal)
            yield Event(position, name, oid, table, OPERATIONS[op], moments[number], body)

    def events_of(self, rows: pa.Table, made: RelationRows) -> Iterator[Event]:  # noqa: ARG002 - of others
        """Yield the events of changes that are converted by columns. `rows`: the unconverted rows."""
        return self.together(made)

    def _events(self, rows: pa.Table) -> Iterator[Event]:
        sides = self.changes.sides(rows, self.envelope.texts)
        return self.events_of(rows, RelationRows.of(rows, *sides))


def _lacks_values(rows: pa.Table) -> Bools:
    """Return a mask of the rows that lack values."""
    counts = pc.fill_null(pc.list_value_length(rows["unchanged"]), 0)
    found: Bools = pc.greater(counts, 0).to_numpy()
    return found


class KeyedEvents(JsonEvents):
    """Makes events with JSON bodies and JSON keys."""

    def shape_of(self, record: RelationRecord) -> JsonShape:
        return _KeyedShape(*self.enveloped(record), self.few, self.keys_of(record))

    def keys_of(self, record: RelationRecord) -> list[int]:
        """Return the columns of the row key, by position in the stream."""
        whole = record.message.replica_identity == "f"
        sent = record.message.columns
        return [
            index
            for index, column in self.columns_of(record).items()
            if (column.is_key if whole else sent[index].is_identity)
        ]


class _KeyedShape(JsonShape):
    def __init__(self, changes: TypedShape, envelope: BodyFormat, few: int, keys: list[int]) -> None:
        super().__init__(changes, envelope, few)
        self._keys = keys
        self._names = [changes.columns[index].name for index in keys]
        self._objects = JsonRows(self._names)
        self._frame = envelope.key_frame(self._names)

    def key_of(self, change: Change) -> bytes | None:
        return self._key(change.data, change) or self._key(change.old, change)

    def events_of(self, rows: pa.Table, made: RelationRows) -> Iterator[Event]:
        events = self.together(made)
        if not self._keys:
            return events
        new = self._keys_of(made.after, self.changes.columns, rows.num_rows)
        old = self._keys_of(made.before, self.changes.identity, rows.num_rows)
        return self._keyed(rows, events, old, new)

    def _keyed(
        self, rows: pa.Table, events: Iterator[Event], old: pa.Array, new: pa.Array
    ) -> Iterator[Event]:
        has_moved = pc.fill_null(pc.not_equal(old, new), False)
        moved = self.one_by_one(rows.filter(has_moved)) if pc.any(has_moved).as_py() else iter(())
        keys = self._framed(pc.coalesce(new, old)).cast(pa.large_binary()).to_pylist()
        for event, key, is_other in zip(events, keys, has_moved.to_pylist(), strict=True):
            if is_other:
                yield next(moved)
            else:
                event.key = key
                yield event

    def _framed(self, keys: pa.Array) -> pa.Array:
        start, end = (pa.scalar(text, TEXT) for text in self._frame)
        return (
            pc.binary_join_element_wise(start, keys, end, pa.scalar("", TEXT)) if any(self._frame) else keys
        )

    def _keys_of(
        self, side: ChangeSide[pa.Array], columns: Mapping[int, TypedColumn], count: int
    ) -> pa.Array:
        """Return, for each change, the key of its row on one side; null if it has no row there."""
        places = {index: place for place, index in enumerate(columns)}
        values = [side.values[places[index]] for index in self._keys] if side.values else []
        return of_all(self._objects, ChangeSide(side.numbers, values), count)

    def event_of(self, change: Change) -> Event:
        old, new = self._key(change.old, change), self._key(change.data, change)
        left = None
        if old is not None and new is not None and old != new:
            gone = replace(change, op="delete", data=None, unchanged=())
            left = old, self.envelope.body(gone)
            change = replace(change, op="insert", old=None)
        event = super().event_of(change)
        event.key, event.left = new or old, left
        return event

    def _key(self, row: Mapping[str, Any] | None, change: Change) -> bytes | None:
        if row is None or not self._keys:
            return None
        # A large key value that an update did not send can only be in the old row.
        old = change.old or {}
        key = {name: row[name] if name in row else old.get(name) for name in self._names}
        start, end = self._frame
        return f"{start}{self.envelope.key(change, key)}{end}".encode()
