"""Tables without lake tables: recorded at a snapshot, after which the changelog has all of their changes."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.errors import PgReplError, TableError
from airflow_provider_pgrepl.replication.app.copy_states import CopyStates
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.point_files import ConsistentPoint
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import Copied
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.copy.keeper import Keeper
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.export import ExportedSnapshot
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState

log = logging.getLogger(__name__)


def record_tables(
    pipeline: Pipeline,
    store: Store,
    states: CopyStates,
    record: EpochRecord,
    keeper: Keeper,
    exported: ExportedSnapshot,
) -> Copied:
    """Record the keeper's tables, which are `snapshotting`, as of its snapshot; no row is read. One that the
    settings do not fit as it is now is errored. Raises LakeError, StateError."""
    # A commit at the consistent point itself is not in the snapshot.
    position = LSN(exported.consistent_point - 1)
    index = RelationIndex(relations_uri(pipeline.lake_root))
    watching = trigger.read_watching(keeper.connection, pipeline)
    place = None if watching is None else EffectiveFrom(position, watching)
    rules = BoundRules(pipeline, index.records, lambda: set(index.relation_ids()))
    found = Copied()
    # First: a table that is recorded is not taken again by whoever repeats this.
    _leave_lake(pipeline, record, position)
    for relation in (without_excluded_defaults(known, pipeline) for known in keeper.relations):
        if problems := list(rules.problems(relation)):
            error: PgReplError = TableError("\n".join(f"{relation.table}: {one}" for one in problems))
            states.mark_errored(relation.table, error)
            found.failed[relation.table] = error
            continue
        index.add(record.epoch, RelationRecord.of_catalog(relation), place)
        store.record_snapshot(pipeline.name, relation, position, 0, pipeline.to_json())
        store.set_state(pipeline.name, relation.table, TableState.CATCHING_UP)
        found.done[relation.table] = 0
        log.info("%s: the changelog has its changes after %s", relation.table, position)
    return found


def _leave_lake(pipeline: Pipeline, record: EpochRecord, position: LSN) -> None:
    """Where there were lake tables: a point that names none. Nobody is to read for current what stays as it
    is."""
    points = Points(pipeline.lake_root)
    newest = points.latest()
    if newest is not None and newest.tables:
        points.append(ConsistentPoint(record.epoch, position, None, {}, {}))
        log.warning(
            "lake_tables is none: the lake tables in %s stay as they are, and the newest consistent point"
            " names none of them any more",
            pipeline.lake_root,
        )
