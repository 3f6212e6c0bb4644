"""The recorded epoch of a pipeline, and the refusals where its lake or state is gone, or is another one.

A folder that is not mounted looks like one in which nothing has begun; to begin there drops the slot, and
with it what the lake that is away still needs.

Whether tables were taken with lake tables or without, as the pipeline file says it now.
The pipeline file by which a table was taken is recorded with it.
"""

from __future__ import annotations

import json

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    ChangelogError,
    ConfigError,
    LakeError,
    NoChangelogError,
    StateError,
)
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import POINTS, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.storage.probe import is_there

_NAMED = 5


def find_epoch(pipeline: Pipeline) -> EpochRecord | None:
    """The present epoch; None when none has begun. Raises LakeError when the lake is another pipeline's."""
    try:
        record = reader.read_epoch(changelog_uri(pipeline.lake_root))
    except NoChangelogError:
        return None
    check_owner(pipeline, record)
    return record


def check_owner(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raises LakeError when the lake is another pipeline's."""
    if record.pipeline != pipeline.name:
        raise LakeError(
            f"the lake {pipeline.lake_root} belongs to the pipeline {record.pipeline!r}",
            f"give {pipeline.name!r} a lake root of its own",
        )


def has_tables(record: EpochRecord | None, records: Records) -> bool:
    """Whether any table of this epoch is in the lake; before that, the epoch can be begun again."""
    return record is not None and any(
        table.position_lsn is not None and table.position_lsn >= record.consistent_point - 1
        for table in records.values()
    )


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
        f"mount it, or name the folder where it is (lake); if it is lost, {errors.NEW_EPOCH}",
    )


def begun_epoch(store: Store, pipeline: Pipeline) -> EpochRecord:
    """The present epoch. Raises LakeError when the lake is another pipeline's, or not there any more,
    NoChangelogError before the first snapshot."""
    epoch = find_epoch(pipeline)
    if epoch is None and store.is_set_up():
        store.migrate()
        check_lake(pipeline, epoch, store.read_tables(pipeline.name))
    return epoch or read_epoch(changelog_uri(pipeline.lake_root))


def check_state(store: Store, pipeline: Pipeline, epoch: EpochRecord | None) -> None:
    """Raises StateError when the lake has begun and nothing is recorded of the pipeline. Creates nothing."""
    if epoch is not None and not is_recorded(store, pipeline):
        raise lost_state(pipeline, epoch)


def is_recorded(store: Store, pipeline: Pipeline) -> bool:
    """Raises StateError when the state cannot be read."""
    return store.is_set_up() and store.read_pipeline(pipeline.name) is not None


def lost_state(pipeline: Pipeline, epoch: EpochRecord) -> StateError:
    """What happened, and what leads out of it."""
    return StateError(
        f"the lake of pipeline {pipeline.name} is in epoch {epoch.epoch}, but the state database knows"
        " nothing of the pipeline: its schema _pgrepl was dropped, or this is another server or database, or"
        " a copy of the source",
        "name the database that has it (state_conn_id, or PGREPL_STATE_DSN), or bring it back from a backup."
        f" If it is lost: {errors.reference('errors')}. Nothing was changed",
    )


def taken_otherwise(pipeline: Pipeline, record: TableRecord) -> bool:
    """Whether a table has a lake table and is to have none, or the other way round.

    Tables that were copied by older versions have one.
    """
    if record.position_lsn is None or record.state is TableState.REMOVED:
        return False
    known = json.loads(record.config) if record.config else {}
    return bool(known.get("lake_tables", "all") != pipeline.lake_tables)


def otherwise_taken(pipeline: Pipeline, records: Records) -> list[TableName]:
    """Those that are to be taken the other way."""
    return sorted(table for table, record in records.items() if taken_otherwise(pipeline, record))


def check_lake_choice(pipeline: Pipeline, records: Records) -> None:
    """Raises ConfigError, naming the tables that were taken the other way than the file says."""
    found = otherwise_taken(pipeline, records)
    if not found:
        return
    names = ", ".join(map(str, found[:_NAMED])) + (", …" if len(found) > _NAMED else "")
    if pipeline.has_lake_tables:
        raise ConfigError(
            f"lake_tables: {len(found)} tables have no lake table: they were taken with none: {names}",
            f"{errors.SNAPSHOT}: it copies them; or set lake_tables back to none",
        )
    raise ConfigError(
        f"lake_tables: none, and {len(found)} tables have lake tables, which would not be kept: {names}",
        f"{errors.SNAPSHOT}: from then on their lake tables stay as they are, and cannot be read at a"
        " consistent point; or set lake_tables back to all",
    )


def check_may_change(store: Store, pipeline: Pipeline, tables: list[TableName]) -> None:
    """Raises BusyError while a replication runs, which does with these tables what the file said before."""
    if tables and store.is_locked(pipeline.name, "replicate"):
        raise BusyError(
            f"lake_tables is {pipeline.lake_tables} now, and the replication that runs was started with"
            " the other",
            "stop it, run this again, and start it again",
        )


def refuse_without_lake(pipeline: Pipeline, what: str, instead: str) -> None:
    """Raises ConfigError for what only lake tables can be asked for."""
    if not pipeline.has_lake_tables:
        raise ConfigError(f"{what}: pipeline {pipeline.name} has no lake tables (lake_tables: none)", instead)
