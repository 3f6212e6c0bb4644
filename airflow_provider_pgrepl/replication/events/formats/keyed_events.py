"""Events with keys, for targets that keep the order of each key: who has one key's events has its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.changes import Side, TypedShape
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents, JsonShape
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT, JsonRows
from airflow_provider_pgrepl.replication.events.formats.relation_rows import Envelope, RelationRows, of_all
from airflow_provider_pgrepl.replication.values import TypedColumn


class KeyedEvents(JsonEvents):
    """Events whose bodies and keys are JSON."""

    def shape_of(self, record: RelationRecord) -> JsonShape:
        return _KeyedShape(*self.enveloped(record), self.few, self.keys_of(record))

    def keys_of(self, record: RelationRecord) -> list[int]:
        """The columns of its rows' keys, by place in the stream."""
        whole = record.message.replica_identity == "f"
        sent = record.message.columns
        return [
            index
            for index, column in self.columns_of(record).items()
            if (column.is_key if whole else sent[index].is_identity)
        ]


class _KeyedShape(JsonShape):
    def __init__(self, changes: TypedShape, envelope: Envelope, few: int, keys: list[int]) -> None:
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

    def _keys_of(self, side: Side[pa.Array], columns: Mapping[int, TypedColumn], count: int) -> pa.Array:
        """Of each change the key of one side's row; null where it has none."""
        places = {index: place for place, index in enumerate(columns)}
        values = [side.values[places[index]] for index in self._keys] if side.values else []
        return of_all(self._objects, Side(side.numbers, values), count)

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
        # A large value of a key that an update did not touch is in the old row, if anywhere.
        old = change.old or {}
        key = {name: row[name] if name in row else old.get(name) for name in self._names}
        start, end = self._frame
        return f"{start}{self.envelope.key(change, key)}{end}".encode()
