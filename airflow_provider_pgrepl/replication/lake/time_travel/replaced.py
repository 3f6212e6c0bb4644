"""Rows that changes replace in a version of a lake table with a key, in Arrow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_equality import row_codes
from airflow_provider_pgrepl.replication.lake.merge.tuples import Ints
from airflow_provider_pgrepl.replication.lake.time_travel.entries import (
    ALIVE,
    EMPTY,
    KIND,
    MARK,
    MISSING,
    MUST,
    ROW,
    kept,
    origin,
    replaced,
    value,
)
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED


@dataclass(frozen=True)
class Replaced:
    """The entries of some changes, and the columns by which the version's rows are found."""

    entries: pa.Table
    key_names: list[str]

    def lay_over(self, version: pa.Table) -> pa.Table:
        """The version with the changes. Raises LakeTableError when it lacks a row, or holds a key twice."""
        kinds = self.entries[KIND]
        if pc.any(pc.equal(kinds, EMPTY)).as_py():
            version = version.slice(0, 0)
        rows = self.entries.filter(pc.equal(kinds, ROW))
        goes, origins = self._places(version, rows)
        if bool((goes[rows[MUST].to_numpy()] < 0).any()):
            raise LakeTableError(MISSING)
        stays = np.ones(len(version), np.bool_)
        stays[goes[goes >= 0]] = False
        remaining = version.filter(pa.array(stays))
        marks = self.entries.filter(pc.equal(kinds, MARK))
        if len(marks):
            remaining = _marked(remaining, marks)
        alive = rows[ALIVE].to_numpy()
        final = rows.filter(pa.array(alive))
        columns = [
            _final(final[value(number)], final[kept(number)], version[name], origins[alive])
            for number, name in enumerate(version.column_names)
        ]
        return pa.concat_tables([remaining, pa.table(columns, schema=version.schema)])

    def _places(self, version: pa.Table, rows: pa.Table) -> tuple[Ints, Ints]:
        """Where in the version the rows to go and the origins stand; -1: nowhere."""
        keys, size, wanted = range(len(self.key_names)), len(version), len(rows)
        columns = (
            _joined(version[self.key_names[key]], rows[replaced(key)], rows[origin(key)]) for key in keys
        )
        codes = row_codes(columns, size + 2 * wanted)
        there, asked = codes[:size], codes[size:]
        counts = np.bincount(there, minlength=int(codes.max(initial=-1)) + 1)
        given = np.concatenate([rows[named].is_valid().to_numpy() for named in (replaced(0), origin(0))])
        if bool((counts[asked[given]] > 1).any()):
            raise LakeTableError(MISSING)
        place = np.full(len(counts), -1, np.int64)
        place[there] = np.arange(size)
        found = np.where(given, place[asked], -1)
        return found[:wanted], found[wanted:]


def _marked(remaining: pa.Table, marks: pa.Table) -> pa.Table:
    """Live rows deleted, softly; such that were deleted before stay as they are."""
    live = pc.invert(remaining[DELETED])
    for number, name in enumerate(remaining.column_names):
        if name in (DELETED, COMMIT_LSN, COMMIT_TS):
            stamp = pa.scalar(True) if name == DELETED else marks[value(number)][0]
            field = remaining.schema.field(name)
            values = pc.if_else(live, stamp.cast(field.type), remaining[name])
            remaining = remaining.set_column(number, field, values)
    return remaining


def _joined(first: pa.ChunkedArray, *more: pa.ChunkedArray) -> pa.Array:
    chunks = [*first.chunks, *(chunk for column in more for chunk in column.cast(first.type).chunks)]
    return pa.chunked_array(chunks, first.type).combine_chunks()


def _final(
    values: pa.ChunkedArray, keep: pa.ChunkedArray, before: pa.ChunkedArray, origins: Ints
) -> pa.ChunkedArray:
    if not pc.any(keep).as_py():
        return values.cast(before.type)
    stays = keep.to_numpy()
    if bool((origins[stays] < 0).any()):
        raise LakeTableError(MISSING)
    picked = np.where(stays, origins, np.arange(len(values)) + len(before))
    return pa.chunked_array([_joined(before, values).take(pa.array(picked))])
