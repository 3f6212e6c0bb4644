"""The history of one table, as a Delta table: its location, its columns, and how it is created and appended
to.

It is written under the app id of its lake table, and always before it, so a history is never behind its
table. After a crash between the two commits it is ahead. The versions up to its position are then not
appended again.

The lake table has the version of each row that is valid now. The history has all versions that have ended.
Rows are only appended to it. A version is valid from the transaction that made it up to, but not including,
the one that ended it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import FencedError, LakeTableError
from airflow_provider_pgrepl.replication.delta.log import commit_token, committing
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    allow_timestamp_without_tz,
    commit_files,
    commit_properties,
    try_commit,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import settle_log
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_replaceable, table_marks
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot, create_table
from airflow_provider_pgrepl.replication.lake.delta.table import (
    CLOSED,
    FENCED_HINT,
    app_id,
    earlier_apps,
    missing_marks,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.storage.probe import doubt_of_absence
from airflow_provider_pgrepl.replication.values import typed_columns

HISTORY_SUFFIX = "~history"
"""The path of a table never ends like this: in such a path, `~` is followed by 2 hexadecimal digits, and `hi`
is not one."""
FROM_EPOCH, FROM_LSN, FROM_TS = "_pgrepl_from_epoch", "_pgrepl_from_lsn", "_pgrepl_from_ts"
TO_EPOCH, TO_LSN, TO_TS, TO_OP = "_pgrepl_to_epoch", "_pgrepl_to_lsn", "_pgrepl_to_ts", "_pgrepl_to_op"
TIME = pa.timestamp("us", "UTC")
LIFETIME = pa.schema(
    [
        (FROM_EPOCH, pa.int64()),
        (FROM_LSN, pa.int64()),
        (FROM_TS, TIME),
        (TO_EPOCH, pa.int64()),
        (TO_LSN, pa.int64()),
        (TO_TS, TIME),
        (TO_OP, pa.string()),
    ]
)
"""The lifetime of a version: `[from, to)` in the order of (epoch, LSN). `to_op` is what ended it: `U` a newer
version of the row, `D` its deletion, `T` TRUNCATE, `S` a snapshot that copied the table again."""
_KIND = "history"


def history_path(table: TableName) -> str:
    """Return the path of the history below the lake root."""
    return table.path + HISTORY_SUFFIX


def history_uri(lake_root: str, table: TableName) -> str:
    """Return the URI of a table's history."""
    return f"{lake_root}/{history_path(table)}"


def history_key(table: TableName) -> str:
    """Return the key of the history in a consistent point. No table has this key: a name with `~` is in
    quotes."""
    return str(table) + HISTORY_SUFFIX


def is_history(key: str) -> bool:
    """Return True if a key of a consistent point, or a path below the lake root, is that of a history."""
    return key.endswith(HISTORY_SUFFIX)


def path_of(key: str) -> str:
    """Return the path below the lake root for a key of a consistent point, which is a table or a history."""
    if is_history(key):
        return history_path(TableName.parse(key.removesuffix(HISTORY_SUFFIX)))
    return TableName.parse(key).path


def history_schema(relation: Relation, options: TableOptions) -> pa.Schema:
    """Return the columns of a new history of this table: the lake table's typed columns, then LIFETIME.

    Columns that the table gets later are added after these, and columns that it loses stay. Raises
    ConfigError.
    """
    fields = [pa.field(typed.name, typed.lake_type) for typed in typed_columns(relation, options)]
    return pa.schema([*fields, *LIFETIME])


def snapshot_app(app: str) -> str:
    """Return the app id whose version is the position of the last snapshot that ended all versions."""
    return f"{app}:snapshot"


def snapshot_marks(pipeline_name: str, epoch: Epoch, position: LSN) -> dict[str, int]:
    """Return the app ids for a commit in which a snapshot ends all versions, in addition to the epoch's own.
    Those of earlier epochs are closed."""
    older = dict.fromkeys(earlier_apps(pipeline_name, epoch), CLOSED)
    return {**older, snapshot_app(app_id(pipeline_name, epoch)): position}


def append_versions(
    history: DeltaTable,
    rows: Iterable[pa.Table],
    table: TableName,
    lake_root: str,
    app: str,
    position: LSN,
    commit_ts: datetime | None,
    marks: Mapping[str, int] | None = None,
) -> None:
    """Append versions, and advance the history to `position`, in one commit.

    `rows` have the LIFETIME columns and those of the table, in any order. Raises what `fenced` does, and what
    `rows` raises.
    """
    schema = pa.schema(history.schema().to_arrow())
    with ParquetFiles(lake_root, history_path(table), schema) as files:
        for some in rows:
            for batch in aligned(some, schema).to_batches():
                files.write(batch)
        written = files.finish()
    others = {**missing_marks(history), **(marks or {})}
    commit_files(history, app, position, written, commit_properties(app, position, _KIND, commit_ts, others))


def advance_history(
    history: DeltaTable,
    table: TableName,
    lake_root: str,
    app: str,
    position: LSN,
    commit_ts: datetime | None,
) -> None:
    """Advance the history to `position`, up to which no change has ended a version. Raises what `fenced`
    does."""
    if (read_position(history, app) or 0) < position:
        append_versions(history, (), table, lake_root, app, position, commit_ts)


def aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows with exactly the columns of the schema. A column that the rows lack is null."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def prepare_history(
    relation: Relation, pipeline: Pipeline, position: LSN, epoch: Epoch, exported_at: datetime
) -> None:
    """Create the history of a table that a snapshot is about to copy, or add the columns that it lacks.

    A new history begins with this snapshot, which therefore ends no version. If the first snapshot of the
    table failed, the empty history is created again: the settings may give its columns other types now.
    Raises ConfigError, LakeError, FencedError, and LakeTableError if a column has another type in the
    history.
    """
    uri = history_uri(pipeline.lake_root, relation.table)
    schema = history_schema(relation, pipeline.options(relation.table))
    check_replaceable(uri, pipeline.name)
    settle_log(uri, pipeline.name)
    if has_delta(uri):
        history = open_table(uri)
        if history.file_uris() or has_delta(f"{pipeline.lake_root}/{relation.table.path}"):
            add_columns(history, schema, relation.table)
        else:
            commit_snapshot(uri, schema, [], position, pipeline.name, epoch, exported_at)
        return
    app = app_id(pipeline.name, epoch)
    marks = {**snapshot_marks(pipeline.name, epoch, position), **table_marks(uri)}
    create_table(uri, schema, [], commit_properties(app, position, _KIND, exported_at, marks))


def check_not_hidden(lake_root: str, table: TableName) -> None:
    """Raise LakeTableError if consistent points name a history that is not found and may only be
    inaccessible."""
    uri = history_uri(lake_root, table)
    if not has_delta(uri) and (doubt := doubt_of_absence(uri)):
        raise LakeTableError(
            f"{table}: consistent points name its history, and it is not in {uri}: {doubt}",
            "mount the folder, give this process the right to read it, or restore it from a copy of this"
            " lake; then run the command again. If its log is lost, move the folder away and keep it: its"
            f" files hold the past versions. Then {errors.resnapshot(table)}",
        )


def add_columns(history: DeltaTable, schema: pa.Schema, table: TableName) -> None:
    """Add the columns that the history lacks, in a commit without data.

    Raises LakeTableError for a column that the history has with another type or letter case, FencedError if
    another process committed meanwhile.
    """
    wanted = Schema.from_arrow(schema).fields
    held = {field.name.casefold(): field for field in history.schema().fields}
    unlike, lacking = [], []
    for field in wanted:
        own = held.get(field.name.casefold())
        if own is None:
            lacking.append(Field(field.name, field.type, nullable=True))
        elif (own.name, own.type) != (field.name, field.type):
            unlike.append(quote_identifier(field.name))
    if unlike:
        raise LakeTableError(
            f"the history of {table} holds versions with another type or spelling of {', '.join(unlike)}",
            f"it is never rewritten: move {history.table_uri} away to keep it, then"
            f" {errors.resnapshot(table)}",
        )
    if lacking:
        allow_timestamp_without_tz(history, schema)
        before = history.version()
        properties = CommitProperties(custom_metadata=commit_token())

        def add() -> None:
            with committing(history, properties):
                history.alter.add_columns(lacking, commit_properties=properties)

        try_commit(history, add)
        if history.version() != before + 1:
            raise FencedError(f"{history.table_uri}: another process has written this table", FENCED_HINT)
