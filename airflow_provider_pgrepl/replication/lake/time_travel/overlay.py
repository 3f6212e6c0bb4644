"""Applies changes to a version of a lake table. For a table with a key they become entries, one for each
changed row.

Columns of entries: `kind`. `r…`: the key of the version's row that is removed (null: none), and `must`: True
if that row must exist. `alive`: True if a new row is added. `c…`: the values of the new row. `u…`: True where
the value of the origin row is used instead. `o…`: the key of the origin row in the version (null: it is not
in the version).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows, row_codes
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.changes import Bools, Ints
from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.lake.merge.keyed import RowsCommit
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows, net_rows
from airflow_provider_pgrepl.replication.lake.merge.soft_deletes import SoftDeleteCommit, held_keys
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import relation_timeline
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import evolved, is_same_layout
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    lake_schema,
    typed_column,
)

if TYPE_CHECKING:
    from .plan import TablePlan

_STAMPS = {COMMIT_LSN: "commit_lsn", COMMIT_TS: "commit_ts"}

ROW, EMPTY, MARK = range(3)
"""Kinds of entries. ROW: a changed row. EMPTY: all rows of the version are removed. MARK: each row of the
version that no entry replaces is soft-deleted, with the commit LSN and time of this entry."""

KIND, ALIVE, MUST = "kind", "alive", "must"

MISSING = (
    "the lake table lacks a row that the source updated or deleted, or has it twice: another program changed"
    " the table, or the table lost commits"
)
Values = Iterable[tuple[pa.Array, Bools | None]]
"""For each lake column: the values, and a mask of the rows that use the origin's value instead."""


def replaced(number: int) -> str:
    """Return the entries' column for key column `number` of the version's row that is removed."""
    return f"r{number}"


def origin(number: int) -> str:
    """Return the entries' column for key column `number` of the origin: the version's row whose values stay
    where no change sent them."""
    return f"o{number}"


def value(number: int) -> str:
    """Return the entries' column for the lake table's column `number`."""
    return f"c{number}"


def kept(number: int) -> str:
    """Return the entries' column that is True where the lake table's column `number` uses the origin's
    value."""
    return f"u{number}"


def entries_of(changes: pa.Table, relation: Relation, options: TableOptions) -> pa.Table:
    """Return the entries of changelog rows of one relation with a key, ops I U D T, ordered by (commit_lsn,
    ordinal).

    Raises DriftError, LakeTableError (the changes contradict each other), ValueRangeError.
    """
    policy = options.policy
    builder = _Builder(changes, relation, options)
    return builder.of_held(soft=policy.deletes == "soft") if policy.follows_keys else builder.of_collapsed()


@dataclass(frozen=True)
class _Builder:
    changes: pa.Table
    relation: Relation
    options: TableOptions

    def of_collapsed(self) -> pa.Table:
        done = collapse(self.changes, self.relation)
        alive, dead = np.flatnonzero(done.final >= 0), np.flatnonzero(done.final < 0)
        order = np.concatenate([alive, dead])
        keys = [self._typed_key(number, done.key_texts(number, done.origin[order])) for number in self._keys]
        values = RowsCommit(done, self.changes, self.relation, self.options).values(alive)
        columns = {
            KIND: pa.array(np.full(len(order), ROW)),
            ALIVE: pa.array(done.final[order] >= 0),
            MUST: pa.array(done.origin[order] >= 0),
            **{replaced(number): key for number, key in enumerate(keys)},
            **{origin(number): key for number, key in enumerate(keys)},
            **_rows(values, len(alive), len(dead)),
        }
        entries = pa.table(columns)
        return pa.concat_tables([entries, _special(entries.schema, EMPTY)]) if done.overwrite else entries

    def of_held(self, *, soft: bool) -> pa.Table:
        policy = self.options.policy
        done = held_keys(self.changes, self.relation, policy.truncate)
        values = SoftDeleteCommit(done, self.changes, self.relation, self.options).values()
        columns = {
            KIND: pa.array(np.full(len(done), ROW)),
            ALIVE: pa.array(np.ones(len(done), np.bool_) if soft else ~done.gone),
            MUST: pa.array(done.in_lake),
        }
        for number in self._keys:
            columns[replaced(number)] = self._typed_key(number, done.key_texts(number, done.code))
            columns[origin(number)] = self._typed_key(number, done.key_texts(number, done.origin))
        entries = pa.table({**columns, **_rows(values, len(done), 0)})
        if done.truncated < 0:
            return entries
        mark = _special(entries.schema, MARK)
        for number, name in enumerate(lake_schema(self.relation, self.options).names):
            if name in _STAMPS:
                at = mark.schema.get_field_index(value(number))
                stamp = self.changes[_STAMPS[name]].slice(done.truncated, 1)
                mark = mark.set_column(at, mark.schema.field(at), stamp)
        return pa.concat_tables([entries, mark])

    @property
    def _keys(self) -> range:
        return range(len(self.relation.key_columns))

    def _typed_key(self, number: int, texts: pa.Array) -> pa.Array:
        column = self.relation.key_columns[number]
        return typed_column(column, self.relation.table, self.options).parse(texts)


def _rows(values: Values, present: int, missing: int) -> dict[str, pa.ChunkedArray]:
    """Return the value columns and kept flags of `present` new rows, followed by `missing` nulls."""
    columns: dict[str, pa.ChunkedArray] = {}
    for number, (found, keep) in enumerate(values):
        columns[value(number)] = pa.chunked_array([found, pa.nulls(missing, found.type)])
        stays = np.zeros(present, np.bool_) if keep is None else keep
        columns[kept(number)] = pa.chunked_array([pa.array(stays), pa.array(np.zeros(missing, np.bool_))])
    return columns


def _special(schema: pa.Schema, kind: int) -> pa.Table:
    """Return one entry of a kind other than ROW. All other columns are False or null."""
    flags = {ALIVE: False, MUST: False, KIND: kind}
    return pa.table(
        [
            pa.array([flags[field.name]], field.type) if field.name in flags else pa.nulls(1, field.type)
            for field in schema
        ],
        schema=schema,
    )


@dataclass(frozen=True)
class ReplacedRows:
    """The entries of some changes, and the key columns that identify the version's rows."""

    entries: pa.Table
    key_names: list[str]

    def lay_over(self, version: pa.Table) -> pa.Table:
        """Return the version with the changes applied. Raises LakeTableError if a row is missing or a key
        exists twice."""
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
        """Return the row numbers in the version of the rows to remove, and of the origins. -1: the version
        has no such row."""
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
    """Return the remaining rows with live ones soft-deleted. Rows that were deleted before keep their
    values."""
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


@dataclass(frozen=True)
class Overlay:
    """The changes of a table above one LSN and up to another, while one relation is effective, and everything
    needed to read them.

    `before`: the relation of the version that they are applied to. If DDL came in the middle of their first
    transaction, `first` is the relation in which that transaction begins in the changelog, and `received` has
    the relations that were received since. `count`: the number of changes. `truncated`: True if a TRUNCATE is
    among them.
    """

    changelog: str
    paths: tuple[str, ...]
    relation: Relation
    options: TableOptions
    above: LSN
    upto: LSN
    before: Relation
    first: Relation | None = None
    received: tuple[RelationRecord, ...] = ()
    count: int = 0
    truncated: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The lake table's columns after the changes."""
        return lake_schema(self.relation, self.options)

    @property
    def key_names(self) -> list[str]:
        """The key columns that identify rows. If there are none, a row is identified by all of its values."""
        return [column.name for column in self.relation.key_columns]

    @property
    def evolves(self) -> bool:
        """Return True if the version must be converted to another relation before the changes are applied."""
        return not (
            is_same_layout(self.before, self.relation)
            and lake_schema(self.before, self.options) == self.schema
        )

    def evolved(self, version: pa.Table) -> pa.Table:
        """Return rows of the version in the layout of the effective relation. Raises DriftError,
        ValueRangeError."""
        if self.evolves:
            version = evolved(version, self.before, self.relation, self.options)
        # In the lake table, a column that was added later is the last one.
        return version.select(self.schema.names).cast(self.schema)

    def changes(self) -> pa.Table:
        """Return the changes, ops I U D T, ordered by (commit_lsn, ordinal), in the layout of the effective
        relation.

        Raises ChangelogError if a file no longer exists, DriftError.
        """
        filesystem, root = open_storage(self.changelog)
        rows = reader.read_rows(filesystem, root, self.paths, self.relation.oid, self.above)
        rows = rows.filter(pc.less_equal(rows["commit_lsn"], int(self.upto)))
        if self.first is not None:
            records = {record.version: record for record in self.received}
            rows = relation_timeline(self.first, rows, records.get, self.options).spans[-1].rows
        return rows.filter(pc.is_in(rows["op"], letters(CHANGES))).combine_chunks()

    def net_rows(self) -> NetRows:
        """Return the net effect of the changes on a table without a key. Raises LakeTableError,
        ValueRangeError."""
        return net_rows(self.changes(), self.relation, self.options)

    def entries(self) -> pa.Table:
        """Return the entries of the changes to a table with a key. Raises LakeTableError, ValueRangeError."""
        return entries_of(self.changes(), self.relation, self.options)

    def lay_over(self, version: pa.Table) -> pa.Table:
        """Return the version with the changes applied. Raises LakeTableError if the version lacks rows that
        the changes need."""
        version = self.evolved(version)
        if not self.count:
            return version
        if self.key_names:
            return ReplacedRows(self.entries(), self.key_names).lay_over(version)
        net = self.net_rows()
        gained = net.gained.select(version.column_names).cast(version.schema)
        return pa.concat_tables([net.remaining(version), gained])


class RowsByKey:
    """Finds rows of the table of a plan without reading the whole table into memory.

    `names`: the other columns of the source to return, without those of the key.
    """

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
        rows = entries.filter(pc.equal(entries[KIND], ROW))
        # A MARK sets only bookkeeping columns, which are not returned.
        emptied = entries.filter(pc.equal(entries[KIND], EMPTY))
        comes = pc.and_(rows[ALIVE], self._is_any(rows, self._final(overlay), keys))
        goes = self._is_any(rows, [replaced(number) for number in self._places], keys)
        some = rows.filter(pc.or_(comes, goes))
        version = self._of_version(self._with_those_of(some, keys))
        laid = ReplacedRows(
            pa.concat_tables([self._renumbered(some, overlay), self._renumbered(emptied, overlay)]),
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
        fixed = [KIND, ALIVE, MUST, *(of(number) for of in (replaced, origin) for number in self._places)]
        found = entries.select(fixed)
        for number, name in enumerate(self._columns):
            place = overlay.schema.get_field_index(name)
            found = found.append_column(value(number), entries[value(place)])
            found = found.append_column(kept(number), entries[kept(place)])
        return found
