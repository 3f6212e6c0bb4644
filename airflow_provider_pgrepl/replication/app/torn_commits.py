"""What a crash of the machine left half written in a pipeline's own tables is set aside at the next start."""

from __future__ import annotations

from contextlib import suppress

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import find_torn_changelog
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.points import find_torn_points
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.storage.torn import Torn, find_torn


def settle_lake(pipeline: Pipeline) -> None:
    """For who holds the lock of replication. Raises LakeError, LakeUnavailableError."""
    for torn in _find(pipeline):
        torn.set_aside()


def settle_idle_lake(store: Store, pipeline: Pipeline) -> None:
    """Likewise for who does not hold it: a replication app that runs has done it itself."""
    if not any(_find(pipeline)):
        return
    with suppress(BusyError):
        store.lock(pipeline.name, "replicate")
        try:
            settle_lake(pipeline)
        finally:
            store.unlock(pipeline.name, "replicate")


def _find(pipeline: Pipeline) -> list[Torn]:
    lake = pipeline.lake_root
    return [
        find_torn_changelog(changelog_uri(lake)),
        find_torn_points(lake),
        find_torn(relations_uri(lake)),
    ]
