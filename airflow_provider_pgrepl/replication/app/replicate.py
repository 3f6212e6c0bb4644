"""The replication app: runs the receiver, and the applier or the table watch, until stopped or caught up."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import NEW_EPOCH, ConfigError, PgReplError
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import (
    Address,
    check_client,
    metrics_address,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.failover import alter_failover
from airflow_provider_pgrepl.replication.source.preflight.check import check_role
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.recorded_events import EventKind
from airflow_provider_pgrepl.replication.storage.probe import check_store

from . import process, progress_writer
from .epoch import begun_epoch, check_lake_tables_setting, check_state, known_tables
from .evidence import check, record_evidence
from .process import of_replicate
from .reconnecting_database import open_reconnecting_database
from .recovery import index_recorded_tables, set_aside_torn_commits
from .replication import Replication
from .tables import file_differences

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.spark.session import LazySession

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the app and return its exit code."""
    return process.run("replicate", argv, of_replicate, _run)


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    metrics = metrics_address(arguments.metrics_port, arguments.metrics_host)
    with process.StopSignal() as stop:
        return replicate(pipeline, stop, arguments.until, arguments.publish, metrics=metrics)


def replicate(
    pipeline: Pipeline,
    stop: process.StopSignal,
    until: LSN | str | None = None,
    publisher: str | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    metrics: Address | None = None,
) -> int:
    """Replicate until it is time to end, or up to an LSN or `caught-up`, and return the exit code.

    Raises ConfigError, and the error that ends receiving, applying or publishing.

    :param publisher: the publisher that runs in this process, only for a pipeline without lake tables
    :param meanwhile: called repeatedly, only for a pipeline without lake tables
    :param metrics: host and port of a Prometheus endpoint
    """
    _check_publisher(pipeline, publisher)
    if metrics is not None:
        check_client()
    begin_compiling()
    dsn = process.source_dsn()
    role = f"replicate {pipeline.name}"
    with ExitStack() as stack:
        state_db = stack.enter_context(
            closing(open_reconnecting_database(process.state_dsn(), role, pipeline.reconnect_s, stop.wait))
        )
        state_db.lock(pipeline.name, "replicate")
        # Only now: a second app has ended before it.
        session = _session(pipeline, stack, stop)
        with _recorded_failure(state_db, pipeline):
            record = _check_begun(pipeline, state_db, dsn)
            # Record this process before Spark has started: until then `pgrepl status` would show the previous
            # process.
            state_db.write_progress(pipeline.name, holder=progress_writer.holder())
            state_db.record_run(pipeline.name, EventKind.STARTED)
            check_role(dsn, pipeline)
            alter_failover(dsn, pipeline.slot, pipeline.failover)
            target = _target(dsn, until)
            code = _replication(dsn, pipeline, state_db, record, stop, session, publisher, meanwhile).run(
                target, metrics
            )
        with suppress(PgReplError):
            state_db.record_run(pipeline.name, EventKind.STOPPED)
        return code


def _check_begun(pipeline: Pipeline, state_db: StateDatabase, dsn: str) -> EpochRecord:
    """Check that source, lake and state are the pipeline's, and return the record of its epoch.

    Brings the state and what this package keeps in the lake up to date.
    """
    check_store(pipeline.lake_root)
    # Check before torn commits are set aside, and again afterwards: the changelog may be unreadable before.
    set_aside_torn_commits(check(pipeline, state_db, dsn, lake_may_fail=True), dsn)
    evidence = check(pipeline, state_db, dsn)
    record = begun_epoch(state_db, pipeline)
    check_record(pipeline, record)
    check_state(state_db, pipeline, record)
    state_db.migrate()
    own_tables.check(pipeline.lake_root, known_tables(state_db, pipeline, record))
    record_evidence(state_db, evidence)
    records = state_db.read_tables(pipeline.name)
    check_lake_tables_setting(pipeline, records)
    for difference in file_differences(pipeline, records):
        log.warning("%s", difference)
    index_recorded_tables(pipeline, record, records.values())
    # Only now: `index_recorded_tables` may have recreated an index whose loss was accepted.
    own_tables.record(pipeline.lake_root)
    return record


def _session(pipeline: Pipeline, stack: ExitStack, stop: process.StopSignal) -> LazySession | None:
    """Return the run's Spark session, which `stack` stops; None without lake tables, when Spark need not be
    installed."""
    if not pipeline.has_lake_tables:
        return None
    from .lake_replication import session_of

    session = session_of(pipeline, stop)
    stack.callback(session.stop)
    return session


@contextmanager
def _recorded_failure(state_db: StateDatabase, pipeline: Pipeline) -> Iterator[None]:
    """Record the error with which the app ends, unless the state's record of this name is of another lake.

    If the state database is out of reach by then, only the error of the app is raised.
    """
    try:
        yield
    except PgReplError as error:
        with suppress(PgReplError):
            recorded = state_db.read_pipeline(pipeline.name)
            if recorded is not None and recorded.lake == pipeline.lake_root:
                state_db.record_run(pipeline.name, EventKind.FAILED, error)
        raise


def _replication(
    dsn: str,
    pipeline: Pipeline,
    state_db: StateDatabase,
    record: EpochRecord,
    stop: process.StopSignal,
    session: LazySession | None,
    publisher: str | None,
    meanwhile: Callable[[], None],
) -> Replication:
    # Each class imports modules that the other does not need.
    if session is not None:
        from .lake_replication import LakeReplication

        return LakeReplication(dsn, pipeline, state_db, record, stop, session)
    from .event_replication import EventReplication

    return EventReplication(dsn, pipeline, state_db, record, stop, publisher, meanwhile)


def _check_publisher(pipeline: Pipeline, publisher: str | None) -> None:
    if publisher is None:
        return
    if pipeline.has_lake_tables:
        raise ConfigError(
            "--publish: is only for pipelines with lake_tables none",
            f"start the publisher as another process: pgrepl publish FILE.json --publisher {publisher}",
        )
    pipeline.publisher(publisher)


def check_record(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raise ConfigError if the lake was begun with another slot or publication."""
    for field in ("slot", "publication"):
        begun, wanted = getattr(record, field), getattr(pipeline, field)
        if begun != wanted:
            raise ConfigError(
                f"{field}: the pipeline file has {wanted!r}, but this lake was begun with {begun!r}",
                f"set `{field}` to {begun!r} again: nothing is lost. To change it, {NEW_EPOCH}",
            )


def _target(dsn: str, until: LSN | str | None) -> LSN | None:
    if until is None or isinstance(until, LSN):
        return until
    with closing(connect(dsn, "catch-up target")) as connection:
        return wal_lsn(connection)
