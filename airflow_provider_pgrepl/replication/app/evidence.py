"""The evidence that source, lake and state belong together: it is gathered, and recorded where it is missing.
Also the checks of lake tables and commands when a promoted standby continues the changelog, and whether an
epoch continues.

A table that was copied from the former primary after the last WAL that the standby received may have rows
that the source has lost. The changelog cannot correct them: the table's position is past the LSN at which the
standby was promoted, so that the first changes of the new primary would not be applied to it.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    ChangelogError,
    LakeError,
    LakeTableError,
    NoChangelogError,
    PgReplError,
    Remedy,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import LAYOUT_VERSION, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    is_torn_down,
    lake_id,
    open_changelog,
    read_durable_lsn,
    read_token,
)
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.continuity import slot_error
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.server import (
    find_fork,
    known_source,
    read_server,
    written_lsn,
)
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import (
    PipelineRecord,
    StateDatabase,
    find_lake_at_source,
)
from airflow_provider_pgrepl.replication.state.source_tokens import token_error
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.storage.durable import is_same_place
from airflow_provider_pgrepl.replication.storage.probe import doubt_of_absence

from .epoch import has_tables
from .ownership import Evidence, check_ours, has_begun
from .tables import Records

log = logging.getLogger(__name__)

_START = LSN(0)


def gather(
    pipeline: Pipeline,
    state_db: StateDatabase,
    source: Connection | None,
    *,
    lake_may_fail: bool = False,
    migrates: bool = True,
) -> Evidence:
    """Read the evidence from source, lake and state.

    Raises SourceError, StateError, ChangelogError, LakeError.

    :param source: None to leave the source out
    :param lake_may_fail: treat a changelog that cannot be read as missing, for commands that do not use it,
        or that read it again after the remains of a crash are set aside
    :param migrates: migrate a state schema of an earlier version to this one; if False, such a schema is an
        error
    """
    recorded = _read_recorded(state_db, pipeline, migrates=migrates)
    lake = _Lake()
    try:
        lake = _read_lake(pipeline.lake_root)
    except (ChangelogError, LakeError):
        if not lake_may_fail:
            raise
    recorded_lake, doubt = "", ""
    if recorded is not None and is_same_place(recorded.lake, pipeline.lake_root):
        # The same lake under another path, for example through a symbolic link.
        recorded = replace(recorded, lake=pipeline.lake_root)
    if lake.epoch is not None and recorded is not None and recorded.lake != pipeline.lake_root:
        recorded_lake, doubt = _find_recorded_lake(recorded.lake)
    evidence = Evidence(
        pipeline,
        epoch=lake.epoch,
        lake_id=lake.id,
        recorded=recorded,
        recorded_lake_id=recorded_lake,
        recorded_lake_doubt=doubt,
        durable_lsn=lake.durable_lsn,
        torn_down=lake.torn_down,
        token=lake.token,
    )
    if lake.epoch is None and recorded is not None:
        evidence = replace(evidence, durable_lsn=_received_by_state(state_db, pipeline.name))
    return evidence if source is None else _ask_source(source, evidence)


def _ask_source(source: Connection, evidence: Evidence) -> Evidence:
    epoch, recorded, token = evidence.epoch, evidence.recorded, evidence.token
    names = {record.slot for record in (epoch, recorded) if record is not None}
    found = [read_slot(source, name) for name in sorted(names)]
    slots = {slot.name: slot for slot in found if slot is not None}
    durable_lsn = evidence.durable_lsn
    if epoch is not None and epoch.slot in slots and slot_error(slots[epoch.slot], durable_lsn):
        # A running receiver has advanced the slot since the changelog was opened. Read the durable LSN again,
        # after the slot; and the record, which has the timeline that the receiver follows.
        lake = _read_lake(evidence.pipeline.lake_root)
        durable_lsn, epoch = lake.durable_lsn, lake.epoch or epoch
    missing_token = None
    # A teardown deletes the tokens. The lake of an interrupted teardown still belongs to the pipeline.
    if epoch is not None and token and not evidence.torn_down:
        missing_token = token_error(source, epoch.slot, token, is_recorded=recorded is not None)
    server, lake_at_source, fork_lsn = read_server(source), "", None
    if epoch is not None and not known_source(epoch, server, slots).differs(server):
        fork_lsn = find_fork(source, server, epoch.timeline)
    if recorded is None:
        lake_at_source = find_lake_at_source(source, server.system_identifier, evidence.pipeline)
    return replace(
        evidence,
        epoch=epoch,
        server=server,
        lake_at_source=lake_at_source,
        slots=slots,
        missing_token=missing_token,
        durable_lsn=durable_lsn,
        written_lsn=written_lsn(source),
        fork_lsn=fork_lsn,
    )


def check(
    pipeline: Pipeline,
    state_db: StateDatabase,
    dsn: str,
    *,
    lake_may_fail: bool = False,
    needs_source: bool = True,
) -> Evidence:
    """Check at the start of a command that source, lake and state are this pipeline's, and log their names.

    Raises the first contradiction, and what `gather` raises.

    :param needs_source: False if the command changes only state or lake: an unreachable source is then left
        out
    """
    try:
        with closing(connect(dsn, f"check {pipeline.name}", read_only=True)) as source:
            evidence = gather(pipeline, state_db, source, lake_may_fail=lake_may_fail)
    except SourceConnectionError as error:
        if needs_source:
            raise
        log.warning("the source is not compared with what is recorded: %s", error.message)
        evidence = gather(pipeline, state_db, None, lake_may_fail=lake_may_fail)
    check_ours(evidence)
    if not lake_may_fail:
        log.info("%s", evidence.describe())
    return evidence


def _read_recorded(state_db: StateDatabase, pipeline: Pipeline, *, migrates: bool) -> PipelineRecord | None:
    if not state_db.is_set_up():
        return None
    if migrates:
        state_db.migrate()
    return state_db.read_pipeline(pipeline.name)


def _received_by_state(state_db: StateDatabase, name: str) -> LSN:
    """Return the LSN up to which changes or copies of the source were received, according to the state."""
    positions = [record.position_lsn or _START for record in state_db.read_tables(name).values()]
    progress = state_db.read_progress(name)
    return max([_START if progress is None else progress.durable_lsn, *positions])


@dataclass(frozen=True)
class _Lake:
    """The evidence in the changelog; the defaults mean that there is no changelog."""

    epoch: EpochRecord | None = None
    id: str = ""
    token: int = 0
    durable_lsn: LSN = _START
    torn_down: bool = False


def _read_lake(root: str) -> _Lake:
    try:
        changelog = open_changelog(changelog_uri(root))
    except NoChangelogError:
        return _Lake()
    record = EpochRecord.from_json(changelog.metadata().description)
    return _Lake(
        record,
        lake_id(changelog),
        read_token(changelog),
        read_durable_lsn(changelog),
        is_torn_down(changelog),
    )


def _find_recorded_lake(root: str) -> tuple[str, str]:
    """Return the ID of the lake at the recorded path, and if none was read, why one may be there."""
    try:
        try:
            return lake_id(open_changelog(changelog_uri(root))), ""
        except NoChangelogError:
            return "", doubt_of_absence(changelog_uri(root))
    except PgReplError as error:
        return "", error.message


def record_evidence(state_db: StateDatabase, evidence: Evidence) -> None:
    """Record the evidence that state and changelog lack about each other and about the source.

    The caller holds the replication lock and has checked that all known evidence agrees. The commit to the
    changelog ends a receiver that runs in spite of the lock. Raises LakeError, StateError.
    """
    server, epoch, recorded = evidence.server, evidence.epoch, evidence.recorded
    assert server is not None
    assert epoch is not None
    assert recorded is not None
    root = evidence.pipeline.lake_root
    known = (recorded.database, recorded.database_oid, recorded.lake, recorded.lake_id)
    found = (server.database, server.database_oid, root, evidence.lake_id)
    if known != found:
        state_db.record_evidence(
            recorded.name,
            database=server.database,
            database_oid=server.database_oid,
            lake=root,
            lake_id=evidence.lake_id,
        )
        if recorded.lake != root:
            log.warning("the lake of pipeline %s was moved from %s to %s", recorded.name, recorded.lake, root)
    if (epoch.database_oid, epoch.pipeline_id) != (server.database_oid, recorded.id):
        complete = replace(
            epoch,
            layout=LAYOUT_VERSION,
            database=server.database,
            database_oid=server.database_oid,
            pipeline_id=recorded.id,
        )
        writer.describe(changelog_uri(root), complete)


def stop_lost_copies(
    pipeline: Pipeline, state_db: StateDatabase, record: EpochRecord, fork_lsn: LSN
) -> list[str]:
    """Mark each table errored whose copy is later than `fork_lsn`, and return their names.

    Called before changes are received from the promoted standby. Can be repeated after an interruption.
    Raises StateError, LakeError, SourceConnectionError.
    """
    lost = []
    for table in state_db.read_tables(pipeline.name).values():
        if table.state is TableState.REMOVED:
            continue
        position = _position(pipeline, table, record)
        if position <= fork_lsn:
            continue
        error = lost_copy(table, position, fork_lsn)
        log.error("%s", error)
        state_db.set_state(
            pipeline.name,
            table.table,
            TableState.ERRORED,
            error=type(error).__name__,
            reason=error.message,
            hint=error.hint,
            remedy=error.remedy,
        )
        lost.append(str(table.table))
    return lost


def lost_copy(table: TableRecord, position: LSN, fork_lsn: LSN) -> LakeTableError:
    """Return the error of a table that may have rows which the source lost in a failover."""
    return LakeTableError(
        f"{table.table}: it was copied from the former primary at {LSN(position + 1)}, past {fork_lsn}, where"
        " the promoted standby continues: it may have rows that the source has lost",
        errors.resnapshot(table.table),
        remedy=Remedy.RESNAPSHOT,
    )


def _position(pipeline: Pipeline, table: TableRecord, record: EpochRecord) -> LSN:
    recorded = table.position_lsn or _START
    if not pipeline.has_lake_tables:
        return recorded
    try:
        lake_table = open_table(f"{pipeline.lake_root}/{table.table.path}")
    except LakeTableError:
        # No table, or one that cannot be opened: its own merge reports that.
        return recorded
    return max(recorded, read_position(lake_table, app_id(record.pipeline, record.epoch)) or _START)


def check_followed(evidence: Evidence) -> None:
    """Raise BusyError if the source was promoted, and the replication app has not followed it yet.

    The changelog's record shows from which primary a copy or a comparison has read.
    """
    if evidence.is_promoted:
        assert evidence.server is not None
        raise BusyError(
            f"the source was promoted to timeline {evidence.server.timeline}, and the replication app has not"
            " received from it yet",
            "start the replication app, then run this again",
        )


def continues_epoch(evidence: Evidence, records: Records, source: Connection) -> bool:
    """Return True if tables are copied into the present epoch, whose evidence does not differ.

    Also an epoch without copied tables continues while it is whole: its changelog may have changes that no
    other epoch would receive, as those since the position of a slot that was taken over.
    """
    return has_tables(evidence.epoch, records) or is_whole(evidence, source)


def is_whole(evidence: Evidence, source: Connection) -> bool:
    """Return True if the present epoch has the slot and the publication that it began with, and the pipeline
    file names them."""
    epoch, pipeline = evidence.epoch, evidence.pipeline
    if epoch is None or not has_begun(evidence):
        return False
    slot, found = evidence.slots.get(epoch.slot), publication.read_identity(source, epoch.publication)
    return (
        slot is not None
        and not slot.invalidation
        and found is not None
        and found[0] == epoch.publication_oid
        and (epoch.slot, epoch.publication) == (pipeline.slot, pipeline.publication)
    )
