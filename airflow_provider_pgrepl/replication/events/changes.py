"""Conversion of changelog rows to Changes, with a column's text values typed at once, as the lake types
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.changelog.gaps import GAP
from airflow_provider_pgrepl.replication.changelog.layout import letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.merge.changes import TEXTS, Ints, RowImages, array_of
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn

from .columns import FilteredRows, PublishedColumn, PublishedColumns
from .position import EventPosition
from .relations import KnownRelations, TableSelection

Operation = Literal["insert", "update", "delete", "truncate"]
OPERATIONS: dict[str, Operation] = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}
"""The operations by their letters in the changelog."""
LETTERS = "".join(OPERATIONS)
OptionsOf = Callable[[TableName], TableOptions]
Made = TypeVar("Made")
Of = TypeVar("Of", covariant=True)
Row = dict[str, Any]
Values = TypeVar("Values")
Read = Callable[[TypedColumn, pa.Array], Values]
"""Converts a typed column. Raises ValueError or OverflowError for a value that Python cannot represent."""
_PLACE = ("op", "epoch", "commit_lsn", "ordinal", "xid", "commit_ts", "unchanged")


@dataclass(frozen=True)
class Change:
    """One change, with values typed as in the lake.

    :param position: the epoch, commit LSN and ordinal, which order all changes of a pipeline
    :param table: `schema.name`, the table's name when the change was received
    :param op: `insert`, `update`, `delete` or `truncate`
    :param data: the row after an insert or update, None for a delete or truncate. It lacks the columns in
        `unchanged`
    :param old: the row before, as far as the server sent it, or None. With REPLICA IDENTITY FULL that is the
        whole row; otherwise the key, for a delete and for an update that changes the key
    :param unchanged: columns with large values that the update did not change and the server did not send
    :param xid: the transaction ID
    :param commit_ts: the commit time by the source's clock; it does not order changes
    :param json_columns: the columns whose text values are JSON
    :param relation_id: the table's OID, which a rename does not change
    """

    position: EventPosition
    table: str
    op: Operation
    data: dict[str, Any] | None
    old: dict[str, Any] | None
    unchanged: tuple[str, ...]
    xid: int
    commit_ts: datetime
    json_columns: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    relation_id: int = field(default=0, repr=False, compare=False)

    @cached_property
    def id(self) -> str:
        """Return the change's ID, `<epoch>:<commit LSN>:<ordinal>`, which is the same in each reading."""
        return str(self.position)

    @property
    def commit_lsn(self) -> LSN:
        """Return the commit LSN of the transaction, which all of its changes share."""
        return self.position.commit_lsn


class ChangeMaker(Protocol[Of]):
    """A relation, and the conversion of its rows."""

    def make(self, rows: pa.Table) -> Iterator[Of]:
        """Yield one object for each row, in order."""


class ChangeConverter(Generic[Made]):
    """Converts each change of the tables in `wanted`, in the order of the rows."""

    def __init__(
        self,
        relations: KnownRelations,
        options_of: OptionsOf,
        wanted: TableSelection,
        published: PublishedColumns | None = None,
    ) -> None:
        self.relations, self.options_of, self.wanted = relations, options_of, wanted
        self.published = published or PublishedColumns(relations)
        self.rows = FilteredRows(relations, self.published.filter)
        self._shapes: dict[int, ChangeMaker[Made]] = {}

    def of(self, rows: pa.Table) -> list[Made]:
        """Return the converted changes of `rows`, in order.

        Raises ChangelogError for a relation that is missing from the index, ValueRangeError for a value that
        its column's Python type cannot hold, ConfigError, DriftError.
        """
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
        """Return the rows that `of` converts, and the rows of skipped transactions."""
        is_change = pc.is_in(rows["op"], value_set=letters(LETTERS)).to_numpy()
        versions = rows["relation_version"].to_numpy()
        is_needed = pc.equal(rows["op"], GAP).to_numpy().copy()
        for version in np.unique(versions[is_change]).tolist():
            record = self.relations.find(version)
            if self.is_wanted(record):
                is_needed |= is_change & (versions == version)
        return rows.filter(pa.array(is_needed))

    def is_wanted(self, record: RelationRecord) -> bool:
        """Return True if changes of this relation are wanted."""
        return self.wanted.has(record.message.oid, record.names)

    def is_of_wanted(self, oid: int) -> bool:
        """Return True if the table may be wanted under a name that it ever had."""
        return self.wanted.may_have(oid, self.relations.names(oid))

    def shape_of(self, record: RelationRecord) -> ChangeMaker[Made]:
        """Return the conversion of a relation's rows. Raises ConfigError."""
        raise NotImplementedError

    def columns_of(self, record: RelationRecord) -> dict[int, PublishedColumn]:
        """Return the published columns of a relation, by position in the stream.

        Omits the columns whose values the changelog does not keep, and those that the pipeline or the
        publisher excludes. Raises DriftError.
        """
        return self.published.of_stream(record, dict(self._kept(record)))

    def _kept(self, record: RelationRecord) -> Iterator[tuple[int, Column]]:
        catalog = record.catalog.columns if record.catalog else ()
        known = {(column.name, column.type_oid, column.typmod): column for column in catalog}
        options = self.options_of(record.name)
        for index, sent in enumerate(record.message.columns):
            # The table may have been altered or dropped before the receiver queried the catalog.
            column = known.get((sent.name, sent.type_oid, sent.typmod)) or self.relations.column(
                record.message.oid, sent, index
            )
            if index not in record.hidden and not options.column(column.name).excluded:
                yield index, column

    def _shape(self, version: int, record: RelationRecord) -> ChangeMaker[Made]:
        if version not in self._shapes:
            self._shapes[version] = self.shape_of(record)
        return self._shapes[version]


def once_each(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as Python objects.

    Each distinct timestamp is converted only once: the conversion is slow, and all changes of a transaction
    have the same timestamp.
    """
    if not pa.types.is_timestamp(column.type):
        plain: list[Any] = column.to_pylist()
        return plain
    encoded = column.combine_chunks().dictionary_encode()
    found = encoded.dictionary.to_pylist()
    return [None if place is None else found[place] for place in encoded.indices.to_pylist()]


class TypedChanges(ChangeConverter[Change]):
    """Converts changelog rows to Changes, with values typed as in the lake."""

    def shape_of(self, record: RelationRecord) -> TypedShape:
        options = self.options_of(record.name)
        columns = {
            index: one.typed(record.name, options, index) for index, one in self.columns_of(record).items()
        }
        return TypedShape(record, columns)


@dataclass(frozen=True)
class ChangeSide(Generic[Values]):
    """The rows before, or after, some changes.

    `numbers`: the index of each row's change. `values`: the converted values of each column.
    """

    numbers: Ints
    values: Sequence[Values]


class TypedShape:
    """A relation, and the conversion of its rows to dictionaries.

    `columns`, and `identity` (the columns of the replica identity), are by position in the stream.
    `json_columns`: the names of the columns whose text values are JSON.
    """

    def __init__(self, record: RelationRecord, columns: Mapping[int, TypedColumn]) -> None:
        self._sent = record.message.columns
        self.table, self.oid, self.columns = record.name, record.message.oid, columns
        self.json_columns = frozenset(
            one.name for one in columns.values() if one.column.type_oid in oids.JSON_TYPES
        )
        whole = record.message.replica_identity == "f"
        self.identity = {i: one for i, one in columns.items() if whole or self._sent[i].is_identity}

    def make(self, rows: pa.Table) -> Iterator[Change]:
        new, old_side = self.sides(rows, lambda _, typed: python_values(typed))
        after, before = _by_number(new, self.columns), _by_number(old_side, self.identity)
        columns = zip(*(once_each(rows[name]) for name in _PLACE), strict=True)
        table = str(self.table)
        for number, (op, epoch, lsn, ordinal, xid, commit_ts, unchanged) in enumerate(columns):
            data, old = after.get(number), before.get(number)
            left = tuple(self._without(data, old, unchanged or ()))
            place = EventPosition(Epoch(epoch), LSN(lsn), ordinal)
            op_name = OPERATIONS[op]
            yield Change(place, table, op_name, data, old, left, xid, commit_ts, self.json_columns, self.oid)

    def sides(self, rows: pa.Table, read: Read[Values]) -> tuple[ChangeSide[Values], ChangeSide[Values]]:
        """Return the rows after, and the rows before, the changes.

        The rows before have the columns of the replica identity only. Raises ValueRangeError for a value that
        its type, or Python, cannot hold, DriftError.
        """
        is_row = pc.not_equal(rows["op"], "T")
        numbers, some = np.flatnonzero(is_row.to_numpy()), rows.filter(is_row)
        return (
            self._side(some, numbers, "new", self.columns, read),
            self._side(some, numbers, "old", self.identity, read),
        )

    def _side(
        self,
        rows: pa.Table,
        numbers: Ints,
        name: str,
        columns: Mapping[int, TypedColumn],
        read: Read[Values],
    ) -> ChangeSide[Values]:
        if rows.num_rows == 0:
            return ChangeSide(numbers, [])
        tuples = RowImages(array_of(rows, name, TEXTS), len(self._sent), self.table)
        if tuples.count == 0:
            return ChangeSide(numbers[:0], [])
        values = [self._read(column, tuples.column(index), read) for index, column in columns.items()]
        return ChangeSide(numbers[tuples.present], values)

    def _read(self, column: TypedColumn, texts: pa.Array, read: Read[Values]) -> Values:
        typed = column.parse(texts)
        found: Values | None = None
        try:
            found = read(column, typed)
        except (ValueError, OverflowError):
            found = None  # the exception's message may hold the value
        if found is None:
            raise ValueRangeError(
                f'column "{one_line(column.name)}" of {self.table} holds a value that Python cannot',
                "read it as its text: give the column lake type string in types",
            )
        return found

    def _without(self, data: Row | None, old: Row | None, unchanged: Sequence[int]) -> Iterator[str]:
        """Copy values that the update did not send from `old` to `data`, and remove those that `old` lacks.

        Yields the names of the removed columns.
        """
        for index in unchanged:
            if data is None or index not in self.columns:
                continue
            name = self.columns[index].name
            if old is not None and index in self.identity:
                data[name] = old[name]
            else:
                del data[name]
                yield name


def python_values(typed: pa.Array) -> list[Any]:
    """Return the values as in a Change.

    Raises ValueError or OverflowError for a value that Python cannot represent.
    """
    values: list[Any] = typed.to_pylist(maps_as_pydicts="strict")
    return values


def _by_number(side: ChangeSide[list[Any]], columns: Mapping[int, TypedColumn]) -> dict[int, Row]:
    """Return the rows of one side as dictionaries, by the index of their change."""
    names = [column.name for column in columns.values()]
    found = zip(*side.values, strict=True) if side.values else (() for _ in side.numbers)
    dictionaries = (dict(zip(names, row, strict=True)) for row in found)
    return dict(zip(side.numbers.tolist(), dictionaries, strict=True))
