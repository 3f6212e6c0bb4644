"""Events with keys, for targets that keep the order of each key: who has one key's events has its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import Shape
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.json_columns import JsonRows
from airflow_provider_pgrepl.replication.events.json_format import to_json, to_json_object
from airflow_provider_pgrepl.replication.events.publishing.event import Event, event_of
from airflow_provider_pgrepl.replication.events.publishing.json_events import JsonEvents, JsonShape, of_all
from airflow_provider_pgrepl.replication.events.typed_changes import Side, TypedShape
from airflow_provider_pgrepl.replication.values import TypedColumn


class KeyedEvents(JsonEvents):
    """Events whose bodies and keys are JSON."""

    def shape_of(self, record: RelationRecord) -> Shape[Event]:
        whole = record.message.replica_identity == "f"
        sent = record.message.columns
        keys = [
            index
            for index, column in self.columns_of(record)
            if (column.is_key if whole else sent[index].is_identity)
        ]
        return _KeyedShape(self.changes_of(record), self.few, keys)


class _KeyedShape(JsonShape):
    def __init__(self, changes: TypedShape, few: int, keys: list[int]) -> None:
        super().__init__(changes, few)
        self._keys = keys
        self._names = [changes.columns[index].name for index in keys]
        self._objects = JsonRows(self._names)

    def one_by_one(self, rows: pa.Table) -> Iterator[Event]:
        return map(self._event, self.changes.make(rows))

    def together(self, rows: pa.Table, after: Side[pa.Array], before: Side[pa.Array]) -> Iterator[Event]:
        events = super().together(rows, after, before)
        if not self._keys:
            return events
        new = self._keys_of(after, self.changes.columns, rows.num_rows)
        old = self._keys_of(before, self.changes.identity, rows.num_rows)
        return self._keyed(rows, events, old, new)

    def _keyed(
        self, rows: pa.Table, events: Iterator[Event], old: pa.Array, new: pa.Array
    ) -> Iterator[Event]:
        has_moved = pc.fill_null(pc.not_equal(old, new), False)
        moved = self.one_by_one(rows.filter(has_moved)) if pc.any(has_moved).as_py() else iter(())
        keys = pc.coalesce(new, old).cast(pa.large_binary()).to_pylist()
        for event, key, is_other in zip(events, keys, has_moved.to_pylist(), strict=True):
            if is_other:
                yield next(moved)
            else:
                event.key = key
                yield event

    def _keys_of(self, side: Side[pa.Array], columns: Mapping[int, TypedColumn], count: int) -> pa.Array:
        """Of each change the key of one side's row; null where it has none."""
        places = {index: place for place, index in enumerate(columns)}
        values = [side.values[places[index]] for index in self._keys] if side.values else []
        return of_all(self._objects, Side(side.numbers, values), count)

    def _event(self, change: Change) -> Event:
        old, new = self._key(change.old, change), self._key(change.data, change)
        left = None
        if old is not None and new is not None and old != new:
            gone = replace(change, op="delete", data=None, unchanged=())
            left = old, to_json(gone).encode()
            change = replace(change, op="insert", old=None)
        event = event_of(change)
        event.key, event.left = new or old, left
        return event

    def _key(self, row: Mapping[str, Any] | None, change: Change) -> bytes | None:
        if row is None or not self._keys:
            return None
        # A large value of a key that an update did not touch is in the old row, if anywhere.
        old = change.old or {}
        key = {name: row[name] if name in row else old.get(name) for name in self._names}
        return to_json_object(key, change.json_columns).encode()
