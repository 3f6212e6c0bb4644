"""A lake that is not there, of a pipeline that has begun: said before another takes its place.

A folder that is not mounted looks like one in which nothing has begun; to begin there drops the slot, and
with it what the lake that is away still needs.
"""

from __future__ import annotations

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ChangelogError, LakeError, NoChangelogError
from airflow_provider_pgrepl.replication.app.epoch_record import find_epoch
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog.layout import POINTS, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.storage.absence import is_there


def check_lake(pipeline: Pipeline, epoch: EpochRecord | None, records: Records) -> None:
    """Raises LakeError when tables were copied into a lake in which nothing has begun."""
    if epoch is None and any(record.position_lsn is not None for record in records.values()):
        raise lost_lake(pipeline)


def known_tables(store: Store, pipeline: Pipeline, record: EpochRecord | None) -> frozenset[str]:
    """The tables beside the changelog that the lake has had by what the state says: an earlier version did
    not mark them there. The index of relations is none of them: what the state has of it is put back."""
    # Without lake tables an LSN is applied, too, and there are no points.
    if record is None or not pipeline.has_lake_tables or not store.is_set_up():
        return frozenset()
    progress = store.read_progress(record.pipeline)
    has_points = progress is not None and progress.applied_lsn >= record.consistent_point
    return frozenset({POINTS} if has_points else ())


def check_lake_is_there(pipeline: Pipeline, records: Records, *, must_have_begun: bool) -> None:
    """Raise LakeError if tables were copied into a lake whose changelog is not there, and NoChangelogError if
    nothing was copied although `must_have_begun`.

    Reads only. A changelog that is there and cannot be opened is left to the application, which sets aside
    what a crash has left in it.
    """
    uri = changelog_uri(pipeline.lake_root)
    try:
        read_epoch(uri)
    except NoChangelogError:
        if is_there(uri):
            return
        check_lake(pipeline, None, records)
        if must_have_begun:
            raise
    except (ChangelogError, LakeError):
        return


def lost_lake(pipeline: Pipeline) -> LakeError:
    """What happened, and what leads out of it."""
    return LakeError(
        f"tables of pipeline {pipeline.name} have been copied, but there is no changelog in the lake"
        f" {pipeline.lake_root}: it is not mounted on this host, or was moved or deleted",
        f"mount it, or name the folder where it is (lake); if it is lost, {hints.NEW_EPOCH}",
    )


def begun_epoch(store: Store, pipeline: Pipeline) -> EpochRecord:
    """The present epoch. Raises LakeError when the lake is another pipeline's, or not there any more,
    NoChangelogError before the first snapshot."""
    epoch = find_epoch(pipeline)
    if epoch is None and store.is_set_up():
        store.migrate()
        check_lake(pipeline, epoch, store.read_tables(pipeline.name))
    return epoch or read_epoch(changelog_uri(pipeline.lake_root))
