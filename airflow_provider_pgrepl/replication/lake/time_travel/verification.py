"""Detects DDL that left no trace in the stream and may have come before a point in time.

Some DDL makes the server send the same relation again: a column that was dropped and added again under its
name, or an ALTER TYPE with a USING clause that computes other values of the same type. It is found in the
catalog entry that is recorded when the relation is received again. Without an event trigger, its position
lies anywhere between that announcement and the previous one, or the last copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import STATUS_ORDINAL
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import judge
from airflow_provider_pgrepl.replication.lake.delta.live_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import SNAPSHOT_KINDS
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

from .moment import ChangelogFinder


class UnverifiedWarning(UserWarning):
    """The rows shown of a table may lack the effect of DDL, because its position relative to the point in
    time is not known."""


@dataclass(frozen=True)
class Unverified:
    """A table was altered at an unknown LSN above `above` and at or below `found`."""

    table: TableName
    above: LSN
    found: LSN

    def __str__(self) -> str:
        return (
            f"{self.table} was altered between {self.above} and {self.found}; whether that came before what"
            f" is read is not known"
        )


def find_unverified(relation: Relation, kept: ChangelogFinder, pipeline: Pipeline) -> Unverified | None:
    """Return the unsafe DDL that the next announcement of the table after the point in time shows, if its
    position is not known. Otherwise return None.

    `relation`: the effective one at the point in time.
    """
    moment = kept.moment
    mine = [record for record in kept.records if record.message.oid == relation.oid]
    # Such DDL is rare. For most tables the relation index alone rules it out.
    if not any(_is_hidden(relation, record, pipeline) for record in mine):
        return None
    received = _next_received(relation.oid, kept)
    if received is None:
        return None
    found, version = received
    record = kept.find_record(relation.oid, version)
    if record is None or not _is_hidden(relation, record, pipeline):
        return None
    known = kept.index.effective(moment.epoch, relation.oid, found)
    if known is not None and known[1].trigger and known[1].commit_lsn <= moment.lsn:
        # An event trigger was active the whole time, so that the position of the DDL is known.
        return None
    lake_table = open_table(f"{pipeline.lake_root}/{relation.table.path}")
    above = max(_last_announced(relation.oid, kept), _last_copied(lake_table, moment.lsn))
    return Unverified(relation.table, above, found)


def _is_hidden(relation: Relation, record: RelationRecord, pipeline: Pipeline) -> bool:
    """Return True if a received relation is an unsafe change of `relation`, and all or a part of that change
    does not show in the stream."""
    shape = RelationRecord.of_catalog(relation).message
    same = _columns(record.message.columns) == _columns(shape.columns)
    named = (record.message.schema, record.message.name) == (shape.schema, shape.name)
    same = same and named and record.message.replica_identity == shape.replica_identity
    hidden = same or (record.catalog is not None and _is_altered_alike(relation, record.catalog))
    return hidden and judge(relation, record, pipeline.options(relation.table)).kind is DriftKind.UNSAFE


def _columns(columns: tuple[WireColumn, ...]) -> list[tuple[str, int, int]]:
    return [(column.name, column.type_oid, column.typmod) for column in columns]


def _is_altered_alike(before: Relation, after: Relation) -> bool:
    """Return True if a column with the same name and type is another column, or was rewritten."""
    known = {(column.name, column.type_oid, column.typmod): column for column in before.columns}
    rewritten = before.relfilenode != after.relfilenode
    for column in after.columns:
        own = known.get((column.name, column.type_oid, column.typmod))
        if own and (own.attnum != column.attnum or (rewritten and own.xmin != column.xmin)):
            return True
    return False


def _announcements(rows: pa.Table) -> pa.Table:
    """Return the op R rows that the stream sent."""
    sent = pc.greater(rows["ordinal"], STATUS_ORDINAL)
    return rows.filter(pc.and_(pc.equal(rows["op"], "R"), sent))


def _next_received(relation_id: int, kept: ChangelogFinder) -> tuple[LSN, int] | None:
    """Return the LSN of the relation's first announcement after the point in time, and its version. None if
    there is none."""
    lsn = kept.moment.lsn
    for file in kept.files(relation_id, lsn):
        rows = kept.rows([file], relation_id, lsn)
        rows = _announcements(rows)
        if rows.num_rows:
            return LSN(rows["commit_lsn"][0].as_py()), rows["relation_version"][0].as_py()
    return None


def _last_announced(relation_id: int, kept: ChangelogFinder) -> LSN:
    """Return the LSN of the relation's last announcement up to the point in time. Returns the changelog's
    floor if there is none in the kept files."""
    upto = kept.moment.lsn
    for file in reversed(kept.files(relation_id, LSN(0), upto)):
        rows = kept.rows([file], relation_id, LSN(0), upto)
        rows = _announcements(rows)
        if rows.num_rows:
            return LSN(rows["commit_lsn"][-1].as_py())
    return kept.moment.floor_lsn


def _last_copied(table: DeltaTable, upto: LSN) -> LSN:
    """Return the position of the last copy at or before an LSN, or 0 if the table's log has none."""
    abouts = (json.loads(commit.get(COMMIT_METADATA) or "{}") for commit in table.history())
    copies = (LSN(about["position"]) for about in abouts if about.get("kind") in SNAPSHOT_KINDS)
    return max((copy for copy in copies if copy <= upto), default=LSN(0))
