"""Whether the catalog was seen after a moment: what DDL left no trace in the stream may have come before it.

Some DDL sends a table's relation again just as it was: a column dropped and added again under its name, an
ALTER TYPE whose USING clause makes other values of the same type. It is found by what the catalog says when
the relation is next received. Without an event trigger its place lies anywhere between that announcement and
the one before, or the copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.changelog.layout import STANDING_ORDINAL
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.judge import judge
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.lake.delta.live_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.time_travel.moment import KeptChanges
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


class UnverifiedWarning(UserWarning):
    """What is shown of a table may lack what DDL did to it: whether that came before is not known."""


@dataclass(frozen=True)
class Unverified:
    """Somewhere above one LSN, and at the latest at another, the table was altered unseen."""

    table: TableName
    above: LSN
    found: LSN

    def __str__(self) -> str:
        return (
            f"{self.table} was altered between {self.above} and {self.found}; whether that came before what"
            f" is read is not known"
        )


def find_unverified(relation: Relation, kept: KeptChanges, pipeline: Pipeline) -> Unverified | None:
    """Whether the next that is known of the table, above the moment, is unsafe DDL of no known place.

    `relation` is the effective one.
    """
    moment = kept.moment
    mine = [record for record in kept.records if record.message.oid == relation.oid]
    # Few have any such DDL: most are told from the index alone.
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
        # An event trigger watched all the time: the place is that of the DDL.
        return None
    lake_table = open_table(f"{pipeline.lake_root}/{relation.table.path}")
    above = max(_last_announced(relation.oid, kept), _last_copied(lake_table, moment.lsn))
    return Unverified(relation.table, above, found)


def _is_hidden(relation: Relation, record: RelationRecord, pipeline: Pipeline) -> bool:
    """Whether what is unsafe in a received relation, or a part of it, does not show in the stream."""
    shape = RelationRecord.of_catalog(relation).message
    same = _columns(record.message.columns) == _columns(shape.columns)
    named = (record.message.schema, record.message.name) == (shape.schema, shape.name)
    same = same and named and record.message.replica_identity == shape.replica_identity
    hidden = same or (record.catalog is not None and _is_altered_alike(relation, record.catalog))
    return hidden and judge(relation, record, pipeline.choices(relation.table)).kind is Kind.UNSAFE


def _columns(columns: tuple[WireColumn, ...]) -> list[tuple[str, int, int]]:
    return [(column.name, column.type_oid, column.typmod) for column in columns]


def _is_altered_alike(before: Relation, after: Relation) -> bool:
    """Whether a column that looks the same is another one, or was rewritten."""
    known = {(column.name, column.type_oid, column.typmod): column for column in before.columns}
    rewritten = before.relfilenode != after.relfilenode
    for column in after.columns:
        own = known.get((column.name, column.type_oid, column.typmod))
        if own and (own.attnum != column.attnum or (rewritten and own.xmin != column.xmin)):
            return True
    return False


def _announcements(rows: pa.Table) -> pa.Table:
    """Those of the stream."""
    sent = pc.greater(rows["ordinal"], STANDING_ORDINAL)
    return rows.filter(pc.and_(pc.equal(rows["op"], "R"), sent))


def _next_received(relation_id: int, kept: KeptChanges) -> tuple[LSN, int] | None:
    """Where a relation is received first above the moment, and under which version."""
    lsn = kept.moment.lsn
    for file in kept.files(relation_id, lsn):
        rows = kept.rows([file], relation_id, lsn)
        rows = _announcements(rows)
        if rows.num_rows:
            return LSN(rows["commit_lsn"][0].as_py()), rows["relation_version"][0].as_py()
    return None


def _last_announced(relation_id: int, kept: KeptChanges) -> LSN:
    """Where it was received last, up to the moment; the changelog's floor when that is not kept."""
    upto = kept.moment.lsn
    for file in reversed(kept.files(relation_id, LSN(0), upto)):
        rows = kept.rows([file], relation_id, LSN(0), upto)
        rows = _announcements(rows)
        if rows.num_rows:
            return LSN(rows["commit_lsn"][-1].as_py())
    return kept.moment.floor_lsn


def _last_copied(table: DeltaTable, upto: LSN) -> LSN:
    """The position of the last copy at or before an LSN; 0 when the log does not reach back to it."""
    abouts = (json.loads(commit.get(COMMIT_METADATA) or "{}") for commit in table.history())
    copies = (LSN(about["position"]) for about in abouts if about.get("kind") == "snapshot")
    return max((copy for copy in copies if copy <= upto), default=LSN(0))
