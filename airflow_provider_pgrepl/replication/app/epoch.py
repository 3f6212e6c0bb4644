"""The recorded epoch of a pipeline, and the errors for a lake or a state that is missing or is another one.

A folder that is not mounted looks like one in which no epoch has begun. Beginning an epoch there would drop
the slot, and with it the changes that the missing lake still needs.

The pipeline file by which a table was copied is recorded with the table. It shows whether the table was
copied with a lake table, which may differ from the present pipeline file.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    ChangelogError,
    ConfigError,
    LakeError,
    LakeTableError,
    NoChangelogError,
    StateError,
)
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import POINTS, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, earlier_apps, open_table
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.storage.probe import is_there

from .tables import Records

_NAMED = 5


def find_epoch(pipeline: Pipeline) -> EpochRecord | None:
    """Return the present epoch, or None if none has begun.

    Raises LakeError if the lake is another pipeline's.
    """
    try:
        record = reader.read_epoch(changelog_uri(pipeline.lake_root))
    except NoChangelogError:
        return None
    check_owner(pipeline, record)
    return record


def check_owner(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raise LakeError if the lake is another pipeline's."""
    if record.pipeline != pipeline.name:
        raise LakeError(
            f"the lake {pipeline.lake_root} belongs to the pipeline {record.pipeline!r}",
            f"give {pipeline.name!r} a lake root of its own",
        )


def has_tables(record: EpochRecord | None, records: Records) -> bool:
    """Return True if the state records a table that was copied in this epoch."""
    return record is not None and any(
        table.position_lsn is not None and table.position_lsn >= record.consistent_point - 1
        for table in records.values()
    )


def check_lake(pipeline: Pipeline, epoch: EpochRecord | None, records: Records) -> None:
    """Raise LakeError if tables were copied, but no epoch has begun in the lake."""
    if epoch is None and any(record.position_lsn is not None for record in records.values()):
        raise lost_lake(pipeline)


def known_tables(state_db: StateDatabase, pipeline: Pipeline, record: EpochRecord | None) -> frozenset[str]:
    """Return the names of the lake's own tables, besides the changelog, that must exist according to the
    state.

    An earlier version did not mark them in the changelog. The index of relations is not among them: it is
    restored from the state.
    """
    # Without lake tables the progress has an applied LSN too, but there are no consistent points.
    if record is None or not pipeline.has_lake_tables or not state_db.is_set_up():
        return frozenset()
    progress = state_db.read_progress(record.pipeline)
    has_points = progress is not None and progress.applied_lsn >= record.consistent_point
    return frozenset({POINTS} if has_points else ())


def check_lake_is_there(pipeline: Pipeline, records: Records, *, must_have_begun: bool) -> None:
    """Raise LakeError if tables were copied into a lake whose changelog is missing.

    Raises NoChangelogError if nothing was copied although `must_have_begun`. Reads only. Raises nothing for a
    changelog that exists but cannot be opened: the app sets aside what a crash left in it.
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
    """Return the error of a lake into which tables were copied, and whose changelog is missing."""
    return LakeError(
        f"tables of pipeline {pipeline.name} have been copied, but there is no changelog in the lake"
        f" {pipeline.lake_root}: it is not mounted on this host, or was moved or deleted",
        "mount it, or set `lake` to the folder where it is. Only if its files are lost for good: pgrepl"
        " snapshot FILE.json --new-epoch, or PgSnapshotOperator with new_epoch=True. It drops the slot, so"
        " that a lake which was only not mounted can never continue",
    )


def begun_epoch(state_db: StateDatabase, pipeline: Pipeline) -> EpochRecord:
    """Return the present epoch. Migrates the schema of a state that is set up, if the lake has no epoch.

    Raises LakeError if the lake is another pipeline's or is missing, NoChangelogError before the first
    snapshot.
    """
    epoch = find_epoch(pipeline)
    if epoch is None and state_db.is_set_up():
        state_db.migrate()
        check_lake(pipeline, epoch, state_db.read_tables(pipeline.name))
    return epoch or read_epoch(changelog_uri(pipeline.lake_root))


def check_state(state_db: StateDatabase, pipeline: Pipeline, epoch: EpochRecord | None) -> None:
    """Raise StateError if the lake has an epoch and the state does not record the pipeline.

    Creates nothing.
    """
    if epoch is not None and not is_recorded(state_db, pipeline):
        raise lost_state(pipeline, epoch)


def is_recorded(state_db: StateDatabase, pipeline: Pipeline) -> bool:
    """Return True if the state records the pipeline. Raises StateError if the state cannot be read."""
    return state_db.is_set_up() and state_db.read_pipeline(pipeline.name) is not None


def lost_state(pipeline: Pipeline, epoch: EpochRecord) -> StateError:
    """Return the error of a state database that does not record the pipeline of an existing lake."""
    return StateError(
        f"the lake of pipeline {pipeline.name} is in epoch {epoch.epoch}, but the state database knows"
        " nothing of the pipeline: its schema _pgrepl was dropped, or this is another server or database, or"
        " a copy of the source",
        "name the database that has it (state_conn_id, or PGREPL_STATE_DSN), or bring it back from a backup."
        f" If it is lost: {errors.reference('errors')}. Nothing was changed",
    )


def is_copied_differently(pipeline: Pipeline, record: TableRecord) -> bool:
    """Return True if a table has a lake table and `lake_tables` is now `none`, or the reverse.

    Tables that were copied by older versions have a lake table.
    """
    if record.position_lsn is None or record.state is TableState.REMOVED:
        return False
    known = json.loads(record.config) if record.config else {}
    return bool(known.get("lake_tables", "all") != pipeline.lake_tables)


def tables_copied_differently(pipeline: Pipeline, records: Records) -> list[TableName]:
    """Return the tables that must be copied again because `lake_tables` has changed, sorted."""
    return sorted(table for table, record in records.items() if is_copied_differently(pipeline, record))


def check_lake_tables_setting(pipeline: Pipeline, records: Records) -> None:
    """Raise ConfigError, naming the tables, if tables were copied with another value of `lake_tables`."""
    found = tables_copied_differently(pipeline, records)
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


def check_may_change(state_db: StateDatabase, pipeline: Pipeline, tables: list[TableName]) -> None:
    """Raise BusyError if `lake_tables` changes for these tables while a replication runs with its former
    value."""
    if tables and state_db.is_locked(pipeline.name, "replicate"):
        raise BusyError(
            f"lake_tables is {pipeline.lake_tables} now, and the replication that runs was started with"
            " the other",
            "stop it, run this again, and start it again",
        )


def refuse_without_lake(pipeline: Pipeline, what: str, instead: str) -> None:
    """Raise ConfigError if the pipeline has no lake tables, for an operation that needs them."""
    if not pipeline.has_lake_tables:
        raise ConfigError(f"{what}: pipeline {pipeline.name} has no lake tables (lake_tables: none)", instead)


def unwritten_tables(pipeline: Pipeline, epoch: EpochRecord | None, records: Records) -> set[TableName]:
    """Return the tables that an interrupted run left: those that only an earlier epoch has written, and if
    there are any, those that are being copied. Raises LakeUnavailableError.

    A lake table shows to which epoch it belongs: the first commit of an epoch has that epoch's app ID. One
    that no epoch has written says nothing of a run: its first copy may have failed at any time.
    """
    if epoch is None:
        return set()
    app, earlier = app_id(pipeline.name, epoch.epoch), earlier_apps(pipeline.name, epoch.epoch)
    known = {
        table: record.state for table, record in records.items() if record.state is not TableState.REMOVED
    }
    left = {table for table in known if _is_left(f"{pipeline.lake_root}/{table.path}", app, earlier)}
    return left and left | {table for table, state in known.items() if state.is_being_copied}


def _is_left(uri: str, app: str, earlier: Collection[str]) -> bool:
    try:
        table = open_table(uri)
    except LakeTableError:
        return False
    return app_version(table, app) is None and any(app_version(table, one) is not None for one in earlier)
