"""Comments of a lake table and its columns, where every reader of Delta finds them: in its metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema

from airflow_provider_pgrepl.replication.delta.log import can_commit, metadata_action
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_actions
from airflow_provider_pgrepl.replication.lake.delta.fenced_commit import commit_properties, fenced
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.catalog.comments import Comments

log = logging.getLogger(__name__)

# Delta leaves the metadata of a column to its writers (PROTOCOL.md of github.com/delta-io/delta); Spark
# has a column's comment there: org.apache.spark.sql.types.StructField.getComment.
_COMMENT = "comment"


def commented(schema: pa.Schema, comments: Mapping[str, str]) -> pa.Schema:
    """With the comments of its columns, as deltalake takes them over into a table's metadata."""
    about = {name: {_COMMENT: comment} for name, comment in comments.items()}
    return pa.schema([field.with_metadata(about.get(field.name)) for field in schema])


def commit_comments(table: DeltaTable, app: str, position: LSN, comments: Comments) -> None:
    """Have these and no others, in a commit of its own without data, unless it is so already.

    Raises what `fenced` does.
    """
    fields = [_told_of(field, comments.columns.get(field.name)) for field in table.schema().fields]
    is_told = (table.metadata().description or "") == comments.table
    if is_told and fields == table.schema().fields:
        return
    if not can_commit(table):
        log.warning(
            "%s keeps its description, and what comments it has: its protocol demands more of"
            " writers than this program does",
            table.table_uri,
        )
        return
    action = metadata_action(table, {}, Schema(fields))
    action["metaData"].pop("description", None)
    action["metaData"] |= {"description": comments.table} if comments.table else {}
    properties = commit_properties(app, position, "comments")
    fenced(table, app, position, lambda: commit_actions(table, "SET COMMENTS", properties, [action]))


def _told_of(field: Field, comment: str | None) -> Field:
    others = {key: value for key, value in field.metadata.items() if key != _COMMENT}
    wanted = {**others, _COMMENT: comment} if comment else others
    return field if wanted == field.metadata else Field(field.name, field.type, field.nullable, wanted)
