"""Conversion of changelog rows to events of creek's wire, one column at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.errors import ValueRangeError
from airflow_provider_pgrepl.replication.avro.columns import CreekColumn
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changes import (
    OPERATIONS,
    ChangeConverter,
    ChangeMaker,
    OptionsOf,
    once_each,
)
from airflow_provider_pgrepl.replication.events.columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.avro import NOTHING, EncodedRows, avro_columns
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

from .wire import CreekEnvelope, EncodedChange, code_of

_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid")


@dataclass(slots=True, kw_only=True)
class CreekEvent(Event):
    """An event of creek's wire. `missing`: the Avro names of columns whose values were not sent, and that are
    NULL in the event. `previous`: the id of the table's event that was sent before it, empty for the first
    one of a run; None until this event is sent."""

    envelope: CreekEnvelope
    unstamped: EncodedChange
    missing: tuple[str, ...] = ()
    previous: str | None = None


class CreekEvents(ChangeConverter[CreekEvent]):
    """The events of a database's tables. `database`: the name by which consumers know it; `has_last`: as in
    Envelope.

    `is_complete`: raise ValueRangeError for a row that lacks a value that was not sent, instead of sending
    NULL.
    """

    def __init__(
        self,
        database: str,
        has_last: bool,
        is_complete: bool,
        relations: KnownRelations,
        options_of: OptionsOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        super().__init__(relations, options_of, wanted, published)
        self._database, self._has_last, self._is_complete = database, has_last, is_complete

    def shape_of(self, record: RelationRecord) -> ChangeMaker[CreekEvent]:
        columns = avro_columns(record, self.columns_of(record), self.options_of(record.name))
        envelope = CreekEnvelope(self._database, record.name, list(columns.values()), self._has_last)
        return _Shape(record, columns, envelope, self._is_complete)


class _Shape:
    def __init__(
        self,
        record: RelationRecord,
        columns: dict[int, CreekColumn],
        envelope: CreekEnvelope,
        is_complete: bool,
    ) -> None:
        self._is_complete = is_complete
        self._oid, self._table = record.message.oid, record.name
        self._width = len(record.message.columns)
        self._columns, self._envelope = columns, envelope
        self._names = dict(zip(columns, envelope.names, strict=True))

    def make(self, rows: pa.Table) -> Iterator[CreekEvent]:
        ops, epochs, lsns, ordinals, xids = (rows[name].to_pylist() for name in _PLACE)
        moments = once_each(rows["commit_ts"])
        microseconds = rows["commit_ts"].cast(pa.int64()).to_pylist()
        encoded = EncodedRows.of(rows, self._columns, self._width, self._table)
        after, before, keys, missing = encoded.after, encoded.before, encoded.keys, encoded.missing
        if self._is_complete:
            self._check_complete(missing)
        name, envelope, of_transaction = str(self._table), self._envelope, (-1, -1)
        for row, (op, epoch, lsn, ordinal, xid) in enumerate(
            zip(ops, epochs, lsns, ordinals, xids, strict=True)
        ):
            if of_transaction != (epoch, lsn):
                of_transaction = epoch, lsn
                commit, head = LSN(lsn), envelope.head(microseconds[row], xid)
                id_start = f"{epoch}:{commit}:"
            old_row = before[row]
            key = old_row or (keys[row] if op == "U" else NOTHING)
            yield CreekEvent(
                EventPosition(Epoch(epoch), commit, ordinal),
                f"{id_start}{ordinal}",
                self._oid,
                name,
                OPERATIONS[op],
                moments[row],
                b"",
                envelope=envelope,
                unstamped=EncodedChange(
                    head,
                    code_of(OPERATIONS[op], has_old=bool(old_row)),
                    (key or NOTHING) + ((after[row] if op != "D" else NOTHING) or NOTHING),
                    envelope.has_last,
                ),
                missing=tuple(self._names[index] for index in missing[row] if index in self._names)
                if row in missing
                else (),
            )

    def _check_complete(self, missing: Mapping[int, Sequence[int]]) -> None:
        places = {index for indexes in missing.values() for index in indexes}
        if unknown := sorted(self._names[index] for index in places if index in self._names):
            raise ValueRangeError(
                f"{self._table}: an update left {', '.join(unknown)} as it was: the server did not send it,"
                " and neither the changelog nor the lake can tell its value",
                "give the table REPLICA IDENTITY FULL; or set on_error to skip_and_record, and the change is"
                " not sent; or, of a pipeline with lake tables, unchanged to look_up, and NULL is sent, named"
                " in the header Creek-Unchanged",
            )
