"""Collapse: changes of one relation → one final state per row, by the key that the row has in the lake.

The server sends old keys exactly as it stored them, so within a batch rows are followed by the text of
their keys; only what is left at the end is typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake import kernels
from airflow_provider_pgrepl.replication.lake.tuples import Bools, Ints, Tuples, take, unsent_pairs
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_INSERT, _UPDATE, _DELETE, _TRUNCATE = (ord(letter) for letter in "IUDT")
TEXTS = pa.large_list(pa.large_string())
_HINT = "take it anew: run the snapshot app with --tables"
_REASON = {
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
    _first: int
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
        rows = self._unsent[index][entries] if index in self._unsent else self.last[entries]
        texts = self._new.column(index, np.where(rows < 0, -1, rows - self._first))
        keep = rows < 0
        return texts, keep if keep.any() else None


def collapse(changes: pa.Table, relation: Relation) -> Collapsed:
    """Collapse changelog rows of one relation, ops I U D T, in order (commit_lsn, ordinal).

    Raises DriftError when rows have another number of columns than the relation, LakeTableError when the
    changes contradict each other, or change rows of a table without a key.
    """
    op = _ops(changes)
    truncates = np.flatnonzero(op == _TRUNCATE)
    first = int(truncates[-1]) + 1 if len(truncates) else 0
    changes, op = changes.slice(first), op[first:]
    width = len(relation.columns)
    new = Tuples(array_of(changes, "new", TEXTS), width, relation.table)
    old = Tuples(array_of(changes, "old", TEXTS), width, relation.table)
    _check_complete(op, new, old, relation)
    if not relation.key_columns:
        return _keyless(op, new, relation, first, overwrite=bool(len(truncates)))
    unsent_row, unsent_column = unsent_pairs(array_of(changes, "unchanged", pa.list_(pa.int16())))
    if bool((op[unsent_row] != _UPDATE).any() or (unsent_column >= width).any()):
        raise _contradiction(relation, "a change that is no update of its columns lacks values")
    keys, old_code, new_code = _key_codes(relation, new, old, unsent_row, unsent_column)
    old_image, new_image = _images(relation, op, new, old, unsent_row, unsent_column)
    is_key = np.array([column.is_key for column in relation.columns])
    beside_key = ~is_key[unsent_column]
    columns, numbers = np.unique(unsent_column[beside_key], return_inverse=True)
    status, at, entities, origin, final, last, source = kernels.replay(
        op, old_code, new_code, len(keys[0]), bool(len(truncates)),
        unsent_row[beside_key], numbers.astype(np.int64), len(columns), old_image, new_image,
    )  # fmt: skip
    if status != kernels.OK:
        lsn = LSN(changes["commit_lsn"][int(at)].as_py())
        raise _contradiction(relation, f"a change committed at {lsn} {_REASON[status]}")
    stays = np.flatnonzero((origin[:entities] >= 0) | (final[:entities] >= 0))
    return Collapsed(
        overwrite=bool(len(truncates)),
        origin=origin[stays],
        final=final[stays],
        last=last[stays] + first,
        _relation=relation,
        _keys=keys,
        _new=new,
        _first=first,
        _unsent={
            int(column): _shifted(source[stays, number], first) for number, column in enumerate(columns)
        },
    )


def _shifted(rows: Ints, first: int) -> Ints:
    return np.where(rows < 0, -1, rows + first)


def _contradiction(relation: Relation, what: str) -> LakeTableError:
    return LakeTableError(f"{relation.table}: the changelog is inconsistent: {what}", _HINT)


def array_of(changes: pa.Table, name: str, wanted: pa.DataType) -> pa.Array:
    """A column of the changelog as one array."""
    column = changes[name].combine_chunks() if changes[name].num_chunks != 1 else changes[name].chunk(0)
    return column if column.type == wanted else column.cast(wanted)


def _ops(changes: pa.Table) -> Bytes:
    """The ops as bytes: each is one letter, so the string array's data are they."""
    op = array_of(changes, "op", pa.string())
    if len(op) == 0:
        return np.empty(0, np.uint8)
    start = np.frombuffer(op.buffers()[1], np.int32)[op.offset]
    return np.frombuffer(op.buffers()[2], np.uint8)[start : start + len(op)]


def _check_complete(op: Bytes, new: Tuples, old: Tuples, relation: Relation) -> None:
    deletes = op == _DELETE
    if bool((~np.isin(op, (_INSERT, _UPDATE, _DELETE))).any()):
        raise _contradiction(relation, "it holds an operation that is none of a table")
    if bool((new.present == deletes).any()) or bool((~old.present[deletes]).any()):
        raise _contradiction(relation, "a change lacks its row")


def _keyless(op: Bytes, new: Tuples, relation: Relation, first: int, *, overwrite: bool) -> Collapsed:
    if bool((op != _INSERT).any()):
        raise LakeTableError(
            f"{relation.table}: rows were updated or deleted, but the table has no key",
            "it is listed under insert_only: give it a primary key, or take it anew after each such change",
        )
    rows = np.arange(len(op), dtype=np.int64)
    return Collapsed(overwrite, np.full_like(rows, -1), rows, rows + first, relation, [], new, first, {})


def _key_codes(
    relation: Relation, new: Tuples, old: Tuples, unsent_row: Ints, unsent_column: Ints
) -> tuple[list[pa.Array], Ints, Ints]:
    """Texts of the different keys by code, and the codes of each change's key before and after."""
    texts = []
    for index, column in enumerate(relation.columns):
        if column.is_key:
            after = _sent_or_old(index, new, old, unsent_row[unsent_column == index])
            texts.append(pa.concat_arrays([after, old.column(index)]))
    if any(column.null_count for column in texts):
        raise _contradiction(relation, "a change lacks its key")
    codes, representative = _encode(texts)
    new_code = np.full(len(new.present), -1, np.int64)
    new_code[new.present] = codes[: new.count]
    old_code = new_code.copy()
    old_code[old.present] = codes[new.count :]
    return [column.take(pa.array(representative)) for column in texts], old_code, new_code


def _sent_or_old(index: int, new: Tuples, old: Tuples, unsent: Ints) -> pa.Array:
    """A key column after each change: one stored outside its row may be unsent, and is then in `old`."""
    texts = new.column(index)
    if len(unsent) == 0:
        return texts
    mask = np.zeros(len(texts), np.bool_)
    mask[new.place[unsent]] = True
    before = old.column(index, np.where(old.present[unsent], unsent, -1))
    return pc.replace_with_mask(texts, pa.array(mask), before)


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


def _images(
    relation: Relation, op: Bytes, new: Tuples, old: Tuples, unsent_row: Ints, unsent_column: Ints
) -> tuple[Hashes, Hashes]:
    """Hashes of the whole row before and after each change, if the replica identity is FULL, else none.

    Only such a table can have a deferrable key (PostgreSQL takes none as replica identity), and only
    there may two rows hold one key for a moment.
    """
    if relation.replica_identity != "f":
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    if bool((~old.present[op != _INSERT]).any()):
        raise _contradiction(relation, "a change lacks the old row")
    after, before = new.hashes(), old.hashes()
    after[new.place[unsent_row], unsent_column] = before[old.place[unsent_row], unsent_column]
    return _row_hashes(before, old.present), _row_hashes(after, new.present)


def _row_hashes(values: Hashes, present: Bools) -> Hashes:
    rows = np.zeros(len(values), np.uint64)
    for index in range(values.shape[1]):
        rows = (rows ^ values[:, index]) * np.uint64(0xFF51AFD7ED558CCD)
        rows ^= rows >> np.uint64(32)
    everywhere = np.zeros(len(present), np.uint64)
    everywhere[present] = rows
    return everywhere
