"""Rows of the changelog → events of creek's wire, a column at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Shape, once_each
from airflow_provider_pgrepl.replication.events.change import OPERATIONS
from airflow_provider_pgrepl.replication.events.creek.columns import CreekColumn, creek_column
from airflow_provider_pgrepl.replication.events.creek.envelope import Envelope, Unstamped, code_of
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.published_columns import PublishedColumns
from airflow_provider_pgrepl.replication.events.publishing.event import Event
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merging.tuples import Ints, Tuples
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch

_NOTHING, _RECORD = b"\x00", b"\x02"
"""The branches of `["null", record]`."""
_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid", "unchanged")


@dataclass(slots=True, kw_only=True)
class CreekEvent(Event):
    """`missing`: columns, by their names in Avro, that were not sent, and are NULL in it."""

    envelope: Envelope
    unstamped: Unstamped
    missing: tuple[str, ...] = ()


class CreekEvents(ByRelation[CreekEvent]):
    """Events of the tables of a database, which consumers know by its name. `has_last`: as of Envelope."""

    def __init__(
        self,
        database: str,
        has_last: bool,
        relations: KnownRelations,
        choices_of: ChoicesOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        super().__init__(relations, choices_of, wanted, published)
        self._database, self._has_last = database, has_last

    def shape_of(self, record: RelationRecord) -> Shape[CreekEvent]:
        choices, identity = self.choices_of(record.name), record.message.replica_identity
        columns = {
            index: creek_column(
                column,
                record.name,
                choices,
                identity,
                is_of_identity=record.message.columns[index].is_identity,
            )
            for index, column in self.columns_of(record).items()
        }
        return _Shape(
            record, columns, Envelope(self._database, record.name, list(columns.values()), self._has_last)
        )


class _Shape:
    def __init__(self, record: RelationRecord, columns: dict[int, CreekColumn], envelope: Envelope) -> None:
        self._oid, self._table = record.message.oid, record.name
        self._width = len(record.message.columns)
        self._columns, self._envelope = columns, envelope
        self._keys = {index: column for index, column in columns.items() if column.is_key}
        self._names = dict(zip(columns, envelope.names, strict=True))

    def make(self, rows: pa.Table) -> Iterator[CreekEvent]:
        ops, epochs, lsns, ordinals, xids, unchanged = (rows[name].to_pylist() for name in _PLACE)
        moments = once_each(rows["commit_ts"])
        microseconds = rows["commit_ts"].cast(pa.int64()).to_pylist()
        # A TRUNCATE has no row on either side.
        numbers = np.array([place for place, op in enumerate(ops) if op != "T"], np.int64)
        with_rows = rows.take(pa.array(numbers))
        old, new = (
            _Side(Tuples(array_of(with_rows, side, TEXTS), self._width, self._table), numbers, len(ops))
            for side in ("old", "new")
        )
        missing = new.fill(unchanged, old, self._keys) if any(unchanged) else {}
        after, before, keys = new.records(self._columns), old.records(self._keys), new.records(self._keys)
        name, envelope, of_transaction = str(self._table), self._envelope, (-1, -1)
        for row, (op, epoch, lsn, ordinal, xid) in enumerate(
            zip(ops, epochs, lsns, ordinals, xids, strict=True)
        ):
            if of_transaction != (epoch, lsn):
                of_transaction = epoch, lsn
                commit, head = LSN(lsn), envelope.head(microseconds[row], xid)
                id_start = f"{epoch}:{commit}:"
            old_row = before[row]
            key = old_row or (keys[row] if op == "U" else _NOTHING)
            yield CreekEvent(
                EventPosition(Epoch(epoch), commit, ordinal),
                f"{id_start}{ordinal}",
                self._oid,
                name,
                OPERATIONS[op],
                moments[row],
                b"",
                envelope=envelope,
                unstamped=Unstamped(
                    head,
                    code_of(OPERATIONS[op], has_old=bool(old_row)),
                    (key or _NOTHING) + ((after[row] if op != "D" else _NOTHING) or _NOTHING),
                    envelope.has_last,
                ),
                missing=tuple(self._names[index] for index in missing[row] if index in self._names)
                if row in missing
                else (),
            )


class _Side:
    """The rows before, or after, of some changes; each by the number of its change."""

    def __init__(self, tuples: Tuples, numbers: Ints, count: int) -> None:
        self._tuples = tuples
        self.numbers: list[int] = numbers[tuples.present].tolist()
        self._count = count
        self._filled: dict[int, dict[int, str | None]] = {}
        self._columns: dict[int, list[bytes]] = {}

    def fill(
        self, unchanged: Sequence[Sequence[int] | None], old: _Side, keys: Collection[int]
    ) -> dict[int, list[int]]:
        """Give values that updates did not send as the old row has them; of each change, by number, those
        columns that nobody has."""
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
        """Of one column."""
        texts = self._tuples.column(index)
        if index not in self._filled:
            return texts
        filled = self._filled[index]
        found = [
            filled.get(number, text) for number, text in zip(self.numbers, texts.to_pylist(), strict=True)
        ]
        return pa.array(found, texts.type)

    def records(self, columns: Mapping[int, CreekColumn]) -> list[bytes]:
        """Of each change's row these columns, as the record in its union; empty where there is no row."""
        found = [b""] * self._count
        if not self.numbers:
            return found
        encoded = [self._encoded(index, column) for index, column in columns.items()]
        join = b"".join
        if encoded:
            for number, values in zip(self.numbers, zip(*encoded, strict=True), strict=True):
                found[number] = _RECORD + join(values)
        else:
            for number in self.numbers:
                found[number] = _RECORD
        return found

    def _encoded(self, index: int, column: CreekColumn) -> list[bytes]:
        if index not in self._columns:
            self._columns[index] = column.encode(self.texts(index))
        return self._columns[index]
