"""What each key is to hold into its lake table, where deleted or truncated rows may stay there.

What the lake is to hold under each key that changes touched, where deleted or truncated rows may stay.
`collapse` is enough where the lake holds exactly the source's rows. With soft deletes, or a TRUNCATE that is
passed over, a row stays under its key until another takes it, and then it counts which rows were ever to be
seen: what one transaction inserts and deletes leaves nothing, what two do leaves a mark. Nothing here depends
on how changes are cut into batches, as long as no transaction is cut.
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
from airflow_provider_pgrepl.replication.lake.merge.changes import Bools, Ints, array_of, replaced, take
from airflow_provider_pgrepl.replication.lake.merge.collapse import FollowedRows, follow
from airflow_provider_pgrepl.replication.lake.merge.kernels import DELETE, NONE
from airflow_provider_pgrepl.replication.lake.merge.keyed import Kinds, MergeOnRead
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import MISSING, SliceCommit
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.runtime.compiled_loops import BYTES, FLAG, INT, INTS, inner, loop
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableChoices, Truncate
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

# What becomes of the lake's row under a key: it must be there and changes; it changes if it is there, else
# one comes; it must be there and goes; it goes if it is there.
_UPDATE, _PUT, _DELETE, _CLEAR = range(4)
_STAMPS = {COMMIT_LSN: "commit_lsn", COMMIT_TS: "commit_ts"}
_KINDS = Kinds(there=(_UPDATE, _DELETE), goes=(_DELETE, _CLEAR), comes=(_PUT,))


@inner
def _settle(  # type: ignore[no-untyped-def]
    touched, alive, stale, at_code, seen_at, shadow, left_at, latest, version, of_row, gone, since, places
):
    """What a transaction did to keys becomes visible: first what left them, then who holds them now."""
    for n in range(touched.shape[0]):
        row = touched[n]
        code = seen_at[row]
        if code != NONE and (not alive[row] or at_code[row] != code):
            version[code], of_row[code], gone[code], since[code] = shadow[row], row, True, left_at[row]
    # A row that an ignored TRUNCATE left gives way to one that came after it.
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
    """Say what each key holds after the last transaction, of what was ever visible after one.

    `row`, `before`, `origin` as of `kernels.follow_rows`; `places`, `truncate_places`: what is told of when
    something became so; `ignoring`: TRUNCATE is passed over.

    Returns by code: the row that the key holds (-1: as in the lake), the change that made it what it is (-1:
    it is the lake's), whether it has left the key, and the place of the change or TRUNCATE that made it so.
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
        # Under the key that it leaves stays what it was there.
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
class HeldKeys:
    """One entry for each key whose row in the lake changes.

    `truncated`: index of the change that emptied the source's table first, -1: none. It takes every row of
    the lake that has not gone, but those under the keys here. `code`: the key's. `gone`: its row has left
    it (deleted, truncated, or moved to another key). `since`: index of the change that made it so. `in_lake`:
    the lake must hold a live row under the key; otherwise it may hold one. `origin`: code of the key whose
    row in the lake has the values that no change sent. Codes index into `key_texts(i, codes)`.
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
        """Texts of the key column `index` (counted among the key columns) for codes; -1 gives null."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int) -> tuple[pa.Array, Bools]:
        """Texts of the column `index`, and where instead the value of the origin's row in the lake stays."""
        return self._followed.texts(index, self._version, self.code)


def held_keys(changes: pa.Table, relation: Relation, truncate: Truncate) -> HeldKeys:
    """Follow changelog rows of one relation with a key, ops I U D T, in order (commit_lsn, ordinal).

    `truncate` is `apply` or `ignore`. Raises DriftError when rows have another number of columns than the
    relation, LakeTableError when the changes contradict each other.
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
    return HeldKeys(
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
class KeysCommit:
    """One slice of changes, followed by key, to become one commit."""

    held: HeldKeys
    changes: pa.Table
    relation: Relation
    choices: TableChoices

    def make(self, commit: SliceCommit) -> None:
        """Raises LakeTableError when a row that must be there is missing, or a key is there twice."""
        if len(self.held) == 0 and self.held.truncated < 0:
            commit.nothing()
            return
        source, kept = self._source(commit)
        names = self._names()
        keys = {column.name: f"k{number}" for number, column in enumerate(self.relation.key_columns)}
        gone_mark = DELETED if self.soft else None
        on_read = MergeOnRead(commit, source, keys, names, _KINDS, gone_mark, self._partitions)
        # A TRUNCATE that leaves rows behind changes every row there is.
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
        # A row that is not there, or has gone before, must stop the commit; MERGE has no other way to say so.
        fail = {target: f"case when 1 / s.zero > 0 then {value} end" for target, value in fresh.items()}
        merger.when_not_matched_insert(fail, f"s.kind = {_UPDATE} or s.kind = {_DELETE}")
        if self.held.truncated >= 0:
            self._mark_all_others(merger)
        self._check(commit.run(merger))

    def _names(self) -> list[str]:
        return list(lake_schema(self.relation, self.choices).names)

    @property
    def soft(self) -> bool:
        return self.choices.policy.deletes == "soft"

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
        """What `_mark_all_others` does, to rows."""
        live, at = pc.invert(rows[DELETED]), self.held.truncated
        marks = {DELETED: pa.scalar(True)}
        marks |= {name: self.changes[source][at] for name, source in _STAMPS.items()}
        for number, field in enumerate(rows.schema):
            if field.name in marks:
                marked = pc.if_else(live, marks[field.name].cast(field.type), rows[field.name])
                rows = rows.set_column(number, field, marked)
        return rows

    def _mark_all_others(self, merger: Any) -> None:
        """TRUNCATE: rows that no later change concerns; those marked before keep the moment of their end."""
        at = self.held.truncated
        marks = {quote_identifier(DELETED): "true"}
        if self.choices.commit_lsn_column:
            marks[quote_identifier(COMMIT_LSN)] = str(self.changes["commit_lsn"][at].as_py())
        if self.choices.commit_ts_column:
            micros = self.changes["commit_ts"][at].cast(pa.int64()).as_py()
            marks[quote_identifier(COMMIT_TS)] = (
                f"arrow_cast({micros}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
            )
        merger.when_not_matched_by_source_update(marks, f"not t.{quote_identifier(DELETED)}")

    def values(self) -> Iterator[tuple[pa.Array, Bools | None]]:
        """Typed values by lake column, and where the value of the origin's row in the lake stays."""
        partitions, partition = self._partitions, None
        for typed in typed_columns(self.relation, self.choices):
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
        if self.choices.commit_lsn_column:
            yield take(array_of(self.changes, "commit_lsn", pa.int64()), self.held.since), None
        if self.choices.commit_ts_column:
            yield take(array_of(self.changes, "commit_ts", pa.timestamp("us", "UTC")), self.held.since), None
        if partition is not None:
            yield partition

    @property
    def _partitions(self) -> Partitioning | None:
        return partitioning(self.relation, self.choices)

    def _source(self, commit: SliceCommit) -> tuple[pa.Table, set[int]]:
        """Keys k…, values c…, u… where the value stays that the lake has under that key."""
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
            typed_column(column, self.relation.table, self.choices) for column in self.relation.key_columns
        ]

    def _check(self, metrics: dict[str, Any]) -> None:
        """A key that the lake holds twice is changed twice."""
        counts = np.bincount(self._kinds(), minlength=4).tolist()
        changed = metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]
        deleted = metrics["num_target_rows_deleted"]
        others = self.held.truncated >= 0 or changed == counts[_UPDATE] + counts[_PUT]
        if not others or not counts[_DELETE] <= deleted <= counts[_DELETE] + counts[_CLEAR]:
            raise LakeTableError(f"{self.relation.table}: the lake table holds a key twice")


class _LakeValues:
    """Values that a row takes along to another key: they are in the lake only, under the key it had there."""

    def __init__(self, keys: KeysCommit, commit: SliceCommit) -> None:
        self._keys = keys
        self._commit = commit
        self._rows: pa.Table | None = None
        self._row_of: Ints = np.empty(0, np.int64)

    def filled(self, name: str, values: pa.Array, where: Bools) -> pa.Array:
        """`values`, and where it is said those that the lake has in column `name`."""
        if self._rows is None:
            self._read()
        assert self._rows is not None
        rows = self._row_of[where]
        if bool((rows < 0).any()):
            raise LakeTableError(f"{self._keys.relation.table}: {MISSING}")
        return replaced(values, where, take(self._rows[name].combine_chunks(), rows))

    def _read(self) -> None:
        """The lake's rows under the keys from which rows have moved, with all their values."""
        held, typed = self._keys.held, self._keys._key_columns()
        moved = np.flatnonzero((held.origin >= 0) & (held.origin != held.code))
        origins = np.unique(held.origin[moved])
        wanted = pa.table(
            {key.name: key.parse(held.key_texts(number, origins)) for number, key in enumerate(typed)}
        )
        names = [column.name for column in typed_columns(self._keys.relation, self._keys.choices)]
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
