"""SnapshotCopy: tables at one snapshot, range by range in Spark tasks, each table one commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.copy import WrittenFile, write_range
from airflow_provider_pgrepl.replication.lake.history.place import history_key, history_uri
from airflow_provider_pgrepl.replication.lake.history.snapshot import end_all_versions
from airflow_provider_pgrepl.replication.lake.history.table import prepare_history
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.table import commit_snapshot, open_table
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.slot import ExportedSnapshot
from airflow_provider_pgrepl.replication.source.snapshot import CopyRange, Keeper
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.values import lake_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_TABLES_AT_ONCE = 4
_RETRY_HINT = "mend it and run the snapshot app with --tables"


@dataclass(frozen=True)
class _Copied:
    """What a task has to say: the files, or the error, as data, so that no value travels in a traceback."""

    files: tuple[WrittenFile, ...] = ()
    error_kind: str = ""
    message: str = ""
    hint: str = ""


@dataclass(frozen=True)
class _Job:
    """A table's share of the snapshot, as it goes to the tasks."""

    dsn: str
    snapshot: str
    relation: Relation
    pipeline: Pipeline
    position: LSN
    exported_at: datetime

    def copy(self, copy_range: CopyRange) -> _Copied:
        try:
            files = write_range(
                self.dsn,
                self.snapshot,
                copy_range,
                self.relation,
                self.pipeline,
                self.position,
                self.exported_at,
            )
        except errors.PgReplError as error:
            return _Copied(error_kind=error.__class__.__name__, message=error.message, hint=error.hint)
        except Exception as error:
            # Its text may hold values of rows, so only its kind is told.
            return _Copied(error_kind="TableError", message=f"unexpected {error.__class__.__name__}")
        return _Copied(tuple(files))


class SnapshotCopy:
    """Copies the keeper's tables. A table in error does not keep the others from being copied."""

    def __init__(
        self,
        spark: SparkSession,
        dsn: str,
        pipeline: Pipeline,
        store: Store,
        record: EpochRecord,
        keeper: Keeper,
        exported: ExportedSnapshot,
    ) -> None:
        self._spark = spark
        self._dsn = dsn
        self._pipeline = pipeline
        self._store = store
        self._record = record
        self._keeper = keeper
        self._exported = exported
        # A commit at the consistent point itself is not in the snapshot.
        self._position = LSN(exported.consistent_point - 1)
        self._index = RelationIndex(relations_uri(pipeline.lake_root))
        self._index_lock = threading.Lock()
        self._versions: dict[str, int] = {}

    def run(self) -> list[str]:
        """Copy and commit; returns the tables that went into error. Raises what stops more than one table."""
        relations = self._keeper.relations
        self._announce(relations)
        failed = []
        with ThreadPoolExecutor(min(_TABLES_AT_ONCE, len(relations))) as pool:
            plans = [(relation, self._plan(relation)) for relation in relations]
            futures = {pool.submit(self._copy, relation, ranges): relation for relation, ranges in plans}
            for future in as_completed(futures):
                relation = futures[future]
                try:
                    rows = future.result()
                except errors.PgReplError as error:
                    if error.scope is not errors.Scope.TABLE:
                        pool.shutdown(cancel_futures=True)
                        raise
                    self._put_in_error(relation, error)
                    failed.append(str(relation.table))
                else:
                    self._store.record_snapshot(self._pipeline.name, relation, self._position, rows)
                    self._store.set_state(self._pipeline.name, relation.table, TableState.CATCHING_UP)
        return failed

    def write_point(self) -> None:
        """Record the copies as a consistent point: the first moment of an epoch that can be read.

        Only for the snapshot that begins it: from then on points are the replication app's.
        """
        if self._versions:
            position, epoch, exported_at = self._moment
            point = ConsistentPoint(epoch, position, exported_at, self._versions)
            Points(self._pipeline.lake_root).append(point)

    def _announce(self, relations: list[Relation]) -> None:
        records = self._store.read_tables(self._pipeline.name)
        for relation in relations:
            record = records.get(relation.table)
            if record is None or record.state is TableState.REMOVED:
                self._store.set_state(self._pipeline.name, relation.table, TableState.PENDING)
            elif record.state is TableState.PAUSED:
                self._store.set_state(self._pipeline.name, relation.table, TableState.CATCHING_UP)
            self._store.set_state(self._pipeline.name, relation.table, TableState.SNAPSHOTTING)

    @property
    def _moment(self) -> tuple[LSN, Epoch, datetime]:
        """Position, epoch and time that the rows are of."""
        return self._position, self._record.epoch, self._exported.exported_at

    def _plan(self, relation: Relation) -> list[CopyRange]:
        return self._keeper.plan(relation, self._pipeline.snapshot_range_bytes)

    def _copy(self, relation: Relation, ranges: list[CopyRange]) -> int:
        started = time.monotonic()
        keeps_history = self._pipeline.policy(relation.table).history
        if keeps_history:
            prepare_history(relation, self._pipeline, *self._moment)
        job = _Job(
            self._dsn,
            self._keeper.snapshot,
            relation,
            self._pipeline,
            self._position,
            self._exported.exported_at,
        )
        work: Callable[[CopyRange], _Copied] = job.copy
        outcomes = self._spark.sparkContext.parallelize(ranges, len(ranges)).map(work).collect()
        for outcome in outcomes:
            if outcome.error_kind:
                kind: type[errors.PgReplError] = getattr(errors, outcome.error_kind)
                raise kind(outcome.message, outcome.hint)
        self._keeper.check()
        files = [file for outcome in outcomes for file in outcome.files]
        record = RelationRecord.of_catalog(relation)
        with self._index_lock:
            self._index.add(self._record.epoch, record)
        if keeps_history:
            end_all_versions(relation, self._pipeline, *self._moment)
        self._versions[str(relation.table)] = commit_snapshot(
            f"{self._pipeline.lake_root}/{relation.table.path}",
            lake_schema(relation, self._pipeline),
            files,
            self._position,
            self._pipeline.name,
            self._record.epoch,
            self._exported.exported_at,
            record.version,
        )
        if keeps_history:
            history = open_table(history_uri(self._pipeline.lake_root, relation.table))
            self._versions[history_key(relation.table)] = history.version()
        rows = sum(file.rows for file in files)
        log.info("copied %s: %d rows in %.1f s", relation.table, rows, time.monotonic() - started)
        return int(rows)

    def _put_in_error(self, relation: Relation, error: errors.PgReplError) -> None:
        log.error("%s: %s", relation.table, error)
        self._store.set_state(
            self._pipeline.name,
            relation.table,
            TableState.ERRORED,
            reason=error.message,
            hint=error.hint or _RETRY_HINT,
            lsn=self._position,
        )
