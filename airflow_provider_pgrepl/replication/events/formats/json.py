"""Rows of the changelog → events whose bodies are JSON, made from columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf
from airflow_provider_pgrepl.replication.events.change import OPERATIONS, Change
from airflow_provider_pgrepl.replication.events.changes import TypedShape
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.plain_envelope import PlainEnvelope
from airflow_provider_pgrepl.replication.events.formats.relation_rows import Envelope, RelationRows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools
from airflow_provider_pgrepl.replication.settings.tables import TableChoices

_FEW = 32
"""A call of Arrow takes its time however few rows it is given: fewer than these are sooner made alone."""


Enveloped = Callable[
    [RelationRecord, Mapping[int, PublishedColumn], TableChoices], tuple[TypedShape, Envelope]
]
"""What a format makes of a relation, given its columns."""


class JsonEvents(ByRelation[Event]):
    """Events whose bodies are JSON. `few`: fewer changes of a relation than that are made one by one."""

    def __init__(
        self,
        relations: KnownRelations,
        choices_of: ChoicesOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
        few: int = _FEW,
        enveloped: Enveloped | None = None,
    ) -> None:
        super().__init__(relations, choices_of, wanted, published)
        self.few, self._enveloped = few, enveloped or _plain

    def shape_of(self, record: RelationRecord) -> JsonShape:
        return JsonShape(*self.enveloped(record), self.few)

    def enveloped(self, record: RelationRecord) -> tuple[TypedShape, Envelope]:
        """A relation's changes, and what they are put into."""
        return self._enveloped(record, self.columns_of(record), self.choices_of(record.name))


def _plain(
    record: RelationRecord, columns: Mapping[int, PublishedColumn], choices: TableChoices
) -> tuple[TypedShape, Envelope]:
    typed = {index: one.typed(record.name, choices, index) for index, one in columns.items()}
    changes = TypedShape(record, typed)
    return changes, PlainEnvelope(changes)


class JsonShape:
    """A relation, and how its rows become events."""

    def __init__(self, changes: TypedShape, envelope: Envelope, few: int) -> None:
        self.changes, self.envelope, self.few = changes, envelope, few

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

    def key_of(self, change: Change) -> bytes | None:  # noqa: ARG002 - of those that have keys
        """By which a change's events are kept in order, where the target does that."""
        return None

    def one_by_one(self, rows: pa.Table) -> Iterator[Event]:
        """By way of Changes."""
        return map(self.event_of, self.changes.make(rows))

    def event_of(self, change: Change) -> Event:
        """Of one change."""
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
        """By columns."""
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
        """By columns; `rows`: the same as they were."""
        return self.together(made)

    def _events(self, rows: pa.Table) -> Iterator[Event]:
        sides = self.changes.sides(rows, self.envelope.texts)
        return self.events_of(rows, RelationRows.of(rows, *sides))


def _lacks_values(rows: pa.Table) -> Bools:
    """Which updates left values out."""
    counts = pc.fill_null(pc.list_value_length(rows["unchanged"]), 0)
    found: Bools = pc.greater(counts, 0).to_numpy()
    return found
