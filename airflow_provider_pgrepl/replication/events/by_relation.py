"""Rows of the changelog → something of each change, made by what is known of its relation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.gaps import GAP
from airflow_provider_pgrepl.replication.changelog.layout import letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.change import LETTERS
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.filtered_rows import FilteredRows
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.settings.tables import TableChoices

ChoicesOf = Callable[[TableName], TableChoices]
Made = TypeVar("Made")
Of = TypeVar("Of", covariant=True)


class Shape(Protocol[Of]):
    """A relation, and what becomes of its rows."""

    def make(self, rows: pa.Table) -> Iterator[Of]:
        """One for each change, in their order."""


class ByRelation(Generic[Made]):
    """Makes something of each change of the tables that are `wanted`, in the order of the rows."""

    def __init__(
        self,
        relations: KnownRelations,
        choices_of: ChoicesOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        self.relations, self.choices_of, self.wanted = relations, choices_of, wanted
        self.published = published or PublishedColumns(relations)
        self.rows = FilteredRows(relations, self.published.filter)
        self._shapes: dict[int, Shape[Made]] = {}

    def of(self, rows: pa.Table) -> list[Made]:
        """Raises ChangelogError for a relation that is not known, ValueRangeError for a value that the type
        of its column here cannot hold, ConfigError, DriftError."""
        is_change = pc.is_in(rows["op"], value_set=letters(LETTERS)).to_numpy()
        versions = rows["relation_version"].to_numpy()
        found: dict[int, Made] = {}
        for version in np.unique(versions[is_change]).tolist():
            record = self.relations.find(version)
            if self.is_wanted(record):
                places = np.flatnonzero(is_change & (versions == version))
                told, which = self.rows.of(record, rows.take(pa.array(places)))
                made = self._shape(version, record).make(told)
                found |= zip((places if which is None else places[which]).tolist(), made, strict=True)
        return [found[place] for place in sorted(found)]

    def needed(self, rows: pa.Table) -> pa.Table:
        """Those that `of` makes something of, or that tell of skipped transactions."""
        is_change = pc.is_in(rows["op"], value_set=letters(LETTERS)).to_numpy()
        versions = rows["relation_version"].to_numpy()
        is_needed = pc.equal(rows["op"], GAP).to_numpy().copy()
        for version in np.unique(versions[is_change]).tolist():
            record = self.relations.find(version)
            if self.is_wanted(record):
                is_needed |= is_change & (versions == version)
        return rows.filter(pa.array(is_needed))

    def is_wanted(self, record: RelationRecord) -> bool:
        """Whether changes under a relation are wanted."""
        return self.wanted.has(record.message.oid, record.names)

    def is_of_wanted(self, oid: int) -> bool:
        """Whether a table may be wanted under a name that it ever had."""
        return self.wanted.may_have(oid, self.relations.names(oid))

    def shape_of(self, record: RelationRecord) -> Shape[Made]:
        """What becomes of a relation's rows. Raises ConfigError."""
        raise NotImplementedError

    def columns_of(self, record: RelationRecord) -> dict[int, PublishedColumn]:
        """Those whose values the changelog keeps, and neither pipeline nor publisher leaves out, by place in
        the stream. Raises DriftError."""
        return self.published.of_stream(record, dict(self._kept(record)))

    def _kept(self, record: RelationRecord) -> Iterator[tuple[int, Column]]:
        catalog = record.catalog.columns if record.catalog else ()
        known = {(column.name, column.type_oid, column.typmod): column for column in catalog}
        choices = self.choices_of(record.name)
        for index, sent in enumerate(record.message.columns):
            # The table may have been altered, or gone, when the receiver asked the catalog.
            column = known.get((sent.name, sent.type_oid, sent.typmod)) or self.relations.column(
                record.message.oid, sent, index
            )
            if index not in record.hidden and not choices.column(column.name).excluded:
                yield index, column

    def _shape(self, version: int, record: RelationRecord) -> Shape[Made]:
        if version not in self._shapes:
            self._shapes[version] = self.shape_of(record)
        return self._shapes[version]


def once_each(column: pa.ChunkedArray) -> list[Any]:
    """A column's values. A moment, which takes long to make and which all changes of a transaction share, is
    made once."""
    if not pa.types.is_timestamp(column.type):
        plain: list[Any] = column.to_pylist()
        return plain
    encoded = column.combine_chunks().dictionary_encode()
    found = encoded.dictionary.to_pylist()
    return [None if place is None else found[place] for place in encoded.indices.to_pylist()]
