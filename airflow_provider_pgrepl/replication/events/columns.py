"""The columns of a table as a target gets them: renamed, hashed, masked or excluded, and the row filters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import DriftError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.matching import HiddenColumns, new_places
from airflow_provider_pgrepl.replication.lake.merge.changes import Bools
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.publisher_sections import ColumnRules, RowFilter, Values
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_column
from airflow_provider_pgrepl.replication.values.parser import Text, as_string

from .relations import KnownRelations

Hide = Callable[[pa.Array], pa.Array]
"""Replaces the text values of a column. NULL stays NULL."""
Attnums = Mapping[int, Collection[int]]
_MASK = "***"
_ByPlace = Mapping[int, Values]


class HiddenText(Text):
    """The type of a hidden column: text, whatever type the source column has."""

    csv_type = None

    def __init__(self, hide: Hide) -> None:
        self._hide = hide

    def parse(self, texts: pa.Array) -> pa.Array:
        return as_string(self._hide(texts))


@dataclass(frozen=True)
class PublishedColumn:
    """A column that is published.

    `source`: the column of the table. `name`: its name at the target. `hide`: replaces its text values, if
    they are hidden.
    """

    source: Column
    name: str
    hide: Hide | None = None

    @property
    def is_key(self) -> bool:
        return self.source.is_key

    @cached_property
    def column(self) -> Column:
        """Return the column of the target: renamed, and of type text if its values are hidden."""
        if self.hide is None:
            return replace(self.source, name=self.name)
        return replace(
            self.source,
            name=self.name,
            type_oid=oids.TEXT,
            typmod=-1,
            type_name="text",
            type_kind="b",
            type=None,
            missing=None,
        )

    def choice(self, options: TableOptions) -> ColumnOptions:
        """Return the pipeline's options for the column, by its name in the table; none if it is hidden."""
        if self.hide is not None:
            return ColumnOptions()
        return options.column(self.source.name, is_key=self.is_key)

    def typed(self, table: TableName, options: TableOptions, index: int | None = None) -> TypedColumn:
        """Return the typed column. Raises ConfigError for an unsuitable type."""
        if self.hide is not None:
            return TypedColumn(self.column, table, index, HiddenText(self.hide))
        return replace(typed_column(self.source, table, options, index), column=self.column)


@dataclass(frozen=True)
class PublishedColumns:
    """The columns of each table after a publisher's rules are applied.

    `salt`: the salt of the hashes. `filter`: the row filter. `initial_columns`: the attnums of each table,
    by oid, when the publisher began. A column that was added later is published only if a rule names it.
    With None, every column is published.

    A column that ever had a name in a rule is identified by its attnum, so that it stays hidden when it, or
    its table, is renamed. Methods raise DriftError, which stops only the table, if a rule names a column that
    the table never had, hides its key, or gives two columns one name.
    """

    relations: KnownRelations
    rules: ColumnRules = field(default_factory=ColumnRules)
    salt: bytes = b""
    filter: RowFilter = field(default_factory=RowFilter)
    initial_columns: Attnums | None = None

    def of_stream(self, record: RelationRecord, columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
        """Return the published columns of a received relation, by position in the stream."""
        oid, new = record.message.oid, set[int]()
        self._check_kin(oid, record.name)
        if self.initial_columns is not None:
            new = new_places(record, self.relations.records(oid), self.initial_columns.get(oid, ()))
        if not self._rules_of(oid, record.names):
            _refuse_new(record.name, columns, new)
            return _as_they_are(columns)
        whole = record.message.replica_identity == "f"
        sent = record.message.columns
        keys = [i for i, one in columns.items() if (one.is_key if whole else sent[i].is_identity)]
        return self._published(record.name, columns, keys, new, lambda known: known.places(record))

    def of_catalog(self, relation: Relation, columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
        """Return the published columns of a relation of the catalog, by attnum."""
        new = set[int]()
        self._check_kin(relation.oid, relation.table)
        if self.initial_columns is not None:
            new = columns.keys() - self.initial_columns.get(relation.oid, ())
        if not self._rules_of(relation.oid, {relation.table}):
            _refuse_new(relation.table, columns, new)
            return _as_they_are(columns)
        keys = [attnum for attnum, one in columns.items() if one.is_key]
        return self._published(relation.table, columns, keys, new, lambda known: known.attnums(relation))

    def _check_kin(self, oid: int, table: TableName) -> None:
        """Raise DriftError for a table without rules if its partitioned table, or a partition, has rules."""
        ruled = {*self.rules.tables(), *self.filter.tables}
        if not ruled or ruled & {table, *self.relations.names(oid)}:
            return
        if kin := sorted(ruled & self.relations.kin(oid)):
            raise kin_error(table, kin[0])

    def _known(self, *names: ColumnName) -> HiddenColumns:
        return HiddenColumns(frozenset(names), self.relations.records)

    def _rules_of(self, oid: int, names: Collection[TableName]) -> bool:
        """Return True if a rule applies to the table, under any name that it had.

        Raises DriftError if a rule names a column that the table never had.
        """
        tables = self.rules.tables() & {*names, *self.relations.names(oid)}
        said = {column for column in self.rules.all if column.table in tables}
        if said and (unknown := sorted(said - self.relations.columns(oid))):
            raise DriftError(
                f"{unknown[0]}, which the publisher's settings name, was never a column of the table",
                "fix the name. To name a column that will be added later, stop the publisher, add"
                " the column, and then add the rule",
                remedy=None,
            )
        return bool(said)

    def _published(
        self,
        table: TableName,
        columns: Mapping[int, Column],
        keys: Collection[int],
        new: Set[int],
        places_of: Callable[[HiddenColumns], Collection[int]],
    ) -> dict[int, PublishedColumn]:
        """Return the published columns. Raises DriftError.

        `places_of`: returns the positions where columns with given names are, or may be. If in doubt it
        returns more, so that more columns are hidden.
        """
        rules = (self.rules.excluded, self.rules.masked, self.rules.hashed)
        excluded, masked, hashed = (places_of(self._known(*names)) for names in rules)
        renamed = self._renamed(table, columns, places_of)
        _refuse_new(table, columns, new - {*excluded, *masked, *hashed, *renamed})
        if lost := sorted(columns[place].name for place in keys if place in excluded or place in masked):
            raise DriftError(
                f"{', '.join(map(one_line, lost))} of {table} {'is' if len(lost) == 1 else 'are'} of its key,"
                " by which consumers tell rows apart",
                "columns of a key can be hashed (hash_columns), not masked or excluded",
                remedy=None,
            )
        found = {}
        for place, column in columns.items():
            if place in excluded:
                continue
            hide = _masked if place in masked else partial(_hashed, self.salt) if place in hashed else None
            found[place] = PublishedColumn(column, renamed.get(place, column.name), hide)
        names = [one.name for one in found.values()]
        if alike := sorted({name for name in names if names.count(name) > 1}):
            raise DriftError(
                f"two columns of {table} are called {', '.join(map(one_line, alike))} at the target",
                "give another name in rename_columns",
                remedy=None,
            )
        return found

    def _renamed(
        self,
        table: TableName,
        columns: Mapping[int, Column],
        places_of: Callable[[HiddenColumns], Collection[int]],
    ) -> dict[int, str]:
        """Return the new names by position.

        If several positions are possible, only the column that currently has the name of the rule is renamed.
        """
        found: dict[int, str] = {}
        for known, name in self.rules.renamed.items():
            places = places_of(self._known(known))
            if len(places) > 1:
                places = [at for at, one in columns.items() if ColumnName(table, one.name) == known]
            found |= dict.fromkeys(places, name)
        return found


def kin_error(table: TableName, ruled: TableName) -> DriftError:
    """Return the error for a table without settings whose partitioned table or partition has settings."""
    return DriftError(
        f"{table} and {ruled} were, or are, partition and partitioned table, and the publisher has settings"
        f" for {ruled} alone",
        f"say of {table} too what becomes of its columns and rows: rename_columns with a column's own name"
        " says that it is published",
        remedy=None,
    )


def _refuse_new(table: TableName, columns: Mapping[int, Column], new: Set[int]) -> None:
    """Raise DriftError if a new column would be published that no rule names."""
    if names := ", ".join(sorted(one_line(column.name) for place, column in columns.items() if place in new)):
        raise DriftError(
            f"{table} has columns that it did not have when the publisher began, and that no rule names"
            f" (new_columns): {names}",
            "name each in exclude_columns, hash_columns or mask_columns; or, to publish it as it is, in"
            " rename_columns with its own name",
            remedy=None,
        )


def _as_they_are(columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
    return {place: PublishedColumn(column, column.name) for place, column in columns.items()}


def _masked(texts: pa.Array) -> pa.Array:
    mask, null = (pa.scalar(text, pa.large_string()) for text in (_MASK, None))
    return pc.if_else(texts.is_valid(), mask, null)


def _hashed(salt: bytes, texts: pa.Array) -> pa.Array:
    """Return the SHA-256 of salt and text, in hexadecimal digits."""
    begun = hashlib.sha256(salt)

    def digests() -> Iterator[str | None]:
        for text in texts.cast(pa.large_binary()).to_pylist():
            if text is None:
                yield None
                continue
            one = begun.copy()
            one.update(text)
            yield one.hexdigest()

    return pa.array(digests(), pa.large_string())


class FilteredRows:
    """Filters rows like the row filters of PostgreSQL.

    An update that makes a row match becomes an insert; one after which it no longer matches becomes a delete.
    A TRUNCATE is always kept.

    https://www.postgresql.org/docs/current/logical-replication-row-filter.html
    """

    def __init__(self, relations: KnownRelations, wanted: RowFilter) -> None:
        self._relations, self._filter = relations, wanted
        self._wanted: dict[int, _ByPlace] = {}

    def of(self, record: RelationRecord, rows: pa.Table) -> tuple[pa.Table, Bools | None]:
        """Return the matching changes of a relation, and a mask of the `rows` that match (None: all).

        Raises DriftError, which stops only the table, if it cannot be determined whether a row matches.
        """
        wanted = self._wanted_of(record)
        if not wanted:
            return rows, None
        ops = rows["op"].to_numpy()
        is_update, is_insert = ops == "U", ops == "I"
        self._check_identity(record, wanted, has_old=bool(np.isin(ops, ("U", "D")).any()))
        old, is_truncate = rows["old"].combine_chunks(), ops == "T"
        before, after = _fit(old, wanted, ~is_truncate), _fit(_whole(rows, wanted), wanted, ~is_truncate)
        # An update without an old row did not change its key, and the key has all columns of the filter.
        before = np.where(is_update & ~old.is_valid().to_numpy(zero_copy_only=False), after, before)
        told = is_truncate | (is_insert & after) | (is_update & (before | after)) | ((ops == "D") & before)
        comes, goes = is_update & after & ~before, is_update & before & ~after
        if comes.any() or goes.any():
            rows = _changed(rows, comes, goes)
        return rows.filter(pa.array(told)), told

    def _wanted_of(self, record: RelationRecord) -> _ByPlace:
        if not self._filter.tables:
            return {}
        if record.version not in self._wanted:
            self._wanted[record.version] = self._places(record)
        return self._wanted[record.version]

    def _places(self, record: RelationRecord) -> _ByPlace:
        """Return the filter's values by position in the stream.

        A table keeps its filter when it, or a column, is renamed. Raises DriftError if a column cannot be
        identified.
        """
        oid = record.message.oid
        found: dict[int, Values] = {}
        for table in sorted({*record.names, *self._relations.names(oid)} & self._filter.tables.keys()):
            for column, values in self._filter.tables[table].items():
                named = frozenset((ColumnName(table, column),))
                places = HiddenColumns(named, self._relations.records).places(record) - set(record.hidden)
                if len(places) != 1:
                    raise DriftError(
                        f"row_filter: it cannot be determined which column of {table} is {one_line(column)}",
                        "fix the name, or resnapshot the table: its columns are then recorded",
                        remedy=None,
                    )
                (place,) = places
                found[place] = found.get(place, values) & values
        return found

    def _check_identity(self, record: RelationRecord, wanted: _ByPlace, *, has_old: bool) -> None:
        """Raise DriftError if updates or deletes do not contain the old values of a filter column."""
        columns = record.message.columns
        if not has_old or record.message.replica_identity == "f":
            return
        if lost := [columns[place].name for place in wanted if not columns[place].is_identity]:
            raise DriftError(
                f"row_filter: updates and deletes of {record.name} do not say what a row had before in"
                f" {', '.join(map(one_line, lost))}",
                f"ALTER TABLE {record.name.sql} REPLICA IDENTITY FULL has the server say so from then on",
                remedy=None,
            )


def _fit(side: pa.Array, wanted: _ByPlace, is_row: Bools) -> Bools:
    """Return a mask of the rows of one side that match. A missing row does not match."""
    fits: Bools = side.is_valid().to_numpy(zero_copy_only=False) & is_row
    if not fits.any():
        return fits
    there = side.filter(pa.array(fits))
    found = np.ones(len(there), bool)
    for place, values in wanted.items():
        column = pc.list_element(there, place)
        texts = [value for value in values if value is not None]
        has = pc.is_in(column, pa.array(texts, column.type)).to_numpy(zero_copy_only=False)
        if None in values:
            has = has | column.is_null().to_numpy(zero_copy_only=False)
        found &= has
    fits[fits] = found
    return fits


def _whole(rows: pa.Table, wanted: _ByPlace) -> pa.Array:
    """Return the new rows, with values that an update did not send copied from the old rows.

    Only rows that lack a value of a filter column are completed. Raises DriftError if the old row lacks it
    too.
    """
    new = rows["new"].combine_chunks()
    lacks = pc.fill_null(pc.greater(pc.list_value_length(rows["unchanged"]), 0), False)
    if not pc.any(lacks).as_py():
        return new
    found = new.to_pylist()
    for place in np.flatnonzero(lacks.to_numpy()).tolist():
        (row,) = rows.slice(place, 1).to_pylist()
        if wanted.keys().isdisjoint(row["unchanged"]):
            continue
        whole = _filled(row)
        if not wanted.keys().isdisjoint(whole["unchanged"] or ()):
            raise DriftError(
                "row_filter: an update does not say a large value by which rows are filtered",
                "filter by a smaller column, or let unchanged be fill or look_up",
                remedy=None,
            )
        found[place] = whole["new"]
    return pa.array(found, new.type)


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a change, with values that were not sent copied from its old row if it has them."""
    old, left = row["old"], []
    for place in row["unchanged"] or ():
        if old is not None and old[place] is not None:
            row["new"][place] = old[place]
        else:
            left.append(place)
    return {**row, "unchanged": left or None}


def _changed(rows: pa.Table, comes: Bools, goes: Bools) -> pa.Table:
    """Return the rows with updates replaced: by inserts where `comes` is set, by deletes where `goes` is set.

    An update stays an update if its insert would lack a value.
    """
    at = np.flatnonzero(comes | goes)
    made = []
    for row, is_new in zip(rows.take(pa.array(at)).to_pylist(), comes[at].tolist(), strict=True):
        whole = _filled(row)
        if not is_new:
            made.append({**row, "op": "D", "new": None, "unchanged": None})
        elif whole["unchanged"]:
            made.append(whole)
        else:
            made.append({**whole, "op": "I", "old": None})
    others = np.flatnonzero(~(comes | goes))
    both = pa.concat_tables([rows.take(pa.array(others)), pa.Table.from_pylist(made, rows.schema)])
    return both.take(pa.array(np.argsort(np.concatenate([others, at]))))
