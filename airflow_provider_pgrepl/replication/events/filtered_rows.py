"""Rows of the changelog as whoever has only some rows of a table is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import DriftError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.matching import HiddenColumns
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools
from airflow_provider_pgrepl.replication.postgres.names import ColumnName
from airflow_provider_pgrepl.replication.settings.row_filter import RowFilter, Values

_ByPlace = Mapping[int, Values]


class FilteredRows:
    """As PostgreSQL's own row filters have it: a row that comes to be one of them is inserted, one that is
    no more is deleted. A TRUNCATE is told of whatever the filter is.

    https://www.postgresql.org/docs/current/logical-replication-row-filter.html
    """

    def __init__(self, relations: KnownRelations, wanted: RowFilter) -> None:
        self._relations, self._filter = relations, wanted
        self._wanted: dict[int, _ByPlace] = {}

    def of(self, record: RelationRecord, rows: pa.Table) -> tuple[pa.Table, Bools | None]:
        """What is told of a relation's changes, and of which (None: all).

        Raises DriftError, which stops the table alone, where it cannot be told whether a row is one of them.
        """
        wanted = self._wanted_of(record)
        if not wanted:
            return rows, None
        ops = rows["op"].to_numpy()
        is_update, is_insert = ops == "U", ops == "I"
        self._check_identity(record, wanted, has_old=bool(np.isin(ops, ("U", "D")).any()))
        old, is_truncate = rows["old"].combine_chunks(), ops == "T"
        before, after = _fit(old, wanted, ~is_truncate), _fit(_whole(rows, wanted), wanted, ~is_truncate)
        # Where an update says nothing of the old row, its key, of which all these columns are, is the same.
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
        """By place in the stream. A table keeps its filter when it, or a column, is renamed."""
        oid = record.message.oid
        found: dict[int, Values] = {}
        for table in sorted({*record.names, *self._relations.names(oid)} & self._filter.tables.keys()):
            for column, values in self._filter.tables[table].items():
                named = frozenset((ColumnName(table, column),))
                places = HiddenColumns(named, self._relations.records).places(record) - set(record.hidden)
                if len(places) != 1:
                    raise DriftError(
                        f"row_filter: it cannot be told which column of {table} is {one_line(column)}",
                        "mend the name, or resnapshot the table: then its columns are known",
                        remedy=None,
                    )
                (place,) = places
                found[place] = found.get(place, values) & values
        return found

    def _check_identity(self, record: RelationRecord, wanted: _ByPlace, *, has_old: bool) -> None:
        """Whether updates and deletes say what a row was before."""
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
    """Which rows of a side have the values; those that are not there have not."""
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
    """The new rows, with what an update left alone and did not send taken from the old ones: of the columns
    that count. Raises DriftError where these have it not."""
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
    """A change without values that were not sent, as far as the old row has them."""
    old, left = row["old"], []
    for place in row["unchanged"] or ():
        if old is not None and old[place] is not None:
            row["new"][place] = old[place]
        else:
            left.append(place)
    return {**row, "unchanged": left or None}


def _changed(rows: pa.Table, comes: Bools, goes: Bools) -> pa.Table:
    """With inserts and deletes where rows come and go. An insert that would lack a value stays an update."""
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
