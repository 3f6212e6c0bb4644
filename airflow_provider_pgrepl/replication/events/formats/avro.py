"""Conversion of changelog rows to events with Avro bodies, and JSON keys like those of other formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.avro.codec import long, string, to_text, unique_long
from airflow_provider_pgrepl.replication.avro.columns import (
    CreekColumn,
    avro_name,
    avro_names,
    creek_column,
    fields_of,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changes import (
    ChangeConverter,
    ChangeMaker,
    OptionsOf,
    TypedShape,
)
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.lake.merge.changes import TEXTS, Ints, RowImages, array_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.tables import TableOptions

from .json import BodyFormat, KeyedEvents, PlainEnvelope, RelationRows

_TIMESTAMP = {"type": "long", "logicalType": "timestamp-micros"}
NOTHING, RECORD = b"\x00", b"\x02"
"""The encoded branches of the union `["null", record]`."""


def avro_column(
    published: PublishedColumn,
    table: TableName,
    options: TableOptions,
    identity: str,
    *,
    is_of_identity: bool,
) -> CreekColumn:
    """Return the column of the target. `identity`: the table's replica identity, as in pg_class."""
    column, choice = published.column, published.choice(options)
    return creek_column(column, choice, published.hide, table, identity, is_of_identity=is_of_identity)


def avro_columns(
    record: RelationRecord, published: Mapping[int, PublishedColumn], options: TableOptions
) -> dict[int, CreekColumn]:
    """Return the columns of a relation, by position in the stream."""
    identity, sent = record.message.replica_identity, record.message.columns
    return {
        index: avro_column(column, record.name, options, identity, is_of_identity=sent[index].is_identity)
        for index, column in published.items()
    }


@dataclass(frozen=True)
class ChangeSchema:
    """The Avro schema of one version of a relation.

    `source`: the name of the source for consumers. `columns`: by position in the stream.
    """

    source: str
    table: TableName
    columns: Mapping[int, CreekColumn]

    @property
    def namespace(self) -> str:
        return ".".join(map(avro_name, (self.source, self.table.schema, self.table.name)))

    @property
    def name(self) -> str:
        """Return the full name of the record."""
        return f"{self.namespace}.Change"

    @cached_property
    def names(self) -> dict[int, str]:
        """Return the field name of each column."""
        return dict(zip(self.columns, avro_names(self.columns.values()), strict=True))

    @cached_property
    def text(self) -> str:
        """Return the schema as JSON, in the form that is registered."""
        row = [(self.names[index], column) for index, column in self.columns.items()]
        old = [(name, column) for name, column in row if column.is_key]
        fields = [
            *({"name": name, "type": "string"} for name in ("id", "table", "op", "commit_lsn")),
            {"name": "commit_ts", "type": _TIMESTAMP},
            {"name": "xid", "type": "long"},
            {"name": "data", "type": ["null", self._record("Row", row)], "default": None},
            {"name": "old", "type": ["null", self._record("Old", old)], "default": None},
            {"name": "unchanged", "type": {"type": "array", "items": "string"}, "default": []},
        ]
        whole = {"type": "record", "name": "Change", "namespace": self.namespace, "fields": fields}
        return to_text(whole)

    def _record(self, name: str, named: list[tuple[str, CreekColumn]]) -> dict[str, Any]:
        # Each row record has its own namespace: both may define the enum of infinities.
        namespace = f"{self.namespace}.{name}"
        fields = [_with_default(field) for field in fields_of(named, namespace)]
        return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def _with_default(field: dict[str, Any]) -> dict[str, Any]:
    """Return the field with a default of NULL, if it may be NULL.

    Such a column can be added or removed: readers with another version of the schema get NULL.
    """
    kind = field["type"]
    return {**field, "default": None} if isinstance(kind, list) and kind[0] == "null" else field


@dataclass(frozen=True)
class EncodedRows:
    """The encoded rows of some changes.

    For each change: the row after it, the row before as far as it was sent, and the key of the row after.
    Each is encoded as the record branch of a union with null, or empty if there is none. `missing`: the
    columns that were not sent, by the change's index; they are NULL in `after`.
    """

    after: list[bytes]
    before: list[bytes]
    keys: list[bytes]
    missing: Mapping[int, Sequence[int]]

    @classmethod
    def of(
        cls, rows: pa.Table, columns: Mapping[int, CreekColumn], width: int, table: TableName
    ) -> EncodedRows:
        """Encode rows of `width` columns. `columns`: by position in the stream. Raises ValueRangeError."""
        keys = {index: column for index, column in columns.items() if column.is_key}
        ops, unchanged = rows["op"].to_pylist(), rows["unchanged"].to_pylist()
        # A TRUNCATE has no row on either side.
        numbers = np.array([place for place, op in enumerate(ops) if op != "T"], np.int64)
        with_rows = rows.take(pa.array(numbers))
        old, new = (
            _Side(RowImages(array_of(with_rows, side, TEXTS), width, table), numbers, len(ops))
            for side in ("old", "new")
        )
        missing = new.fill(unchanged, old, keys) if any(unchanged) else {}
        return cls(new.records(columns), old.records(keys), new.records(keys), missing)


class _Side:
    """The rows before, or after, some changes, by the index of their change."""

    def __init__(self, tuples: RowImages, numbers: Ints, count: int) -> None:
        self._tuples = tuples
        self.numbers: list[int] = numbers[tuples.present].tolist()
        self._count = count
        self._filled: dict[int, dict[int, str | None]] = {}
        self._columns: dict[int, list[bytes]] = {}

    def fill(
        self, unchanged: Sequence[Sequence[int] | None], old: _Side, keys: Collection[int]
    ) -> dict[int, list[int]]:
        """Fill in values that updates did not send from the old rows.

        Returns the columns that the old rows lack too, by the index of the change.
        """
        missing: dict[int, list[int]] = {}
        olds = {index: dict(zip(old.numbers, old.texts(index).to_pylist(), strict=True)) for index in keys}
        for number in self.numbers:
            for index in unchanged[number] or ():
                if number in olds.get(index, ()):
                    self._filled.setdefault(index, {})[number] = olds[index][number]
                else:
                    missing.setdefault(number, []).append(index)
        return missing

    def texts(self, index: int) -> pa.Array:
        """Return the text values of one column."""
        texts = self._tuples.column(index)
        if index not in self._filled:
            return texts
        filled = self._filled[index]
        found = [
            filled.get(number, text) for number, text in zip(self.numbers, texts.to_pylist(), strict=True)
        ]
        return pa.array(found, texts.type)

    def records(self, columns: Mapping[int, CreekColumn]) -> list[bytes]:
        """Return these columns of each row, as the record branch of a union; empty where there is no row."""
        found = [b""] * self._count
        if not self.numbers:
            return found
        encoded = [self._encoded(index, column) for index, column in columns.items()]
        join = b"".join
        if encoded:
            for number, values in zip(self.numbers, zip(*encoded, strict=True), strict=True):
                found[number] = RECORD + join(values)
        else:
            for number in self.numbers:
                found[number] = RECORD
        return found

    def _encoded(self, index: int, column: CreekColumn) -> list[bytes]:
        if index not in self._columns:
            self._columns[index] = column.encode(self.texts(index))
        return self._columns[index]


@dataclass(slots=True, kw_only=True)
class AvroEvent(Event):
    """An event with an Avro body. `schema`: the schema of the body, and of the body in `left`."""

    schema: ChangeSchema


class AvroEvents(ChangeConverter[AvroEvent]):
    """Makes events with Avro bodies. `source`: the name of the source for consumers."""

    def __init__(
        self,
        source: str,
        relations: KnownRelations,
        options_of: OptionsOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        super().__init__(relations, options_of, wanted, published)
        self._source = source
        self._keys = _Keys(relations, options_of, wanted, published)

    def shape_of(self, record: RelationRecord) -> ChangeMaker[AvroEvent]:
        columns = avro_columns(record, self.columns_of(record), self.options_of(record.name))
        schema = ChangeSchema(self._source, record.name, columns)
        return _Shape(schema, len(record.message.columns), self._keys.shape_of(record))


@dataclass(frozen=True)
class _Shape:
    """The conversion of a relation's rows. `keyed`: makes the events without bodies."""

    schema: ChangeSchema
    width: int
    keyed: ChangeMaker[Event]

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
                # As in other formats, the deletion in the old key's partition carries the old row, and the
                # insertion has none.
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
    """Makes events with keys and empty bodies."""

    def enveloped(self, record: RelationRecord) -> tuple[TypedShape, BodyFormat]:
        options, keys = self.options_of(record.name), set(self.keys_of(record))
        typed = {
            index: one.typed(record.name, options, index)
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
