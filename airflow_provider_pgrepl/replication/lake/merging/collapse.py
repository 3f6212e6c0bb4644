"""Collapse: changes of one relation → one final state per row, by the key that the row has in the lake.

The server sends old keys exactly as it stored them, so within a batch rows are followed by the text of
their keys; only what is left at the end is typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import IdentityError
from airflow_provider_pgrepl.replication.lake.merging import kernels
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import (
    ChangedRows,
    contradiction,
    read_changes,
)
from airflow_provider_pgrepl.replication.lake.merging.tuples import Bools, Ints, Tuples, take
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_INSERT = ord("I")
REASON = {
    kernels.KEY_HELD_TWICE: "gives a row a key that another row holds",
    kernels.ROW_MISSING: "changes a row that was deleted, or whose key had changed, before",
}


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
    _relation: Relation
    _keys: list[pa.Array]
    _new: Tuples
    _at: Ints
    _unsent: dict[int, Ints]

    def __len__(self) -> int:
        return len(self.origin)

    @property
    def only_inserts(self) -> bool:
        return bool((self.origin < 0).all())

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Texts of the key column `index` (counted among the key columns) for codes; -1 gives null."""
        return take(self._keys[index], codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Bools | None]:
        """Final texts of the column `index` for entries that are not deleted, and where to keep the lake's.

        The second is None when every value was sent.
        """
        column = self._relation.columns[index]
        if column.is_key:
            return self.key_texts(self._relation.key_columns.index(column), self.final[entries]), None
        rows = self._unsent[index][entries] if index in self._unsent else self._at[entries]
        texts = self._new.column(index, rows)
        keep = rows < 0
        return texts, keep if keep.any() else None


def collapse(changes: pa.Table, relation: Relation) -> Collapsed:
    """Collapse changelog rows of one relation, ops I U D T, in order (commit_lsn, ordinal).

    For deletes that take rows away and a TRUNCATE that empties the table; `held_keys` has the other policies.
    Raises DriftError when rows have another number of columns than the relation, LakeTableError when the
    changes contradict each other, IdentityError when they do not tell the row that they change.
    """
    read = read_changes(changes, relation)
    if not relation.key_columns:
        return _keyless(read, relation)
    keys, old_code, new_code = key_codes(relation, read)
    old_image, new_image = images(relation, read)
    unsent = read.unsent_beside_key(relation)
    status, at, entities, origin, final, last, source = kernels.replay(
        read.op, old_code, new_code, len(keys[0]), read.truncated,
        unsent.row, unsent.number, len(unsent.columns), old_image, new_image,
    )  # fmt: skip
    if status != kernels.OK:
        lsn = LSN(changes["commit_lsn"][int(read.places[at])].as_py())
        raise contradiction(relation, f"a change committed at {lsn} {REASON[status]}")
    stays = np.flatnonzero((origin[:entities] >= 0) | (final[:entities] >= 0))
    return Collapsed(
        overwrite=read.truncated,
        origin=origin[stays],
        final=final[stays],
        last=read.places[last[stays]],
        _relation=relation,
        _keys=keys,
        _new=read.new,
        _at=last[stays],
        _unsent={int(column): source[stays, number] for number, column in enumerate(unsent.columns)},
    )


def _keyless(read: ChangedRows, relation: Relation) -> Collapsed:
    if bool((read.op != _INSERT).any()):
        raise IdentityError(
            f"{relation.table}: rows were updated or deleted, but the table has no key",
            "it is listed under insert_only: give it a primary key, or resnapshot it after each such change",
        )
    rows = np.arange(len(read.op), dtype=np.int64)
    nowhere = np.full_like(rows, -1)
    return Collapsed(read.truncated, nowhere, rows, read.places, relation, [], read.new, rows, {})


def key_codes(relation: Relation, read: ChangedRows) -> tuple[list[pa.Array], Ints, Ints]:
    """Texts of the different keys by code, and the codes of each change's key before and after."""
    new, old = read.new, read.old
    texts = []
    for index, column in enumerate(relation.columns):
        if column.is_key:
            texts.append(pa.concat_arrays([read.after(index), old.column(index)]))
    if any(column.null_count for column in texts):
        raise IdentityError(
            f"{relation.table}: a change does not carry the key of its row",
            f"see to its replica identity, then {hints.resnapshot(relation.table)}",
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


def images(relation: Relation, read: ChangedRows) -> tuple[Hashes, Hashes]:
    """Hashes of the whole row before and after each change, if the replica identity is FULL, else none.

    Only such a table can have a deferrable key (PostgreSQL takes none as replica identity), and only
    there may two rows hold one key for a moment.
    """
    if relation.replica_identity != "f":
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    new, old = read.new, read.old
    after, before = new.hashes(), old.hashes()
    after[new.place[read.unsent_row], read.unsent_column] = before[
        old.place[read.unsent_row], read.unsent_column
    ]
    return _row_hashes(before, old.present), _row_hashes(after, new.present)


def _row_hashes(values: Hashes, present: Bools) -> Hashes:
    rows = np.zeros(len(values), np.uint64)
    for index in range(values.shape[1]):
        rows = (rows ^ values[:, index]) * np.uint64(0xFF51AFD7ED558CCD)
        rows ^= rows >> np.uint64(32)
    everywhere = np.zeros(len(present), np.uint64)
    everywhere[present] = rows
    return everywhere
