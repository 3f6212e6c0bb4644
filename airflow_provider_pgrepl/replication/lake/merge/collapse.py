"""Collapse: changes of one relation → one final state per row, by the key that the row has in the lake."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import IdentityError
from airflow_provider_pgrepl.replication.lake.merge.changes import read_changes
from airflow_provider_pgrepl.replication.lake.merge.followed_rows import FollowedRows, each_its_own, follow
from airflow_provider_pgrepl.replication.lake.merge.kernels import INSERT, last_changes
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints
from airflow_provider_pgrepl.replication.postgres.relation import Relation


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
