"""RelationRows: changes of one relation, as what puts them into events is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.changes import Row, Side
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT, JsonRows, joined
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.tuples import Ints, take
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.values import TypedColumn

_TRANSACTION = ("epoch", "commit_lsn", "xid", "commit_ts")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Transactions:
    """The transactions of some changes, and of each change which of them it is of, by `number`.

    `places` and `moments`: what Event says of them; `id_starts`: the ids up to their ordinals. `xids`, and
    `microseconds` since 1970 at which they committed.
    """

    number: Ints
    places: list[tuple[Epoch, LSN]]
    moments: list[datetime]
    id_starts: pa.Array
    xids: list[int]
    microseconds: pa.Array

    @classmethod
    def of(cls, rows: pa.Table) -> Transactions:
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
        """Of each change the text of its transaction."""
        return pa.array(texts, TEXT).take(pa.array(self.number))


@dataclass(frozen=True)
class RelationRows:
    """Changes of one relation, in order; `after` and `before`: their rows' columns as JSON."""

    ops: pa.Array
    ordinals: pa.Array
    ids: pa.Array
    transactions: Transactions
    after: Side[pa.Array]
    before: Side[pa.Array]

    @classmethod
    def of(cls, rows: pa.Table, after: Side[pa.Array], before: Side[pa.Array]) -> RelationRows:
        of = Transactions.of(rows)
        ordinals = array_of(rows, "ordinal", pa.int64())
        ids = joined(of.id_starts.take(pa.array(of.number)), ordinals.cast(TEXT))
        return cls(array_of(rows, "op", pa.string()), ordinals, ids, of, after, before)

    def objects(self, made: JsonRows, side: Side[pa.Array]) -> pa.Array:
        """Of each change its row of one side; null where it has none."""
        return of_all(made, side, len(self.ops))


class Envelope(Protocol):
    """How a relation's changes are put into bodies of events, and keys of rows into messages'."""

    def texts(self, column: TypedColumn, typed: pa.Array) -> pa.Array:
        """A typed column as JSON."""

    def bodies(self, rows: RelationRows) -> pa.Array:
        """Of each change, as texts."""

    def body(self, change: Change) -> bytes:
        """Of one."""

    def key_frame(self, names: Sequence[str]) -> tuple[str, str]:
        """What stands before and after the object of a key, whose members have these names."""

    def key(self, change: Change, values: Row) -> str:
        """The object of one change's key."""


def of_all(objects: JsonRows, side: Side[pa.Array], count: int) -> pa.Array:
    """Of each change its row of one side; null where it has none."""
    made = objects.of(side.values, len(side.numbers))
    if len(made) == count:
        return made
    places = np.full(count, -1, np.int64)
    places[side.numbers] = np.arange(len(made))
    return take(made, places)
