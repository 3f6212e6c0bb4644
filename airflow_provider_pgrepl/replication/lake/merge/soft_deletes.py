"""Merging of changes by key into a lake table in which deleted or truncated rows may remain.

This module determines the row that the lake must have for each key that changes touched. `collapse` is enough
if the lake holds exactly the source's rows. With soft deletes, or with an ignored TRUNCATE, a row remains
under its key until another row gets the key. So it matters which rows were visible after a transaction: a row
that one transaction inserts and deletes leaves nothing, but one that two transactions insert and delete
leaves a row marked as deleted. The result does not depend on how changes are cut into batches of whole
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.runtime.compiled_loops import BYTES, FLAG, INT, INTS, inner, loop
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableOptions, Truncate
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    Partitioning,
    TypedColumn,
    lake_schema,
    partitioning,
    typed_column,
    typed_columns,
)

from .changes import Bools, Ints, array_of, replaced, take
from .collapse import FollowedRows, follow
from .kernels import DELETE, NONE
from .keyed import MergeOnRead, RowKindEffects
from .slice_commit import MISSING, SliceCommit

# The effect on the lake's row with a key. _UPDATE: it must exist and is updated. _PUT: it is updated if it
# exists, else a row is added. _DELETE: it must exist and is deleted. _CLEAR: it is deleted if it exists.
_UPDATE, _PUT, _DELETE, _CLEAR = range(4)
_STAMPS = {COMMIT_LSN: "commit_lsn", COMMIT_TS: "commit_ts"}
_KINDS = RowKindEffects(there=(_UPDATE, _DELETE), goes=(_DELETE, _CLEAR), comes=(_PUT,))


@inner
def _settle(  # type: ignore[no-untyped-def]
    touched, alive, stale, at_code, seen_at, shadow, left_at, latest, version, of_row, gone, since, places
):
    """Record what keys hold after a transaction: first the keys that rows left, then the keys they have."""
    for n in range(touched.shape[0]):
        row = touched[n]
        code = seen_at[row]
        if code != NONE and (not alive[row] or at_code[row] != code):
            version[code], of_row[code], gone[code], since[code] = shadow[row], row, True, left_at[row]
    # A row that was kept by an ignored TRUNCATE is replaced by one that came after it.
    for passed_over in (True, False):
        for n in range(touched.shape[0]):
            row = touched[n]
            if alive[row] and stale[row] == passed_over:
                code = at_code[row]
                version[code], of_row[code], gone[code], since[code] = (
                    latest[row],
                    row,
                    False,
                    places[latest[row]],
                )
                seen_at[row] = code
    for n in range(touched.shape[0]):
        if not alive[touched[n]]:
            seen_at[touched[n]] = NONE


@loop(
    BYTES, INTS, INT, INTS, INTS, INTS, INTS,
    INTS, INTS, INTS, INTS, FLAG,
)  # fmt: skip
def hold_keys(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, new_code, codes, commit, row, before, origin,
    places, truncates, truncate_commits, truncate_places, ignoring,
):  # fmt: skip
    """Find what each key holds after the last transaction. Counts rows that were visible after a transaction.

    `row`, `before`, `origin`: as `kernels.follow_rows` returns them. `places`, `truncate_places`: the indexes
    of the changes, and of the TRUNCATEs, among the changelog rows. `ignoring`: TRUNCATE is ignored.

    Returns, for each code: the row that the key holds (-1: unchanged in the lake); the change that made its
    version (-1: the version in the lake); True if the row has left the key; and the index of the change or
    TRUNCATE since which this is so.
    """
    rows = origin.shape[0]
    of_row = np.full(codes, NONE, np.int64)
    version = np.full(codes, NONE, np.int64)
    gone = np.zeros(codes, np.bool_)
    since = np.full(codes, NONE, np.int64)
    alive = np.zeros(rows, np.bool_)
    stale = np.zeros(rows, np.bool_)
    at_code = origin.copy()
    seen_at = origin.copy()
    latest = np.full(rows, NONE, np.int64)
    shadow = np.full(rows, NONE, np.int64)
    left_at = np.full(rows, NONE, np.int64)
    in_commit = np.full(rows, NONE, np.int64)
    touched = np.empty(rows, np.int64)
    touches = truncate = met = truncated = 0
    now = np.int64(-1)
    for i in range(op.shape[0] + 1):
        while True:
            truncating = truncate < truncates.shape[0] and truncates[truncate] <= i
            if not truncating and i == op.shape[0]:
                break
            by = truncate_commits[truncate] if truncating else commit[i]
            if by != now:
                _settle(
                    touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, latest, version,
                    of_row, gone, since, places,
                )  # fmt: skip
                touches, now = 0, by
            if not truncating:
                break
            for this in range(truncated, met):
                if not alive[this]:
                    continue
                if in_commit[this] != now:
                    in_commit[this] = now
                    touched[touches] = this
                    touches += 1
                if ignoring:
                    stale[this] = True
                    continue
                alive[this] = False
                if seen_at[this] == at_code[this]:
                    shadow[this], left_at[this] = latest[this], truncate_places[truncate]
            truncated = met
            truncate += 1
        if i == op.shape[0]:
            break
        this = row[i]
        met = max(met, this + 1)
        if in_commit[this] != now:
            in_commit[this] = now
            touched[touches] = this
            touches += 1
        # Under the key that the row leaves, its last version with that key remains.
        if (
            seen_at[this] != NONE
            and at_code[this] == seen_at[this]
            and (op[i] == DELETE or new_code[i] != at_code[this])
        ):
            shadow[this], left_at[this] = before[i], places[i]
        alive[this] = op[i] != DELETE
        if alive[this]:
            at_code[this], latest[this] = new_code[i], i
    _settle(
        touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, latest, version,
        of_row, gone, since, places,
    )  # fmt: skip
    return of_row, version, gone, since


@dataclass(frozen=True)
class LakeKeys:
    """The keys whose row in the lake changes, with one entry for each key.

    `truncated`: the index of the first TRUNCATE, which marks every live row of the lake as deleted, except
    those with the keys here; -1 if there is none. `code`: the code of the key. `gone`: its row has left it
    (deleted, truncated, or moved to another key). `since`: the index of the change or TRUNCATE that made it
    so.

    `in_lake`: the lake must have a live row with the key; otherwise it may have one. `origin`: the code of
    the key whose row in the lake has the values that no change sent. `key_texts` maps codes to keys.
    """

    truncated: int
    code: Ints
    gone: Bools
    since: Ints
    in_lake: Bools
    origin: Ints
    _followed: FollowedRows
    _version: Ints

    def __len__(self) -> int:
        return len(self.code)

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Return the text values of the key column `index` (among the key columns) for codes; null for -1."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int) -> tuple[pa.Array, Bools]:
        """Return the text values of the column `index`, and where the value of the origin's row is kept."""
        return self._followed.texts(index, self._version, self.code)


def held_keys(changes: pa.Table, relation: Relation, truncate: Truncate) -> LakeKeys:
    """Return what the keys hold after changelog rows (ops I U D T) of one relation with a key.

    The rows are ordered by (commit_lsn, ordinal). `truncate` is `apply` or `ignore`. Raises DriftError if
    rows have another number of columns than the relation, LakeTableError if the changes contradict each
    other.
    """
    followed = follow(changes, relation, whole=True)
    read, origin = followed.read, followed.origin
    commit = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    of_row, version, gone, since = hold_keys(
        read.op, followed.new_code, followed.codes, commit[read.places], followed.row, followed.before,
        origin, read.places, read.truncates, commit[read.truncate_places], read.truncate_places,
        truncate == "ignore",
    )  # fmt: skip
    in_lake = np.zeros(followed.codes, np.bool_)
    in_lake[origin[origin >= 0]] = True
    code = np.flatnonzero(of_row >= 0)
    return LakeKeys(
        truncated=int(read.truncate_places[0]) if read.truncated and truncate == "apply" else -1,
        code=code,
        gone=gone[code],
        since=since[code],
        in_lake=in_lake[code],
        origin=origin[of_row[code]],
        _followed=followed,
        _version=version[code],
    )


@dataclass(frozen=True)
class SoftDeleteCommit:
    """One slice of changes, followed by key, which becomes one commit."""

    held: LakeKeys
    changes: pa.Table
    relation: Relation
    options: TableOptions

    def make(self, commit: SliceCommit) -> None:
        """Commit the changes. Raises LakeTableError if a required row is missing, or a key is there twice."""
        if len(self.held) == 0 and self.held.truncated < 0:
            commit.nothing()
            return
        source, kept = self._source(commit)
        names = self._names()
        keys = {column.name: f"k{number}" for number, column in enumerate(self.relation.key_columns)}
        gone_mark = DELETED if self.soft else None
        on_read = MergeOnRead(commit, source, keys, names, _KINDS, gone_mark, self._partitions)
        # A TRUNCATE that leaves rows behind changes every row of the table.
        is_truncated = self.held.truncated >= 0
        if is_truncated and commit.is_ours:
            on_read.rewrite(self._marked_by_truncate)
            return
        way = "merge" if is_truncated else commit.way(on_read.bytes_to_rewrite, source.nbytes)
        if way != "merge":
            on_read.make(way)
            return
        merger = commit.merge(source, self._conditions(source), names)
        fresh = {quote_identifier(name): f"s.c{index}" for index, name in enumerate(names)}
        changed = {
            target: f"case when s.u{index} then t.{target} else s.c{index} end"
            if index in kept
            else f"s.c{index}"
            for index, target in enumerate(fresh)
        }
        if self.soft:
            mark = quote_identifier(DELETED)
            gone_before = f"s.kind = {_UPDATE} and t.{mark}"
            changed[mark] = f"case when {gone_before} then 1 / s.zero > 0 else {changed[mark]} end"
        merger.when_matched_delete(f"s.kind >= {_DELETE}")
        merger.when_matched_update(changed, f"s.kind < {_DELETE}")
        merger.when_not_matched_insert(fresh, f"s.kind = {_PUT}")
        # A row that is missing, or was deleted before, must stop the commit. MERGE has no other way to fail.
        fail = {target: f"case when 1 / s.zero > 0 then {value} end" for target, value in fresh.items()}
        merger.when_not_matched_insert(fail, f"s.kind = {_UPDATE} or s.kind = {_DELETE}")
        if self.held.truncated >= 0:
            self._mark_all_others(merger)
        self._check(commit.run(merger))

    def _names(self) -> list[str]:
        return list(lake_schema(self.relation, self.options).names)

    @property
    def soft(self) -> bool:
        return self.options.policy.deletes == "soft"

    def _kinds(self) -> Ints:
        held = self.held
        if self.soft:
            return np.where(held.in_lake, _UPDATE, _PUT)
        return np.where(held.in_lake, _UPDATE, _PUT) + np.where(held.gone, _DELETE, 0)

    def _conditions(self, source: pa.Table) -> Iterator[str]:
        keys = {}
        for number, column in enumerate(self.relation.key_columns):
            yield f"(t.{quote_identifier(column.name)} = s.k{number})"
            keys[column.name] = source[f"k{number}"]
        if self._partitions is not None and self.held.truncated < 0:
            yield from self._partitions.conditions(pa.table(keys))

    def _marked_by_truncate(self, rows: pa.Table) -> pa.Table:
        """Return rows with the live ones marked as deleted by the TRUNCATE, as `_mark_all_others` does."""
        live, at = pc.invert(rows[DELETED]), self.held.truncated
        marks = {DELETED: pa.scalar(True)}
        marks |= {name: self.changes[source][at] for name, source in _STAMPS.items()}
        for number, field in enumerate(rows.schema):
            if field.name in marks:
                marked = pc.if_else(live, marks[field.name].cast(field.type), rows[field.name])
                rows = rows.set_column(number, field, marked)
        return rows

    def _mark_all_others(self, merger: Any) -> None:
        """Mark the rows without an entry here as deleted by the TRUNCATE.

        Rows that were marked before keep the LSN and the time of their end.
        """
        at = self.held.truncated
        marks = {quote_identifier(DELETED): "true"}
        if self.options.commit_lsn_column:
            marks[quote_identifier(COMMIT_LSN)] = str(self.changes["commit_lsn"][at].as_py())
        if self.options.commit_ts_column:
            micros = self.changes["commit_ts"][at].cast(pa.int64()).as_py()
            marks[quote_identifier(COMMIT_TS)] = (
                f"arrow_cast({micros}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
            )
        merger.when_not_matched_by_source_update(marks, f"not t.{quote_identifier(DELETED)}")

    def values(self) -> Iterator[tuple[pa.Array, Bools | None]]:
        """Yield, for each lake column, the typed values, and where the lake's are kept (or None).

        A kept value is that of the row with the origin key.
        """
        partitions, partition = self._partitions, None
        for typed in typed_columns(self.relation, self.options):
            if typed.index is None:
                yield pa.nulls(len(self.held), typed.lake_type), None
                continue
            texts, keep = self.held.texts(typed.index)
            found = typed.parse(texts), keep if keep.any() else None
            yield found
            if partitions is not None and typed.index == partitions.typed.index:
                partition = partitions.texts(found[0]), found[1]
        if self.soft:
            yield pa.array(self.held.gone), None
        if self.options.commit_lsn_column:
            yield take(array_of(self.changes, "commit_lsn", pa.int64()), self.held.since), None
        if self.options.commit_ts_column:
            yield take(array_of(self.changes, "commit_ts", pa.timestamp("us", "UTC")), self.held.since), None
        if partition is not None:
            yield partition

    @property
    def _partitions(self) -> Partitioning | None:
        return partitioning(self.relation, self.options)

    def _source(self, commit: SliceCommit) -> tuple[pa.Table, set[int]]:
        """Return the source of the merge, and the numbers of the columns that have a column u….

        Its columns are k… (keys), c… (values) and u… (true where the lake's value with that key is kept).
        """
        held, columns, kept = self.held, dict[str, Any](), set[int]()
        kinds, at_origin = self._kinds(), self.held.origin == self.held.code
        for number, key in enumerate(self._key_columns()):
            columns[f"k{number}"] = key.parse(held.key_texts(number, held.code))
        lake = _LakeValues(self, commit)
        for index, (name, (values, keep)) in enumerate(zip(self._names(), self.values(), strict=True)):
            columns[f"c{index}"] = values
            if keep is None:
                continue
            from_elsewhere = keep & ~at_origin & (kinds < _DELETE)
            if from_elsewhere.any():
                columns[f"c{index}"] = lake.filled(name, values, from_elsewhere)
            if (keep & at_origin).any():
                kept.add(index)
                columns[f"u{index}"] = keep & at_origin
        columns["kind"] = pa.array(kinds)
        columns["zero"] = pa.array(np.zeros(len(held), np.int64))
        return pa.table(columns), kept

    def _key_columns(self) -> list[TypedColumn]:
        return [
            typed_column(column, self.relation.table, self.options) for column in self.relation.key_columns
        ]

    def _check(self, metrics: dict[str, Any]) -> None:
        """Raise LakeTableError if the MERGE changed other numbers of rows: a key is there twice then."""
        counts = np.bincount(self._kinds(), minlength=4).tolist()
        changed = metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]
        deleted = metrics["num_target_rows_deleted"]
        others = self.held.truncated >= 0 or changed == counts[_UPDATE] + counts[_PUT]
        if not others or not counts[_DELETE] <= deleted <= counts[_DELETE] + counts[_CLEAR]:
            raise LakeTableError(f"{self.relation.table}: the lake table holds a key twice")


class _LakeValues:
    """Values of rows that move to another key. Only the lake has them, under the rows' old keys."""

    def __init__(self, keys: SoftDeleteCommit, commit: SliceCommit) -> None:
        self._keys = keys
        self._commit = commit
        self._rows: pa.Table | None = None
        self._row_of: Ints = np.empty(0, np.int64)

    def filled(self, name: str, values: pa.Array, where: Bools) -> pa.Array:
        """Return `values` with those at `where` replaced by the lake's values of the column `name`.

        Raises LakeTableError if the lake lacks a row.
        """
        if self._rows is None:
            self._read()
        assert self._rows is not None
        rows = self._row_of[where]
        if bool((rows < 0).any()):
            raise LakeTableError(f"{self._keys.relation.table}: {MISSING}")
        return replaced(values, where, take(self._rows[name].combine_chunks(), rows))

    def _read(self) -> None:
        """Read all values of the lake's rows with the keys from which rows have moved."""
        held, typed = self._keys.held, self._keys._key_columns()
        moved = np.flatnonzero((held.origin >= 0) & (held.origin != held.code))
        origins = np.unique(held.origin[moved])
        wanted = pa.table(
            {key.name: key.parse(held.key_texts(number, origins)) for number, key in enumerate(typed)}
        )
        names = [column.name for column in typed_columns(self._keys.relation, self._keys.options)]
        partitions = self._keys._partitions
        if partitions is not None:
            names.append(PARTITION)
        commit = self._commit
        lake = FileRows(commit.table)
        may_be_in = None if partitions is None else partitions.of_rows(wanted)
        places = commit.read(lambda: lake.find(wanted, may_be_in))
        rows, which = lake.rows(places, names), places.which
        self._rows = rows
        row_of = np.full(
            int(held.code.max(initial=-1)) + 1 + int(held.origin.max(initial=-1)) + 1, -1, np.int64
        )
        row_of[origins[which]] = np.arange(len(rows))
        self._row_of = np.where(held.origin >= 0, row_of[held.origin], -1)
