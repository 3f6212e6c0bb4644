"""TableOutcomes: what becomes of a table when a merge of it has ended, here and in what is recorded."""

from __future__ import annotations

import logging
import time

from airflow_provider_pgrepl.replication.lake.apply.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.lake.apply.catch_up_planner import CatchUpPlanner, snapshot_of
from airflow_provider_pgrepl.replication.lake.apply.caught_up_tables import CaughtUpTable
from airflow_provider_pgrepl.replication.lake.apply.schedule import TableSchedule
from airflow_provider_pgrepl.replication.lake.apply.table_result import TableResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord

log = logging.getLogger(__name__)

ACTIVE = (TableState.CATCHING_UP, TableState.STREAMING)
"""States of tables to which changes are applied."""


class TableOutcomes:
    """Takes results, one by one."""

    def __init__(
        self,
        pipeline: str,
        store: Store,
        schedule: TableSchedule,
        planner: CatchUpPlanner,
        progress: ApplierProgress,
    ) -> None:
        self._pipeline = pipeline
        self._store = store
        self._schedule = schedule
        self._planner = planner
        self._progress = progress

    def take(self, result: TableResult, record: TableRecord | None) -> None:
        """`record`: the table as it is recorded now, None when no changes are applied to it any more.

        Raises the error that ends the pipeline, if it is one.
        """
        oid, job, now = result.relation_id, self._schedule.running[result.relation_id], time.monotonic()
        self._schedule.pace(oid).end(
            now,
            result.seconds,
            result.bytes_written,
            result.bytes_changed,
            listed=job.bytes,
            live=result.bytes_live,
        )
        caught_up = None
        if result.error is not None:
            self._mark_errored(record, job.snapshot, result)
        elif result.has_gone_back:
            log.warning("table %s has gone back to %s", job.work.relation.table, LSN(result.position))
        elif result.overtaken:
            log.warning("table %s: %s; trying again", job.work.relation.table, result.overtaken)
        else:
            self._progress.changes += result.changes
            if record is not None and result.relation is not None:
                # What the lake table itself says already, for people and for the sensor to see.
                relation = Relation.from_json(result.relation)
                self._store.record_relation(self._pipeline, relation, job.snapshot)
            if job.is_last:
                caught_up = CaughtUpTable(
                    job.snapshot,
                    job.through,
                    job.through,
                    result.version,
                    result.position,
                    result.history_version,
                    result.fingerprint,
                )
            else:
                self._planner.remember(oid, LSN(result.position), job.reach_lsn)
        failed = result.error is not None or result.has_gone_back or bool(result.overtaken)
        self._schedule.finish(oid, caught_up, now if failed else None)
        if caught_up is not None and record is not None and record.state is TableState.CATCHING_UP:
            self._move(record)

    def mark_errored(self, record: TableRecord, result: TableResult) -> None:
        """Of a table that cannot even be planned. Raises what `take` does."""
        self._mark_errored(record, snapshot_of(record), result)

    def _move(self, record: TableRecord) -> None:
        if self._store.move(self._pipeline, record, TableState.STREAMING):
            log.info("table %s has caught up", record.table)

    def _mark_errored(self, record: TableRecord | None, snapshot: LSN, result: TableResult) -> None:
        """A table's own trouble stays its own; any other ends us, unless the table left meanwhile.

        A copy that was replaced meanwhile may have refused what we had for it: the new one is looked at next.
        """
        if record is None:
            return
        now = self._store.read_tables(self._pipeline).get(record.table)
        if now is None or now.state not in ACTIVE or snapshot_of(now) != snapshot:
            return
        error = result.to_error(record.table)
        if result.stops_pipeline:
            if error.trace:
                log.error("table %s stops the pipeline, by %s", record.table, error.trace)
            raise error
        log.error("table %s stops: %s\n  hint: %s", record.table, error.message, error.hint)
        if error.trace:
            log.error("table %s stopped by an unexpected %s", record.table, error.trace)
        lsn = LSN(result.error_lsn) if result.error_lsn else None
        if not self._store.mark_errored(self._pipeline, now, error, lsn):
            log.info("table %s was changed by somebody else meanwhile", record.table)
