"""Appends to a table's history: versions that changes end, and those that a snapshot ends, which are all open
ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import check_ours
from airflow_provider_pgrepl.replication.lake.delta.table import (
    CLOSED,
    RELATION_APP,
    app_id,
    epoch_of,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.merge import Applied, apply_changes, check_columns, slices
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableOptions
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED, lake_schema

from . import table as layout
from .table import add_columns, append_versions, history_uri, snapshot_app, snapshot_marks
from .versions import closed, current_rows, ended_rows

_BOOKKEEPING = (COMMIT_LSN, COMMIT_TS, DELETED, PARTITION)


def apply_with_history(
    table: DeltaTable,
    history: DeltaTable,
    changes: pa.Table,
    relation: Relation,
    options: TableOptions,
    app: str,
    lake_root: str,
    slice_bytes: int,
) -> Applied:
    """Apply changes as `apply_changes` does, and append the versions that they end to the history, exactly
    once.

    Neither handle may be refreshed meanwhile. Raises what `apply_changes` does, and LakeTableError if the
    history does not match the table: it lacks changes that the table has, or a snapshot ended all versions
    and did not replace the table.
    """
    position = check_history(table, history, relation, app)
    # Versions must have the types of the table, so check these before anything is appended.
    check_columns(table, lake_schema(relation, options), relation)
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    changes = changes.slice(int(np.searchsorted(commit_lsn, int(position), side="right")))
    welcome = _before_refusal(changes, options)
    applied = Applied(position, int(table.version()), 0, 0)
    for start, end in slices(changes.slice(0, welcome), slice_bytes):
        part = changes.slice(start, end - start).combine_chunks()
        _append(table, history, part, relation, options, app, lake_root)
        applied = _sum(applied, apply_changes(table, part, relation, options, app, slice_bytes))
    if welcome < len(changes):
        last = apply_changes(table, changes.slice(welcome), relation, options, app, slice_bytes)
        applied = _sum(applied, last)
    return applied


def check_history(table: DeltaTable, history: DeltaTable, relation: Relation, app: str) -> LSN:
    """Return the table's position. Raises LakeTableError if its history has not reached it, or has versions
    that a later snapshot ended."""
    position, reached = read_position(table, app), read_position(history, app)
    if position is None or reached is None:
        raise LakeTableError(f"{relation.table}: its lake table was not copied in the current epoch")
    if reached < position:
        raise LakeTableError(
            f"{relation.table}: its history ends at {reached}, the table is at {position}: history"
            " was turned off in between, or its folder was restored from a copy"
        )
    if (app_version(history, snapshot_app(app)) or 0) > position:
        raise LakeTableError(
            f"{relation.table}: a snapshot ended all versions of its rows and did not replace them"
        )
    return position


def _before_refusal(changes: pa.Table, options: TableOptions) -> int:
    """Return the number of changes before the first transaction that the table's settings reject. That
    transaction must end no version."""
    if options.policy.truncate != "error":
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
    options: TableOptions,
    app: str,
    lake_root: str,
) -> None:
    reached, position = read_position(history, app), LSN(part["commit_lsn"][-1].as_py())
    if reached is None or position <= reached:
        return
    rows = ended_rows(table, part, relation, options, epoch_of(app), reached)
    commit_ts, version = part["commit_ts"][-1].as_py(), part["relation_version"][-1].as_py()
    marks = {RELATION_APP: version}
    append_versions(history, rows, relation.table, lake_root, app, position, commit_ts, marks)


def _sum(before: Applied, now: Applied) -> Applied:
    return Applied(now.position, now.version, before.changes + now.changes, before.commits + now.commits)


def end_all_versions(
    relation: Relation, pipeline: Pipeline, position: LSN, epoch: Epoch, exported_at: datetime
) -> int:
    """Append the rows of the lake table to its history, as versions that the snapshot at `position` ended.
    Return the history's version after the commit.

    No version is ended twice: rows are skipped that an earlier snapshot ended without replacing the table, or
    that changes ended without reaching the table. Raises LakeError, LakeTableError, FencedError.
    """
    history = open_table(history_uri(pipeline.lake_root, relation.table))
    app = app_id(pipeline.name, epoch)
    older = [app_id(pipeline.name, Epoch(number)) for number in range(1, epoch)]
    check_ours(history, app, older, position)
    append_versions(
        history,
        _open_versions(history, relation, pipeline, position, epoch, exported_at),
        relation.table,
        pipeline.lake_root,
        app,
        position,
        exported_at,
        snapshot_marks(pipeline.name, epoch, position),
    )
    return int(history.version())


def _open_versions(
    history: DeltaTable,
    relation: Relation,
    pipeline: Pipeline,
    position: LSN,
    epoch: Epoch,
    exported_at: datetime,
) -> Iterator[pa.Table]:
    uri = f"{pipeline.lake_root}/{relation.table.path}"
    if not has_delta(uri):
        return
    table = open_table(uri)
    at = _newest(table, [app_id(pipeline.name, Epoch(number)) for number in range(1, epoch + 1)])
    ended = _newest(
        history, [snapshot_app(app_id(pipeline.name, Epoch(number))) for number in range(1, epoch + 1)]
    )
    if at is None or (ended is not None and ended > at):
        return
    names = _columns(table, history, relation)
    its_epoch, its_position = Epoch(at[0]), LSN(at[1])
    known = _ended_above(history, names, its_epoch, its_position, app_id(pipeline.name, its_epoch))
    for batch in current_rows(table, names):
        rows = batch if known is None else batch.filter(pa.array(match_rows(batch, known) < 0))
        to_lsn, to_ts = pa.scalar(int(position), pa.int64()), pa.scalar(exported_at, layout.TIME)
        yield closed(rows, its_epoch, epoch, to_lsn, to_ts, "S")


def _newest(table: DeltaTable, apps: Sequence[str]) -> tuple[int, int] | None:
    """Return the last epoch that wrote under its app id, and its position, or None. `apps`: the app ids of
    epochs 1, 2, … in this order."""
    for number in range(len(apps), 0, -1):
        version = app_version(table, apps[number - 1])
        if version is not None and version != CLOSED:
            return number, version
    return None


def _columns(table: DeltaTable, history: DeltaTable, relation: Relation) -> list[str]:
    """Return the lake table's columns without the soft-delete and partition columns. Adds those that the
    history lacks.

    The table may have the columns of an older relation. Raises LakeTableError if it lacks the bookkeeping
    columns.
    """
    held = pa.schema(table.schema().to_arrow())
    if not {COMMIT_LSN, COMMIT_TS} <= set(held.names):
        raise LakeTableError(
            f"{relation.table}: its lake table lacks commit_lsn_column or commit_ts_column, which its"
            " history needs",
            f"set both columns to on. Move {history.table_uri} away and keep it, then"
            f" {errors.resnapshot(relation.table)}: a new history begins",
        )
    add_columns(
        history, pa.schema([field for field in held if field.name not in _BOOKKEEPING]), relation.table
    )
    return [name for name in held.names if name not in (DELETED, PARTITION)]


def _ended_above(
    history: DeltaTable, names: Sequence[str], epoch: Epoch, position: LSN, app: str
) -> pa.Table | None:
    """Return versions that changes after `position` ended, as rows of the lake table, or None if there are
    none."""
    reached = app_version(history, app)
    if reached is None or reached <= position:
        return None
    lifetime = {COMMIT_LSN: layout.FROM_LSN, COMMIT_TS: layout.FROM_TS}
    condition = f"({layout.TO_EPOCH} = {int(epoch)}) and ({layout.TO_LSN} > {int(position)})"
    found = list(current_rows(history, [lifetime.get(name, name) for name in names], condition))
    return pa.concat_tables(found).rename_columns(list(names)) if found else None
