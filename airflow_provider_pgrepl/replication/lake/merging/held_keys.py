"""What the lake is to hold under each key that changes touched, where deleted or truncated rows may stay.

`collapse` is enough where the lake holds exactly the source's rows. With soft deletes, or a TRUNCATE that is
passed over, a row stays under its key until another takes it, and then it counts which rows were ever to be
seen: what one transaction inserts and deletes leaves nothing, what two do leaves a mark. Nothing here depends
on how changes are cut into batches, as long as no transaction is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.choices import Truncate
from airflow_provider_pgrepl.replication.lake.merging import kernels
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import (
    array_of,
    contradiction,
    read_changes,
)
from airflow_provider_pgrepl.replication.lake.merging.collapse import REASON, images, key_codes
from airflow_provider_pgrepl.replication.lake.merging.key_kernel import replay_keys
from airflow_provider_pgrepl.replication.lake.merging.tuples import Bools, Ints, Tuples, take
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation


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
    _relation: Relation
    _keys: list[pa.Array]
    _new: Tuples
    _last: Ints
    _unsent: dict[int, Ints]

    def __len__(self) -> int:
        return len(self.code)

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Texts of the key column `index` (counted among the key columns) for codes; -1 gives null."""
        return take(self._keys[index], codes)

    def texts(self, index: int) -> tuple[pa.Array, Bools]:
        """Texts of the column `index`, and where instead the value of the origin's row in the lake stays."""
        column = self._relation.columns[index]
        if column.is_key:
            texts = self.key_texts(self._relation.key_columns.index(column), self.code)
            return texts, np.zeros(len(self), np.bool_)
        rows = self._unsent.get(index, self._last)
        return self._new.column(index, rows), rows < 0


def held_keys(changes: pa.Table, relation: Relation, truncate: Truncate) -> HeldKeys:
    """Follow changelog rows of one relation with a key, ops I U D T, in order (commit_lsn, ordinal).

    `truncate` is `apply` or `ignore`. Raises DriftError when rows have another number of columns than the
    relation, LakeTableError when the changes contradict each other.
    """
    read = read_changes(changes, relation, whole=True)
    keys, old_code, new_code = key_codes(relation, read)
    old_image, new_image = images(relation, read)
    unsent = read.unsent_beside_key(relation)
    commit = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    status, at, row, gone, since, in_lake, origin, last, source = replay_keys(
        read.op, old_code, new_code, len(keys[0]), commit[read.places], read.places,
        read.truncates, commit[read.truncate_places], read.truncate_places, truncate == "ignore",
        unsent.row, unsent.number, len(unsent.columns), old_image, new_image,
    )  # fmt: skip
    if status != kernels.OK:
        lsn = LSN(commit[read.places[at]])
        raise contradiction(relation, f"a change committed at {lsn} {REASON[status]}")
    code = np.flatnonzero(row >= 0)
    record = row[code]
    return HeldKeys(
        truncated=int(read.truncate_places[0]) if read.truncated and truncate == "apply" else -1,
        code=code,
        gone=gone[code],
        since=since[code],
        in_lake=in_lake[code],
        origin=origin[record],
        _relation=relation,
        _keys=keys,
        _new=read.new,
        _last=last[record],
        _unsent={int(column): source[record, number] for number, column in enumerate(unsent.columns)},
    )
