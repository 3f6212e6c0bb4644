"""What a crash of the machine left half written in a pipeline's own tables is set aside at the next start.

Of the changelog only what the slot was not told of: that comes again. A file that is not there although the
slot was told of its commit may only be out of sight, behind a mount or while a copy is under way. So may one
of the points or of the index of relations that a crash cannot have left so.
"""

from __future__ import annotations

from contextlib import closing, suppress

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import BusyError, LakeError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_durable_lsn_before
from airflow_provider_pgrepl.replication.changelog.relation_index import relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import find_torn_changelog
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.points import find_torn_points
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.slot.record import read_slot
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.storage.torn import Torn, find_torn_by_crash


def settle_lake(pipeline: Pipeline, dsn: str | None) -> None:
    """For who holds the lock of replication.

    `dsn`: the source, whose slot is asked first; None when a new epoch begins, for which nothing counts that
    the slot was told. Raises LakeError, LakeUnavailableError, SourceConnectionError.
    """
    changelog, *others = _find(pipeline)
    if changelog.commits and dsn is not None:
        _check_untold(pipeline, dsn, changelog)
    for torn in (changelog, *others):
        torn.set_aside()


def settle_idle_lake(store: Store, pipeline: Pipeline, dsn: str | None) -> None:
    """Likewise for who does not hold it: a replication app that runs has done it itself."""
    if not any(_find(pipeline)):
        return
    with suppress(BusyError):
        store.lock(pipeline.name, "replicate")
        try:
            settle_lake(pipeline, dsn)
        finally:
            store.unlock(pipeline.name, "replicate")


def _find(pipeline: Pipeline) -> list[Torn]:
    lake = pipeline.lake_root
    return [
        find_torn_changelog(changelog_uri(lake)),
        find_torn_points(lake),
        find_torn_by_crash(relations_uri(lake)),
    ]


def _check_untold(pipeline: Pipeline, dsn: str, torn: Torn) -> None:
    first = min(torn.commits)
    left = read_durable_lsn_before(torn.uri, first)
    with closing(connect(dsn, f"settle {pipeline.name}")) as connection:
        slot = read_slot(connection, pipeline.slot)
    if left is None or slot is None or (slot.confirmed_flush_lsn or 0) <= left:
        return
    raise LakeError(
        f"commit {first} of the changelog, or a file that it names, is not whole. Without it the changelog"
        f" ends at {left}, but the slot {pipeline.slot} was told {slot.confirmed_flush_lsn}. Nothing changed",
        "see that the lake's storage shows all its files (a mount, a copy that is still under way), and start"
        f" again; if they are lost, {hints.NEW_EPOCH}",
    )
