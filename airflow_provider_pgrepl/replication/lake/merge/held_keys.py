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

from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.followed_rows import FollowedRows, follow
from airflow_provider_pgrepl.replication.lake.merge.key_kernel import hold_keys
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import Truncate


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
