"""The parts of a pipeline without its apps: slot, changelog, lake tables and receiver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import keep
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from benchmarks import measuring
from benchmarks.store import lake_uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.01


def make_pipeline(folder: Path, name: str, *tables: str, **options: Any) -> Pipeline:
    """Return a pipeline with default settings except for the names and `options`."""
    return Pipeline(name=name, lake=lake_uri(folder, name), tables=tables, **options)


def publish(dsn: str, pipeline: Pipeline) -> None:
    """Create the pipeline's publication of its tables."""
    with closing(connect(dsn, "benchmark")) as source:
        publication.create_publication(source, pipeline.publication, resolve_tables(source, pipeline))


def begin_changelog(dsn: str, pipeline: Pipeline, consistent_point: LSN) -> EpochRecord:
    """Create an empty changelog that continues from the slot's position. Returns its epoch record."""
    with closing(connect(dsn, "benchmark")) as source:
        server = read_server(source)
        found = publication.read_publication(source, pipeline.publication)
    assert found is not None
    record = EpochRecord(
        pipeline.name,
        Epoch(1),
        server.system_identifier,
        server.timeline,
        pipeline.slot,
        pipeline.publication,
        found.oid,
        consistent_point,
    )
    create_changelog(changelog_uri(pipeline.lake_root), record)
    return record


def take_snapshot(spark: SparkSession, dsn: str, pipeline: Pipeline, state_db: StateDatabase) -> EpochRecord:
    """Create the slot and the changelog, and copy all tables. The publication must exist.

    Returns the epoch record. Raises RuntimeError if a table cannot be copied.
    """
    with closing(connect(dsn, "benchmark")) as source:
        relations = resolve_tables(source, pipeline)
        identifier = read_server(source).system_identifier
    state_db.register(pipeline, identifier, slot_owned=True, publication_owned=True)
    with (
        create_slot(dsn, pipeline.slot, timeout_s=60) as exported,
        keep(dsn, exported.snapshot, relations, pipeline.publication, 10) as keeper,
    ):
        exported.close()
        record = begin_changelog(dsn, pipeline, exported.consistent_point)
        for relation in keeper.relations:
            for state in (TableState.PENDING, TableState.SNAPSHOTTING):
                state_db.set_state(pipeline.name, relation.table, state)
        failed = SnapshotCopy(spark, dsn, pipeline, state_db, record, keeper, exported).run().failed
    if failed:
        raise RuntimeError(f"errored: {failed}")
    return record


@contextmanager
def receiving(dsn: str, pipeline: Pipeline) -> Iterator[Receiver]:
    """Run a receiver in this process until the end of the block."""
    receiver = Receiver(dsn, pipeline)
    receiver.start()
    try:
        with measuring.recorded(
            dsn, pipeline, lambda: receiver.progress, request_keepalive=receiver.request_keepalive
        ):
            yield receiver
    finally:
        receiver.stop()


def wait_received(receiver: Receiver, lsn: LSN, timeout_s: float = 300) -> None:
    """Wait until everything up to an LSN is durable in the changelog. Raises the receiver's error."""
    deadline = time.monotonic() + timeout_s
    while receiver.progress.seen_lsn < lsn:
        if receiver.error is not None:
            raise receiver.error
        if time.monotonic() > deadline:
            raise TimeoutError(f"the receiver is at {receiver.progress.seen_lsn}, not at {lsn}")
        time.sleep(_POLL_S)
