"""A snapshot replaces a table: all versions that its lake table holds end, before it is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import check_ours
from airflow_provider_pgrepl.replication.lake.delta.table import CLOSED, app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.history import columns as layout
from airflow_provider_pgrepl.replication.lake.history.place import history_uri
from airflow_provider_pgrepl.replication.lake.history.rows import closed, current_rows
from airflow_provider_pgrepl.replication.lake.history.table import (
    add_columns,
    append_versions,
    snapshot_app,
    snapshot_marks,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

_BOOKKEEPING = (COMMIT_LSN, COMMIT_TS, DELETED, PARTITION)


def end_all_versions(
    relation: Relation, pipeline: Pipeline, position: LSN, epoch: Epoch, exported_at: datetime
) -> int:
    """Append what the lake table holds now to its history, as ended by the snapshot at `position`; the
    history's version after it.

    Ends nothing twice: neither what a snapshot ended that never replaced the table, nor what changes did that
    never reached it. Raises LakeError, LakeTableError, FencedError.
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
    """The last epoch that wrote under one of the app ids, given in the order of epochs, and its position."""
    for number in range(len(apps), 0, -1):
        version = app_version(table, apps[number - 1])
        if version is not None and version != CLOSED:
            return number, version
    return None


def _columns(table: DeltaTable, history: DeltaTable, relation: Relation) -> list[str]:
    """The lake table's columns, all of which the history has or gets. They may be of an older relation."""
    held = pa.schema(table.schema().to_arrow())
    if not {COMMIT_LSN, COMMIT_TS} <= set(held.names):
        raise LakeTableError(
            f"{relation.table}: its rows do not say when they came to be, so their versions cannot be ended",
            f"history begins again with a snapshot once {history.table_uri} is moved away",
        )
    add_columns(
        history, pa.schema([field for field in held if field.name not in _BOOKKEEPING]), relation.table
    )
    return [name for name in held.names if name not in (DELETED, PARTITION)]


def _ended_above(
    history: DeltaTable, names: Sequence[str], epoch: Epoch, position: LSN, app: str
) -> pa.Table | None:
    """Versions that changes above the position ended, as rows of the lake table; None when none can have."""
    reached = app_version(history, app)
    if reached is None or reached <= position:
        return None
    lifetime = {COMMIT_LSN: layout.FROM_LSN, COMMIT_TS: layout.FROM_TS}
    condition = f"({layout.TO_EPOCH} = {int(epoch)}) and ({layout.TO_LSN} > {int(position)})"
    found = list(current_rows(history, [lifetime.get(name, name) for name in names], condition))
    return pa.concat_tables(found).rename_columns(list(names)) if found else None
