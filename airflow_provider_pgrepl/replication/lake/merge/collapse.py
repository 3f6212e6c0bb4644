"""Changes of one relation, each with the row that it changes, and the state that each row ends in.

The server sends old keys exactly as it stored them, so rows are followed by the texts of their keys; only
what is left at the end is typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import IdentityError
from airflow_provider_pgrepl.replication.lake.merge import kernels
from airflow_provider_pgrepl.replication.lake.merge.changes import (
    Bools,
    ChangedRows,
    Ints,
    array_of,
    contradiction,
    read_changes,
    take,
)
from airflow_provider_pgrepl.replication.lake.merge.kernels import INSERT, last_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_REASON = {
    kernels.KEY_HELD_TWICE: "gives a row a key that another row holds",
    kernels.ROW_MISSING: "changes a row that was deleted, or whose key had changed, before",
}


@dataclass(frozen=True)
class FollowedRows:
    """Changes, numbered as in `read`, and the rows that they change, numbered as they come.

    A version of a row is the number of the change that made it; -1 is the one that the lake has.
    By change: `row`, and `before`, the row's version before it (-1 also for the first of an inserted row).
    `new_code`: of the key that the change gives, -1: it deletes. `origin`, by row: code of the key by which
    the lake has it, -1: it was inserted. Codes are of keys, `codes` many.
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
        """Texts of the key column `index` (counted among the key columns) for codes; -1 gives null."""
        return take(self._keys[index], codes)

    def texts(self, index: int, versions: Ints, codes: Ints) -> tuple[pa.Array, Bools]:
        """Texts of the column `index` of versions that have these keys, and where the lake's value stays."""
        column = self.relation.columns[index]
        if column.is_key:
            texts = self.key_texts(self.relation.key_columns.index(column), codes)
            return texts, np.zeros(len(codes), np.bool_)
        sent_by = self._sent(index, versions)
        return self.read.new.column(index, sent_by), sent_by < 0

    def needs_lake(self, versions: Ints) -> Bools:
        """Where some value is the lake's."""
        needed: Bools = versions < 0
        for index in self._sent_by:
            needed |= self._sent(index, versions) < 0
        return needed

    def _sent(self, index: int, versions: Ints) -> Ints:
        """The changes that sent the column last."""
        if index not in self._sent_by:
            return versions
        return np.where(versions < 0, -1, self._sent_by[index][versions])


def follow(changes: pa.Table, relation: Relation, *, whole: bool = False) -> FollowedRows:
    """Follow the rows of changelog rows of one relation, ops I U D T, in order (commit_lsn, ordinal).

    Only those after the last TRUNCATE unless the `whole` is wanted. Raises DriftError when rows have another
    number of columns than the relation, LakeTableError when the changes contradict each other, IdentityError
    when they do not tell the row that they change.
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
    """By change a hash of the key that its row has, and of the one that it had before.

    Of changelog rows of a relation that has a key, without TRUNCATE. Raises what `read_changes` does."""
    read = read_changes(changes, relation)
    is_key = [column.is_key for column in relation.columns]
    before, after = _value_hashes(read)
    old = _row_hashes(before[:, is_key], read.old.present)
    new = _row_hashes(after[:, is_key], read.new.present)
    return np.where(read.new.present, new, old), np.where(read.old.present, old, new)


def each_its_own(read: ChangedRows, relation: Relation) -> FollowedRows:
    """The inserts of a table without a key: a row of its own, and a code, each."""
    rows = np.arange(len(read.op), dtype=np.int64)
    nowhere = np.full_like(rows, -1)
    return FollowedRows(relation, read, len(rows), rows, rows, nowhere, nowhere, [], {})


def _key_codes(relation: Relation, read: ChangedRows) -> tuple[list[pa.Array], Ints, Ints]:
    """Texts of the different keys by code, and the codes of each change's key before and after."""
    new, old = read.new, read.old
    texts = []
    for index, column in enumerate(relation.columns):
        if column.is_key:
            texts.append(pa.concat_arrays([read.after(index), old.column(index)]))
    if any(column.null_count for column in texts):
        raise IdentityError(
            f"{relation.table}: a change does not carry the key of its row",
            f"see to its replica identity, then {errors.resnapshot(relation.table)}",
        )
    codes, representative = _encode(texts)
    new_code = np.full(len(new.present), -1, np.int64)
    new_code[new.present] = codes[: new.count]
    old_code = new_code.copy()
    old_code[old.present] = codes[new.count :]
    return [column.take(pa.array(representative)) for column in texts], old_code, new_code


def _encode(texts: list[pa.Array]) -> tuple[Ints, Ints]:
    """A code for each different tuple of texts, from 0, and where each code stands first."""
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
    """Hashes of the whole row before and after each change, if the replica identity is FULL, else none.

    Only such a table can have a deferrable key (PostgreSQL takes none as replica identity), and only
    there may two rows hold one key for a moment.
    """
    if relation.replica_identity != "f":
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    before, after = _value_hashes(read)
    return _row_hashes(before, read.old.present), _row_hashes(after, read.new.present)


def _value_hashes(read: ChangedRows) -> tuple[Hashes, Hashes]:
    """Hashes of the values of rows before and after; those that were not sent are as before, if that was."""
    new, old = read.new, read.old
    after, before = new.hashes(), old.hashes()
    is_told = old.present[read.unchanged_row]
    row, column = read.unchanged_row[is_told], read.unchanged_column[is_told]
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
class Collapsed:
    """What a batch does to a table, one entry per row that it leaves changed.

    `overwrite`: the table was truncated; everything before counts no more, and no row has an origin.
    `origin`: code of the key by which the row is found in the lake, -1: it is not there (insert).
    `final`: code of the key it ends with, -1: deleted (then `origin` is not -1).
    `last`: index of the change, among those given, which made the final state.
    Codes index into `key_texts(i, codes)`.
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
        """Texts of the key column `index` (counted among the key columns) for codes; -1 gives null."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Bools | None]:
        """Final texts of the column `index` for entries that are not deleted, and where to keep the lake's.

        The second is None when every value was sent.
        """
        texts, keep = self._followed.texts(index, self._version[entries], self.final[entries])
        return texts, keep if keep.any() else None


def collapse(changes: pa.Table, relation: Relation) -> Collapsed:
    """Collapse changelog rows of one relation, ops I U D T, in order (commit_lsn, ordinal).

    For deletes that take rows away and a TRUNCATE that empties the table; `held_keys` has the other policies.
    Raises DriftError when rows have another number of columns than the relation, LakeTableError when the
    changes contradict each other, IdentityError when they do not tell the row that they change.
    """
    followed = follow(changes, relation) if relation.key_columns else _keyless(changes, relation)
    read, codes = followed.read, followed.codes
    last = last_changes(read.op, followed.new_code, codes, followed.row, followed.origin)
    final = followed.new_code[last]
    stays = np.flatnonzero((last >= 0) & ((followed.origin >= 0) | (final >= 0)))
    version = last[stays]
    return Collapsed(
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
            "it is listed under insert_only: give it a primary key, or resnapshot it after each such change",
        )
    return each_its_own(read, relation)
