"""The rows of a table with given keys, as of a point in time, without reading the whole table into memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import (
    ALIVE,
    KIND,
    ROW,
    Overlay,
    ReplacedRows,
    kept,
    origin,
    replaced,
    value,
)
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan


class RowsByKey:
    """Finds rows of the table of a plan. `names`: the other columns to return, without those of the key."""

    def __init__(self, plan: TablePlan, key_names: Sequence[str], names: Sequence[str]) -> None:
        self._plan, self._key_names, self._names = plan, list(key_names), list(names)

    @property
    def can_be_read(self) -> bool:
        """Return True if the version has the columns that the table had at the point in time, so that no DDL
        came in between. `find` requires this."""
        overlays = self._plan.overlays
        return not overlays or (len(overlays) == 1 and not overlays[0].evolves)

    def find(self, keys: pa.Table) -> pa.Table:
        """Return the rows with these keys: the key's columns, then the others. The keys must be distinct.
        Raises LakeError, LakeTableError, DriftError, ValueRangeError, and the errors of DataFusion."""
        overlay = next((one for one in self._plan.overlays if one.count), None)
        if overlay is None:
            return self._of_version(keys)
        entries = self._entries
        is_row = pc.equal(entries[KIND], ROW)
        rows, others = entries.filter(is_row), entries.filter(pc.invert(is_row))
        comes = pc.and_(rows[ALIVE], self._is_any(rows, self._final(overlay), keys))
        goes = self._is_any(rows, [replaced(number) for number in self._places], keys)
        some = rows.filter(pc.or_(comes, goes))
        version = self._of_version(self._with_those_of(some, keys))
        laid = ReplacedRows(
            pa.concat_tables([self._renumbered(some, overlay), self._renumbered(others, overlay)]),
            self._key_names,
        )
        found = laid.lay_over(version)
        return found.filter(pa.array(match_rows(found, keys) >= 0))

    @property
    def _places(self) -> range:
        return range(len(self._key_names))

    @property
    def _columns(self) -> list[str]:
        return [*self._key_names, *self._names]

    @cached_property
    def _entries(self) -> pa.Table:
        """The entries of the changes since the version."""
        (overlay,) = self._plan.overlays
        return overlay.entries()

    def _of_version(self, keys: pa.Table) -> pa.Table:
        rows = FileRows(self._plan.version.open())
        found = rows.rows(rows.find(keys), self._columns)
        return found.cast(pa.schema([self._plan.schema.field(name) for name in self._columns]))

    def _final(self, overlay: Overlay) -> list[str]:
        """Return the columns of the entries with the keys of the new rows."""
        return [value(overlay.schema.get_field_index(name)) for name in self._key_names]

    def _is_any(self, rows: pa.Table, names: Sequence[str], keys: pa.Table) -> pa.Array:
        """Return a mask of the rows that have one of `keys` in these columns."""
        named = pa.table([rows[name] for name in names], names=self._key_names)
        return pa.array(match_rows(named, keys) >= 0)

    def _with_those_of(self, entries: pa.Table, keys: pa.Table) -> pa.Table:
        """Return `keys`, and the keys of the version's rows that the entries replace or take values from."""
        parts = [keys]
        for column in (replaced, origin):
            named = pa.table([entries[column(number)] for number in self._places], names=self._key_names)
            parts.append(named.filter(named.column(0).is_valid()).cast(keys.schema))
        return pa.concat_tables(parts).group_by(self._key_names).aggregate([]).select(self._key_names)

    def _renumbered(self, entries: pa.Table, overlay: Overlay) -> pa.Table:
        """Return the entries numbered for a version that has only the columns to return."""
        fixed = [KIND, ALIVE, "must", *(of(number) for of in (replaced, origin) for number in self._places)]
        found = entries.select(fixed)
        for number, name in enumerate(self._columns):
            place = overlay.schema.get_field_index(name)
            found = found.append_column(value(number), entries[value(place)])
            found = found.append_column(kept(number), entries[kept(place)])
        return found
