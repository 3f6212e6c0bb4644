"""Which relation some changes obey, and where it stops to be the one that their lake table was built for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.state.drift import find_drift

FindRecord = Callable[[int], RelationRecord | None]
"""Gives the relation of a relation version."""

_OBEYING = ["I", "U", "D", "R"]


def find_first_drift(relation: Relation, rows: pa.Table, find_record: FindRecord) -> tuple[LSN, str] | None:
    """The commit LSN from which on the table is no longer what was recorded, and what changed.

    `rows` are changelog rows of the relation, op R among them, in order; of their columns commit_lsn, op and
    relation_version are used.
    """
    rows = rows.filter(pc.is_in(rows["op"], pa.array(_OBEYING)))
    versions, first = np.unique(rows["relation_version"].to_numpy(), return_index=True)
    lsns = rows["commit_lsn"].to_numpy()
    found = []
    for version, index in zip(versions.tolist(), first.tolist(), strict=True):
        if version == relation.version:
            continue
        record = find_record(version)
        reason = find_drift(relation, record) if record else "its definition is no longer in the changelog"
        if reason:
            found.append((LSN(lsns[index]), reason))
    return min(found, default=None)
