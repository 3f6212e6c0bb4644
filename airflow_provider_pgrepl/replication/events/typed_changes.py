"""Rows of the changelog → Changes: each column's texts are typed at once, as the lake types them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.choices import TableChoices
from airflow_provider_pgrepl.replication.events.change import OPERATIONS, Change
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merging.tuples import Ints, Tuples
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_column

Row = dict[str, Any]
_JSON = (114, 3802)
"""Oids of json and jsonb."""
_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "unchanged")


@dataclass
class TypedChanges:
    """Makes Changes of those tables that are `wanted` (None: of all), in the order of the rows.

    A change is wanted if its table had one of these names, by the stream or by the catalog, when it came.
    """

    relations: KnownRelations
    choices_of: Callable[[TableName], TableChoices]
    wanted: frozenset[TableName] | None = None
    _shapes: dict[int, _Shape] = field(default_factory=dict)

    def of(self, rows: pa.Table) -> list[Change]:
        """Raises ChangelogError for a relation that is not known, ValueRangeError for a value that the type
        of its column here cannot hold, ConfigError, DriftError."""
        is_change = np.isin(np.array(rows["op"].to_pylist()), list(OPERATIONS))
        versions = rows["relation_version"].to_numpy()
        found: dict[int, Change] = {}
        for version in np.unique(versions[is_change]).tolist():
            record = self.relations.find(version)
            if self.wanted is None or record.names & self.wanted:
                places = np.flatnonzero(is_change & (versions == version))
                changes = self._shape(version, record).changes(rows.take(pa.array(places)))
                found |= zip(places.tolist(), changes, strict=True)
        return [found[place] for place in sorted(found)]

    def is_of_wanted(self, oid: int) -> bool:
        """Whether a table may be wanted under a name that it ever had."""
        return self.wanted is None or bool(self.relations.names(oid) & self.wanted)

    def _shape(self, version: int, record: RelationRecord) -> _Shape:
        if version not in self._shapes:
            columns = _typed_columns(record, self.relations, self.choices_of(record.name))
            self._shapes[version] = _Shape(record, dict(columns))
        return self._shapes[version]


class _Shape:
    """A relation, and how its rows become dictionaries."""

    def __init__(self, record: RelationRecord, columns: dict[int, TypedColumn]) -> None:
        self.table, self._sent, self._columns = record.name, record.message.columns, columns
        self._json = frozenset(one.name for one in self._columns.values() if one.column.type_oid in _JSON)
        whole = record.message.replica_identity == "f"
        self._identity = {i: one for i, one in self._columns.items() if whole or self._sent[i].is_identity}

    def changes(self, rows: pa.Table) -> Iterator[Change]:
        is_row = np.array([op != "T" for op in rows["op"].to_pylist()], np.bool_)
        numbers, some = np.flatnonzero(is_row), rows.filter(pa.array(is_row))
        after = self._by_number(some, numbers, "new", self._columns)
        before = self._by_number(some, numbers, "old", self._identity)
        columns = zip(*(rows[name].to_pylist() for name in _PLACE), strict=True)
        for number, (op, epoch, lsn, ordinal, xid, commit_ts, unchanged) in enumerate(columns):
            data, old = after.get(number), before.get(number)
            left = tuple(self._without(data, old, unchanged or ()))
            place = EventPosition(Epoch(epoch), LSN(lsn), ordinal)
            yield Change(place, str(self.table), OPERATIONS[op], data, old, left, xid, commit_ts, self._json)

    def _without(self, data: Row | None, old: Row | None, unchanged: Sequence[int]) -> Iterator[str]:
        """Give values that the update did not send as the old row has them; those that nobody has go."""
        for index in unchanged:
            name = self._sent[index].name
            if data is None or index not in self._columns:
                continue
            if old is not None and index in self._identity:
                data[name] = old[name]
            else:
                del data[name]
                yield name

    def _by_number(
        self, rows: pa.Table, numbers: Ints, side: str, columns: dict[int, TypedColumn]
    ) -> dict[int, Row]:
        """Rows of one side, by the number of the change."""
        if rows.num_rows == 0:
            return {}
        tuples = Tuples(array_of(rows, side, TEXTS), len(self._sent), self.table)
        present = numbers[tuples.present].tolist()
        names = [column.name for column in columns.values()]
        values = [self._values(column, tuples.column(index)) for index, column in columns.items()]
        found = zip(*values, strict=True) if values else (() for _ in present)
        dictionaries = (dict(zip(names, row, strict=True)) for row in found)
        return dict(zip(present, dictionaries, strict=True))

    def _values(self, column: TypedColumn, texts: pa.Array) -> list[Any]:
        typed = column.parse(texts)
        found: list[Any] | None = None
        try:
            found = typed.to_pylist(maps_as_pydicts="strict")
        except (ValueError, OverflowError):
            found = None  # its message may hold the value
        if found is None:
            raise ValueRangeError(
                f'column "{one_line(column.name)}" of {self.table} holds a value that Python cannot',
                "read it as its text: give the column lake type string in types",
            )
        return found


def _typed_columns(
    record: RelationRecord, relations: KnownRelations, choices: TableChoices
) -> Iterator[tuple[int, TypedColumn]]:
    """Those whose values the changelog keeps and the pipeline does not leave out, by place in the stream."""
    catalog = record.catalog.columns if record.catalog else ()
    known = {(column.name, column.type_oid, column.typmod): column for column in catalog}
    for index, sent in enumerate(record.message.columns):
        # The table may have been altered, or gone, when the receiver asked the catalog.
        column = known.get((sent.name, sent.type_oid, sent.typmod)) or relations.column(
            record.message.oid, sent, index
        )
        if index not in record.hidden and not choices.column(column.name).excluded:
            yield index, typed_column(column, record.name, choices, index)
