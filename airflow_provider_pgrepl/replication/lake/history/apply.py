"""Changes into a table that keeps its history: for each slice first what it ends, then the table itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, epoch_of, read_position
from airflow_provider_pgrepl.replication.lake.history.rows import ended_rows
from airflow_provider_pgrepl.replication.lake.history.table import append_versions, snapshot_app
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.merge import Applied, apply_changes, check_columns, slices
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import lake_schema


def apply_with_history(
    table: DeltaTable,
    history: DeltaTable,
    changes: pa.Table,
    relation: Relation,
    choices: TableChoices,
    app: str,
    lake_root: str,
    slice_bytes: int,
) -> Applied:
    """What `apply_changes` does, with the versions that end appended to the history, exactly once.

    Both handles must not be refreshed meanwhile. Raises what `apply_changes` does, and LakeTableError when
    the history is not one of this very table: it lacks changes that the table has, or a snapshot ended all
    versions and did not replace the table.
    """
    position = check_history(table, history, relation, app)
    # No version may be appended in other types than the table has.
    check_columns(table, lake_schema(relation, choices), relation)
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    changes = changes.slice(int(np.searchsorted(commit_lsn, int(position), side="right")))
    welcome = _before_refusal(changes, choices)
    applied = Applied(position, int(table.version()), 0, 0)
    for start, end in slices(changes.slice(0, welcome), slice_bytes):
        part = changes.slice(start, end - start).combine_chunks()
        _append(table, history, part, relation, choices, app, lake_root)
        applied = _sum(applied, apply_changes(table, part, relation, choices, app, slice_bytes))
    if welcome < len(changes):
        last = apply_changes(table, changes.slice(welcome), relation, choices, app, slice_bytes)
        applied = _sum(applied, last)
    return applied


def check_history(table: DeltaTable, history: DeltaTable, relation: Relation, app: str) -> LSN:
    """The table's position, which its history has reached. Raises LakeTableError."""
    position, reached = read_position(table, app), read_position(history, app)
    if position is None or reached is None:
        raise LakeTableError(f"{relation.table}: this epoch has no snapshot in the lake")
    if reached < position:
        raise LakeTableError(
            f"{relation.table}: its history ends at {reached}, the table is at {position}: history was off"
            " meanwhile, or its folder was put back"
        )
    if (app_version(history, snapshot_app(app)) or 0) > position:
        raise LakeTableError(
            f"{relation.table}: a snapshot ended all versions of its rows and did not replace them"
        )
    return position


def _before_refusal(changes: pa.Table, choices: TableChoices) -> int:
    """How many changes come before a transaction that the table's policy refuses: it must end no version."""
    if choices.policy.truncate != "error":
        return len(changes)
    first = pc.index(changes["op"], "T").as_py()
    if first < 0:
        return len(changes)
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    return int(np.searchsorted(commit_lsn, commit_lsn[first]))


def _append(
    table: DeltaTable,
    history: DeltaTable,
    part: pa.Table,
    relation: Relation,
    choices: TableChoices,
    app: str,
    lake_root: str,
) -> None:
    reached, position = read_position(history, app), LSN(part["commit_lsn"][-1].as_py())
    if reached is None or position <= reached:
        return
    rows = ended_rows(table, part, relation, choices, epoch_of(app), reached)
    commit_ts, version = part["commit_ts"][-1].as_py(), part["relation_version"][-1].as_py()
    marks = {RELATION_APP: version}
    append_versions(history, rows, relation.table, lake_root, app, position, commit_ts, marks)


def _sum(before: Applied, now: Applied) -> Applied:
    return Applied(now.position, now.version, before.changes + now.changes, before.commits + now.commits)
