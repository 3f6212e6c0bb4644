"""Rows of the changelog → events whose bodies are Avro, and whose keys are JSON as in other formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.replication.avro.codec import long, string, unique_long
from airflow_provider_pgrepl.replication.avro.columns import creek_columns
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Shape
from airflow_provider_pgrepl.replication.events.changes import TypedShape
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.change_schema import ChangeSchema
from airflow_provider_pgrepl.replication.events.formats.encoded_rows import NOTHING, EncodedRows
from airflow_provider_pgrepl.replication.events.formats.keyed_events import KeyedEvents
from airflow_provider_pgrepl.replication.events.formats.plain_envelope import PlainEnvelope
from airflow_provider_pgrepl.replication.events.formats.relation_rows import Envelope, RelationRows
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection


@dataclass(slots=True, kw_only=True)
class AvroEvent(Event):
    """`schema`: of the body, and of what `left` holds."""

    schema: ChangeSchema


class AvroEvents(ByRelation[AvroEvent]):
    """`source`: what consumers call the source."""

    def __init__(
        self,
        source: str,
        relations: KnownRelations,
        choices_of: ChoicesOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        super().__init__(relations, choices_of, wanted, published)
        self._source = source
        self._keys = _Keys(relations, choices_of, wanted, published)

    def shape_of(self, record: RelationRecord) -> Shape[AvroEvent]:
        columns = creek_columns(record, self.columns_of(record), self.choices_of(record.name))
        schema = ChangeSchema(self._source, record.name, columns)
        return _Shape(schema, len(record.message.columns), self._keys.shape_of(record))


@dataclass(frozen=True)
class _Shape:
    """`keyed`: makes the events without bodies."""

    schema: ChangeSchema
    width: int
    keyed: Shape[Event]

    def make(self, rows: pa.Table) -> Iterator[AvroEvent]:
        table, schema = self.schema.table, self.schema
        encoded = EncodedRows.of(rows, schema.columns, self.width, table)
        microseconds, xids = rows["commit_ts"].cast(pa.int64()).to_pylist(), rows["xid"].to_pylist()
        name = string(str(table).encode())
        for number, event in enumerate(self.keyed.make(rows)):
            start = string(event.id.encode()) + name
            lsn = string(str(event.position.commit_lsn).encode())
            place = lsn + unique_long(microseconds[number]) + long(xids[number])
            after = (encoded.after[number] if event.op != "delete" else b"") or NOTHING
            before = encoded.before[number] or NOTHING
            body = [start, string(event.op.encode()), place, after]
            left = None
            if event.left is not None:
                # What the old key's partition must know is all in one of the two, as in other formats.
                gone = [start, string(b"delete"), place, NOTHING, before, NOTHING]
                left, before = (event.left[0], b"".join(gone)), NOTHING
            yield AvroEvent(
                event.position,
                event.id,
                event.relation_id,
                event.table,
                event.op,
                event.commit_ts,
                b"".join([*body, before, self._unchanged(encoded.missing.get(number, ()))]),
                key=event.key,
                left=left,
                schema=schema,
            )

    def _unchanged(self, missing: Sequence[int]) -> bytes:
        names = [self.schema.names[index] for index in missing if index in self.schema.names]
        if not names:
            return NOTHING
        return b"".join([long(len(names)), *(string(name.encode()) for name in names), NOTHING])


class _Keys(KeyedEvents):
    """Events that have keys alone."""

    def enveloped(self, record: RelationRecord) -> tuple[TypedShape, Envelope]:
        choices, keys = self.choices_of(record.name), set(self.keys_of(record))
        typed = {
            index: one.typed(record.name, choices, index)
            for index, one in self.columns_of(record).items()
            if index in keys
        }
        changes = TypedShape(record, typed)
        return changes, _NoBody(changes)


class _NoBody(PlainEnvelope):
    def bodies(self, rows: RelationRows) -> pa.Array:
        return pa.array([""] * len(rows.ops))

    def body(self, _: object) -> bytes:
        return b""
