"""Which versions of rows some transactions ended, and where the values of each come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.history.kernels import follow_versions
from airflow_provider_pgrepl.replication.lake.merging import kernels
from airflow_provider_pgrepl.replication.lake.merging.changed_rows import (
    array_of,
    contradiction,
    read_changes,
)
from airflow_provider_pgrepl.replication.lake.merging.collapse import REASON, images, key_codes
from airflow_provider_pgrepl.replication.lake.merging.tuples import Bools, Ints, Tuples, take
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation


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
    _relation: Relation
    _keys: list[pa.Array]
    _new: Tuples
    _code: Ints
    _last: Ints
    _sent_by: dict[int, Ints]

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Texts of the key column `index` (counted among the key columns) for codes."""
        return take(self._keys[index], codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Ints]:
        """Texts of the column `index` for those of the entries whose value is known, and which these are.

        The others have the value of the lake's row.
        """
        column = self._relation.columns[index]
        if column.is_key:
            texts = self.key_texts(self._relation.key_columns.index(column), self._code[entries])
            return texts, np.arange(len(entries))
        rows = self._sent_by.get(index, self._last)[entries]
        sent = np.flatnonzero(rows >= 0)
        return self._new.column(index, rows[sent]), sent

    def needs_lake(self, entries: Ints) -> Bools:
        """Whether a value or the beginning of an entry is the lake's."""
        needed: Bools = self._last[entries] < 0
        for rows in self._sent_by.values():
            needed |= rows[entries] < 0
        return needed


def ended_versions(changes: pa.Table, relation: Relation, *, ignoring: bool = False) -> EndedVersions:
    """The versions that changelog rows of one relation with a key end: ops I U D T, whole transactions, in
    order. `ignoring`: TRUNCATE is passed over, and rows stay until another one has their key.

    Raises DriftError, LakeTableError (the changes contradict each other).
    """
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    transaction = np.cumsum(np.diff(commit_lsn, prepend=commit_lsn[:1]) != 0)
    ends = np.append(np.flatnonzero(np.diff(transaction)), len(changes) - 1)
    read = read_changes(changes, relation, whole=True)
    keys, old_code, new_code = key_codes(relation, read)
    old_image, new_image = images(relation, read)
    unsent = read.unsent_beside_key(relation)
    status, fault, origin, code, last, ended_in, how, sent_by, maybe, touched, emptied_in = follow_versions(
        read.op, old_code, new_code, len(keys[0]), transaction[read.places],
        read.truncates, transaction[read.truncate_places], ignoring,
        unsent.row, unsent.number, len(unsent.columns), old_image, new_image,
    )  # fmt: skip
    if status != kernels.OK:
        lsn = LSN(commit_lsn[read.places[fault]])
        raise contradiction(relation, f"a change committed at {lsn} {REASON[status]}")
    return EndedVersions(
        origin=origin,
        made_by=_places(read.places, last),
        ended_by=ends[ended_in],
        ended_how=pa.array(how.view("S1").astype("U1"), pa.string()),
        maybe=maybe,
        touched=touched,
        emptied_by=int(ends[emptied_in]) if emptied_in >= 0 else -1,
        _relation=relation,
        _keys=keys,
        _new=read.new,
        _code=code,
        _last=last,
        _sent_by={int(column): sent_by[:, number] for number, column in enumerate(unsent.columns)},
    )


def _places(places: Ints, rows: Ints) -> Ints:
    found = np.full(len(rows), -1, np.int64)
    found[rows >= 0] = places[rows[rows >= 0]]
    return found
