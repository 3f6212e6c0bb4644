"""Which versions of rows some transactions ended, and where the values of each come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.history.kernels import end_versions
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.followed_rows import FollowedRows, follow
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints
from airflow_provider_pgrepl.replication.postgres.relation import Relation


@dataclass(frozen=True)
class EndedVersions:
    """The versions that a slice's transactions ended, one entry each, in the order in which they ended.

    `origin`: code of the key by which the lake has the row (as it was before the slice), -1: it has not.
    `made_by`, `ended_by`: a change of the transaction that made or ended the version; made by -1: the lake's.
    `ended_how`: the letters of LIFETIME's `to_op`. `maybe`: it was there only if the lake has it.
    `touched`: codes of the keys of all lake rows that some change met. `emptied_by`: a change of the first
    transaction that truncated the table, and so ended every lake row not among these; -1: none did.
    """

    origin: Ints
    made_by: Ints
    ended_by: Ints
    ended_how: pa.Array
    maybe: Bools
    touched: Ints
    emptied_by: int
    _followed: FollowedRows
    _code: Ints
    _version: Ints

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Texts of the key column `index` (counted among the key columns) for codes."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Ints]:
        """Texts of the column `index` for those of the entries whose value is known, and which these are.

        The others have the value of the lake's row.
        """
        texts, in_lake = self._followed.texts(index, self._version[entries], self._code[entries])
        known = np.flatnonzero(~in_lake)
        return texts if len(known) == len(texts) else texts.take(pa.array(known)), known

    def needs_lake(self, entries: Ints) -> Bools:
        """Whether a value or the beginning of an entry is the lake's."""
        return self._followed.needs_lake(self._version[entries])


def ended_versions(changes: pa.Table, relation: Relation, *, ignoring: bool = False) -> EndedVersions:
    """The versions that changelog rows of one relation with a key end: ops I U D T, whole transactions, in
    order. `ignoring`: TRUNCATE is passed over, and rows stay until another one has their key.

    Raises DriftError, LakeTableError (the changes contradict each other).
    """
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    transaction = np.cumsum(np.diff(commit_lsn, prepend=commit_lsn[:1]) != 0)
    ends = np.append(np.flatnonzero(np.diff(transaction)), len(changes) - 1)
    followed = follow(changes, relation, whole=True)
    read, lake_codes = followed.read, followed.origin
    origin, code, version, ended_in, how, maybe, emptied_in = end_versions(
        read.op, followed.new_code, followed.codes, transaction[read.places], followed.row, lake_codes,
        read.truncates, transaction[read.truncate_places], ignoring,
    )  # fmt: skip
    return EndedVersions(
        origin=origin,
        made_by=np.where(version < 0, -1, read.places[version]) if len(read.places) else version,
        ended_by=ends[ended_in],
        ended_how=pa.array(how.view("S1").astype("U1"), pa.string()),
        maybe=maybe,
        touched=lake_codes[lake_codes >= 0],
        emptied_by=int(ends[emptied_in]) if emptied_in >= 0 else -1,
        _followed=followed,
        _code=code,
        _version=version,
    )
