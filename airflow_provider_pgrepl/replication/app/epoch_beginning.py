"""The beginning of an epoch: publication, slot, changelog, and the copy of every table at one snapshot."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError
from airflow_provider_pgrepl.replication.app.former_lake import Beginning, find_beginning
from airflow_provider_pgrepl.replication.app.snapshot_tables import ATTEMPTS, Outcome, TableSnapshotter
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog, read_token
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import Copied
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.export import ExportedSnapshot
from airflow_provider_pgrepl.replication.source.known_source import known_source
from airflow_provider_pgrepl.replication.source.permanent import create_slot, drop_unused
from airflow_provider_pgrepl.replication.source.preflight.selection import RequestedTables
from airflow_provider_pgrepl.replication.source.server import Server, read_server
from airflow_provider_pgrepl.replication.source.takeover import take_over_slot
from airflow_provider_pgrepl.replication.source.temporary import temporary_name
from airflow_provider_pgrepl.replication.state.source_tokens import forget_tokens, write_token

log = logging.getLogger(__name__)


def begin_epoch(
    taking: TableSnapshotter,
    relations: list[Relation],
    requested: RequestedTables,
    last: EpochRecord | None,
    take_over: str = "",
    *,
    replace_record: bool = False,
) -> Outcome:
    """Make publication and slot, and copy these tables at the slot's snapshot.

    Tables that were not finished when that snapshot was lost are taken under another one, into the epoch that
    has begun. `take_over`: another program's slot, where the epoch begins; its tables are then taken as new
    ones are. `replace_record`: a new epoch was asked for, also of another source, slot or lake than recorded.
    Raises SlotError or PublicationError for what is somebody else's, SnapshotError when no snapshot could be
    held; no slot is left then.
    """
    pipeline, server = taking.pipeline, read_server(taking.source)
    ownership = SourceOwnership(taking.access.dsn, taking.source, pipeline, taking.store)
    tables = [relation.table for relation in relations]
    beginning = find_beginning(taking.store, pipeline, tables, last)
    ownership.claim(server, last, replace_record=replace_record)
    with ownership.slot_noted():
        return _make_epoch(taking, ownership, server, relations, requested, last, take_over, beginning)


def _make_epoch(
    taking: TableSnapshotter,
    ownership: SourceOwnership,
    server: Server,
    relations: list[Relation],
    requested: RequestedTables,
    last: EpochRecord | None,
    take_over: str,
    beginning: Beginning,
) -> Outcome:
    pipeline, tables = taking.pipeline, [relation.table for relation in relations]
    # Also before, because it refuses while the slot is read: nothing may be altered under a running app.
    ownership.drop_slot()
    # First of all: settings are bound to the tables as they are now, whatever becomes of this run.
    taking.record_selected(relations)
    ownership.prepare_publication(relations)
    if take_over:
        position = take_over_slot(taking.access.dsn, pipeline.slot, take_over, pipeline.publication)
        ownership.record_slot()
        record = _open_epoch(taking, ownership, server, position, last, beginning)
        return taking.take(tables, requested, record)
    failed: dict[TableName, PgReplError] = {}
    for attempt in range(1, ATTEMPTS + 1):
        ownership.drop_slot()
        exported = create_slot(
            taking.access.dsn,
            pipeline.slot,
            through=temporary_name(taking.source),
            timeout_s=pipeline.slot_timeout_s,
            made=ownership.record_slot,
        )
        try:
            record, copied = _begin(taking, exported, ownership, server, relations, last, beginning)
            break
        except SnapshotError as error:
            if attempt == ATTEMPTS:
                ownership.drop_slot()
                raise
            log.warning("the snapshot cannot be used, taking another: %s", error.message)
        wanted = {relation.table for relation in relations}
        relations, unfit = taking.examine(wanted, requested, last)
        failed |= unfit
        if not relations:
            ownership.drop_slot()
            return Outcome(failed=failed)
        taking.record_selected(relations)
        ownership.drop_slot()
        ownership.prepare_publication(relations)
    failed |= copied.failed
    unfinished = {relation.table for relation in relations} - copied.done.keys() - copied.failed.keys()
    if copied.unusable is None or not unfinished:
        return Outcome(tuple(copied.done), failed)
    log.warning(
        "the snapshot cannot be used any more: %s. Finished tables are kept; under a new one these are"
        " copied from their beginning: %s",
        copied.unusable.message,
        ", ".join(map(str, sorted(unfinished))),
    )
    more = taking.take(unfinished, requested, record)
    return Outcome((*copied.done, *more.copied), failed | more.failed)


def _begin(
    taking: TableSnapshotter,
    exported: ExportedSnapshot,
    ownership: SourceOwnership,
    server: Server,
    relations: list[Relation],
    last: EpochRecord | None,
    beginning: Beginning,
) -> tuple[EpochRecord, Copied]:
    with exported, ExitStack() as held:
        try:
            keeper = held.enter_context(taking.keep(exported, relations))
            exported.close()
        except BaseException:
            drop_unused(taking.access.dsn, taking.source, taking.pipeline.slot)
            raise
        record = _open_epoch(taking, ownership, server, exported.consistent_point, last, beginning)
        with taking.copy_states() as states:
            # What tables were in another epoch is over.
            states.copying()
            states.begin(relations)
            return record, taking.copy(keeper, exported, record, states, begins_epoch=True)


def _open_epoch(
    taking: TableSnapshotter,
    ownership: SourceOwnership,
    server: Server,
    begins: LSN,
    last: EpochRecord | None,
    beginning: Beginning,
) -> EpochRecord:
    pipeline = taking.pipeline
    uri = changelog_uri(pipeline.lake_root)
    is_other_source = last is not None and known_source(last, server).differs(server)
    try:
        selected = taking.store.read_selected(pipeline.name)
        record = EpochRecord(
            pipeline.name,
            beginning.epoch,
            server.system_identifier,
            server.timeline,
            pipeline.slot,
            pipeline.publication,
            ownership.publication_oid(),
            begins,
            database=server.database,
            database_oid=server.database_oid,
            pipeline_id=ownership.pipeline_id(),
        )
        # First in the source. That of the last epoch stays there until the changelog has this one.
        before = read_token(open_changelog(uri)) if last is not None else 0
        token = write_token(taking.source, pipeline.slot, before, pipeline.used_publication)
        if not is_other_source:
            # Before there is an epoch that a receiver could begin to read.
            taking.index_selected(record.epoch, selected)
        if last is None:
            writer.create_changelog(uri, record, token, beginning.former_lake)
        else:
            writer.begin_epoch(uri, record, token)
            if is_other_source:
                RelationIndex(relations_uri(pipeline.lake_root)).begin_source(record.epoch)
                taking.index_selected(record.epoch, selected)
            if last.slot != record.slot and not server.in_recovery:
                forget_tokens(taking.source, last.slot)
        taking.store.record_evidence(
            pipeline.name,
            database=server.database,
            database_oid=server.database_oid,
            lake=pipeline.lake_root,
            lake_id=lake_id(open_changelog(uri)),
        )
    except BaseException:
        # A slot that no changelog goes with would hold the source's WAL for nobody.
        drop_unused(taking.access.dsn, taking.source, pipeline.slot)
        raise
    log.info("epoch %d begins at %s", record.epoch, record.consistent_point)
    return record
