"""Events with keys, for targets that keep the order of each key: who has one key's events has its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Shape
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.json_format import to_json, to_json_object
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.publishing.event import Event
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.events.typed_changes import TypedChanges


@dataclass(slots=True, kw_only=True)
class KeyedEvent(Event):
    """`key`: of the row; of the table where rows have none (`is_of_row`). `left`: key and body of the first
    of two messages, when the change gives a row another key: that the row with the old key is gone."""

    key: bytes
    is_of_row: bool
    left: tuple[bytes, bytes] | None = None


class KeyedEvents(ByRelation[KeyedEvent]):
    """Events whose bodies and keys are JSON."""

    def __init__(self, relations: KnownRelations, choices_of: ChoicesOf, wanted: TableSelection) -> None:
        super().__init__(relations, choices_of, wanted)
        self._changes = TypedChanges(relations, choices_of, wanted)

    def shape_of(self, record: RelationRecord) -> Shape[KeyedEvent]:
        sent = record.message.columns
        whole = record.message.replica_identity == "f"
        names = tuple(
            column.name
            for index, column in self.columns_of(record)
            if (column.is_key if whole else sent[index].is_identity)
        )
        return _Keyed(self._changes.shape_of(record), names)


class _Keyed:
    def __init__(self, shape: Shape[Change], names: tuple[str, ...]) -> None:
        self._shape, self._names = shape, names

    def make(self, rows: pa.Table) -> Iterator[KeyedEvent]:
        return map(self._event, self._shape.make(rows))

    def _event(self, change: Change) -> KeyedEvent:
        old, new = self._key(change.old, change), self._key(change.data, change)
        left = None
        if old is not None and new is not None and old != new:
            gone = replace(change, op="delete", data=None, unchanged=())
            left = old, to_json(gone).encode()
            change = replace(change, op="insert", old=None)
        key = new or old
        return KeyedEvent(
            change.position,
            change.id,
            change.relation_id,
            change.table,
            change.op,
            change.commit_ts,
            to_json(change).encode(),
            key=key or to_json_object({"table": change.table}).encode(),
            is_of_row=key is not None,
            left=left,
        )

    def _key(self, row: Mapping[str, Any] | None, change: Change) -> bytes | None:
        if row is None or not self._names:
            return None
        # A large value of a key that an update did not touch is in the old row, if anywhere.
        old = change.old or {}
        key = {name: row[name] if name in row else old.get(name) for name in self._names}
        return to_json_object(key, change.json_columns).encode()
