"""Collapsing of changes of one relation: the row that each one changes, and the final state of each row.

The server sends old keys exactly as it stored them, so rows are followed by the text values of their keys.
Only the final values are converted to lake types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import IdentityError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation

from . import kernels
from .changes import Bools, ChangedRows, Ints, array_of, contradiction, read_changes, take
from .kernels import INSERT, last_changes

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_REASON = {
    kernels.KEY_HELD_TWICE: "gives a row a key that another row holds",
    kernels.ROW_MISSING: "changes a row that was deleted, or whose key had changed, before",
}


@dataclass(frozen=True)
class FollowedRows:
    """Changes, numbered as in `read`, and the rows that they change, numbered in order of their first change.

    A version of a row is the number of the change that made it; -1 is the version in the lake. Each of the
    `codes` different keys has a code from 0.

    For each change: `row`, and `before`, the row's version before it (-1 also for the insert of a row);
    `new_code`, the code of the key after it, or -1 for a delete. For each row: `origin`, the code of its key
    in the lake, or -1 if it was inserted.
    """

    relation: Relation
    read: ChangedRows
    codes: int
    new_code: Ints
    row: Ints
    before: Ints
    origin: Ints
    _keys: list[pa.Array]
    _sent_by: dict[int, Ints]

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Return the text values of the key column `index` (among the key columns) for codes; null for -1."""
        return take(self._keys[index], codes)

    def texts(self, index: int, versions: Ints, codes: Ints) -> tuple[pa.Array, Bools]:
        """Return the text values of the column `index` in `versions`, and where the lake's value is kept.

        `codes`: the keys of these versions.
        """
        column = self.relation.columns[index]
        if column.is_key:
            texts = self.key_texts(self.relation.key_columns.index(column), codes)
            return texts, np.zeros(len(codes), np.bool_)
        sent_by = self._sent(index, versions)
        return self.read.new.column(index, sent_by), sent_by < 0

    def needs_lake(self, versions: Ints) -> Bools:
        """Return True for each version of which at least one value is only in the lake."""
        needed: Bools = versions < 0
        for index in self._sent_by:
            needed |= self._sent(index, versions) < 0
        return needed

    def _sent(self, index: int, versions: Ints) -> Ints:
        """Return, for each version, the change that last sent the column; -1 if its value is the lake's."""
        if index not in self._sent_by:
            return versions
        return np.where(versions < 0, -1, self._sent_by[index][versions])


def follow(changes: pa.Table, relation: Relation, *, whole: bool = False) -> FollowedRows:
    """Find the row that each changelog row of one relation changes (ops I U D T).

    The changelog rows are ordered by (commit_lsn, ordinal). Follows all of them if `whole`, else those after
    the last TRUNCATE. Raises DriftError if rows have another number of columns than the relation,
    LakeTableError if the changes contradict each other, IdentityError if a change does not have the key of
    its row.
    """
    read = read_changes(changes, relation, whole=whole)
    keys, old_code, new_code = _key_codes(relation, read)
    old_image, new_image = _images(relation, read)
    commit = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    truncates = read.truncates if whole else np.zeros(int(read.truncated), np.int64)
    status, at, row, before, origin = kernels.follow_rows(
        read.op, old_code, new_code, len(keys[0]), commit[read.places], truncates, old_image, new_image
    )
    if status != kernels.OK:
        lsn = LSN(commit[read.places[at]])
        raise contradiction(relation, f"a change committed at {lsn} {_REASON[status]}")
    unchanged = read.unchanged_beside_key(relation)
    sent_by = {
        int(column): kernels.carry(before, unchanged.row[unchanged.number == number])
        for number, column in enumerate(unchanged.columns)
    }
    return FollowedRows(relation, read, len(keys[0]), new_code, row, before, origin, keys, sent_by)


def key_hashes(changes: pa.Table, relation: Relation) -> tuple[Hashes, Hashes]:
    """Return, for each change, a hash of the row's key after it, and one of the key before it.

    `changes`: changelog rows, without TRUNCATE, of a relation that has a key. Raises what `read_changes`
    does.
    """
    read = read_changes(changes, relation)
    is_key = [column.is_key for column in relation.columns]
    before, after = _value_hashes(read)
    old = _row_hashes(before[:, is_key], read.old.present)
    new = _row_hashes(after[:, is_key], read.new.present)
    return np.where(read.new.present, new, old), np.where(read.old.present, old, new)


def each_its_own(read: ChangedRows, relation: Relation) -> FollowedRows:
    """Return the inserts of a table without a key, each with its own row and its own code."""
    rows = np.arange(len(read.op), dtype=np.int64)
    nowhere = np.full_like(rows, -1)
    return FollowedRows(relation, read, len(rows), rows, rows, nowhere, nowhere, [], {})


def _key_codes(relation: Relation, read: ChangedRows) -> tuple[list[pa.Array], Ints, Ints]:
    """Return the text values of the different keys, by code, and the codes of each change's old and new key.

    Raises IdentityError if a change does not have the key of its row.
    """
    new, old = read.new, read.old
    texts = []
    for index, column in enumerate(relation.columns):
        if column.is_key:
            texts.append(pa.concat_arrays([read.after(index), old.column(index)]))
    if any(column.null_count for column in texts):
        raise IdentityError(
            f"{relation.table}: a change does not carry the key of its row",
            "give the table a primary key or REPLICA IDENTITY FULL, then"
            f" {errors.resnapshot(relation.table)}",
        )
    codes, representative = _encode(texts)
    new_code = np.full(len(new.present), -1, np.int64)
    new_code[new.present] = codes[: new.count]
    old_code = new_code.copy()
    old_code[old.present] = codes[new.count :]
    return [column.take(pa.array(representative)) for column in texts], old_code, new_code


def _encode(texts: list[pa.Array]) -> tuple[Ints, Ints]:
    """Return a code, from 0, for each row of text values, equal for equal rows, and each code's first row."""
    codes = np.zeros(len(texts[0]), np.int64)
    count = 1
    for column in texts:
        encoded = column.dictionary_encode()
        combined = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
        if count > 1:
            dense = pa.array(combined).dictionary_encode()
            codes, count = dense.indices.to_numpy().astype(np.int64), len(dense.dictionary)
        else:
            codes, count = combined, len(encoded.dictionary)
    representative = np.empty(count if len(codes) else 0, np.int64)
    representative[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return codes, representative


def _images(relation: Relation, read: ChangedRows) -> tuple[Hashes, Hashes]:
    """Return hashes of the whole row before and after each change; empty unless replica identity is FULL.

    Only a table with FULL can have a deferrable key, which PostgreSQL does not accept as replica identity.
    Only in such a table can two rows have the same key within a transaction.
    """
    if relation.replica_identity != "f":
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    before, after = _value_hashes(read)
    return _row_hashes(before, read.old.present), _row_hashes(after, read.new.present)


def _value_hashes(read: ChangedRows) -> tuple[Hashes, Hashes]:
    """Return hashes of the values of old and of new rows, by tuple and column.

    A value that was not sent has the hash of the value in the old row, if there is an old row.
    """
    new, old = read.new, read.old
    after, before = new.hashes(), old.hashes()
    is_present = old.present[read.unchanged_row]
    row, column = read.unchanged_row[is_present], read.unchanged_column[is_present]
    after[new.place[row], column] = before[old.place[row], column]
    return before, after


def _row_hashes(values: Hashes, present: Bools) -> Hashes:
    rows = np.zeros(len(values), np.uint64)
    for index in range(values.shape[1]):
        rows = (rows ^ values[:, index]) * np.uint64(0xFF51AFD7ED558CCD)
        rows ^= rows >> np.uint64(32)
    everywhere = np.zeros(len(present), np.uint64)
    everywhere[present] = rows
    return everywhere


@dataclass(frozen=True)
class NetChanges:
    """The effect of a batch on a table, with one entry for each row that differs at its end.

    `overwrite`: the table was truncated, so all earlier rows are gone and no row has an origin.
    `origin`: the code of the row's key in the lake; -1 if it is not there (insert).
    `final`: the code of the row's key at the end; -1 if it is deleted (then `origin` is not -1).
    `last`: the index, among the changes given, of the change that made the final state.
    `key_texts` maps codes to keys.
    """

    overwrite: bool
    origin: Ints
    final: Ints
    last: Ints
    _followed: FollowedRows
    _version: Ints

    def __len__(self) -> int:
        return len(self.origin)

    @property
    def only_inserts(self) -> bool:
        return bool((self.origin < 0).all())

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Return the text values of the key column `index` (among the key columns) for codes; null for -1."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Bools | None]:
        """Return the final text values of the column `index`, and where to keep the lake's value instead.

        `entries`: entries that are not deleted. The second result is None if every value was sent.
        """
        texts, keep = self._followed.texts(index, self._version[entries], self.final[entries])
        return texts, keep if keep.any() else None


def collapse(changes: pa.Table, relation: Relation) -> NetChanges:
    """Collapse changelog rows of one relation (ops I U D T) to the final states of its rows.

    The changelog rows are ordered by (commit_lsn, ordinal). This is for tables where a delete removes its row
    and a TRUNCATE empties the table; `held_keys` is for the other policies. Raises DriftError if rows have
    another number of columns than the relation, LakeTableError if the changes contradict each other,
    IdentityError if a change does not identify its row.
    """
    followed = follow(changes, relation) if relation.key_columns else _keyless(changes, relation)
    read, codes = followed.read, followed.codes
    last = last_changes(read.op, followed.new_code, codes, followed.row, followed.origin)
    final = followed.new_code[last]
    stays = np.flatnonzero((last >= 0) & ((followed.origin >= 0) | (final >= 0)))
    version = last[stays]
    return NetChanges(
        overwrite=read.truncated,
        origin=followed.origin[stays],
        final=final[stays],
        last=read.places[version],
        _followed=followed,
        _version=version,
    )


def _keyless(changes: pa.Table, relation: Relation) -> FollowedRows:
    read = read_changes(changes, relation)
    if bool((read.op != INSERT).any()):
        raise IdentityError(
            f"{relation.table}: rows were updated or deleted, but the table has no key",
            "it is listed under insert_only: give it a primary key, remove it from insert_only, and"
            f" {errors.resnapshot(relation.table)}. Without a key, resnapshot it after each such change",
        )
    return each_its_own(read, relation)
